// What changes a score, hides a key or drops a weight: the one place where causal masks, windows,
// soft caps, ALiBi, biases, boolean masks and dropout are defined. Host and device compile it.
//
// Invariant: visibility along a row is one interval of keys (key_interval) further thinned by bias
// and mask; what holds for tiles (ranges, bands) says the same of many rows. Positions i (query)
// and j (key) are local to a sequence and 64-bit. Hooks are templates on T: float, double, a vector
// of queries, or a Dual of these, which makes every variant differentiable. Kernels load bias, mask
// and slope their own way and pass the values in. Includes algebra/scalar.h only.
#pragma once

#include "onefold/algebra/scalar.h"

namespace onefold {

inline constexpr i64 kUnbounded = i64{1} << 60;

struct Lengths {
  i64 q, k;  // used lengths of one sequence
};

struct Variant {
  double scale = 1.0;
  double softcap = 0.0;
  // Key j of query i lies in the band when band_begin <= j - diagonal(i) <= band_end.
  i64 band_begin = -kUnbounded;
  i64 band_end = kUnbounded;
  bool top_left = false;
  bool has_bias = false;
  bool has_mask = false;
  bool has_slopes = false;
  double dropout_p = 0.0;
  u64 seed = 0;

  // The score is scale * q.k and nothing else; a kernel may then fold scale and log2(e) together.
  bool scale_only() const { return softcap == 0.0 && !has_bias && !has_slopes; }
  bool banded() const { return band_begin > -kUnbounded || band_end < kUnbounded; }
  bool dropout() const { return dropout_p > 0.0; }
};

// ---- visibility ----

struct KeyInterval {
  i64 begin, end;
  bool empty() const { return begin >= end; }
};

static inline i64 clamp(i64 x, i64 low, i64 high) { return x < low ? low : x > high ? high : x; }

// The key on query i's diagonal, possibly outside [0, k).
static inline i64 diagonal(const Variant& v, Lengths n, i64 i) {
  return v.top_left ? i : i + n.k - n.q;
}

// The keys that causality, window and length leave to query i. Both ends are monotone in i.
static inline KeyInterval key_interval(const Variant& v, Lengths n, i64 i) {
  if (v.band_begin > v.band_end) return {0, 0};
  const i64 d = diagonal(v, n, i);
  return {clamp(d + v.band_begin, 0, n.k), clamp(d + v.band_end + 1, 0, n.k)};
}

// [begin, end) may be seen by some row, [full_begin, full_end) is inside every row's interval.
struct TileRange {
  i64 begin, full_begin, full_end, end;
};

// The keys of rows [i0, i1), i0 < i1.
static inline TileRange kv_range(const Variant& v, Lengths n, i64 i0, i64 i1) {
  const KeyInterval first = key_interval(v, n, i0);
  const KeyInterval last = key_interval(v, n, i1 - 1);
  const i64 begin = first.begin;
  const i64 end = last.end > begin ? last.end : begin;
  const i64 full_begin = clamp(last.begin, begin, end);
  const i64 full_end = clamp(first.end, full_begin, end);
  return {begin, full_begin, full_end, end};
}

// The transpose: the rows that see some, or all, of keys [j0, j1), j0 < j1.
static inline TileRange q_range(const Variant& v, Lengths n, i64 j0, i64 j1) {
  if (v.band_begin > v.band_end) return {0, 0, 0, 0};
  const i64 shift = v.top_left ? 0 : n.k - n.q;
  const i64 begin = clamp(j0 - shift - v.band_end, 0, n.q);
  const i64 last = clamp(j1 - shift - v.band_begin, 0, n.q);
  const i64 end = last > begin ? last : begin;
  const i64 full_begin = clamp(j1 - 1 - shift - v.band_end, begin, end);
  const i64 full_end = clamp(j0 - shift - v.band_begin + 1, full_begin, end);
  return {begin, full_begin, full_end, end};
}

enum class TileClass { kEmpty, kPartial, kFull };

// What the band alone says of rows [i0, i1) against keys [j0, j1).
static inline TileClass tile_class(const Variant& v, Lengths n, i64 i0, i64 i1, i64 j0, i64 j1) {
  const TileRange range = kv_range(v, n, i0, i1);
  if (j1 <= range.begin || j0 >= range.end) return TileClass::kEmpty;
  if (j0 >= range.full_begin && j1 <= range.full_end) return TileClass::kFull;
  return TileClass::kPartial;
}

// The band seen from one tile, in 32 bits: row r of a tile sees column c of it when
// first + r <= c < end + r and c < limit. Meant for tiles of fewer than 2^20 rows and columns.
struct TileBand {
  i32 first, end, limit;
};
static inline TileBand tile_band_of(i64 first, i64 end, i64 limit) {
  constexpr i64 kFar = i64{1} << 29;
  return {static_cast<i32>(clamp(first, -kFar, kFar)), static_cast<i32>(clamp(end, -kFar, kFar)),
          static_cast<i32>(clamp(limit, 0, kFar))};
}
// Rows are queries from i0 on, columns keys from j0 on.
static inline TileBand key_band(const Variant& v, Lengths n, i64 i0, i64 j0) {
  const i64 d = diagonal(v, n, i0) - j0;
  return tile_band_of(d + v.band_begin, d + v.band_end + 1, n.k - j0);
}
// Rows are keys from j0 on, columns queries from i0 on.
static inline TileBand query_band(const Variant& v, Lengths n, i64 j0, i64 i0) {
  const i64 d = j0 - (v.top_left ? 0 : n.k - n.q) - i0;
  return tile_band_of(d - v.band_end, d - v.band_begin + 1, n.q - i0);
}

// ---- scores ----

// A number with its derivative by the unmodified score.
template <class T>
struct Dual {
  T value, slope;
};
template <class T>
inline Dual<T> operator+(Dual<T> a, T b) {
  return {a.value + b, a.slope};
}
template <class T>
inline Dual<T> operator-(Dual<T> a, T b) {
  return {a.value - b, a.slope};
}
template <class T>
inline Dual<T> operator*(Dual<T> a, T b) {
  return {a.value * b, a.slope * b};
}

template <class T>
inline T capped(T x, T inverse_cap, T cap) {
  return Arith<T>::tanh(x * inverse_cap) * cap;
}
template <class T>
inline Dual<T> capped(Dual<T> x, T inverse_cap, T cap) {
  const T t = Arith<T>::tanh(x.value * inverse_cap);
  const T one = Arith<T>::splat(typename Arith<T>::Scalar(1));
  return {t * cap, x.slope * (one - t * t)};
}

// What the kernel has loaded for one position (or one vector of positions).
template <class T>
struct At {
  T bias;      // read when has_bias; minus infinity hides
  T slope;     // of the head, read when has_slopes
  T distance;  // |i + Sk - Sq - j|, read when has_slopes
};

// The constants of a score in T, made once where a score is made often. A kernel compiled for what
// a variant does sets the flags from what it was compiled for.
template <class T>
struct Modifier {
  bool capped, biased, sloped;
  T inverse_cap, cap;
};
template <class T>
inline Modifier<T> modifier(const Variant& v) {
  using Scalar = typename Arith<T>::Scalar;
  const double inverse = v.softcap > 0.0 ? 1.0 / v.softcap : 0.0;
  return {v.softcap > 0.0, v.has_bias, v.has_slopes, Arith<T>::splat(Scalar(inverse)),
          Arith<T>::splat(Scalar(v.softcap))};
}

// The modified score in natural units. `x` is scale * q.k, of type T or Dual<T>.
template <class X, class T>
inline X score(const Modifier<T>& m, X x, const At<T>& at) {
  if (m.capped) x = capped(x, m.inverse_cap, m.cap);
  if (m.biased) x = x + at.bias;
  if (m.sloped) x = x - at.slope * at.distance;
  return x;
}
template <class X, class T>
inline X score(const Variant& v, X x, const At<T>& at) {
  return score(modifier<T>(v), x, at);
}

// ---- dropout ----

struct Philox {
  u32 word[4];
};

// Philox4x32-10: J. K. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
static inline Philox philox(u32 c0, u32 c1, u32 c2, u32 c3, u64 seed) {
  u32 k0 = static_cast<u32>(seed), k1 = static_cast<u32>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const u64 p0 = u64{0xD2511F53u} * c0, p1 = u64{0xCD9E8D57u} * c2;
    const u32 n0 = static_cast<u32>(p1 >> 32) ^ c1 ^ k0, n2 = static_cast<u32>(p0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<u32>(p1);
    c3 = static_cast<u32>(p0);
    c0 = n0;
    c2 = n2;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// A weight is kept when its word is at least this; 2^32 keeps nothing.
static inline u64 keep_threshold(const Variant& v) {
  return static_cast<u64>(v.dropout_p * 4294967296.0);
}
// 1 / (1 - p), and 0 when everything is dropped.
static inline double keep_scale(const Variant& v) {
  return v.dropout_p >= 1.0 ? 0.0 : 1.0 / (1.0 - v.dropout_p);
}

// Four neighbouring weights share one draw: the words of (i/2, j/2) are indexed by 2*(i%2) + j%2.
static inline Philox draw(const Variant& v, i64 b, i64 h, i64 i, i64 j) {
  return philox(static_cast<u32>(i / 2), static_cast<u32>(j / 2), static_cast<u32>(h),
                static_cast<u32>(b), v.seed);
}
static inline bool keep(const Variant& v, i64 b, i64 h, i64 i, i64 j) {
  const Philox words = draw(v, b, h, i, j);
  return words.word[2 * (i % 2) + j % 2] >= keep_threshold(v);
}

}  // namespace onefold
