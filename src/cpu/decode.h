// Decoding: up to kDecodeRows rows against a stretch of keys, at the speed of memory.
//
//   for each key tile
//     scores[row][key] = q . k         K is read once, straight from memory, widened once for all
//     rows modify and hide, absorb          along the keys out[row] = out[row] * keep + sum_key
//     weight V        V likewise
//
// Vectors run along d, so nothing is packed or transposed. What the next phase will read is asked
// for while this one computes: V's rows during the scores, the next K rows during the sum. A row's
// arithmetic does not depend on how many rows share the keys. Compiled once per instruction set;
// includes scores.h.
#pragma once

#include "cpu/scores.h"

namespace onefold::cpu::ONEFOLD_ISA {

inline constexpr int kDecodeRows = 8, kDecodeKeys = 64;
using Vf = Vec<float>;
inline constexpr int kW = kWidth<float>;
#if defined(__AVX512F__)
inline constexpr int kDecodeRegisters = 16;  // accumulators in flight
#else
inline constexpr int kDecodeRegisters = 8;
#endif

// One vector of keys' elements, as floats.
inline Vf widen(const float* p) { return load(p); }
struct BFloat16 {
  std::uint16_t bits;
};
struct Float16 {
  std::uint16_t bits;
};
inline Vf widen(const BFloat16* p) {
#if defined(__AVX512F__)
  return std::bit_cast<Vf>(_mm512_slli_epi32(
      _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16));
#elif defined(__AVX2__)
  return std::bit_cast<Vf>(_mm256_slli_epi32(
      _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16));
#else
  Vf v;
  for (int lane = 0; lane < kW; ++lane) v[lane] = bfloat16_to_float(p[lane].bits);
  return v;
#endif
}
inline Vf widen(const Float16* p) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__)
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  Vf v;
  for (int lane = 0; lane < kW; ++lane) v[lane] = float16_to_float(p[lane].bits);
  return v;
#endif
}

// The sum of all lanes, halving: the same order for every accumulator.
inline float sum_lanes(Vf v) {
#if defined(__AVX2__)
#if defined(__AVX512F__)
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
#else
  const __m256 half = v;
#endif
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
#else
  return (v[0] + v[2]) + (v[1] + v[3]);
#endif
}

// The sums of eight or sixteen accumulators at once, each in the order of sum_lanes: halves of all
// vectors are added in pairs until one vector holds every sum. to[n] is the sum of acc[n].
#if defined(__AVX512F__)
template <int kCount>
[[gnu::always_inline]] inline void sum_lanes_of(const Vf* acc, float* to) {
  static_assert(kCount == 8 || kCount == 16);
  __m512 group[4];
#pragma GCC unroll 4
  for (int g = 0; g < kCount / 4; ++g) {  // 128-bit block t of group g: acc[4 g + t]
    const Vf* a = acc + 4 * g;
    const __m512 ab = _mm512_add_ps(_mm512_shuffle_f32x4(a[0], a[1], 0x44),
                                    _mm512_shuffle_f32x4(a[0], a[1], 0xEE));
    const __m512 cd = _mm512_add_ps(_mm512_shuffle_f32x4(a[2], a[3], 0x44),
                                    _mm512_shuffle_f32x4(a[2], a[3], 0xEE));
    group[g] =
        _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xDD));
  }
  __m512 pair[2];
#pragma GCC unroll 2
  for (int g = 0; g < 2; ++g) {
    const int from = kCount == 16 ? 2 * g : 0;
    pair[g] = _mm512_add_ps(_mm512_unpacklo_ps(group[from], group[from + 1]),
                            _mm512_unpackhi_ps(group[from], group[from + 1]));
  }
  alignas(64) float sums[16];  // [t][g]
  _mm512_store_ps(sums, _mm512_add_ps(_mm512_shuffle_ps(pair[0], pair[1], 0x44),
                                      _mm512_shuffle_ps(pair[0], pair[1], 0xEE)));
#pragma GCC unroll 16
  for (int n = 0; n < kCount; ++n) to[n] = sums[n % 4 * 4 + n / 4];
}
#elif defined(__AVX2__)
template <int kCount>
[[gnu::always_inline]] inline void sum_lanes_of(const Vf* acc, float* to) {
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
  alignas(32) float sums[8];  // [t][g]
  _mm256_store_ps(
      sums, _mm256_add_ps(_mm256_shuffle_ps(low, high, 0x44), _mm256_shuffle_ps(low, high, 0xEE)));
#pragma GCC unroll 8
  for (int n = 0; n < 8; ++n) to[n] = sums[n % 2 * 4 + n / 2];
}
#else
template <int kCount>
[[gnu::always_inline]] inline void sum_lanes_of(const Vf* acc, float* to) {
  for (int n = 0; n < kCount; ++n) to[n] = sum_lanes(acc[n]);
}
#endif

inline void ask_for(const void* p, std::int64_t bytes) {
  for (std::int64_t x = 0; x < bytes; x += 64) {
    __builtin_prefetch(static_cast<const std::byte*>(p) + x, 0, 2);
  }
}

// Whether so few rows take this path: not a question of strides, which must not change a bit.
inline bool decodable(const Problem& p, std::int64_t rows) {
  return p.dtype != DType::kFloat64 && rows <= kDecodeRows && p.dim % kW == 0 &&
         p.dim_v % kW == 0 && p.dim > 0 && p.dim_v > 0;
}

// Rows that will be read next: asked for while the present ones are summed.
struct Ahead {
  const std::byte* first = nullptr;
  std::int64_t step = 0, bytes = 0;  // in bytes
  int count = 0;
};

// The rows of one key tile: in place, or a copy as floats when the last stride is not 1.
template <class T>
struct KeyRows {
  const T *k, *v;
  std::int64_t k_step, v_step;

  const T* k_row(int key) const { return k + key * k_step; }
  const T* v_row(int key) const { return v + key * v_step; }
};

template <class T, int kRows>
struct DecodeTile {
  const Problem& p;
  const KeyRows<T>& rows;
  const float* q;  // [row][d], scaled
  float* out;      // [row][step], not yet divided
  std::int64_t step;
  float (&scores)[kDecodeRows][kDecodeKeys];

  // Keys scored at once: as many as fill the accumulators.
  static constexpr int kKeyBlock = kDecodeRegisters / kRows < 8 ? kDecodeRegisters / kRows : 8;

  template <int kKeys>
  void score_keys(int key) {
    const T* k[kKeys];
    Vf acc[kKeys * kRows] = {};
    for (int n = 0; n < kKeys; ++n) {
      k[n] = rows.k_row(key + n);
      ask_for(rows.v_row(key + n), p.dim_v * std::int64_t{sizeof(T)});
    }
    for (std::int64_t d = 0; d < p.dim; d += kW) {
      Vf x[kKeys];
#pragma GCC unroll 16
      for (int n = 0; n < kKeys; ++n) x[n] = pinned(widen(k[n] + d));
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const Vf y = load(q + r * p.dim + d);
#pragma GCC unroll 16
        for (int n = 0; n < kKeys; ++n) {
          acc[r * kKeys + n] = fma(x[n], y, acc[r * kKeys + n]);
        }
      }
    }
    if constexpr (kKeys == kKeyBlock) {
      float sums[kKeys * kRows];
      sum_lanes_of<kKeys * kRows>(acc, sums);
#pragma GCC unroll 16
      for (int n = 0; n < kKeys * kRows; ++n) scores[n / kKeys][key + n % kKeys] = sums[n];
    } else {
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) scores[r][key] = sum_lanes(acc[r]);
    }
  }

  void score(int num_keys) {
    int key = 0;
    for (; key + kKeyBlock <= num_keys; key += kKeyBlock) score_keys<kKeyBlock>(key);
    for (; key < num_keys; ++key) score_keys<1>(key);
  }

  // out[row] over vectors [d, d + kVectors) of V.
  template <int kVectors>
  void sum_vectors(int num_keys, std::int64_t d, const float* keep, const Ahead& ahead, int next) {
    Vf acc[kRows][kVectors] = {};
    for (int key = 0; key < num_keys; ++key) {
      const T* v = rows.v_row(key) + d;
      // Each pass over the tile asks for its share of the next keys.
      if (next + key < ahead.count) ask_for(ahead.first + (next + key) * ahead.step, ahead.bytes);
      Vf x[kVectors];
#pragma GCC unroll 16
      for (int n = 0; n < kVectors; ++n) x[n] = pinned(widen(v + n * kW));
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const Vf w = splat(scores[r][key]);
#pragma GCC unroll 16
        for (int n = 0; n < kVectors; ++n) acc[r][n] = fma(w, x[n], acc[r][n]);
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
      for (int n = 0; n < kVectors; ++n) {
        float* to = out + r * step + d + n * kW;
        store(to, fma(load(to), splat(keep[r]), acc[r][n]));
      }
    }
  }

  void sum_values(int num_keys, const float* keep, const Ahead& ahead) {
    constexpr int kVectors = kDecodeRegisters / kRows < 8 ? kDecodeRegisters / kRows : 8;
    const int passes = static_cast<int>(p.dim_v / (kVectors * kW));
    const int share = passes > 0 ? (ahead.count + passes - 1) / passes : 0;
    std::int64_t d = 0;
    int next = 0;
    for (; d + kVectors * kW <= p.dim_v; d += kVectors * kW, next += share) {
      const Ahead mine{ahead.first, ahead.step, ahead.bytes,
                       next + share < ahead.count ? next + share : ahead.count};
      sum_vectors<kVectors>(num_keys, d, keep, mine, next);
    }
    for (; d < p.dim_v; d += kW) sum_vectors<1>(num_keys, d, keep, {}, 0);
  }

  // For a tile with hidden keys and values that are not finite: only what a row sees, in the order
  // of sum_vectors, so that what a row does not see leaves its bits alone.
  void sum_seen(int num_keys, int live, const float* keep,
                const bool (&hidden)[kDecodeRows][kDecodeKeys]) {
    for (std::int64_t d = 0; d < p.dim_v; d += kW) {
      for (int r = 0; r < live; ++r) {
        Vf acc{};
        for (int key = 0; key < num_keys; ++key) {
          if (!hidden[r][key]) acc = fma(splat(scores[r][key]), widen(rows.v_row(key) + d), acc);
        }
        float* to = out + r * step + d;
        store(to, fma(load(to), splat(keep[r]), acc));
      }
    }
  }
};

// The variant, row by row along the keys; returns whether any key is hidden from some row.
inline bool modify_rows(const Problem& p, const Sequence& seq, const HeadGroup& heads,
                        const QueryTile& tile, std::int64_t j, int num_keys,
                        const LaneFacts<float>& lanes, float* row,
                        float (&scores)[kDecodeRows][kDecodeKeys],
                        bool (&hidden)[kDecodeRows][kDecodeKeys]) {
  const bool natural = !p.variant.scale_only();
  bool any = false;
  for (int r = 0; r < tile.rows; ++r) {
    const std::int64_t i = lanes.query[r], h = lanes.head[r];
    const KeyInterval seen = key_interval(p.variant, seq.used, i);
    float* score_row = scores[r];
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
      hidden[r][key] = j + key < seen.begin || j + key >= seen.end ||
                       (p.bias && at.bias == kEmpty<float>) ||
                       (mask && mask[key * p.mask.stride[3]] == 0);
      any |= hidden[r][key];
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
        store(score_row + key, to_base_2<float>(score(p.variant, x, wide)));
      }
    }
    for (int key = 0; key < num_keys; ++key) {
      if (hidden[r][key]) score_row[key] = kEmpty<float>;
    }
  }
  return any;
}

// Scores become weights; returns what the old sum was scaled by. Lanes beyond num_keys are empty.
inline float absorb_row(float* scores, int num_keys, float& ref, float& sum) {
  const int padded = static_cast<int>(round_up(num_keys, kW));
  for (int key = num_keys; key < padded; ++key) scores[key] = kEmpty<float>;
  Vf tops = splat(kEmpty<float>);
  for (int key = 0; key < padded; key += kW) tops = max(tops, load(scores + key));
  float top = kEmpty<float>;
  for (int lane = 0; lane < kW; ++lane) top = top > tops[lane] ? top : tops[lane];
  Softmax<float> state{ref, sum};
  const float keep = raise<IntegerGauge>(state, top);
  const Vf against = splat(anchor(state.ref));
  Vf sums{};
  for (int key = 0; key < padded; key += kW) {
    const Vf x = weight_from(load(scores + key), against);
    store(scores + key, x);
    sums += x;
  }
  ref = state.ref;
  sum = state.sum + sum_lanes(sums);
  return keep;
}

// The state of one key/value head's rows while its keys go by.
struct DecodeState {
  const float* q;    // [row][d], scaled
  float* out;        // [row][step], not yet divided
  float *ref, *sum;  // [row]
};

// One key tile of `count` keys from j. `row` is room for a tile's biases of one row.
template <class T, int kRows>
void decode_tile(const Problem& p, const Sequence& seq, const QueryTile& tile,
                 const LaneFacts<float>& lanes, const DecodeState& state, std::int64_t step,
                 const KeyRows<T>& keys, std::int64_t j, int count, const Ahead& ahead,
                 float* row) {
  alignas(64) float scores[kDecodeRows][kDecodeKeys];
  bool hidden[kDecodeRows][kDecodeKeys];
  DecodeTile<T, kRows> work{p, keys, state.q, state.out, step, scores};
  work.score(count);
  bool some_hidden = false;
  const TileClass band =
      tile_class(p.variant, seq.used, tile.query_begin(), tile.query_end(), j, j + count);
  if (!p.variant.scale_only() || p.mask || band != TileClass::kFull) {
    some_hidden = modify_rows(p, seq, tile.heads, tile, j, count, lanes, row, scores, hidden);
  }
  float keep[kRows];
  for (int r = 0; r < kRows; ++r) {
    keep[r] = absorb_row(scores[r], count, state.ref[r], state.sum[r]);
  }
  for (int r = 0; p.variant.dropout() && r < tile.rows; ++r) {
    for (int key = 0; key < count; ++key) {
      if (!onefold::keep(p.variant, tile.heads.b, lanes.head[r], lanes.query[r], j + key)) {
        scores[r][key] = 0;
      }
    }
  }
  Vf sums{};  // 0 as long as every value is finite
  for (int key = 0; some_hidden && key < count; ++key) {
    for (std::int64_t d = 0; d < p.dim_v; d += kW) sums += widen(keys.v_row(key) + d) * Vf{};
  }
  const bool finite = sum_lanes(sums) == 0;
  finite ? work.sum_values(count, keep, ahead) : work.sum_seen(count, tile.rows, keep, hidden);
}

template <class T>
void decode_tile_any(const Problem& p, const Sequence& seq, const QueryTile& tile,
                     const LaneFacts<float>& lanes, const DecodeState& state, std::int64_t step,
                     const KeyRows<T>& keys, std::int64_t j, int count, const Ahead& ahead,
                     float* row) {
  const auto run = [&]<int kRows>(std::integral_constant<int, kRows>) {
    decode_tile<T, kRows>(p, seq, tile, lanes, state, step, keys, j, count, ahead, row);
  };
  if (tile.rows == 1) return run(std::integral_constant<int, 1>{});
  if (tile.rows == 2) return run(std::integral_constant<int, 2>{});
  if (tile.rows <= 4) return run(std::integral_constant<int, 4>{});
  run(std::integral_constant<int, 8>{});
}

}  // namespace onefold::cpu::ONEFOLD_ISA
