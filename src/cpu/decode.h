// Decoding: up to kDecodeRows rows of each head against a stretch of keys, at the speed of memory.
//
//   for each key tile
//     scores[head][row][key] = q . k      K is read once, in memory order, and widened once
//     modify, hide, absorb                along the keys of a row
//     out = out * keep + weights V        V likewise
//
// Vectors run along d: nothing is packed. Operands of products are X: numbers, or pairs of bfloat16
// that are not even widened. A row's arithmetic does not depend on how many rows or heads share the
// tile. Compiled once per instruction set; includes scores.h.
#pragma once

#include "cpu/scores.h"

namespace onefold::cpu::ONEFOLD_ISA {

inline constexpr int kDecodeRows = 8, kDecodeKeys = 64;
// The number of rows that the code for `rows` of them is made for.
inline int made_for(std::int64_t rows) {
  return rows <= 2 ? static_cast<int>(rows) : rows <= 4 ? 4 : 8;
}
// Up to so many rows heads take turns: keys of a turn, bytes from a row to the one asked for.
inline constexpr int kFewRows = 2;
template <class T>
inline constexpr int kTurn = 4 / static_cast<int>(sizeof(T));
inline constexpr std::int64_t kLead = 16384;
using Vf = Vec<float>;
inline constexpr int kW = kWidth<float>;
#if defined(__AVX512F__)
inline constexpr int kDecodeRegisters = 16;  // accumulators in flight
#else
inline constexpr int kDecodeRegisters = 8;
#endif
// Whether memory is asked for while scores become weights too, head by head. With shorter vectors
// it gained nothing.
template <int kRows>
inline constexpr bool kAskToWeigh = kW == 16 && kRows > kFewRows;

// All lanes folded by `op`, halving: the same order for every accumulator.
template <class Op>
inline float fold_lanes(Vf v, Op op) {
#if defined(__AVX2__)
#if defined(__AVX512F__)
  const __m256 half = op(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
#else
  const __m256 half = v;
#endif
  __m128 x = op(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  x = op(x, _mm_movehl_ps(x, x));
  return op(float{x[0]}, float{x[1]});
#else
  return op(op(float{v[0]}, float{v[2]}), op(float{v[1]}, float{v[3]}));
#endif
}
inline float sum_lanes(Vf v) {
  return fold_lanes(v, [](auto a, auto b) { return a + b; });
}
inline float max_lane(Vf v) {
  return fold_lanes(v, [](auto a, auto b) { return a > b ? a : b; });
}

// The sums of kCount >= 8 accumulators at once, each in the order of sum_lanes: halves of all
// vectors are added in pairs until the sums lie side by side. Place p of `to` is the sum of
// acc[lane_order<kCount>(p)].
template <int kCount>
constexpr int lane_order(int place) {
  if constexpr (kW == 4 || kCount < 8) {
    return place;
  } else {
    constexpr int kBlocks = kW / 4, kGroups = kCount / kBlocks;
    return place % kGroups * kBlocks + place / kGroups;
  }
}
template <int kCount>
[[gnu::always_inline]] inline void sum_lanes_of(const Vf* acc, float* to) {
#if defined(__AVX512F__)
  static_assert(kCount == 8 || kCount == 16);
  constexpr int kGroups = kCount / 4;
  __m512 group[kGroups];
#pragma GCC unroll 4
  for (int g = 0; g < kGroups; ++g) {  // 128-bit block t of group g: acc[4 g + t]
    const Vf* a = acc + 4 * g;
    const __m512 ab = _mm512_add_ps(_mm512_shuffle_f32x4(a[0], a[1], 0x44),
                                    _mm512_shuffle_f32x4(a[0], a[1], 0xEE));
    const __m512 cd = _mm512_add_ps(_mm512_shuffle_f32x4(a[2], a[3], 0x44),
                                    _mm512_shuffle_f32x4(a[2], a[3], 0xEE));
    group[g] =
        _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xDD));
  }
  __m512 pair[kGroups / 2];
#pragma GCC unroll 2
  for (int g = 0; g < kGroups / 2; ++g) {
    pair[g] = _mm512_add_ps(_mm512_unpacklo_ps(group[2 * g], group[2 * g + 1]),
                            _mm512_unpackhi_ps(group[2 * g], group[2 * g + 1]));
  }
  const __m512 last = pair[kGroups / 2 - 1];
  const __m512 sums =
      _mm512_add_ps(_mm512_shuffle_ps(pair[0], last, 0x44), _mm512_shuffle_ps(pair[0], last, 0xEE));
  if constexpr (kCount == 16) {
    _mm512_storeu_ps(to, sums);
  } else {
    _mm256_storeu_ps(to, _mm512_castps512_ps256(_mm512_maskz_compress_ps(0x3333, sums)));
  }
#elif defined(__AVX2__)
  static_assert(kCount == 8);
  __m256 half[4];  // 128-bit block t of half g: acc[2 g + t]
#pragma GCC unroll 4
  for (int g = 0; g < 4; ++g) {
    half[g] = _mm256_add_ps(_mm256_permute2f128_ps(acc[2 * g], acc[2 * g + 1], 0x20),
                            _mm256_permute2f128_ps(acc[2 * g], acc[2 * g + 1], 0x31));
  }
  const __m256 low =
      _mm256_add_ps(_mm256_unpacklo_ps(half[0], half[1]), _mm256_unpackhi_ps(half[0], half[1]));
  const __m256 high =
      _mm256_add_ps(_mm256_unpacklo_ps(half[2], half[3]), _mm256_unpackhi_ps(half[2], half[3]));
  _mm256_storeu_ps(
      to, _mm256_add_ps(_mm256_shuffle_ps(low, high, 0x44), _mm256_shuffle_ps(low, high, 0xEE)));
#else
  for (int n = 0; n < kCount; ++n) to[n] = sum_lanes(acc[n]);
#endif
}

// Why so many rows do not take this path, or null. Not a question of strides, which must not change
// a bit.
static inline const char* not_decoding(const Problem& p, std::int64_t rows) {
  if (rows > kDecodeRows) return "more than 8 rows share a key/value head";
  if (p.dtype == DType::kFloat64) return "float64 is computed in tiles";
  if (p.dim % kW == 0 && p.dim_v % kW == 0 && p.dim > 0 && p.dim_v > 0) return nullptr;
  return kW == 16  ? "head dims are not multiples of 16"
         : kW == 8 ? "head dims are not multiples of 8"
                   : "head dims are not multiples of 4";
}
static inline bool decodable(const Problem& p, std::int64_t rows) {
  return not_decoding(p, rows) == nullptr;
}

// The rows of one key tile: in place, or a copy as floats when the last stride is not 1. Steps are
// in elements; head 0 is the first of the item.
template <class T>
struct KeyRows {
  const T *k, *v;
  std::int64_t k_step, v_step, k_head, v_head;
};

// What a head asks for while it computes: rows that are used soon, line after line, as many as it
// reads. A few lines at a time, between multiply-adds: more of them at once would wait for each
// other.
template <class T>
struct Asking {
  static constexpr int kLine = 64 / static_cast<int>(sizeof(T));
  const T* at;
  std::int64_t left, dim, gap;  // of the row; of a row; between rows

  // Step number `step` of those that read kStep elements each: whole lines every so many steps.
  template <int kStep>
  [[gnu::always_inline]] void after(std::int64_t step) {
    constexpr int kCount = kStep < kLine ? kLine : kStep;
    if (step % (kCount / kStep) != 0) return;
#pragma GCC unroll 8
    for (int x = 0; x < kCount; x += kLine) __builtin_prefetch(at + x);
    at += kCount;
    left -= kCount;
    if (left <= 0) {
      at += gap;
      left += dim;
    }
  }
};

// What an item keeps of its heads while their keys go by, and of the key tile in flight. Rows of
// one head follow each other, and heads do: as many rows each as the code is made for, because 8
// rows of every head would lie in the same sets of the first cache.
struct DecodeScratch {
  void* q;                  // [head][d / kW][row][kW], scaled, as operands
  float *out, *part;        // [head][row][step]: not yet divided; of the tile so far
  float *ref, *sum, *keep;  // [head][row]
  float* scores;            // [head][row][key]
  Pair* weights;            // the same as operands, where those are pairs
  float* mass;              // [head][row]: the sum of such weights, which are rounded
  bool* hidden;             // [head][row][key]
  bool* some_hidden;        // [head]: and a value that is not finite among the tile's
  std::int64_t dim, step;

  DecodeScratch(Arena& arena, const Problem& p, std::int64_t heads)
      : dim(p.dim), step(padded_dim<float>(p.dim_v)) {
    const std::int64_t rows = heads * kDecodeRows;
    q = arena.take<float>(rows * dim);  // of pairs there are fewer
    out = arena.take<float>(rows * step);
    part = arena.take<float>(rows * step);
    ref = arena.take<float>(rows);
    sum = arena.take<float>(rows);
    keep = arena.take<float>(rows);
    scores = arena.take<float>(rows * kDecodeKeys);
    weights = arena.take<Pair>(kHasPairs ? rows * kDecodeKeys / 2 : 0);
    mass = arena.take<float>(kHasPairs ? rows : 0);
    hidden = arena.take<bool>(rows * kDecodeKeys);
    some_hidden = arena.take<bool>(heads);
  }
};

// The rows of one head against the keys of a tile.
template <class T, class X, int kRows>
struct DecodeTile {
  static constexpr bool kPairs = kTerms<X> == 2;
  static constexpr int kStep = kTerms<X> * kW;  // elements of a vector of operands
  const KeyRows<T>& rows;
  const DecodeScratch& s;
  std::int64_t dim, dim_v, head;
  float factor;  // of sums of pairs: the others have it in q

  Asking<T>& asking;

  const T* k_row(int key) const { return rows.k + head * rows.k_head + key * rows.k_step; }
  const T* v_row(int key) const { return rows.v + head * rows.v_head + key * rows.v_step; }
  static Vec<X> operand(const T* at) {
    if constexpr (kPairs) {
      return load(reinterpret_cast<const Pair*>(at));
    } else {
      return widen(at);
    }
  }
  const Pair* weights(int r) const { return s.weights + (head * kRows + r) * kDecodeKeys / 2; }
  float* scores(int r) const { return s.scores + (head * kRows + r) * kDecodeKeys; }

  // The scores of kKeys keys from k on. Functions like this one are not inlined, so that registers
  // are left to it.
  template <int kKeys>
  [[gnu::noinline]] static void score_keys(const X* q, const T* k, std::int64_t k_step,
                                           Asking<T>& asking, std::int64_t dim, float factor,
                                           float* to) {
    Asking<T> ask = asking;
    constexpr int kCount = kKeys * kRows;
    const auto place = [](int r, int n) { return lane_order<kCount>(r * kKeys + n); };
    Vf acc[kCount] = {};
    for (std::int64_t d = 0; d < dim; d += kStep, q += kRows * kW) {
      // What the last step would ask for is left to the weights.
      if (!kAskToWeigh<kRows> || d + kStep < dim) ask.template after<kKeys * kStep>(d / kStep);
      // The shorter side stays in registers.
      constexpr bool kKeepRows = kRows < kKeys;
      Vec<X> kept[kKeepRows ? kRows : kKeys];
      if constexpr (kKeepRows) {
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) kept[r] = pinned(load(q + r * kW));
#pragma GCC unroll 16
        for (int n = 0; n < kKeys; ++n) {
          const Vec<X> x = pinned(operand(k + n * k_step + d));
#pragma GCC unroll 16
          for (int r = 0; r < kRows; ++r)
            acc[place(r, n)] = multiply_add(x, kept[r], acc[place(r, n)]);
        }
      } else {
#pragma GCC unroll 16
        for (int n = 0; n < kKeys; ++n) kept[n] = pinned(operand(k + n * k_step + d));
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
          const Vec<X> y = pinned(load(q + r * kW));
#pragma GCC unroll 16
          for (int n = 0; n < kKeys; ++n)
            acc[place(r, n)] = multiply_add(kept[n], y, acc[place(r, n)]);
        }
      }
    }
    asking = ask;
    if constexpr (kCount >= 8) {
      float sums[kCount];
      sum_lanes_of<kCount>(acc, sums);
      for (int n = 0; kPairs && n < kCount; ++n) sums[n] *= factor;
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        __builtin_memcpy(to + r * kDecodeKeys, sums + r * kKeys, kKeys * sizeof(float));
      }
    } else {
#pragma GCC unroll 16
      for (int at = 0; at < kCount; ++at) {
        to[at / kKeys * kDecodeKeys + at % kKeys] = (kPairs ? factor : 1.0f) * sum_lanes(acc[at]);
      }
    }
  }

  void drop(int r, int key) const {
    if constexpr (kPairs) {
      Pair& pair = s.weights[((head * kRows + r) * kDecodeKeys + key) / 2];
      pair &= key % 2 == 0 ? static_cast<Pair>(0xFFFF0000) : 0x0000FFFF;
    }
  }

  template <int kKeys>
  void score_blocks(int& key, int end) const {
    const X* q = static_cast<const X*>(s.q) + head * kRows * operands<X>(dim);
    for (; key + kKeys <= end; key += kKeys) {
      score_keys<kKeys>(q, k_row(key), rows.k_step, asking, dim, factor, scores(0) + key);
    }
  }
  void score(int begin, int end) const {
    constexpr int kFill = kDecodeRegisters / kRows, kFew = kTurn<T>;
    int key = begin;
    score_blocks<(kFill < 8 ? kFill : 8)>(key, end);
    if constexpr (kRows <= kFewRows) score_blocks<kFew>(key, end);
    score_blocks<1>(key, end);
  }

  // Adds `count` keys to kVectors vectors of operands of its part, or the part to out.
  template <int kVectors>
  [[gnu::noinline]] static void sum_vectors(const float* weights, const T* v, std::int64_t v_step,
                                            Asking<T>& asking, int count, const float* part,
                                            float* to, std::int64_t step, const float* keep) {
    Asking<T> ask = asking;
    Vf acc[kRows][kVectors] = {};
    if (part) {
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
        for (int n = 0; n < kVectors; ++n) acc[r][n] = load(part + r * step + n * kW);
      }
    }
    for (int key = 0; key < count; ++key, v += v_step) {
      Vf x[kVectors];
#pragma GCC unroll 16
      for (int n = 0; n < kVectors; ++n) x[n] = pinned(widen(v + n * kW));
      ask.template after<kVectors * kStep>(key);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const Vf w = splat(weights[r * kDecodeKeys + key]);
#pragma GCC unroll 16
        for (int n = 0; n < kVectors; ++n) acc[r][n] = fma(w, x[n], acc[r][n]);
      }
    }
    asking = ask;
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
      for (int n = 0; n < kVectors; ++n) {
        float* where = to + r * step + n * kW;
        store(where, keep ? fma(load(where), splat(keep[r]), acc[r][n]) : acc[r][n]);
      }
    }
  }

  // The same of pairs of keys: 2 * kVectors vectors of its part, which lie as `interleave` leaves
  // them.
  template <int kVectors>
  [[gnu::noinline]] static void sum_pairs(const Pair* weights, const T* v, std::int64_t v_step,
                                          Asking<T>& asking, int count, const float* part,
                                          float* to, std::int64_t step, const float* keep) {
    Asking<T> ask = asking;
    Vf acc[kRows][2 * kVectors] = {};
    if (part) {
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
        for (int n = 0; n < 2 * kVectors; ++n) acc[r][n] = load(part + r * step + n * kW);
      }
    }
    for (int key = 0; key < count; key += 2, v += 2 * v_step, ++weights) {
      Vec<Pair> x[2 * kVectors];
#pragma GCC unroll 16
      for (int n = 0; n < kVectors; ++n) {
        const Vec<Pair> second = key + 1 < count ? operand(v + v_step + n * kStep) : Vec<Pair>{};
        const Interleaved both = interleave(operand(v + n * kStep), second);
        x[2 * n] = pinned(both.low);
        x[2 * n + 1] = pinned(both.high);
      }
      ask.template after<2 * kVectors * kStep>(key / 2);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const Vec<Pair> w = splat(weights[r * kDecodeKeys / 2]);
#pragma GCC unroll 16
        for (int n = 0; n < 2 * kVectors; ++n) acc[r][n] = multiply_add(w, x[n], acc[r][n]);
      }
    }
    asking = ask;
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
      for (int n = 0; n < 2 * kVectors; n += 2) {
        if (keep) in_order(acc[r][n], acc[r][n + 1]);
        for (int m = n; m < n + 2; ++m) {
          float* where = to + r * step + m * kW;
          store(where, keep ? fma(load(where), splat(keep[r]), acc[r][m]) : acc[r][m]);
        }
      }
    }
  }

  // Adds keys [begin, end) of the tile's `count` to its part, and the whole part to out.
  void sum_values(int begin, int end, int count) const {
    const std::int64_t at = head * kRows * s.step;
    const float* part = begin > 0 ? s.part + at : nullptr;
    float* to = (end < count ? s.part : s.out) + at;
    const float* keep = end < count ? nullptr : s.keep + head * kRows;
    const T* v = v_row(begin);
    std::int64_t d = 0;
    const auto sum = [&]<int kVectors>() {
      for (; d + kVectors * kStep <= dim_v; d += kVectors * kStep) {
        const float* from = part ? part + d : nullptr;
        if constexpr (kPairs) {
          sum_pairs<kVectors>(weights(0) + begin / 2, v + d, rows.v_step, asking, end - begin, from,
                              to + d, s.step, keep);
        } else {
          sum_vectors<kVectors>(scores(0) + begin, v + d, rows.v_step, asking, end - begin, from,
                                to + d, s.step, keep);
        }
      }
    };
    constexpr int kMost = kDecodeRegisters / kTerms<X> / kRows;
    sum.template operator()<(kMost < 8 / kTerms<X> ? kMost : 8 / kTerms<X>)>();
    sum.template operator()<1>();
  }

  // For a tile with hidden keys and values that are not finite: only what a row sees, in the order
  // of sum_values, so that what a row does not see leaves its bits alone.
  void sum_seen(int count, int live) const {
    for (int r = 0; r < live; ++r) {
      const std::int64_t row = head * kRows + r;
      const bool* hidden = s.hidden + row * kDecodeKeys;
      const Vf keep = splat(s.keep[row]);
      const auto value = [&](int key, std::int64_t d) {
        return key < count && !hidden[key] ? operand(v_row(key) + d) : Vec<X>{};
      };
      for (std::int64_t d = 0; d < dim_v; d += kStep) {
        Vf acc[kTerms<X>] = {};
        for (int key = 0; key < count; key += kTerms<X>) {
          if constexpr (kPairs) {
            const Interleaved both = interleave(value(key, d), value(key + 1, d));
            const Vec<Pair> w = splat(weights(r)[key / 2]);
            acc[0] = multiply_add(w, both.low, acc[0]);
            acc[1] = multiply_add(w, both.high, acc[1]);
          } else {
            acc[0] = fma(splat(scores(r)[key]), value(key, d), acc[0]);
          }
        }
        if constexpr (kPairs) in_order(acc[0], acc[1]);
        for (int n = 0; n < kTerms<X>; ++n) {
          float* to = s.out + row * s.step + d + n * kW;
          store(to, fma(load(to), keep, acc[n]));
        }
      }
    }
  }
  bool all_values_finite(int count) const {
    Vf sums{};  // 0 as long as they are
    for (int key = 0; key < count; ++key) {
      for (std::int64_t d = 0; d < dim_v; d += kW) sums += widen(v_row(key) + d) * Vf{};
    }
    return sum_lanes(sums) == 0;
  }
};

// The variant, row by row along the keys; returns whether any key is hidden from some row.
inline bool modify_rows(const Problem& p, const Sequence& seq, const HeadGroup& heads,
                        const QueryTile& tile, std::int64_t j, int num_keys,
                        const LaneFacts<float>& lanes, float* row, float* scores, bool* hidden) {
  const bool natural = !p.variant.scale_only();
  bool any = false;
  for (int r = 0; r < tile.rows; ++r) {
    const std::int64_t i = lanes.query[r], h = lanes.head[r];
    const KeyInterval seen = key_interval(p.variant, seq.used, i);
    float* score_row = scores + r * kDecodeKeys;
    bool* hidden_row = hidden + r * kDecodeKeys;
    At<float> at{0, lanes.slope[r], 0};
    if (p.bias) {
      load_row(row,
               static_cast<const std::byte*>(p.bias.data) +
                   p.bias.offset(heads.b, h, i, j) * size_bytes(p.bias.dtype),
               p.bias.dtype, p.bias.stride[3], num_keys);
    }
    const auto* mask =
        p.mask ? static_cast<const std::uint8_t*>(p.mask.data) + p.mask.offset(heads.b, h, i, j)
               : nullptr;
    for (int key = 0; key < num_keys; ++key) {
      if (p.bias) at.bias = row[key];
      hidden_row[key] = j + key < seen.begin || j + key >= seen.end ||
                        (p.bias && at.bias == kEmpty<float>) ||
                        (mask && mask[key * p.mask.stride[3]] == 0);
      any |= hidden_row[key];
    }
    if (natural) {
      for (int key = 0; key < num_keys; key += kW) {
        At<Vf> wide{};
        if (p.bias) wide.bias = load(row + key);
        if (p.variant.has_slopes) {
          wide.slope = splat(lanes.slope[r]);
          Vf position;
          for (int lane = 0; lane < kW; ++lane) position[lane] = static_cast<float>(j + key + lane);
          wide.distance = VectorArith<float>::abs(splat(lanes.position[r]) - position);
        }
        const Vf x = load(score_row + key);
        store(score_row + key, to_base_2<float>(natural_score<float>(p.variant, x, wide)));
      }
    }
    for (int key = 0; key < num_keys; ++key) {
      if (hidden_row[key]) score_row[key] = kEmpty<float>;
    }
  }
  return any;
}

// Scores become weights; returns what the old sum was scaled by. Lanes beyond num_keys are empty.
// As pairs they are rounded: the others then are too, and `mass` is their sum. `ask` is called once
// a vector, with its number. Flat, because what it calls is not this instruction set's own.
template <class X, class Ask>
[[gnu::flatten]] inline float absorb_row(float* scores, int num_keys, float& ref, float& sum,
                                         Pair* pairs, float* mass, const Ask& ask) {
  const int padded = static_cast<int>(round_up(num_keys, kW));
  for (int key = num_keys; key < padded; ++key) scores[key] = kEmpty<float>;
  Vf tops = splat(kEmpty<float>);
  for (int key = 0; key < padded; key += kW) tops = max(tops, load(scores + key));
  Softmax<float> state{ref, sum};
  const float keep = raise<IntegerGauge>(state, max_lane(tops));
  const Vf against = splat(anchor(state.ref));
  Vf sums{}, rounded{};
  for (int key = 0; key < padded; key += kW) {
    ask(key / kW);
    Vf x = weight_from(load(scores + key), against);
    sums += x;
    if constexpr (kTerms<X> == 2) {
      x = round_to_bfloat16(x, reinterpret_cast<std::uint16_t*>(pairs) + key);
      rounded += x;
    }
    store(scores + key, x);
  }
  ref = state.ref;
  sum = state.sum + sum_lanes(sums);
  if constexpr (kTerms<X> == 2) *mass = *mass * keep + sum_lanes(rounded);
  return keep;
}

// Scores of head n become weights, in s.scores.
template <class T, class X, int kRows>
void weigh_head(const Problem& p, const Sequence& seq, const QueryTile& tile,
                LaneFacts<float>& lanes, const DecodeTile<T, X, kRows>& work, std::int64_t j,
                int count, float* row) {
  const DecodeScratch& s = work.s;
  const std::int64_t first = work.head * kRows;
  bool some_hidden = false;
  const TileClass band =
      tile_class(p.variant, seq.used, tile.query_begin, tile.query_end, j, j + count);
  const bool modified = !p.variant.scale_only() || p.mask || band != TileClass::kFull;
  if (modified || p.variant.dropout()) set_lanes(p, tile, lanes);
  if (modified) {
    some_hidden = modify_rows(p, seq, tile.heads, tile, j, count, lanes, row, work.scores(0),
                              s.hidden + first * kDecodeKeys);
  }
  Asking<T> asking = work.asking;
  const auto ask = [&](int vector) {  // a step of each key, shared out among the rows
    constexpr int kShare = kW * DecodeTile<T, X, kRows>::kStep / kRows;
    if constexpr (kAskToWeigh<kRows>) asking.template after<kShare>(vector);
  };
  for (int r = 0; r < kRows; ++r) {
    s.keep[first + r] =
        absorb_row<X>(work.scores(r), count, s.ref[first + r], s.sum[first + r],
                      s.weights + (first + r) * kDecodeKeys / 2, s.mass + first + r, ask);
  }
  for (int r = 0; p.variant.dropout() && r < tile.rows; ++r) {
    for (int key = 0; key < count; ++key) {
      if (!onefold::keep(p.variant, tile.heads.b, lanes.head[r], lanes.query[r], j + key)) {
        work.scores(r)[key] = 0;
        work.drop(r, key);
      }
    }
  }
  s.some_hidden[work.head] = some_hidden && !work.all_values_finite(count);
}

// One key tile of `count` keys from j against the rows of `num_heads` heads.
//
// Memory is asked for in its own order. In (batch, seqlen, heads, head_dim) a key's heads are
// neighbours: with few rows, heads take turns every kTurn keys, so that it is read in that order
// too. With more, what heads keep would not fit into the first cache: one head follows another, and
// while K is multiplied and scores become weights the tile's V is asked for, then the next tile's
// K.
template <class T, class X, int kRows, class TileOf>
void decode_tile(const Problem& p, const Sequence& seq, const TileOf& tile_of,
                 LaneFacts<float>& lanes, const DecodeScratch& s, const KeyRows<T>& keys,
                 std::int64_t first_head, std::int64_t num_heads, std::int64_t j, int count,
                 float* row) {
  using Work = DecodeTile<T, X, kRows>;
  const std::int64_t end_head = first_head + num_heads;
  const float factor = score_factor<X>(p).of_scores;
  // Whether rows follow each other, all heads of a key and then the next.
  const bool one_run = p.dim == p.dim_v && keys.k_head == p.dim && keys.v_head == p.dim &&
                       keys.k_step == num_heads * p.dim && keys.v_step == keys.k_step;
  const bool take_turns = kRows <= kFewRows && one_run;
  const int step = take_turns && num_heads > 1 ? kTurn<T> : count;
  const auto in_turns = [&](const T* now, const T* then, std::int64_t then_head,
                            std::int64_t then_step, const auto& function) {
    // From a row of the run to the one to ask for, and the end of what `now` has.
    const std::int64_t lead = take_turns ? kLead / std::int64_t{sizeof(T)} : count * keys.k_step;
    const std::int64_t end_now = count * keys.k_step - lead;
    std::int64_t at = 0;
    for (int key = 0; key < count; key += step) {
      const int end = key + step < count ? key + step : count;
      for (std::int64_t n = first_head; n < end_head; ++n, at += (end - key) * p.dim) {
        const T* ask = !one_run       ? then + n * then_head
                       : at < end_now ? now + (at + lead)
                                      : then + (at - end_now);
        Asking<T> asking{ask, p.dim, p.dim, one_run ? 0 : then_step - p.dim};
        function(Work{keys, s, p.dim, p.dim_v, n, factor, asking}, key, end);
      }
    }
  };
  const auto weigh = [&](const Work& work) {
    weigh_head(p, seq, tile_of(work.head), lanes, work, j, count, row);
  };
  in_turns(keys.k, keys.v, keys.v_head, keys.v_step, [&](const Work& work, int key, int end) {
    work.score(key, end);
    if (kAskToWeigh<kRows>) weigh(work);
  });
  for (std::int64_t n = first_head; !kAskToWeigh<kRows> && n < end_head; ++n) {
    Asking<T> nothing{};
    weigh(Work{keys, s, p.dim, p.dim_v, n, factor, nothing});
  }
  in_turns(keys.v, keys.k + count * keys.k_step, keys.k_head, keys.k_step,
           [&](const Work& work, int key, int end) {
             if (!s.some_hidden[work.head]) return work.sum_values(key, end, count);
             if (key == 0) work.sum_seen(count, tile_of(work.head).rows);
           });
}

}  // namespace onefold::cpu::ONEFOLD_ISA
