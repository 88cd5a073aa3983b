#include "reference/question.h"

#include <array>
#include <bit>
#include <cmath>
#include <limits>

#include "onefold/error.h"

namespace onefold::reference {
namespace {

// ---- numbers ----

double half_to_double(std::uint16_t bits) {
  const int exponent = (bits >> 10) & 31;
  const int fraction = bits & 1023;
  double magnitude;
  if (exponent == 31) {
    magnitude = fraction == 0 ? std::numeric_limits<double>::infinity()
                              : std::numeric_limits<double>::quiet_NaN();
  } else if (exponent == 0) {
    magnitude = std::ldexp(fraction, -24);
  } else {
    magnitude = std::ldexp(1024 + fraction, exponent - 25);
  }
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

double load(const Tensor& t, std::int64_t offset) {
  switch (t.dtype) {
    case DType::kFloat64:
      return static_cast<const double*>(t.data)[offset];
    case DType::kFloat32:
      return static_cast<const float*>(t.data)[offset];
    case DType::kFloat16:
      return half_to_double(static_cast<const std::uint16_t*>(t.data)[offset]);
    case DType::kBFloat16: {
      const std::uint32_t bits = static_cast<const std::uint16_t*>(t.data)[offset];
      return std::bit_cast<float>(bits << 16);
    }
    case DType::kBool:
      return static_cast<const std::uint8_t*>(t.data)[offset] != 0 ? 1 : 0;
    default:
      invalid("a tensor of ", name(t.dtype), " came where the reference reads floating point");
  }
}

std::int64_t load_index(const Tensor& t, std::int64_t n) {
  return t.dtype == DType::kInt32 ? static_cast<const std::int32_t*>(t.data)[n * t.stride[0]]
                                  : static_cast<const std::int64_t*>(t.data)[n * t.stride[0]];
}

bool is_float(DType dtype) {
  return dtype == DType::kFloat64 || dtype == DType::kFloat32 || dtype == DType::kFloat16 ||
         dtype == DType::kBFloat16;
}

// ---- tensors that broadcast to (B, Hq, Sq, Sk) by NumPy's rules ----

using Four = std::array<std::int64_t, 4>;

// The offset of `at` under the given strides; an axis of extent 1 serves every position.
std::int64_t broadcast_offset(const Tensor& t, const Four& at,
                              const std::array<std::int64_t, kMaxRank>& stride) {
  std::int64_t offset = 0;
  for (int axis = 0; axis < t.rank; ++axis) {
    if (t.shape[axis] != 1) offset += at[4 - t.rank + axis] * stride[axis];
  }
  return offset;
}

double broadcast_load(const Tensor& t, const Four& at) {
  return load(t, broadcast_offset(t, at, t.stride));
}

// ---- validation ----

void need_shape(const char* name, const Tensor& t, const std::vector<std::int64_t>& shape) {
  bool same = t.rank == static_cast<int>(shape.size());
  for (std::size_t axis = 0; same && axis < shape.size(); ++axis)
    same = t.shape[axis] == shape[axis];
  if (same) return;
  std::string came, needed;
  for (int axis = 0; axis < t.rank; ++axis) came += concat(axis > 0 ? ", " : "", t.shape[axis]);
  for (const std::int64_t extent : shape) needed += concat(needed.empty() ? "" : ", ", extent);
  invalid(name, " has shape (", came, "): the reference needs (", needed, ")");
}

void need_memory(const char* name, const Tensor& t) {
  if (t.device.type != DeviceType::kCpu) {
    invalid(name, " is not on the CPU: the reference runs there only");
  }
  if (t.data == nullptr && t.elements() > 0) invalid(name, " has elements and a null pointer");
}

void need_index(const char* name, const Tensor& t, std::int64_t extent) {
  need_memory(name, t);
  if (t.dtype != DType::kInt32 && t.dtype != DType::kInt64) {
    invalid(name, " is ", onefold::name(t.dtype), ": int32 or int64 is needed");
  }
  need_shape(name, t, {extent});
}

// Returns the offset behind sequence b; offsets start at 0, never decrease and stay within rows.
std::int64_t next_offset(const char* name, const Tensor& t, std::int64_t b, std::int64_t rows) {
  const std::int64_t begin = load_index(t, b), end = load_index(t, b + 1);
  if ((b == 0 && begin != 0) || end < begin || end > rows) {
    invalid(name, "[", b, "], [", b + 1, "] are ", begin, ", ", end,
            ": offsets start at 0, never decrease and end within ", rows, " rows");
  }
  return end;
}

std::int64_t used_rows(const char* name, const std::optional<Tensor>& used, std::int64_t b,
                       std::int64_t rows) {
  if (!used) return rows;
  const std::int64_t length = load_index(*used, b);
  if (length < 0 || length > rows) {
    invalid(name, "[", b, "] is ", length, ": between 0 and ", rows, " is needed");
  }
  return length;
}

void need_broadcast(const char* name, const Tensor& t, const Four& full) {
  need_memory(name, t);
  if (t.rank > 4) invalid(name, " has ", t.rank, " axes: at most 4 are needed");
  for (int axis = 0; axis < t.rank; ++axis) {
    const std::int64_t extent = full[4 - t.rank + axis];
    if (t.shape[axis] != 1 && t.shape[axis] != extent) {
      invalid(name, " has ", t.shape[axis], " entries along axis ", axis, ": 1 or ", extent,
              " are needed");
    }
  }
}

Matrix read_rows(const Tensor& t, std::int64_t offset, std::int64_t rows, std::int64_t row_axis) {
  const std::int64_t width = t.shape[row_axis + 2];
  Matrix m{width, {}};
  m.data.reserve(static_cast<std::size_t>(rows * width));
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t d = 0; d < width; ++d) {
      m.data.push_back(load(t, offset + r * t.stride[row_axis] + d * t.stride[row_axis + 2]));
    }
  }
  return m;
}

}  // namespace

// ---- reading the question ----

Question::Question(const Attention& attention) : a_(attention) {
  read_shapes();
  read_sequences();
  check_options();
  read_seed();
  scale = a_.scale ? *a_.scale : dim > 0 ? 1.0 / std::sqrt(static_cast<double>(dim)) : 1.0;
}

void Question::read_shapes() {
  packed = a_.cu_seqlens_q.has_value();
  if (packed != a_.cu_seqlens_k.has_value()) {
    invalid("one of cu_seqlens_q and cu_seqlens_k is missing: packed sequences need both");
  }
  const int rank = packed ? 3 : 4;
  for (const auto& [name, t] : {std::pair{"q", &a_.q}, {"k", &a_.k}, {"v", &a_.v}}) {
    need_memory(name, *t);
    if (t->rank != rank) invalid(name, " has ", t->rank, " axes: ", rank, " are needed");
    if (!is_float(t->dtype)) {
      invalid(name, " is ", onefold::name(t->dtype), ": a floating-point tensor is needed");
    }
  }
  const int at = rank - 3;  // the row axis
  q_extent = a_.q.shape[at];
  heads = a_.q.shape[at + 1];
  dim = a_.q.shape[at + 2];
  k_extent = a_.k.shape[at];
  kv_heads = a_.k.shape[at + 1];
  dim_v = a_.v.shape[at + 2];
  batch = packed ? a_.cu_seqlens_q->shape[0] - 1 : a_.q.shape[0];
  if (packed) {
    if (batch < 0) invalid("cu_seqlens_q is empty: one more entry than sequences is needed");
    need_index("cu_seqlens_q", *a_.cu_seqlens_q, batch + 1);
    need_index("cu_seqlens_k", *a_.cu_seqlens_k, batch + 1);
    need_shape("k", a_.k, {k_extent, kv_heads, dim});
    need_shape("v", a_.v, {k_extent, kv_heads, dim_v});
  } else {
    need_shape("k", a_.k, {batch, k_extent, kv_heads, dim});
    need_shape("v", a_.v, {batch, k_extent, kv_heads, dim_v});
  }
  if (heads > 0 && (kv_heads == 0 || heads % kv_heads != 0)) {
    invalid("q has ", heads, " heads and k has ", kv_heads, ": the second must divide the first");
  }
}

void Question::read_sequences() {
  if (a_.seqused_q) need_index("seqused_q", *a_.seqused_q, batch);
  if (a_.seqused_k) need_index("seqused_k", *a_.seqused_k, batch);
  for (std::int64_t b = 0; b < batch; ++b) {
    Sequence s{0, 0, q_extent, k_extent};
    if (packed) {
      s.q_begin = load_index(*a_.cu_seqlens_q, b);
      s.k_begin = load_index(*a_.cu_seqlens_k, b);
      s.q_rows = next_offset("cu_seqlens_q", *a_.cu_seqlens_q, b, q_extent) - s.q_begin;
      s.k_rows = next_offset("cu_seqlens_k", *a_.cu_seqlens_k, b, k_extent) - s.k_begin;
    }
    s.q_rows = used_rows("seqused_q", a_.seqused_q, b, s.q_rows);
    s.k_rows = used_rows("seqused_k", a_.seqused_k, b, s.k_rows);
    sequences.push_back(s);
  }
}

void Question::check_options() const {
  if (a_.scale && !std::isfinite(*a_.scale)) invalid("scale is ", *a_.scale, ": not finite");
  if (!(a_.softcap >= 0) || std::isinf(a_.softcap)) {
    invalid("softcap is ", a_.softcap, ": zero or a positive number is needed");
  }
  if (!(a_.dropout_p >= 0 && a_.dropout_p <= 1)) {
    invalid("dropout_p is ", a_.dropout_p, ": between 0 and 1 is needed");
  }
  if (a_.bias || a_.mask) {
    Four full{batch, heads, q_extent, k_extent};
    if (packed) {
      if (!a_.max_seqlen_q || !a_.max_seqlen_k) {
        invalid("max_seqlen_q or max_seqlen_k is missing: they are the extent of bias and mask");
      }
      full[2] = *a_.max_seqlen_q;
      full[3] = *a_.max_seqlen_k;
      for (const Sequence& s : sequences) {
        if (s.q_rows > full[2] || s.k_rows > full[3]) {
          invalid("max_seqlen_q, max_seqlen_k are ", full[2], ", ", full[3], ": a sequence has ",
                  s.q_rows, " queries and ", s.k_rows, " keys, more than bias and mask cover");
        }
      }
    }
    if (a_.bias) need_broadcast("bias", *a_.bias, full);
    if (a_.mask) need_broadcast("mask", *a_.mask, full);
  }
  if (a_.bias && !is_float(a_.bias->dtype)) {
    invalid("bias is ", name(a_.bias->dtype), ": a floating-point tensor is needed");
  }
  if (a_.mask && a_.mask->dtype != DType::kBool) {
    invalid("mask is ", name(a_.mask->dtype), ": bool is needed");
  }
  if (a_.alibi_slopes) {
    need_memory("alibi_slopes", *a_.alibi_slopes);
    if (a_.alibi_slopes->rank == 2) {
      need_shape("alibi_slopes", *a_.alibi_slopes, {batch, heads});
    } else {
      need_shape("alibi_slopes", *a_.alibi_slopes, {heads});
    }
  }
  if (a_.sinks) {
    need_memory("sinks", *a_.sinks);
    need_shape("sinks", *a_.sinks, {heads});
  }
}

void Question::read_seed() {
  seed_ = a_.seed;
  if (!a_.seed_tensor) return;
  const Tensor& t = *a_.seed_tensor;
  need_memory("seed", t);
  if (t.dtype != DType::kInt64 || t.elements() != 1) {
    invalid("seed is ", t.elements(), " numbers of ", name(t.dtype), ": one int64 is needed");
  }
  seed_ = static_cast<std::uint64_t>(*static_cast<const std::int64_t*>(t.data));
}

void Question::check_cotangents(const std::optional<Tensor>& dout,
                                const std::optional<Tensor>& dlse) const {
  if (dout) {
    need_memory("dout", *dout);
    need_shape("dout", *dout, out_shape());
  }
  if (dlse) {
    need_memory("dlse", *dlse);
    need_shape("dlse", *dlse, lse_shape());
  }
}

Matrix Question::queries(std::int64_t b, std::int64_t h) const { return like_out(a_.q, b, h); }

Matrix Question::like_out(const Tensor& t, std::int64_t b, std::int64_t h) const {
  const Sequence& s = sequences[b];
  return packed ? read_rows(t, s.q_begin * t.stride[0] + h * t.stride[1], s.q_rows, 0)
                : read_rows(t, b * t.stride[0] + h * t.stride[2], s.q_rows, 1);
}

Matrix Question::keys(std::int64_t b, std::int64_t kv) const {
  const Sequence& s = sequences[b];
  const Tensor& t = a_.k;
  return packed ? read_rows(t, s.k_begin * t.stride[0] + kv * t.stride[1], s.k_rows, 0)
                : read_rows(t, b * t.stride[0] + kv * t.stride[2], s.k_rows, 1);
}

Matrix Question::values(std::int64_t b, std::int64_t kv) const {
  const Sequence& s = sequences[b];
  const Tensor& t = a_.v;
  return packed ? read_rows(t, s.k_begin * t.stride[0] + kv * t.stride[1], s.k_rows, 0)
                : read_rows(t, b * t.stride[0] + kv * t.stride[2], s.k_rows, 1);
}

double Question::like_lse(const Tensor& t, std::int64_t b, std::int64_t h, std::int64_t i) const {
  if (packed) return load(t, h * t.stride[0] + (sequences[b].q_begin + i) * t.stride[1]);
  return load(t, b * t.stride[0] + h * t.stride[1] + i * t.stride[2]);
}

// ---- one row ----

bool Question::visible(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) const {
  const Sequence& s = sequences[b];
  const std::int64_t diagonal = a_.causal == Causal::kTopLeft ? i : i + s.k_rows - s.q_rows;
  const std::int64_t right_of = j - diagonal;  // small: a window may be as wide as an int64
  if (a_.causal != Causal::kNone && right_of > 0) return false;
  if (a_.window_right && right_of > *a_.window_right) return false;
  if (a_.window_left && -right_of > *a_.window_left) return false;
  if (a_.mask && broadcast_load(*a_.mask, {b, h, i, j}) == 0) return false;
  return !(a_.bias &&
           broadcast_load(*a_.bias, {b, h, i, j}) == -std::numeric_limits<double>::infinity());
}

double Question::keep(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) const {
  if (a_.dropout_p == 0) return 1;
  const auto word32 = [](std::int64_t x) { return static_cast<std::uint32_t>(x); };
  const std::array<std::uint32_t, 4> words =
      philox4x32_10({word32(i / 2), word32(j / 2), word32(h), word32(b)},
                    {static_cast<std::uint32_t>(seed_), static_cast<std::uint32_t>(seed_ >> 32)});
  const std::uint64_t word = words[static_cast<std::size_t>(2 * (i % 2) + j % 2)];
  const auto threshold = static_cast<std::uint64_t>(std::floor(a_.dropout_p * 0x1p32));
  return word >= threshold ? 1 / (1 - a_.dropout_p) : 0;
}

Key Question::key(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j, const double* q,
                  const double* k) const {
  const Sequence& s = sequences[b];
  Key key;
  key.j = j;
  double dot = 0;
  for (std::int64_t d = 0; d < dim; ++d) {
    dot += q[d] * k[d];
    key.magnitude += std::abs(q[d] * k[d]);
  }
  key.magnitude *= std::abs(scale);
  double y = scale * dot;
  if (a_.softcap > 0) {
    key.capped = std::tanh(y / a_.softcap);
    const double cosh = std::cosh(y / a_.softcap);
    key.cap_slope = 1 / (cosh * cosh);
    y = a_.softcap * key.capped;
    key.added = std::abs(y);
  }
  key.score = y;
  if (a_.bias) {
    const double bias = broadcast_load(*a_.bias, {b, h, i, j});
    key.score += bias;
    key.added += std::abs(bias);
  }
  key.distance = static_cast<double>(std::abs(i + s.k_rows - s.q_rows - j));
  if (a_.alibi_slopes) {
    const Tensor& t = *a_.alibi_slopes;
    const double slope = load(t, t.rank == 2 ? b * t.stride[0] + h * t.stride[1] : h * t.stride[0]);
    key.score -= slope * key.distance;
    key.added += std::abs(slope * key.distance);
  }
  key.keep = keep(b, h, i, j);
  return key;
}

Row Question::row(std::int64_t b, std::int64_t h, std::int64_t i, const double* q,
                  const Matrix& k) const {
  constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();
  Row row;
  row.top = kMinusInfinity;
  for (std::int64_t j = 0; j < sequences[b].k_rows; ++j) {
    if (!visible(b, h, i, j)) continue;
    row.keys.push_back(key(b, h, i, j, q, k.row(j)));
    row.top = std::max(row.top, row.keys.back().score);
  }
  if (a_.sinks) {
    row.sink = load(*a_.sinks, h * a_.sinks->stride[0]);
    row.has_sink = row.sink != kMinusInfinity;
    if (row.has_sink) row.top = std::max(row.top, row.sink);
  }
  // A score of minus infinity weighs nothing, also where nothing is larger.
  const auto weight = [&](double z) { return z == kMinusInfinity ? 0 : std::exp(z - row.top); };
  row.sum = row.has_sink ? weight(row.sink) : 0;
  for (const Key& key : row.keys) row.sum += weight(key.score);
  row.live = row.sum != 0;
  row.lse = row.live ? row.top + std::log(row.sum) : kMinusInfinity;
  if (!row.live) return row;
  for (Key& key : row.keys) key.p = weight(key.score) / row.sum;
  if (row.has_sink) row.sink_p = weight(row.sink) / row.sum;
  return row;
}

// ---- places ----

std::int64_t Question::q_place(std::int64_t b, std::int64_t h, std::int64_t i) const {
  return (packed ? sequences[b].q_begin + i : b * q_extent + i) * heads + h;
}
std::int64_t Question::k_place(std::int64_t b, std::int64_t kv, std::int64_t j) const {
  return (packed ? sequences[b].k_begin + j : b * k_extent + j) * kv_heads + kv;
}
std::int64_t Question::lse_place(std::int64_t b, std::int64_t h, std::int64_t i) const {
  return packed ? h * q_extent + sequences[b].q_begin + i : (b * heads + h) * q_extent + i;
}
std::int64_t Question::bias_place(std::int64_t b, std::int64_t h, std::int64_t i,
                                  std::int64_t j) const {
  const Tensor& t = *a_.bias;
  std::array<std::int64_t, kMaxRank> row_major{};
  std::int64_t step = 1;
  for (int axis = t.rank - 1; axis >= 0; --axis) {
    row_major[axis] = step;
    step *= t.shape[axis];
  }
  return broadcast_offset(t, {b, h, i, j}, row_major);
}
std::int64_t Question::slope_place(std::int64_t b, std::int64_t h) const {
  return a_.alibi_slopes->rank == 2 ? b * heads + h : h;
}

std::vector<std::int64_t> Question::out_shape() const {
  if (packed) return {q_extent, heads, dim_v};
  return {batch, q_extent, heads, dim_v};
}
std::vector<std::int64_t> Question::lse_shape() const {
  if (packed) return {heads, q_extent};
  return {batch, heads, q_extent};
}

}  // namespace onefold::reference
