// A random question with all its memory: shapes, options and layouts drawn together, because
// features fail in combination. Rows that belong to no sequence hold NaN.
//
// Includes array.h and the public headers.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "onefold/attention.h"
#include "tests/cpu/array.h"

namespace onefold::test {

inline bool is_wide(DType dtype) { return dtype == DType::kFloat64; }
inline DType lse_dtype(DType dtype) { return is_wide(dtype) ? DType::kFloat64 : DType::kFloat32; }

inline DType draw_float(Random& random) {
  const DType all[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64};
  return all[random.integer(0, 3)];
}

// Lengths at, and beside, every tile border there is.
inline std::int64_t draw_length(Random& random) {
  static constexpr int kHostile[] = {1,  2,  3,  7,  8,  15, 16,  17,  31,  33,  47,  48,  49,
                                     63, 64, 65, 77, 95, 96, 127, 128, 129, 143, 145, 192, 200};
  if (random.chance(0.04)) return 0;
  if (random.chance(0.3)) return random.integer(1, 12);
  return kHostile[random.integer(0, std::size(kHostile) - 1)];
}

inline std::int64_t draw_dim(Random& random) {
  static constexpr int kDims[] = {16, 32,  33,  40,  64,  64,  72,  80,
                                  96, 100, 112, 128, 192, 256, 300, 576};
  return random.chance(0.3) ? random.integer(1, 24)
                            : kDims[random.integer(0, std::size(kDims) - 1)];
}

struct Question {
  DType dtype = DType::kFloat32;
  std::int64_t batch = 1, heads = 1, kv_heads = 1, dim = 1, dim_v = 1;
  std::vector<std::int64_t> q_lengths, k_lengths;  // rows of each sequence, used or not
  std::vector<std::int64_t> q_used, k_used;
  std::int64_t q_extent = 0, k_extent = 0;  // of the row axis of q and k
  bool packed = false;
  double q_factor = 1, v_shift = 0;
  Layout read = Layout::kRead, write = Layout::kWrite;

  Array q, k, v, bias, mask, slopes, sinks, cu_q, cu_k, used_q, used_k, dout, dlse;
  Attention a;
  std::string text;

  std::int64_t group() const { return heads / kv_heads; }
  std::int64_t longest(const std::vector<std::int64_t>& lengths) const {
    return lengths.empty() ? 0 : *std::max_element(lengths.begin(), lengths.end());
  }
  Shape rows(std::int64_t extent, std::int64_t count, std::int64_t width) const {
    return packed ? Shape{extent, count, width} : Shape{batch, extent, count, width};
  }
  Shape q_shape() const { return rows(q_extent, heads, dim); }
  Shape k_shape() const { return rows(k_extent, kv_heads, dim); }
  Shape v_shape() const { return rows(k_extent, kv_heads, dim_v); }
  Shape out_shape() const { return rows(q_extent, heads, dim_v); }
  Shape lse_shape() const {
    return packed ? Shape{heads, q_extent} : Shape{batch, heads, q_extent};
  }

  // The sequence and the place in it of row r of batch entry b, and whether it is used.
  bool is_live(const std::vector<std::int64_t>& lengths, const std::vector<std::int64_t>& used,
               std::int64_t b, std::int64_t r) const {
    if (!packed) return r < used[static_cast<std::size_t>(b)];
    for (std::size_t s = 0; s < lengths.size(); ++s) {
      if (r < lengths[s]) return r < used[s];
      r -= lengths[s];
    }
    return false;
  }
  // A number into the rows of a tensor shaped like q, k, v or out that belong to no used row;
  // unless it repeats its elements, and the number would be everyone's.
  void poison_rows(Array& t, bool of_q,
                   double number = std::numeric_limits<double>::quiet_NaN()) const {
    const Tensor& x = t.tensor();
    const int rank = x.rank;
    for (int axis = 0; axis < rank; ++axis) {
      if (x.shape[axis] > 1 && x.stride[axis] == 0) return;
    }
    const std::int64_t inner = x.shape[rank - 1] * x.shape[rank - 2], extent = x.shape[rank - 3];
    t.each([&](std::int64_t n, std::int64_t) {
      const std::int64_t r = n / inner % std::max<std::int64_t>(extent, 1);
      const std::int64_t b = packed ? 0 : n / inner / extent;
      const bool live = of_q ? is_live(q_lengths, q_used, b, r) : is_live(k_lengths, k_used, b, r);
      if (!live) t.set(n, number);
    });
  }
};

// ---- drawing, part by part ----

inline void draw_lengths(Question& x, Random& random) {
  x.packed = random.chance(0.35);
  x.batch = x.packed ? random.integer(0, 5) : random.integer(random.chance(0.03) ? 0 : 1, 3);
  const bool few_queries = random.chance(0.15);
  const std::int64_t sq = few_queries ? random.integer(1, 9) : draw_length(random);
  const std::int64_t sk = draw_length(random);
  for (std::int64_t b = 0; b < x.batch; ++b) {
    x.q_lengths.push_back(x.packed ? draw_length(random) : sq);
    x.k_lengths.push_back(x.packed ? draw_length(random) : sk);
    if (x.packed && few_queries) x.q_lengths.back() = random.integer(0, 9);
  }
  x.q_extent = sq;
  x.k_extent = sk;
}

// Keeps the naive oracle affordable: fewer sequences and heads first, then shorter ones.
inline void shrink(Question& x, double most) {
  const auto cost = [&x] {
    double pairs = 0;
    for (std::size_t b = 0; b < x.q_lengths.size(); ++b) {
      pairs += static_cast<double>(x.q_lengths[b]) * static_cast<double>(x.k_lengths[b]);
    }
    return pairs * static_cast<double>(x.heads * (x.dim + x.dim_v));
  };
  while (cost() > most) {
    if (x.batch > 1) {
      --x.batch;
      x.q_lengths.pop_back();
      x.k_lengths.pop_back();
    } else if (x.kv_heads > 1) {
      x.heads = x.group();
      x.kv_heads = 1;
    } else if (x.q_lengths[0] > 33) {
      x.q_extent = x.q_lengths[0] = (x.q_lengths[0] + 1) / 2;
    } else if (x.heads > 1) {
      x.heads /= 2;
    } else if (x.k_lengths[0] > 65) {
      x.k_extent = x.k_lengths[0] = (x.k_lengths[0] + 1) / 2;
    } else {
      return;
    }
  }
}

inline void draw_used(Question& x, Random& random) {
  const auto used = [&](const std::vector<std::int64_t>& lengths) {
    std::vector<std::int64_t> result;
    for (const std::int64_t n : lengths) {
      result.push_back(random.chance(0.3) ? n : random.integer(0, static_cast<int>(n)));
    }
    return result;
  };
  x.q_used = x.q_lengths;
  x.k_used = x.k_lengths;
  const auto index_array = [&](const std::vector<std::int64_t>& numbers) {
    Array t(random.chance(0.5) ? DType::kInt32 : DType::kInt64,
            {static_cast<std::int64_t>(numbers.size())},
            x.read == Layout::kRead ? Layout::kWrite : x.read, random);
    for (std::size_t n = 0; n < numbers.size(); ++n) {
      t.set(static_cast<std::int64_t>(n), static_cast<double>(numbers[n]));
    }
    return t;
  };
  if (random.chance(0.2)) {
    x.q_used = used(x.q_lengths);
    x.a.seqused_q = (x.used_q = index_array(x.q_used)).tensor();
  }
  if (random.chance(0.25)) {
    x.k_used = used(x.k_lengths);
    x.a.seqused_k = (x.used_k = index_array(x.k_used)).tensor();
  }
  if (!x.packed) return;
  const auto offsets = [](const std::vector<std::int64_t>& lengths) {
    std::vector<std::int64_t> result{0};
    for (const std::int64_t n : lengths) result.push_back(result.back() + n);
    return result;
  };
  const std::vector<std::int64_t> q = offsets(x.q_lengths), k = offsets(x.k_lengths);
  x.q_extent = q.back() + (random.chance(0.3) ? random.integer(1, 20) : 0);
  x.k_extent = k.back() + (random.chance(0.3) ? random.integer(1, 20) : 0);
  x.a.cu_seqlens_q = (x.cu_q = index_array(q)).tensor();
  x.a.cu_seqlens_k = (x.cu_k = index_array(k)).tensor();
}

inline void draw_inputs(Question& x, Random& random) {
  const double factors[] = {1, 1, 1, 0.1, 3, 8};
  x.q_factor = factors[random.integer(0, 5)];
  x.v_shift = random.chance(0.2) ? 5 : 0;
  x.q = Array(x.dtype, x.q_shape(), x.read, random);
  x.k = Array(x.dtype, x.k_shape(), x.read, random);
  x.v = Array(x.dtype, x.v_shape(), x.read, random);
  x.q.fill([&] { return x.q_factor * random.normal(); });
  x.k.fill([&] { return random.normal(); });
  x.v.fill([&] { return x.v_shift + random.normal(); });
}

// A tensor that broadcasts to (B, H, Sq, Sk), each axis 1 or full, leading ones possibly absent.
inline Array draw_grid(const Question& x, DType dtype, Random& random) {
  const std::int64_t most_q = x.packed ? *x.a.max_seqlen_q : x.q_extent;
  const std::int64_t most_k = x.packed ? *x.a.max_seqlen_k : x.k_extent;
  Shape shape{x.batch, x.heads, most_q, most_k};
  for (std::int64_t& extent : shape) {
    if (random.chance(0.4)) extent = 1;
  }
  const int absent = random.chance(0.3) ? random.integer(0, 4) : 0;
  shape.erase(shape.begin(), shape.begin() + absent);
  return Array(dtype, shape, x.read, random);
}

inline void draw_score_options(Question& x, Random& random) {
  Attention& a = x.a;
  const double scales[] = {0, -0.7, 0.3, 1};
  const double caps[] = {0.5, 2, 30};
  if (random.chance(0.3)) a.scale = scales[random.integer(0, 3)];
  if (random.chance(0.25)) a.softcap = caps[random.integer(0, 2)];
  if (x.packed && random.chance(0.8)) {
    a.max_seqlen_q = x.longest(x.q_used) + random.integer(0, 3);
    a.max_seqlen_k = x.longest(x.k_used) + random.integer(0, 3);
  }
  const bool grids = !x.packed || a.max_seqlen_q;
  if (grids && random.chance(0.35)) {
    x.bias = draw_grid(x, draw_float(random), random);
    const double factor = random.chance(0.3) ? 4 : 1, hidden = random.chance(0.4) ? 0.2 : 0;
    x.bias.fill([&] {
      return random.chance(hidden) ? -std::numeric_limits<double>::infinity()
                                   : factor * random.normal();
    });
    a.bias = x.bias.tensor();
  }
  if (grids && random.chance(0.3)) {
    x.mask = draw_grid(x, DType::kBool, random);
    const double visible = random.chance(0.3) ? 0.05 : 0.7;
    x.mask.fill([&] { return random.chance(visible) ? 1.0 : 0.0; });
    a.mask = x.mask.tensor();
  }
  const DType option = is_wide(x.dtype) && random.chance(0.5) ? DType::kFloat64 : DType::kFloat32;
  if (random.chance(0.25)) {
    const Shape shape = random.chance(0.5) ? Shape{x.heads} : Shape{x.batch, x.heads};
    x.slopes = Array(option, shape, x.read, random);
    x.slopes.fill([&] { return random.chance(0.1) ? 0.0 : 0.2 * random.normal(); });
    a.alibi_slopes = x.slopes.tensor();
  }
  if (random.chance(0.25)) {
    x.sinks = Array(option, {x.heads}, x.read, random);
    x.sinks.fill([&] {
      return random.chance(0.15) ? -std::numeric_limits<double>::infinity() : 2 * random.normal();
    });
    a.sinks = x.sinks.tensor();
  }
}

inline void draw_visibility(Question& x, Random& random) {
  Attention& a = x.a;
  const double rates[] = {0.1, 0.5, 0.99, 1};
  a.causal = static_cast<Causal>(random.chance(0.5) ? 0 : random.integer(1, 2));
  if (random.chance(0.25)) a.window_left = random.integer(-5, random.chance(0.5) ? 12 : 150);
  if (random.chance(0.2)) a.window_right = random.integer(-5, random.chance(0.5) ? 12 : 150);
  if (random.chance(0.2)) {
    a.dropout_p = rates[random.integer(0, 3)];
    a.seed = random.bits();
  }
}

inline std::string describe(const Question& x) {
  const auto list = [](const std::vector<std::int64_t>& numbers) {
    std::string text = "[";
    for (const std::int64_t n : numbers) text += concat(text.size() > 1 ? "," : "", n);
    return text + "]";
  };
  const Attention& a = x.a;
  std::string text = concat(name(x.dtype), " H ", x.heads, "/", x.kv_heads, " D ", x.dim, " Dv ",
                            x.dim_v, " queries ", list(x.q_lengths), " keys ", list(x.k_lengths));
  if (x.packed) text += " packed";
  if (a.seqused_q) text += " used " + list(x.q_used);
  if (a.seqused_k) text += " used keys " + list(x.k_used);
  if (a.scale) text += concat(" scale ", *a.scale);
  if (a.causal != Causal::kNone) text += a.causal == Causal::kTopLeft ? " top-left" : " causal";
  if (a.window_left) text += concat(" left ", *a.window_left);
  if (a.window_right) text += concat(" right ", *a.window_right);
  if (a.softcap > 0) text += concat(" softcap ", a.softcap);
  if (a.dropout_p > 0) text += concat(" dropout ", a.dropout_p, " seed ", a.seed);
  for (const auto& [what, t] : {std::pair{"bias", &a.bias},
                                {"mask", &a.mask},
                                {"slopes", &a.alibi_slopes},
                                {"sinks", &a.sinks}}) {
    if (!*t) continue;
    text += concat(" ", what, " ", name((*t)->dtype), " (");
    for (int axis = 0; axis < (*t)->rank; ++axis) {
      text += concat(axis > 0 ? "," : "", (*t)->shape[axis]);
    }
    text += ")";
  }
  for (const auto& [what, t] : {std::pair{"q", &a.q}, {"k", &a.k}, {"v", &a.v}}) {
    if (t->rank > 0 && t->stride[t->rank - 1] != 1) {
      text += concat(" last stride of ", what, " ", t->stride[t->rank - 1]);
    }
  }
  return text;
}

// A whole question that costs the oracle at most `most` multiplications. The struct hands out
// pointers into itself only through Tensors, so it may be moved.
inline Question draw_question(Random& random, double most) {
  Question x;
  x.dtype = draw_float(random);
  const int groups[] = {1, 1, 2, 3, 4, 7};
  x.kv_heads = random.integer(1, 3);
  x.heads = x.kv_heads * groups[random.integer(0, 5)];
  x.dim = draw_dim(random);
  x.dim_v = random.chance(0.5) ? x.dim : draw_dim(random);
  draw_lengths(x, random);
  shrink(x, most);
  draw_used(x, random);
  draw_inputs(x, random);
  if (x.a.cu_seqlens_q || x.a.seqused_q || x.a.seqused_k) {
    x.poison_rows(x.q, true);
    x.poison_rows(x.k, false);
    x.poison_rows(x.v, false);
  }
  x.a.q = x.q.tensor();
  x.a.k = x.k.tensor();
  x.a.v = x.v.tensor();
  draw_score_options(x, random);
  draw_visibility(x, random);
  x.text = describe(x);
  return x;
}

// Cotangents of out and lse; of rows that are not used, NaN.
inline void draw_cotangents(Question& x, Random& random) {
  x.dout = Array(x.dtype, x.out_shape(), x.read, random);
  x.dlse = Array(lse_dtype(x.dtype), x.lse_shape(), x.read, random);
  x.dout.fill([&] { return random.normal(); });
  x.dlse.fill([&] { return random.normal(); });
  if (x.a.cu_seqlens_q || x.a.seqused_q) x.poison_rows(x.dout, true);
}

}  // namespace onefold::test
