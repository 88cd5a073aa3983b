// The pieces that forward and backward share: scratch, packing, the register-tile product, and the
// facts of one query tile.
//
// Layouts. A vector holds one element of kWidth rows. "Transposed" query data is [d][lane]; K and V
// panels interleave kPanel rows so that one register tile reads them front to back:
//   score panel [key / kPanel][d][kPanel]     value panel [d / kPanel][key][kPanel]
// The axis that a product sums over is counted in operands: two of its elements where X is Pair.
// Compiled once per instruction set; includes pairs.h and kernels.h.
#pragma once

#include <cmath>
#include <limits>

#include "cpu/isa/pairs.h"
#include "cpu/kernels.h"

namespace onefold::cpu::ONEFOLD_ISA {

// The register tile: kPanel x kTileVectors accumulators, their operands, and a few to spare. 8 x 3
// and 6 x 2 run at the multiply-add peak with 32 and 16 registers.
#if defined(__AVX512F__)
inline constexpr int kPanel = 8, kTileVectors = 3, kOuterRows = 4, kOuterVectors = 4;
#else
inline constexpr int kPanel = 6, kTileVectors = 2, kOuterRows = 4, kOuterVectors = 2;
#endif

template <class R>
inline constexpr int kLanes = kTileVectors* kWidth<R>;

static inline std::int64_t round_up(std::int64_t n, std::int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

// Rows that matrix products read along d are padded to whole vectors.
template <class R>
inline std::int64_t padded_dim(std::int64_t dim) {
  return round_up(dim > 0 ? dim : 1, kWidth<R> > 8 ? kWidth<R> : 8);
}

// Hands out 64-byte aligned pieces of one block; with no block it only counts.
template <class Isa>
class BasicArena {
 public:
  explicit BasicArena(std::byte* base) : base_(base) {}
  template <class T>
  T* take(std::int64_t count) {
    T* p = base_ ? reinterpret_cast<T*>(base_ + used_) : nullptr;
    used_ += static_cast<std::size_t>(round_up(count * std::int64_t{sizeof(T)}, 64));
    return p;
  }
  std::size_t used() const { return used_; }

 private:
  std::byte* base_;
  std::size_t used_ = 0;
};
using Arena = BasicArena<Vec<float>>;  // a type of this instruction set

// acc[m][n] += sum_k a[m * a_row + k * a_step] * b[k * b_step + n * kWidth] for n from kFirst on
// and steps [begin, end).
template <class X, int kFirst, int M, int N>
[[gnu::always_inline]] inline void accumulate(const X* a, std::int64_t a_row, std::int64_t a_step,
                                              const X* b, std::int64_t b_step, std::int64_t begin,
                                              std::int64_t end, Vec<SumOf<X>> (&acc)[M][N]) {
  a += begin * a_step;
  b += begin * b_step;
  for (std::int64_t k = begin; k < end; ++k) {
    Vec<X> row[N];
#pragma GCC unroll 16
    for (int n = kFirst; n < N; ++n) {
      row[n] = pinned(load(b + n * kWidth<SumOf<X>>));
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      const Vec<X> x = splat(a[m * a_row]);
#pragma GCC unroll 16
      for (int n = kFirst; n < N; ++n) acc[m][n] = multiply_add(x, row[n], acc[m][n]);
    }
    a += a_step;
    b += b_step;
  }
}

// The sums over `depth` steps, from 0, handed to `finish`.
template <class X, int M, int N, class Finish>
[[gnu::always_inline]] inline void product(const X* a, std::int64_t a_row, std::int64_t a_step,
                                           const X* b, std::int64_t b_step, std::int64_t depth,
                                           Finish&& finish) {
  Vec<SumOf<X>> acc[M][N];
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) acc[m][n] = Vec<SumOf<X>>{};
  }
  accumulate<X, 0>(a, a_row, a_step, b, b_step, 0, depth, acc);
  finish(acc);
}

// How many keys of a tile the rows of each vector may see, no fewer than those of the vector
// before: at a causal border early rows end early. Beyond, weights are 0 and are not computed.
template <int N>
struct Reach {
  int keys[N];
  explicit Reach(int all) {
    for (int& count : keys) count = all;
  }
  int most() const { return keys[N - 1]; }
  bool level() const { return keys[0] == keys[N - 1]; }
};

// A product whose depth is, per vector, what it reaches.
template <class X, int M, int N, class Finish>
[[gnu::always_inline]] inline void stepped_product(const X* a, std::int64_t a_row,
                                                   std::int64_t a_step, const X* b,
                                                   std::int64_t b_step, const Reach<N>& reach,
                                                   Finish&& finish) {
  std::int64_t end[N];
  for (int n = 0; n < N; ++n) end[n] = operands<X>(reach.keys[n]);
  Vec<SumOf<X>> acc[M][N];
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) acc[m][n] = Vec<SumOf<X>>{};
  }
  accumulate<X, 0>(a, a_row, a_step, b, b_step, 0, end[0], acc);
  if constexpr (N > 1) accumulate<X, 1>(a, a_row, a_step, b, b_step, end[0], end[1], acc);
  if constexpr (N > 2) accumulate<X, 2>(a, a_row, a_step, b, b_step, end[1], end[2], acc);
  finish(acc);
}

// Loads something of every cache line of a row. A loop of loads alone keeps as many misses in
// flight as the core can bear; with arithmetic between them fewer fit into its window.
template <class Byte>
inline void touch(const Byte* row, std::int64_t bytes) {
  constexpr std::int64_t kLine = 64;
  for (std::int64_t x = 0; x < bytes; x += kLine) asm volatile("" : : "r"(row[x]));
}
// The rows [first_row, first_row + count) of a head; with another last stride than 1 none.
static inline void touch_rows(const Rows& rows, std::int64_t b, std::int64_t first_row,
                              std::int64_t head, int count, std::int64_t dim) {
  if (rows.dim != 1) return;
  const std::int64_t bytes = dim * size_bytes(rows.dtype);
  for (int n = 0; n < count; ++n) touch(rows.at(b, first_row + n, head), bytes);
}

// How keys lie in the packed stretch: interleaved panels, or plain rows when only one query tile
// will read them. The arithmetic is the same.
enum class Layout { kPanels, kRows };

// scores[key][lane] = factor * sum_d K[key][d] * Qt[d][lane] for the panels of keys that start in
// [begin, end) of num_keys keys and the vectors from kFirst on; `row_step` is the distance of rows
// in Layout::kRows. Raises top[lane] to their maximum while they are still in registers. Where
// operands are numbers the factor is in Qt.
template <class X, int N, Layout kLayout, int kFirst>
[[gnu::always_inline]] inline void score_panels(const X* keys, std::int64_t row_step, const X* qt,
                                                std::int64_t dim, int begin, int end, int num_keys,
                                                SumOf<X> factor, SumOf<X>* scores,
                                                Vec<SumOf<X>> (&top)[N]) {
  using R = SumOf<X>;
  constexpr int kRow = N * kWidth<R>, kSkip = kFirst * kWidth<R>;
  constexpr bool kRows = kLayout == Layout::kRows;
  const std::int64_t depth = operands<X>(dim);
  const Vec<R> scale = splat<R>(factor);
  for (int first = begin; first < end; first += kPanel) {
    const int valid = num_keys - first < kPanel ? num_keys - first : kPanel;
    R* to = scores + first * kRow + kSkip;
    const X* from = keys + first * (kRows ? row_step : depth);
    product<X, kPanel, N - kFirst>(from, kRows ? row_step : 1, kRows ? 1 : kPanel, qt + kSkip, kRow,
                                   depth, [&](auto& acc) {
#pragma GCC unroll 16
                                     for (int m = 0; m < kPanel; ++m) {
                                       if (m >= valid) break;
#pragma GCC unroll 16
                                       for (int n = 0; n < N - kFirst; ++n) {
                                         Vec<R> x = acc[m][n];
                                         if constexpr (kTerms<X> == 2) x *= scale;
                                         store(to + m * kRow + n * kWidth<R>, x);
                                         top[kFirst + n] = max(top[kFirst + n], x);
                                       }
                                     }
                                   });
  }
}
// The same of what each vector reaches; a function of its own, so that whole tiles keep theirs.
template <class X, int N, Layout kLayout>
[[gnu::noinline]] void stepped_scores(const X* keys, std::int64_t row_step, const X* qt,
                                      std::int64_t dim, const Reach<N>& reach, SumOf<X> factor,
                                      SumOf<X>* scores, Vec<SumOf<X>> (&top)[N]) {
  const int most = reach.most();
  const auto begin = [&](int n) { return static_cast<int>(round_up(reach.keys[n - 1], kPanel)); };
  score_panels<X, N, kLayout, 0>(keys, row_step, qt, dim, 0, reach.keys[0], most, factor, scores,
                                 top);
  if constexpr (N > 1) {
    score_panels<X, N, kLayout, 1>(keys, row_step, qt, dim, begin(1), reach.keys[1], most, factor,
                                   scores, top);
  }
  if constexpr (N > 2) {
    score_panels<X, N, kLayout, 2>(keys, row_step, qt, dim, begin(2), reach.keys[2], most, factor,
                                   scores, top);
  }
}
template <class X, int N, Layout kLayout>
[[gnu::always_inline]] inline void score_product(const X* keys, std::int64_t row_step, const X* qt,
                                                 std::int64_t dim, const Reach<N>& reach,
                                                 SumOf<X> factor, SumOf<X>* scores,
                                                 Vec<SumOf<X>> (&top)[N]) {
  if (N == 1 || reach.level()) {
    const int most = reach.most();
    Vec<SumOf<X>> raised[N];  // in registers, which `top`, known to others, is not
    for (int n = 0; n < N; ++n) raised[n] = top[n];
    score_panels<X, N, kLayout, 0>(keys, row_step, qt, dim, 0, most, most, factor, scores, raised);
    for (int n = 0; n < N; ++n) top[n] = raised[n];
  } else {
    stepped_scores<X, N, kLayout>(keys, row_step, qt, dim, reach, factor, scores, top);
  }
}

// sum[d][lane] = sum[d][lane] * keep[lane] + sum_key V[key][d] * weights[key][lane]. The tile's own
// sum starts at zero and is added once: blocked summation at no cost. Rows of `sum` are padded to
// kPanel. `step` is the number of keys of a value panel, in operands, or the distance of rows.
template <class X, int N, Layout kLayout, bool kLevel>
inline void value_product(const X* values, std::int64_t step, const X* weights, std::int64_t dim,
                          const Reach<N>& reach, const Vec<SumOf<X>>* keep, SumOf<X>* sum) {
  using R = SumOf<X>;
  constexpr int kRow = N * kWidth<R>;
  constexpr bool kRows = kLayout == Layout::kRows;
  const std::int64_t depth = operands<X>(reach.most()), key_step = kRows ? step : kPanel;
  for (std::int64_t first = 0; first < dim; first += kPanel) {
    R* to = sum + first * kRow;
    const X* from = values + first * (kRows ? 1 : step);
    const auto add = [&](auto& acc) {
#pragma GCC unroll 16
      for (int m = 0; m < kPanel; ++m) {
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) {
          R* at = to + m * kRow + n * kWidth<R>;
          store(at, fma(load(at), keep[n], acc[m][n]));
        }
      }
    };
    if constexpr (kLevel) {
      product<X, kPanel, N>(from, 1, key_step, weights, kRow, depth, add);
    } else {
      stepped_product<X, kPanel, N>(from, 1, key_step, weights, kRow, reach, add);
    }
  }
}
template <class X, int N, Layout kLayout>
inline void value_product(const X* values, std::int64_t step, const X* weights, std::int64_t dim,
                          const Reach<N>& reach, const Vec<SumOf<X>>* keep, SumOf<X>* sum) {
  if (N == 1 || reach.level()) {
    value_product<X, N, kLayout, true>(values, step, weights, dim, reach, keep, sum);
  } else {
    value_product<X, N, kLayout, false>(values, step, weights, dim, reach, keep, sum);
  }
}

// sum[key][d] += sum_lane weights[key][lane] * rows[lane][d], lanes in operands, d padded to
// vectors, keys to kOuterRows (rows of `weights` and `sum` beyond the last exist).
template <class X, int M, int N>
[[gnu::always_inline]] inline void outer_block(const X* weights, int weight_step, int lanes,
                                               const X* rows, std::int64_t row_step,
                                               SumOf<X>* sum) {
  using R = SumOf<X>;
  product<X, M, N>(weights, weight_step, 1, rows, row_step, lanes, [&](auto& acc) {
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 16
      for (int n = 0; n < N; ++n) {
        R* at = sum + m * row_step + n * kWidth<R>;
        store(at, load(at) + acc[m][n]);
      }
    }
  });
}
template <class X>
inline void outer_product(const X* weights, int weight_step, int lanes, const X* rows,
                          std::int64_t row_step, int begin, int end, SumOf<X>* sum) {
  using R = SumOf<X>;
  constexpr int kStep = kOuterVectors * kWidth<R>;
  for (int key = begin; key < end; key += kOuterRows) {
    const X* w = weights + key * weight_step;
    R* to = sum + key * row_step;
    std::int64_t d = 0;
    for (; d + kStep <= row_step; d += kStep) {
      outer_block<X, kOuterRows, kOuterVectors>(w, weight_step, lanes, rows + d, row_step, to + d);
    }
    for (; d < row_step; d += kWidth<R>) {
      outer_block<X, kOuterRows, 1>(w, weight_step, lanes, rows + d, row_step, to + d);
    }
  }
}
// Each key's rows are those of the vectors that reach it.
template <class X, int N>
inline void outer_product(const X* weights, const X* rows, std::int64_t row_step,
                          const Reach<N>& reach, SumOf<X>* sum) {
  constexpr int kVector = kWidth<SumOf<X>> / kTerms<X>;
  for (int n = 0, begin = 0; n < N; begin = reach.keys[n++]) {
    const int skip = n * kVector;
    outer_product(weights + skip, N * kVector, N * kVector - skip, rows + skip * row_step, row_step,
                  begin, reach.keys[n], sum);
  }
}

template <class R>
inline R sum_of_lanes(const Vec<R>& x) {
  R sum = 0;
  for (int lane = 0; lane < kWidth<R>; ++lane) sum += x[lane];
  return sum;
}

// The rows of one query tile and which keys each may see.
template <class R>
struct LaneFacts {
  std::int64_t* query;          // local query index per lane
  std::int64_t* head;           // query head per lane
  Int<R>*first_key, *last_key;  // [first, last) relative to the current key tile; lanes without a
                                // row have an empty interval
  R* slope;
  R* position;  // query + Sk - Sq

  LaneFacts(Arena& arena, int lanes)
      : query(arena.take<std::int64_t>(lanes)),
        head(arena.take<std::int64_t>(lanes)),
        first_key(arena.take<Int<R>>(lanes)),
        last_key(arena.take<Int<R>>(lanes)),
        slope(arena.take<R>(lanes)),
        position(arena.take<R>(lanes)) {}
};

// The rows that one item works on: row r is query r / group of head first_head + r % group, all
// against one key/value head.
struct HeadGroup {
  std::int64_t b, kv_head, first_head, group;
};
static inline HeadGroup head_group(const Problem& p, std::int64_t b, std::int64_t kv_head) {
  return {b, kv_head, kv_head * p.group, p.group};
}

// One query tile in flight: `rows` of them in `vectors` vectors.
struct QueryTile {
  HeadGroup heads;
  std::int64_t row_begin;
  int rows, vectors;
  std::int64_t query_begin, query_end;
};
template <class R>
inline QueryTile query_tile(const HeadGroup& heads, std::int64_t row_begin, std::int64_t row_end) {
  const std::int64_t rows = row_end - row_begin < kLanes<R> ? row_end - row_begin : kLanes<R>;
  return {heads,
          row_begin,
          static_cast<int>(rows),
          static_cast<int>((rows + kWidth<R> - 1) / kWidth<R>),
          row_begin / heads.group,
          (row_begin + rows - 1) / heads.group + 1};
}

template <class R>
inline void set_lanes(const Problem& p, const QueryTile& tile, LaneFacts<R>& lanes) {
  const Lengths used = p.sequences[static_cast<std::size_t>(tile.heads.b)].used;
  const std::int64_t first_query = tile.query_begin;
  const std::int64_t first_head = tile.row_begin - first_query * tile.heads.group;
  std::int64_t query = first_query, head = first_head;  // counted: a small call waits for divisions
  for (int lane = 0; lane < tile.vectors * kWidth<R>; ++lane) {
    if (lane >= tile.rows) query = first_query, head = first_head;  // no row's: that of the first
    lanes.query[lane] = query;
    lanes.head[lane] = tile.heads.first_head + head;
    if (++head == tile.heads.group) head = 0, ++query;
    if (p.variant.has_slopes) {
      lanes.slope[lane] = static_cast<R>(p.slopes.load(tile.heads.b, lanes.head[lane]));
      lanes.position[lane] = static_cast<R>(lanes.query[lane] + used.k - used.q);
    }
  }
}

// The part of a key tile that the band leaves to some row of the query tile: whole panels at the
// front, exact at the end. What is cut off has weight 0 in every row, so no result changes.
struct KeyCut {
  int first, count;
};
static inline KeyCut cut_keys(const Problem& p, const QueryTile& tile, std::int64_t key_begin,
                              int num_keys) {
  const Lengths used = p.sequences[static_cast<std::size_t>(tile.heads.b)].used;
  const TileRange seen = kv_range(p.variant, used, tile.query_begin, tile.query_end);
  const std::int64_t first = clamp(seen.begin - key_begin, 0, num_keys) / kPanel * kPanel;
  const std::int64_t last = clamp(seen.end - key_begin, first, num_keys);
  return {static_cast<int>(first), static_cast<int>(last - first)};
}

// Likewise the rows of a query tile; `lanes` has been set for it.
template <class R>
inline void touch_lanes(const Rows& rows, std::int64_t q_begin, const QueryTile& tile,
                        const LaneFacts<R>& lanes, std::int64_t dim) {
  if (rows.dim != 1) return;
  const std::int64_t bytes = dim * size_bytes(rows.dtype);
  for (int lane = 0; lane < tile.rows; ++lane) {
    touch(rows.at(tile.heads.b, q_begin + lanes.query[lane], lanes.head[lane]), bytes);
  }
}

// The interval of each lane inside key tile [key_begin, key_begin + num_keys).
template <class R>
inline void set_intervals(const Problem& p, const QueryTile& tile, std::int64_t key_begin,
                          int num_keys, LaneFacts<R>& lanes) {
  const Lengths used = p.sequences[static_cast<std::size_t>(tile.heads.b)].used;
  for (int lane = 0; lane < tile.vectors * kWidth<R>; ++lane) {
    const KeyInterval keys =
        lane < tile.rows ? key_interval(p.variant, used, lanes.query[lane]) : KeyInterval{0, 0};
    lanes.first_key[lane] = static_cast<Int<R>>(clamp(keys.begin - key_begin, 0, num_keys));
    lanes.last_key[lane] = static_cast<Int<R>>(clamp(keys.end - key_begin, 0, num_keys));
  }
}

// What each vector reaches of the same keys, in whole steps of every product: ends of rows ascend.
template <int N, class R>
inline Reach<N> reach_of(const Problem& p, const QueryTile& tile, std::int64_t key_begin,
                         int num_keys, const LaneFacts<R>& lanes) {
  const Lengths used = p.sequences[static_cast<std::size_t>(tile.heads.b)].used;
  Reach<N> reach(num_keys);
  for (int n = 0; n < N - 1; ++n) {
    const std::int64_t query = lanes.query[(n + 1) * kWidth<R> - 1];
    const std::int64_t end = key_interval(p.variant, used, query).end - key_begin;
    const std::int64_t count = round_up(clamp(end, 0, num_keys), kOuterRows);
    reach.keys[n] = static_cast<int>(count < num_keys ? count : num_keys);
  }
  return reach;
}

// Loads the bias and mask of one (query tile, key tile) as addend[key][lane]; minus infinity hides.
// Returns what the mask and the bias alone say of the tile.
template <class R>
inline TileClass stage_addend(const Problem& p, const QueryTile& tile, std::int64_t key_begin,
                              int num_keys, const LaneFacts<R>& lanes, R* row, R* addend) {
  const int width = tile.vectors * kWidth<R>;
  int hidden = 0;
  for (int lane = 0; lane < tile.rows; ++lane) {
    const std::int64_t h = lanes.head[lane], i = lanes.query[lane];
    if (p.bias) {
      const std::int64_t at = p.bias.offset(tile.heads.b, h, i, key_begin);
      load_row(row, static_cast<const std::byte*>(p.bias.data) + at * size_bytes(p.bias.dtype),
               p.bias.dtype, p.bias.stride[3], num_keys);
    } else {
      for (int key = 0; key < num_keys; ++key) row[key] = R(0);
    }
    if (p.mask) {
      const auto* mask = static_cast<const std::uint8_t*>(p.mask.data) +
                         p.mask.offset(tile.heads.b, h, i, key_begin);
      for (int key = 0; key < num_keys; ++key) {
        if (mask[key * p.mask.stride[3]] == 0) row[key] = kEmpty<R>;
      }
    }
    for (int key = 0; key < num_keys; ++key) {
      hidden += row[key] == kEmpty<R>;
      addend[key * width + lane] = row[key];
    }
  }
  for (int lane = tile.rows; lane < width; ++lane) {
    for (int key = 0; key < num_keys; ++key) addend[key * width + lane] = kEmpty<R>;
  }
  if (hidden == 0) return TileClass::kFull;
  return hidden == tile.rows * num_keys ? TileClass::kEmpty : TileClass::kPartial;
}

template <class R>
inline bool lane_sees(const LaneFacts<R>& lanes, const R* addend, int width, int lane, int key) {
  return key >= lanes.first_key[lane] && key < lanes.last_key[lane] &&
         (addend == nullptr || addend[key * width + lane] != kEmpty<R>);
}

// Clears seen[x] where element x of a row is `hidden`.
template <class T>
inline void clear_hidden(const T* row, std::int64_t stride, T hidden, int count,
                         std::uint8_t* seen) {
  if (stride == 1) {
    for (int x = 0; x < count; ++x) seen[x] &= row[x] != hidden;
  } else {
    for (int x = 0; x < count; ++x) seen[x] &= row[x * stride] != hidden;
  }
}
// The same for a bias, where minus infinity hides.
template <class Isa>
inline void clear_hidden(const Grid& bias, std::int64_t at, int count, std::uint8_t* seen) {
  const auto clear = [&](auto hidden) {
    using T = decltype(hidden);
    clear_hidden<T>(static_cast<const T*>(bias.data) + at, bias.stride[3], hidden, count, seen);
  };
  if (bias.dtype == DType::kFloat32) clear(kEmpty<float>);
  if (bias.dtype == DType::kFloat64) clear(kEmpty<double>);
  if (bias.dtype == DType::kFloat16) clear(std::uint16_t{0xFC00});
  if (bias.dtype == DType::kBFloat16) clear(std::uint16_t{0xFF80});
}

// Whether exactly one key, and no sink, has a weight in row (b, h, i). Long stretches of hidden
// keys are passed over by vectors.
template <class R>
inline bool sees_one_key(const Problem& p, std::int64_t b, std::int64_t h, std::int64_t i) {
  constexpr int kStep = 256;
  if (p.sinks && p.sinks.load(b, h) != kEmpty<double>) return false;
  const KeyInterval keys =
      key_interval(p.variant, p.sequences[static_cast<std::size_t>(b)].used, i);
  if (!p.bias && !p.mask) return keys.end - keys.begin == 1;
  int total = 0;
  for (std::int64_t j = keys.begin; j < keys.end && total < 2; j += kStep) {
    const int count = static_cast<int>(keys.end - j < kStep ? keys.end - j : kStep);
    std::uint8_t seen[kStep];
    for (int x = 0; x < count; ++x) seen[x] = 1;
    if (p.mask) {
      clear_hidden<std::uint8_t>(
          static_cast<const std::uint8_t*>(p.mask.data) + p.mask.offset(b, h, i, j),
          p.mask.stride[3], 0, count, seen);
    }
    if (p.bias) clear_hidden<Vec<R>>(p.bias, p.bias.offset(b, h, i, j), count, seen);
    for (int x = 0; x < count; ++x) total += seen[x];
  }
  return total == 1;
}

// factors[key][lane] = 1 for a kept weight, 0 for a dropped one.
template <class R>
inline void draw_dropout(const Problem& p, const QueryTile& tile, std::int64_t key_begin,
                         int num_keys, const LaneFacts<R>& lanes, R* factors) {
  const int width = tile.vectors * kWidth<R>;
  const u64 threshold = keep_threshold(p.variant);
  const std::int64_t key_end = key_begin + num_keys;
  for (std::int64_t pair = key_begin / 2; 2 * pair < key_end; ++pair) {
    for (int lane = 0; lane < width; ++lane) {
      const std::int64_t i = lanes.query[lane];
      const Philox words = draw(p.variant, tile.heads.b, lanes.head[lane], i, 2 * pair);
      for (int odd = 0; odd < 2; ++odd) {
        const std::int64_t j = 2 * pair + odd;
        if (j < key_begin || j >= key_end) continue;
        factors[(j - key_begin) * width + lane] =
            words.word[2 * (i % 2) + odd] >= threshold ? R(1) : R(0);
      }
    }
  }
}

}  // namespace onefold::cpu::ONEFOLD_ISA
