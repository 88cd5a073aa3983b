#include "core/problem.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/overlap.h"
#include "core/tensor_check.h"

namespace onefold {
namespace {

constexpr std::int64_t kMaxHeadDim = 1 << 20;
constexpr std::int64_t kMaxBatch = std::numeric_limits<std::int32_t>::max();
// More take longer than anyone waits; so many, times all that a plan multiplies them by, fit in 64
// bits.
constexpr std::int64_t kMostElements = std::int64_t{1} << 48;

// Inputs in the order of the question.
template <class Visit>
void for_each_input(const Attention& a, const Visit& visit) {
  const auto option = [&visit](const char* name, const std::optional<Tensor>& t) {
    if (t) visit(name, *t);
  };
  visit("q", a.q);
  visit("k", a.k);
  visit("v", a.v);
  option("alibi_slopes", a.alibi_slopes);
  option("bias", a.bias);
  option("mask", a.mask);
  option("sinks", a.sinks);
  option("seed", a.seed_tensor);
  option("cu_seqlens_q", a.cu_seqlens_q);
  option("cu_seqlens_k", a.cu_seqlens_k);
  option("seqused_q", a.seqused_q);
  option("seqused_k", a.seqused_k);
}

void check_rank(const Tensor& t, const char* name, int rank) {
  if (t.rank == rank) return;
  const bool is_q = std::strcmp(name, "q") == 0;
  const char* hint = "";
  if (is_q && rank == 4 && t.rank == 3) {
    hint = ", or cu_seqlens_q and cu_seqlens_k for packed sequences";
  } else if (is_q && rank == 3 && t.rank == 4) {
    hint =
        ", (tokens, heads, head_dim), for cu_seqlens_q was given: flatten batch and seqlen, or "
        "leave cu_seqlens_q and cu_seqlens_k away";
  }
  invalid(name, " has ", t.rank, t.rank == 1 ? " axis, shape " : " axes, shape ", shape_text(t),
          ": ", rank, rank == 1 ? " is needed" : " are needed", hint);
}

void check_size(const Tensor& t, const char* name) {
  Tensor rows = t;
  std::int64_t& dim = rows.shape[t.rank - 1];
  dim = std::max<std::int64_t>(dim, 1);  // rows without elements count as well
  if (rows.elements() > kMostElements) {
    unsupported(name, " has shape ", shape_text(t), ": at most 2^48 elements work");
  }
}

void check_extent(const char* name, const char* axis, std::int64_t got, std::int64_t want,
                  const char* reason) {
  if (got != want) invalid(axis, " of ", name, " is ", got, ": ", want, " is needed, ", reason);
}

// That of an axis with one element, which may be anything, is `unused`.
std::int64_t stride_of(const Tensor& t, int axis, std::int64_t unused = 0) {
  return t.shape[axis] > 1 ? t.stride[axis] : unused;
}

Rows rows_view(const Tensor& t, bool packed) {
  Rows r;
  r.present = true;
  r.data = t.data;
  r.dtype = t.dtype;
  const int first = packed ? 0 : 1;
  r.batch = packed ? 0 : stride_of(t, 0);
  r.row = stride_of(t, first);
  r.head = stride_of(t, first + 1);
  r.dim = stride_of(t, first + 2, 1);
  return r;
}

void check_same_rows(const char* name, const Tensor& t, const char* like_name, const Tensor& like,
                     std::int64_t last) {
  check_tensor(t, name, like.device);
  check_rank(t, name, like.rank);
  if (t.dtype != like.dtype) {
    invalid(name, " is ", onefold::name(t.dtype), ": ", like_name, " is ",
            onefold::name(like.dtype), " and both must agree");
  }
  for (int axis = 0; axis < t.rank; ++axis) {
    const std::int64_t want = axis == t.rank - 1 ? last : like.shape[axis];
    if (t.shape[axis] != want) {
      Tensor needed = like;
      needed.shape[like.rank - 1] = last;
      invalid(name, " has shape ", shape_text(t), ": ", shape_text(needed), " is needed");
    }
  }
}

void check_float_option(const char* name, const Tensor& t, DType q) {
  const bool fits =
      t.dtype == DType::kFloat32 || (t.dtype == DType::kFloat64 && q == DType::kFloat64);
  if (!fits) {
    invalid(name, " is ", onefold::name(t.dtype), ": float32 is needed",
            q == DType::kFloat64 ? " (or float64)" : "");
  }
}

// Shape (H) or (B, H); `rank` limits which are allowed.
Numbers per_head(const char* name, const Tensor& t, const Problem& p, bool batched_allowed) {
  if (!(t.rank == 1 || (t.rank == 2 && batched_allowed))) {
    invalid(name, " has shape ", shape_text(t), ": (", p.heads_q, ",)",
            batched_allowed ? concat(" or (", p.batch, ", ", p.heads_q, ")") : std::string(),
            " is needed, one number per query head");
  }
  check_float_option(name, t, p.dtype);
  const bool batched = t.rank == 2;
  if (batched) check_extent(name, "batch", t.shape[0], p.batch, "the batch of q");
  check_extent(name, "heads", t.shape[batched ? 1 : 0], p.heads_q, "the heads of q");
  Numbers n;
  n.present = true;
  n.data = t.data;
  n.dtype = t.dtype;
  n.per_sequence = batched;
  n.batch = batched ? stride_of(t, 0) : 0;
  n.head = stride_of(t, batched ? 1 : 0);
  return n;
}

Grid grid_view(const char* name, const Tensor& t, const std::array<std::int64_t, 4>& full) {
  Grid g;
  g.present = true;
  g.data = t.data;
  g.dtype = t.dtype;
  for (int axis = 0; axis < t.rank; ++axis) {
    const int to = 4 - t.rank + axis;
    if (t.shape[axis] != full[to] && t.shape[axis] != 1) {
      invalid(name, " has shape ", shape_text(t), ": it must broadcast to (", full[0], ", ",
              full[1], ", ", full[2], ", ", full[3], ") = (batch, heads, queries, keys)");
    }
    g.extent[to] = t.shape[axis];
    g.stride[to] = stride_of(t, axis);
  }
  return g;
}

void check_index_vector(const char* name, const Tensor& t, std::int64_t want) {
  check_rank(t, name, 1);
  if (!is_index(t.dtype)) {
    invalid(name, " is ", onefold::name(t.dtype), ": int32 or int64 is needed");
  }
  check_extent(name, "length", t.shape[0], want, "from the number of sequences");
}

std::int64_t index_at(const Tensor& t, std::int64_t i) {
  return load_integer(t.data, t.dtype, i * stride_of(t, 0));
}

void check_offsets(const char* name, const Tensor& t, std::int64_t rows, const char* of) {
  if (index_at(t, 0) != 0) invalid(name, " starts with ", index_at(t, 0), ": 0 is needed");
  for (std::int64_t b = 1; b < t.shape[0]; ++b) {
    if (index_at(t, b) < index_at(t, b - 1)) {
      invalid(name, "[", b, "] is ", index_at(t, b), " after ", index_at(t, b - 1),
              ": offsets must not decrease");
    }
  }
  const std::int64_t last = index_at(t, t.shape[0] - 1);
  if (last > rows) {
    invalid(name, " ends with ", last, ": ", of, " has ", rows, " rows, so at most that");
  }
}

std::int64_t used_length(const char* name, const std::optional<Tensor>& used, std::int64_t b,
                         std::int64_t rows) {
  if (!used) return rows;
  const std::int64_t length = index_at(*used, b);
  if (length < 0 || length > rows) {
    invalid(name, "[", b, "] is ", length, ": sequence ", b, " has ", rows, " rows");
  }
  return length;
}

Indices indices(const Tensor& t) { return {t.data, t.dtype, stride_of(t, 0), true}; }

// Lengths that only the device can read: what is known without them.
void bound_sequences(Problem& p, const Attention& a) {
  const auto bound = [](const std::optional<std::int64_t>& hint, std::int64_t rows) {
    return hint ? std::min(*hint, rows) : rows;
  };
  p.longest_q = p.batch == 0 ? 0 : bound(a.max_seqlen_q, p.rows_q);
  p.longest_k = p.batch == 0 ? 0 : bound(a.max_seqlen_k, p.rows_k);
  p.padded = p.packed || a.seqused_q || a.seqused_k;
  if (p.packed) {
    p.cu_q = indices(*a.cu_seqlens_q);
    p.cu_k = indices(*a.cu_seqlens_k);
  }
  if (a.seqused_q) p.used_q = indices(*a.seqused_q);
  if (a.seqused_k) p.used_k = indices(*a.seqused_k);
}

void read_sequences(Problem& p, const Attention& a) {
  if (a.seqused_q) check_index_vector("seqused_q", *a.seqused_q, p.batch);
  if (a.seqused_k) check_index_vector("seqused_k", *a.seqused_k, p.batch);
  const bool no_queries = p.rows_q == 0 || p.heads_q == 0;
  const bool no_keys = p.rows_k == 0 || p.heads_k == 0;
  const bool nothing = !p.packed && no_queries && no_keys;  // of a batch that may be huge
  if (!nothing && p.batch > kMaxBatch) {
    unsupported("batch is ", p.batch, ": at most ", kMaxBatch, " works");
  }
  const std::int64_t heads = std::max(p.heads_q, p.heads_k);
  if (!nothing && heads > kMostElements / std::max<std::int64_t>(p.batch, 1)) {
    unsupported(p.heads_q == heads ? "q" : "k", " has ", heads, " heads in a batch of ", p.batch,
                ": at most 2^48 in the whole batch work");
  }
  if (p.device.type != DeviceType::kCpu) return bound_sequences(p, a);
  if (a.cu_seqlens_q) {
    check_offsets("cu_seqlens_q", *a.cu_seqlens_q, p.rows_q, "q");
    check_offsets("cu_seqlens_k", *a.cu_seqlens_k, p.rows_k, "k");
  }
  if (nothing) return;  // it costs no memory
  p.sequences.resize(static_cast<std::size_t>(p.batch));
  for (std::int64_t b = 0; b < p.batch; ++b) {
    Sequence& s = p.sequences[static_cast<std::size_t>(b)];
    s = {0, 0, {p.rows_q, p.rows_k}, p.rows_q, p.rows_k};
    if (p.packed) {
      s.q_begin = index_at(*a.cu_seqlens_q, b);
      s.k_begin = index_at(*a.cu_seqlens_k, b);
      s.q_rows = index_at(*a.cu_seqlens_q, b + 1) - s.q_begin;
      s.k_rows = index_at(*a.cu_seqlens_k, b + 1) - s.k_begin;
    }
    s.used.q = used_length("seqused_q", a.seqused_q, b, s.q_rows);
    s.used.k = used_length("seqused_k", a.seqused_k, b, s.k_rows);
    p.longest_q = std::max(p.longest_q, s.used.q);
    p.longest_k = std::max(p.longest_k, s.used.k);
  }
  p.padded = a.seqused_q || a.seqused_k;
  if (p.packed) {
    p.padded = p.padded || index_at(*a.cu_seqlens_q, p.batch) < p.rows_q ||
               index_at(*a.cu_seqlens_k, p.batch) < p.rows_k;
  }
}

void read_shapes(Problem& p, const Attention& a) {
  if (a.cu_seqlens_q.has_value() != a.cu_seqlens_k.has_value()) {
    invalid(a.cu_seqlens_q ? "cu_seqlens_k" : "cu_seqlens_q",
            " is missing: packed sequences need cu_seqlens_q and cu_seqlens_k");
  }
  p.packed = a.cu_seqlens_q.has_value();
  if (!p.packed && (a.max_seqlen_q || a.max_seqlen_k)) {
    invalid("max_seqlen_", a.max_seqlen_q ? "q" : "k",
            " was given without cu_seqlens_q and cu_seqlens_k: it belongs to packed sequences");
  }
  for (const auto& [name, hint] :
       {std::pair{"max_seqlen_q", a.max_seqlen_q}, {"max_seqlen_k", a.max_seqlen_k}}) {
    if (hint && *hint < 0) invalid(name, " is ", *hint, ": a length >= 0 is needed");
  }
  const int rank = p.packed ? 3 : 4;
  for (const auto& [name, t] : {std::pair{"q", &a.q}, {"k", &a.k}, {"v", &a.v}}) {
    check_rank(*t, name, rank);
    check_size(*t, name);
  }
  p.dtype = a.q.dtype;
  if (!is_float(p.dtype)) {
    invalid("q is ", name(p.dtype), ": float32, bfloat16, float16 or float64 is needed");
  }
  if (a.k.dtype != p.dtype || a.v.dtype != p.dtype) {
    const bool k_differs = a.k.dtype != p.dtype;
    invalid(k_differs ? "k" : "v", " is ", name(k_differs ? a.k.dtype : a.v.dtype), ": q is ",
            name(p.dtype), " and all three must agree");
  }
  const int at = rank - 3;
  p.rows_q = a.q.shape[at];
  p.rows_k = a.k.shape[at];
  p.heads_q = a.q.shape[at + 1];
  p.heads_k = a.k.shape[at + 1];
  p.dim = a.q.shape[at + 2];
  p.dim_v = a.v.shape[at + 2];
  check_extent("v", "seqlen", a.v.shape[at], p.rows_k, "the rows of k");
  check_extent("v", "heads", a.v.shape[at + 1], p.heads_k, "the heads of k");
  check_extent("k", "head_dim", a.k.shape[at + 2], p.dim, "the head_dim of q");
  if (p.dim > kMaxHeadDim || p.dim_v > kMaxHeadDim) {
    unsupported("head_dim is ", std::max(p.dim, p.dim_v), ": at most ", kMaxHeadDim, " works");
  }
  if (p.packed) {
    check_rank(*a.cu_seqlens_q, "cu_seqlens_q", 1);
    if (a.cu_seqlens_q->shape[0] < 1) {
      invalid("cu_seqlens_q is empty: number of sequences + 1 offsets are needed");
    }
    p.batch = a.cu_seqlens_q->shape[0] - 1;
    check_index_vector("cu_seqlens_q", *a.cu_seqlens_q, p.batch + 1);
    check_index_vector("cu_seqlens_k", *a.cu_seqlens_k, p.batch + 1);
  } else {
    p.batch = a.q.shape[0];
    check_extent("k", "batch", a.k.shape[0], p.batch, "the batch of q");
    check_extent("v", "batch", a.v.shape[0], p.batch, "the batch of q");
  }
  if (p.heads_k == 0 ? p.heads_q != 0 : p.heads_q % p.heads_k != 0) {
    invalid("q has ", p.heads_q, " heads and k has ", p.heads_k,
            ": the heads of k must divide those of q");
  }
  p.group = p.heads_k == 0 ? 1 : p.heads_q / p.heads_k;
}

// Bias and mask are indexed by local positions; their full extent.
std::array<std::int64_t, 4> grid_extent(const Problem& p, const Attention& a, const char* name) {
  if (!p.packed) return {p.batch, p.heads_q, p.rows_q, p.rows_k};
  if (!a.max_seqlen_q || !a.max_seqlen_k) {
    invalid(name,
            " with packed sequences needs max_seqlen_q and max_seqlen_k: they give its shape");
  }
  if (*a.max_seqlen_q < p.longest_q || *a.max_seqlen_k < p.longest_k) {
    const bool q = *a.max_seqlen_q < p.longest_q;
    invalid(q ? "max_seqlen_q" : "max_seqlen_k", " is ", q ? *a.max_seqlen_q : *a.max_seqlen_k,
            ": the longest sequence has ", q ? p.longest_q : p.longest_k, " rows, and ", name,
            " must cover it");
  }
  return {p.batch, p.heads_q, *a.max_seqlen_q, *a.max_seqlen_k};
}

void read_band(Problem& p, const Attention& a) {
  Variant& v = p.variant;
  if (a.causal > Causal::kTopLeft) {
    invalid("causal is ", static_cast<int>(a.causal), ": a value of onefold::Causal is needed");
  }
  v.top_left = a.causal == Causal::kTopLeft;
  // Beyond this no window can be told from an unbounded one; no sum overflows below it.
  const std::int64_t limit = kUnbounded / 4;
  if (a.window_left) v.band_begin = -clamp(*a.window_left, -limit, limit);
  if (a.window_right) v.band_end = clamp(*a.window_right, -limit, limit);
  if (a.causal != Causal::kNone) v.band_end = std::min<std::int64_t>(v.band_end, 0);
  // Canonical form: a border that hides nothing in any sequence is no border.
  bool left_hides = false, right_hides = false;
  const auto look = [&](Lengths used) {
    if (used.q == 0 || used.k == 0) return;
    left_hides |= diagonal(v, used, used.q - 1) + v.band_begin > 0;
    right_hides |= diagonal(v, used, 0) + v.band_end < used.k - 1;
  };
  for (const Sequence& s : p.sequences) look(s.used);
  if (p.device.type != DeviceType::kCpu) {
    if (p.padded) return;  // lengths are not known here
    look({p.rows_q, p.rows_k});
  }
  if (!left_hides) v.band_begin = -kUnbounded;
  if (!right_hides) v.band_end = kUnbounded;
}

void read_seed(Problem& p, const Tensor& t) {
  if (t.dtype != DType::kInt64 || t.elements() != 1) {
    invalid("seed is ", name(t.dtype), " ", shape_text(t),
            ": a number, or one element of int64, is needed");
  }
  const auto* seed = static_cast<const std::uint64_t*>(t.data);
  if (p.device.type == DeviceType::kCpu) {
    p.variant.seed = *seed;
  } else {
    p.device_seed = seed;
  }
}

void read_variant(Problem& p, const Attention& a) {
  Variant& v = p.variant;
  v.scale = a.scale ? *a.scale : p.dim > 0 ? 1.0 / std::sqrt(static_cast<double>(p.dim)) : 1.0;
  if (!std::isfinite(v.scale)) invalid("scale is ", v.scale, ": a finite number is needed");
  // In units of log2 it has to be a float too.
  constexpr double kMost = std::numeric_limits<float>::max(), kMostScale = kMost / kLog2E;
  const bool wide = a.q.dtype == DType::kFloat64;
  if (std::fabs(v.scale) > kMostScale && !wide) {
    invalid("scale is ", v.scale, ": scores are float32 inside, so a number between -", kMostScale,
            " and ", kMostScale, " is needed");
  }
  v.softcap = a.softcap;
  if (!(std::isfinite(v.softcap) && v.softcap >= 0)) {
    invalid("softcap is ", v.softcap, ": a finite number >= 0 is needed, 0 for none");
  }
  if (v.softcap > kMost && !wide) {
    invalid("softcap is ", v.softcap, ": scores are float32 inside, so at most ", kMost,
            " is needed, 0 for none");
  }
  const double least = 1.0 / (wide ? std::numeric_limits<double>::max() : kMost);
  if (v.softcap > 0 && v.softcap < least) {
    invalid("softcap is ", v.softcap, ": its reciprocal has to be finite, so at least ", least,
            " is needed, 0 for none");
  }
  v.dropout_p = a.dropout_p;
  if (!(v.dropout_p >= 0 && v.dropout_p <= 1)) {
    invalid("dropout_p is ", v.dropout_p, ": a probability from 0 to 1 is needed");
  }
  v.seed = a.seed;
  if (a.seed_tensor) read_seed(p, *a.seed_tensor);
  read_band(p, a);
  if (a.alibi_slopes) {
    p.slopes = per_head("alibi_slopes", *a.alibi_slopes, p, true);
    v.has_slopes = true;
  }
  if (a.sinks) p.sinks = per_head("sinks", *a.sinks, p, false);
  if (a.bias) {
    if (!is_float(a.bias->dtype)) {
      invalid("bias is ", name(a.bias->dtype), ": a float dtype is needed (mask takes booleans)");
    }
    p.bias = grid_view("bias", *a.bias, grid_extent(p, a, "bias"));
    v.has_bias = true;
  }
  if (a.mask) {
    if (a.mask->dtype != DType::kBool) {
      invalid("mask is ", name(a.mask->dtype), ": bool is needed (bias takes additive numbers)");
    }
    p.mask = grid_view("mask", *a.mask, grid_extent(p, a, "mask"));
    v.has_mask = true;
  }
}

Numbers make_lse(const Problem& p, const Tensor& t, const char* name) {
  const DType want = p.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  check_tensor(t, name, p.device);
  check_rank(t, name, p.packed ? 2 : 3);
  if (t.dtype != want) {
    invalid(name, " is ", onefold::name(t.dtype), ": ", onefold::name(want), " is needed");
  }
  if (!p.packed) check_extent(name, "batch", t.shape[0], p.batch, "the batch of q");
  const int at = p.packed ? 0 : 1;
  check_extent(name, "heads", t.shape[at], p.heads_q, "the heads of q");
  check_extent(name, "rows", t.shape[at + 1], p.rows_q, "the rows of q");
  Numbers n;
  n.present = true;
  n.data = t.data;
  n.dtype = t.dtype;
  n.batch = p.packed ? 0 : stride_of(t, 0);
  n.head = stride_of(t, at);
  n.row = stride_of(t, at + 1);
  return n;
}

void read_inputs(Footprint& memory, const Attention& a) {
  for_each_input(a, [&memory](const char* name, const Tensor& t) { memory.reads(name, t); });
}

}  // namespace

Problem make_problem(const Attention& a, Device device) {
  Problem p;
  p.device = device;
  check_device(device);
  for_each_input(a, [device](const char* name, const Tensor& t) { check_tensor(t, name, device); });
  read_shapes(p, a);
  read_sequences(p, a);
  p.q = rows_view(a.q, p.packed);
  p.k = rows_view(a.k, p.packed);
  p.v = rows_view(a.v, p.packed);
  read_variant(p, a);
  return p;
}

ForwardTensors make_forward(const Problem& p, const Attention& a, const Tensor& out,
                            const std::optional<Tensor>& lse) {
  ForwardTensors t;
  check_same_rows("out", out, "q", a.q, p.dim_v);
  t.out = rows_view(out, p.packed);
  if (lse) t.lse = make_lse(p, *lse, "lse");
  Footprint memory;
  read_inputs(memory, a);
  memory.writes("out", out);
  memory.writes("lse", lse);
  return t;
}

BackwardTensors make_backward(const Problem& p, const Attention& a, const Tensor& out,
                              const Tensor& lse, const std::optional<Tensor>& dout,
                              const std::optional<Tensor>& dlse, const Gradients& g) {
  BackwardTensors t;
  check_same_rows("out", out, "q", a.q, p.dim_v);
  t.out = rows_view(out, p.packed);
  t.lse = make_lse(p, lse, "lse");
  if (dout) {
    check_same_rows("dout", *dout, "q", a.q, p.dim_v);
    // With everything dropped out is 0, whatever else there is.
    if (p.variant.dropout_p < 1) t.dout = rows_view(*dout, p.packed);
  }
  if (dlse) t.dlse = make_lse(p, *dlse, "dlse");
  const auto like = [&](const char* name, const std::optional<Tensor>& d, const char* of_name,
                        const Tensor& of) {
    if (!d) return Rows{};
    check_same_rows(name, *d, of_name, of, of.shape[of.rank - 1]);
    return rows_view(*d, p.packed);
  };
  t.dq = like("dq", g.dq, "q", a.q);
  t.dk = like("dk", g.dk, "k", a.k);
  t.dv = like("dv", g.dv, "v", a.v);
  const auto same_shape = [](const char* name, const std::optional<Tensor>& d,
                             const std::optional<Tensor>& of, const char* of_name) {
    if (!d) return false;
    if (!of) invalid(name, " was asked for without ", of_name, ": there is nothing to derive by");
    check_tensor(*d, name, of->device);
    check_rank(*d, name, of->rank);
    if (d->dtype != of->dtype || shape_text(*d) != shape_text(*of)) {
      invalid(name, " is ", onefold::name(d->dtype), " ", shape_text(*d), ": ",
              onefold::name(of->dtype), " ", shape_text(*of), " is needed, as ", of_name);
    }
    return true;
  };
  if (same_shape("dbias", g.dbias, a.bias, "bias")) {
    t.dbias = grid_view("dbias", *g.dbias, grid_extent(p, a, "bias"));
  }
  if (same_shape("dslopes", g.dslopes, a.alibi_slopes, "alibi_slopes")) {
    t.dslopes = per_head("dslopes", *g.dslopes, p, true);
  }
  if (same_shape("dsinks", g.dsinks, a.sinks, "sinks")) {
    t.dsinks = per_head("dsinks", *g.dsinks, p, false);
  }
  Footprint memory;
  read_inputs(memory, a);
  memory.reads("out", out);
  memory.reads("lse", lse);
  memory.reads("dout", dout);
  memory.reads("dlse", dlse);
  memory.writes("dq", g.dq);
  memory.writes("dk", g.dk);
  memory.writes("dv", g.dv);
  memory.writes("dbias", g.dbias);
  memory.writes("dslopes", g.dslopes);
  memory.writes("dsinks", g.dsinks);
  return t;
}

void check_merge(const Tensor& outs, const Tensor& lses, const Tensor& out, const Tensor& lse,
                 Device device) {
  check_device(device);
  check_tensor(outs, "outs", device);
  check_rank(outs, "outs", 3);
  const std::int64_t parts = outs.shape[0], rows = outs.shape[1], dim = outs.shape[2];
  const auto check = [device](const char* name, const Tensor& t,
                              std::initializer_list<std::int64_t> want, bool narrow_allowed) {
    check_tensor(t, name, device);
    check_rank(t, name, static_cast<int>(want.size()));
    const Tensor needed = Tensor::packed(nullptr, t.dtype, want);
    if (shape_text(t) != shape_text(needed)) {
      invalid(name, " has shape ", shape_text(t), ": ", shape_text(needed), " is needed");
    }
    const bool wide = t.dtype == DType::kFloat32 || t.dtype == DType::kFloat64;
    if (!(wide || (narrow_allowed && is_float(t.dtype)))) {
      invalid(name, " is ", onefold::name(t.dtype), ": ",
              narrow_allowed ? "a float dtype" : "float32 or float64", " is needed");
    }
  };
  check("outs", outs, {parts, rows, dim}, true);
  check("lses", lses, {parts, rows}, false);
  check("out", out, {rows, dim}, true);
  check("lse", lse, {rows}, false);
  Footprint memory;
  memory.reads("outs", outs);
  memory.reads("lses", lses);
  memory.writes("out", out);
  memory.writes("lse", lse);
}

}  // namespace onefold
