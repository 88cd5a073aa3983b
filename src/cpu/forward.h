// Forward, one work item: the rows of one (sequence, key/value head) against its keys.
//
//   for each stretch of keys (packed once), query tile that sees some of it, key tile
//     scores = K Qt, modified and hidden where the variant or the border asks for it
//     absorb: raise the reference, scores -> weights, sum;  out = out * keep + V^T weights
//   divide, store out and lse
//
// Invariant: a row's arithmetic depends on its own scores and absolute key tiles alone, never on
// its lane, neighbours, item or thread. References are integers: rescaling is exact. Compiled once
// per instruction set; includes decode.h and scratch.h.
#pragma once

#include <algorithm>
#include <cmath>

#include "cpu/decode.h"
#include "cpu/scratch.h"

namespace onefold::cpu::ONEFOLD_ISA {

// Rows whose scores reach this (in base 2) are finished in double: a bias, a sink or a slope gets
// there. So are rows whose sum of values leaves the range of float, which their mean does not.
inline constexpr double kExtremeLog2 = 1e36;
static inline bool extreme_scores(const Problem& p) { return p.bias || p.sinks || p.slopes; }
static inline bool extreme_values(const Problem& p) { return p.dtype != DType::kFloat16; }
static inline bool redone_in_double(const Problem& p) {
  return p.dtype != DType::kFloat64 && (extreme_scores(p) || extreme_values(p));
}

template <class X>
struct ForwardItem {
  using R = SumOf<X>;
  static constexpr bool kPairs = kTerms<X> == 2;
  const ForwardCall& call;
  const Problem& p;
  ForwardScratch<X>& s;
  HeadGroup heads;
  Sequence seq;
  const bool* only;  // per row of the item: store this one (null: all)
  bool single;       // one query tile: keys are used once, so they are not interleaved

  QueryTile tile(std::int64_t row_begin, std::int64_t row_end) const {
    return query_tile<R>(heads, row_begin, row_end);
  }

  // q's rows times `factor` into s.rows, zeros beyond them up to `width`; the rows' states at their
  // start, with their sink or empty.
  void load_queries(const QueryTile& tile, int width, double factor, bool with_sink, R* ref,
                    R* sum) {
    const std::int64_t step = padded_dim<R>(p.dim);
    set_lanes(p, tile, s.lanes);
    touch_lanes(p.q, seq.q_begin, tile, s.lanes, p.dim);
    for (int lane = 0; lane < width; ++lane) {
      R* row = s.rows + lane * step;
      if (lane < tile.rows) {
        load_row(row, p.q.at(heads.b, seq.q_begin + s.lanes.query[lane], s.lanes.head[lane]),
                 p.q.dtype, p.q.dim, p.dim);
        scale_row(row, row, p.dim, factor);
      } else {
        for (std::int64_t d = 0; d < p.dim; ++d) row[d] = R(0);
      }
      Softmax<R> start;
      if (with_sink) start = sink_state<R>(p, heads.b, s.lanes.head[lane]);
      ref[lane] = start.ref;
      sum[lane] = start.sum;
    }
  }

  void pack(std::int64_t key_begin, std::int64_t key_end) {
    const Tiles& t = call.tiles;
    for (std::int64_t j = key_begin; j < key_end; j += t.keys) {
      const std::int64_t idx = (j - key_begin) / t.keys;
      const int count = static_cast<int>(key_end - j < t.keys ? key_end - j : t.keys);
      PoisonList poison{0, s.poison_keys + idx * t.keys};
      const std::int64_t row = seq.k_begin + j;
      touch_rows(p.k, heads.b, row, heads.kv_head, count, p.dim);
      touch_rows(p.v, heads.b, row, heads.kv_head, count, p.dim_v);
      if (single) {
        pack_key_rows(p.k, heads.b, row, heads.kv_head, count, p.dim, key_step(), k_tile(idx));
        pack_value_rows(p.v, heads.b, row, heads.kv_head, count, p.dim_v, value_step(), v_tile(idx),
                        poison);
      } else {
        pack_score_panel(p.k, heads.b, row, heads.kv_head, count, p.dim, s.operand_rows,
                         k_tile(idx));
        pack_value_panel(p.v, heads.b, row, heads.kv_head, count, value_depth(), p.dim_v,
                         s.operand_rows, v_tile(idx), poison);
      }
      s.poison_counts[idx] = poison.count;
    }
  }
  // Where key tile `idx` of the packed stretch starts, and the distance of rows in it.
  std::int64_t key_step() const {
    const std::int64_t depth = operands<X>(p.dim);
    return single ? padded_dim<R>(depth) : depth;
  }
  std::int64_t value_depth() const { return operands<X>(call.tiles.keys); }
  std::int64_t value_step() const {
    return single ? padded_dim<R>(p.dim_v) : round_up(p.dim_v, kPanel);
  }
  X* k_tile(std::int64_t idx) const {
    return s.k_panels + idx * round_up(call.tiles.keys, kPanel) * key_step();
  }
  X* v_tile(std::int64_t idx) const { return s.v_panels + idx * value_depth() * value_step(); }

  // Values that are not finite reach the rows that see their key, and no other.
  void add_poisoned(const QueryTile& tile, std::int64_t tile_begin, KeyCut cut,
                    const PoisonList& poison, const R* addend, R* out) {
    const int width = tile.vectors * kWidth<R>;
    for (int idx = 0; idx < poison.count; ++idx) {
      const int key = poison.keys[idx] - cut.first;
      if (key < 0 || key >= cut.count) continue;
      load_row(s.row, p.v.at(heads.b, seq.k_begin + tile_begin + cut.first + key, heads.kv_head),
               p.v.dtype, p.v.dim, p.dim_v);
      for (int lane = 0; lane < tile.rows; ++lane) {
        if (!lane_sees(s.lanes, addend, width, lane, key)) continue;
        const R weight = s.scores[key * width + lane];
        for (std::int64_t d = 0; d < p.dim_v; ++d) out[d * width + lane] += weight * s.row[d];
      }
    }
  }

  template <int N, Layout kLayout>
  void attend(const QueryTile& tile, std::int64_t tile_begin, int tile_keys, std::int64_t panel,
              const X* qt, R* out, R* ref, R* sum, R* mass) {
    const Tiles& t = call.tiles;
    const KeyCut cut = cut_keys(p, tile, tile_begin, tile_keys);
    if (cut.count == 0) return;
    const std::int64_t key_begin = tile_begin + cut.first;
    const int num_keys = cut.count;
    const TileClass band = tile_class(p.variant, seq.used, tile.query_begin, tile.query_end,
                                      key_begin, key_begin + num_keys);
    if (band == TileClass::kEmpty) return;
    const bool staged = p.bias || p.mask;
    TileClass options = TileClass::kFull;
    if (staged) {
      options = stage_addend(p, tile, key_begin, num_keys, s.lanes, s.row, s.addend);
      if (options == TileClass::kEmpty) return;
    }
    const PoisonList poison{s.poison_counts[panel], s.poison_keys + panel * t.keys};
    const bool border = band == TileClass::kPartial;
    if (border || poison.count > 0) set_intervals(p, tile, key_begin, num_keys, s.lanes);

    const Reach<N> reach =
        border ? reach_of<N>(p, tile, key_begin, num_keys, s.lanes) : Reach<N>(num_keys);
    Vec<R> top[N], keep[N];
    for (int n = 0; n < N; ++n) top[n] = splat<R>(kEmpty<R>);
    score_product<X, N, kLayout>(k_tile(panel) + cut.first * key_step(), key_step(), qt, p.dim,
                                 reach, s.factor.of_scores, s.scores, top);
    const bool add = p.variant.has_bias || options == TileClass::kPartial;
    if (border || add || !p.variant.scale_only()) {
      modify_scores<R, N>(p, s.lanes, s.scores, add ? s.addend : nullptr, reach, border, key_begin,
                          top);
    }
    absorb_scores<X, N>(s.scores, reach, top, ref, sum, mass, s.weights, keep);
    if (p.variant.dropout()) {
      draw_dropout(p, tile, key_begin, num_keys, s.lanes, s.dropout);
      drop_weights<X>(s.dropout, num_keys, N * kWidth<R>, s.scores, s.weights);
    }
    const bool rows = kLayout == Layout::kRows;
    const std::int64_t first = cut.first / kTerms<X> * (rows ? value_step() : kPanel);
    value_product<X, N, kLayout>(v_tile(panel) + first, rows ? value_step() : value_depth(),
                                 s.weights, p.dim_v, reach, keep, out);
    if (poison.count > 0) {
      add_poisoned(tile, tile_begin, cut, poison, add ? s.addend : nullptr, out);
    }
  }

  template <int N>
  void attend_as(const QueryTile& tile, std::int64_t key_begin, int num_keys, std::int64_t panel,
                 const X* qt, R* out, R* ref, R* sum, R* mass) {
    single ? attend<N, Layout::kRows>(tile, key_begin, num_keys, panel, qt, out, ref, sum, mass)
           : attend<N, Layout::kPanels>(tile, key_begin, num_keys, panel, qt, out, ref, sum, mass);
  }
  void attend_any(const QueryTile& tile, std::int64_t key_begin, int num_keys, std::int64_t panel,
                  std::int64_t idx) {
    const X* qt = s.qt + idx * s.qt_size;
    R *out = s.out + idx * s.out_size, *ref = s.ref + idx * kLanes<R>;
    R *sum = s.sum + idx * kLanes<R>, *mass = kPairs ? s.mass + idx * kLanes<R> : nullptr;
    if constexpr (kTileVectors == 3) {
      if (tile.vectors == 3) {
        return attend_as<3>(tile, key_begin, num_keys, panel, qt, out, ref, sum, mass);
      }
    }
    if (tile.vectors == 2) {
      return attend_as<2>(tile, key_begin, num_keys, panel, qt, out, ref, sum, mass);
    }
    attend_as<1>(tile, key_begin, num_keys, panel, qt, out, ref, sum, mass);
  }

  // The end of a row of sums; tells whether all of it is finite.
  bool clear(R* row) {
    for (std::int64_t d = 0; d < p.dim_v; ++d) row[d] = R(0);
    return true;
  }
  bool divide(R* row, R kept, R sum) {
    const Vec<R> factor = splat(kept), by = splat(sum);
    Vec<R> checks{};
    std::int64_t d = 0;
    for (; d + kWidth<R> <= p.dim_v; d += kWidth<R>) {
      const Vec<R> x = load(row + d) * factor / by;
      store(row + d, x);
      checks += x * Vec<R>{};
    }
    R check = sum_of_lanes<R>(checks);
    for (; d < p.dim_v; ++d) {
      row[d] = row[d] * kept / sum;
      check += row[d] * R(0);
    }
    return check == R(0);
  }

  // Divides s.rows and stores; tells whether some row must be done again in double, and marks it.
  bool finish(const QueryTile& tile, std::int64_t item_begin, const R* ref, const R* sum) {
    const R kept = static_cast<R>(p.variant.dropout() ? keep_scale(p.variant) : 1.0);
    const std::int64_t step = padded_dim<R>(p.dim_v);
    bool any_again = false;
    set_lanes(p, tile, s.lanes);
    touch_lanes(call.out, seq.q_begin, tile, s.lanes, p.dim_v);
    for (int lane = 0; lane < tile.rows; ++lane) {
      if (only && !only[tile.row_begin + lane - item_begin]) continue;
      const std::int64_t h = s.lanes.head[lane], i = s.lanes.query[lane];
      const bool empty = sum[lane] == R(0);
      R* row = s.rows + lane * step;
      const bool none = empty || kept == R(0);  // whatever the values were
      const bool finite = none ? clear(row) : divide(row, kept, sum[lane]);
      store_row(call.out.at(heads.b, seq.q_begin + i, h), call.out.dtype, call.out.dim, row,
                p.dim_v);
      if (call.lse) {
        const double log2_sum = static_cast<double>(ref[lane]) + std::log2(double{sum[lane]});
        const double lse = log2_sum * kLn2;
        call.lse.store(heads.b, h, seq.q_begin + i,
                       empty                               ? kEmpty<double>
                       : call.lse.dtype == DType::kFloat32 ? finite_as<float>(lse)
                                                           : lse);
      }
      const bool lost = !finite || std::fabs(ref[lane]) > R(kExtremeLog2);
      const bool again = lost && (finite ? extreme_scores(p) : redone_in_double(p)) &&
                         std::isfinite(ref[lane]) && std::isfinite(sum[lane]);
      s.again[tile.row_begin + lane - item_begin] = again;
      any_again |= again;
    }
    return any_again;
  }

  // A tile at its start, in slot `idx`.
  void begin(const QueryTile& q, std::int64_t idx, bool with_sink) {
    const int width = q.vectors * kWidth<R>;
    load_queries(q, width, s.factor.of_queries, with_sink, s.ref + idx * kLanes<R>,
                 s.sum + idx * kLanes<R>);
    for (std::int64_t lane = idx * kLanes<R>; kPairs && lane < idx * kLanes<R> + width; ++lane) {
      s.mass[lane] = s.sum[lane];
    }
    lay_across(s.rows, width, p.dim, 1.0, s.row, s.operand_rows, s.qt + idx * s.qt_size);
    R* out = s.out + idx * s.out_size;
    for (std::int64_t x = 0; x < round_up(p.dim_v, kPanel) * width; ++x) out[x] = R(0);
  }

  // Rows [row_begin, row_end) against keys [key_begin, key_limit). A tile is loaded with the first
  // stretch and handed to `leave` after its last keys, while its state is in cache; where there is
  // one stretch, all tiles take turns in one slot.
  template <class Leave>
  void run(std::int64_t row_begin, std::int64_t row_end, std::int64_t key_begin,
           std::int64_t key_limit, bool with_sink, Leave&& leave) {
    const Tiles& t = call.tiles;
    const std::int64_t num_tiles = (row_end - row_begin + kLanes<R> - 1) / kLanes<R>;
    const TileRange all =
        kv_range(p.variant, seq.used, row_begin / heads.group, (row_end - 1) / heads.group + 1);
    const std::int64_t first = (all.begin > key_begin ? all.begin : key_begin) / t.keys * t.keys;
    // Whole tiles, so that a tile holds the same keys whoever attends to it.
    std::int64_t end = round_up(all.end < key_limit ? all.end : key_limit, t.keys);
    end = end < seq.used.k ? end : seq.used.k;
    std::int64_t super = first;
    do {
      const std::int64_t key_end = super + t.super_keys < end ? super + t.super_keys : end;
      pack(super, key_end);
      for (std::int64_t n = 0; n < num_tiles; ++n) {
        const QueryTile q = tile(row_begin + n * kLanes<R>, row_end);
        const std::int64_t idx = end - first <= t.super_keys ? 0 : n;
        const TileRange seen = kv_range(p.variant, seq.used, q.query_begin, q.query_end);
        if (super > first && seen.end <= super) continue;  // it has left
        super == first ? begin(q, idx, with_sink) : set_lanes(p, q, s.lanes);
        for (std::int64_t j = super; j < key_end && j < seen.end; j += t.keys) {
          const int count = static_cast<int>(key_end - j < t.keys ? key_end - j : t.keys);
          attend_any(q, j, count, (j - super) / t.keys, idx);
        }
        if (seen.end > key_end && key_end < end) continue;
        if constexpr (kPairs) settle(q, idx);
        leave(q, idx);
      }
      super += t.super_keys;
    } while (super < end);
  }

  // Makes out, a sum with rounded weights, the one that belongs to `sum`.
  void settle(const QueryTile& tile, std::int64_t idx) {
    const int width = tile.vectors * kWidth<R>;
    R* out = s.out + idx * s.out_size;
    for (int n = 0; n < width; n += kWidth<R>) {
      const Vec<R> mass = load(s.mass + idx * kLanes<R> + n);
      const Vec<R> ratio = load(s.sum + idx * kLanes<R> + n) / mass;
      const Vec<R> factor = mass == Vec<R>{} ? splat<R>(R(1)) : ratio;
      for (std::int64_t d = 0; d < p.dim_v; ++d) {
        store(out + d * width + n, load(out + d * width + n) * factor);
      }
    }
  }

  // All of the item's rows, stored; tells whether some must be done again in double.
  bool run_and_finish(const Item& item, bool with_sink) {
    bool any_again = false;
    run(item.row_begin, item.row_end, item.key_begin, item.key_end, with_sink,
        [&](const QueryTile& q, std::int64_t idx) {
          transpose(s.out + idx * s.out_size, q.vectors * kWidth<R>, p.dim_v, q.rows, s.rows,
                    padded_dim<R>(p.dim_v));
          any_again |= finish(q, item.row_begin, s.ref + idx * kLanes<R>, s.sum + idx * kLanes<R>);
        });
    return any_again;
  }
};

// The state of up to kSplitRows rows against a stretch of keys, as it waits to be merged.
template <class R>
struct Partial {
  R *out, *ref, *sum;  // out: [row][d], not yet divided

  Partial(std::byte* at, const Problem& p) {
    Arena arena(at);
    lay_out(arena, p);
  }
  static std::size_t bytes(const Problem& p) {
    Arena arena(nullptr);
    Partial none(nullptr, p);
    none.lay_out(arena, p);
    return arena.used();
  }

 private:
  void lay_out(Arena& arena, const Problem& p) {
    out = arena.take<R>(kSplitRows * padded_dim<R>(p.dim_v));
    ref = arena.take<R>(kSplitRows);
    sum = arena.take<R>(kSplitRows);
  }
};

// The rows of an item that are marked, done again in double.
static void redo_rows(const ForwardCall& call, const Item& item, const bool* again, Arena arena) {
  const Problem& p = *call.problem;
  ForwardScratch<double> scratch(arena, p, call.tiles, 1);
  const Sequence& seq = p.sequences[static_cast<std::size_t>(item.b)];
  for (std::int64_t r = item.row_begin; r < item.row_end; r += kLanes<double>) {
    const std::int64_t end = r + kLanes<double> < item.row_end ? r + kLanes<double> : item.row_end;
    const bool* only = again + (r - item.row_begin);
    if (std::none_of(only, only + (end - r), [](bool marked) { return marked; })) continue;
    ForwardItem<double> work{call, p,    scratch, head_group(p, item.b, item.kv_head),
                             seq,  only, true};
    work.run_and_finish({item.b, item.kv_head, r, end}, true);
  }
}

// The rows of an item against its keys by vectors along d; leaves the states of its heads in `to`.
template <class T, class X, int kRows>
inline void decode_heads(const ForwardCall& call, const Item& item, bool with_sink,
                         ForwardScratch<float>& s, const DecodeScratch& to) {
  constexpr bool kPairs = kTerms<X> == 2;
  const Problem& p = *call.problem;
  const Sequence& seq = p.sequences[static_cast<std::size_t>(item.b)];
  const std::int64_t q_step = padded_dim<float>(p.dim), v_step = padded_dim<float>(p.dim_v);
  const std::int64_t rows = item.row_end - item.row_begin;
  const auto tile_of = [&](std::int64_t n) {
    return query_tile<float>(head_group(p, item.b, item.kv_head + n), item.row_begin, item.row_end);
  };
  for (std::int64_t n = 0; n < item.kv_heads; ++n) {
    const QueryTile tile = tile_of(n);
    ForwardItem<float> work{call, p, s, tile.heads, seq, nullptr, true};
    work.load_queries(tile, tile.rows, score_factor<X>(p).of_queries, with_sink, s.ref, s.sum);
    for (int r = 0; r < kRows; ++r) {
      const bool live = r < rows;
      const std::int64_t row = n * kRows + r;
      float* from = s.rows + r * q_step;
      for (std::int64_t d = 0; !live && d < p.dim; ++d) from[d] = 0.0f;
      X* q = static_cast<X*>(to.q) + n * kRows * operands<X>(p.dim) + r * kW;
      for (std::int64_t d = 0; d < p.dim; d += kTerms<X> * kW, q += kRows * kW) {
        if constexpr (kPairs) {
          narrow_row(from + d, 2 * kW, q);
        } else {
          store(q, load(from + d));
        }
      }
      if constexpr (kPairs) to.mass[row] = live ? s.sum[r] : 0.0f;
      to.ref[row] = live ? s.ref[r] : kEmpty<float>;
      to.sum[row] = live ? s.sum[r] : 0.0f;
    }
  }
  for (std::int64_t n = 0; n < item.kv_heads; ++n) {
    float* out = to.out + n * kRows * to.step;
    for (std::int64_t x = 0; x < kRows * to.step; ++x) out[x] = 0;
  }
  const QueryTile any = tile_of(0);
  const TileRange seen = kv_range(p.variant, seq.used, any.query_begin, any.query_end);
  const std::int64_t end = seen.end < item.key_end ? seen.end : item.key_end;
  std::int64_t j = seen.begin > item.key_begin ? seen.begin : item.key_begin;
  for (j = j / kDecodeKeys * kDecodeKeys; j < end; j += kDecodeKeys) {
    const int count = static_cast<int>(clamp(end - j, 0, kDecodeKeys));
    const std::int64_t row = seq.k_begin + j;
    if (p.k.dim == 1 && p.v.dim == 1) {
      const KeyRows<T> in_place{reinterpret_cast<const T*>(p.k.at(item.b, row, item.kv_head)),
                                reinterpret_cast<const T*>(p.v.at(item.b, row, item.kv_head)),
                                p.k.row,
                                p.v.row,
                                p.k.head,
                                p.v.head};
      decode_tile<T, X, kRows>(p, seq, tile_of, s.lanes, to, in_place, 0, item.kv_heads, j, count,
                               s.row);
      continue;
    }
    using Copied = std::conditional_t<kPairs, T, float>;
    auto *k = reinterpret_cast<Copied*>(s.k_panels), *v = reinterpret_cast<Copied*>(s.v_panels);
    for (std::int64_t n = 0; n < item.kv_heads; ++n) {
      for (int key = 0; key < count; ++key) {
        const void* from_k = p.k.at(item.b, row + key, item.kv_head + n);
        const void* from_v = p.v.at(item.b, row + key, item.kv_head + n);
        if constexpr (kPairs) {
          gather_row(static_cast<const T*>(from_k), p.k.dim, p.dim, k + key * q_step);
          gather_row(static_cast<const T*>(from_v), p.v.dim, p.dim_v, v + key * v_step);
        } else {
          load_row(k + key * q_step, from_k, p.k.dtype, p.k.dim, p.dim);
          load_row(v + key * v_step, from_v, p.v.dtype, p.v.dim, p.dim_v);
        }
      }
      const KeyRows<Copied> copied{k, v, q_step, v_step, 0, 0};
      decode_tile<Copied, X, kRows>(p, seq, tile_of, s.lanes, to, copied, n, 1, j, count, s.row);
    }
  }
  // Makes out, a sum with rounded weights, the one that belongs to `sum`.
  for (std::int64_t n = 0; kPairs && n < item.kv_heads; ++n) {
    for (std::int64_t row = n * kRows; row < n * kRows + rows; ++row) {
      const float factor = to.mass[row] == 0 ? 1.0f : to.sum[row] / to.mass[row];
      for (std::int64_t d = 0; d < p.dim_v; ++d) to.out[row * to.step + d] *= factor;
    }
  }
}

template <class T, class X>
inline void decode_heads_any(const ForwardCall& call, const Item& item, bool with_sink,
                             ForwardScratch<float>& s, const DecodeScratch& to) {
  const std::int64_t rows = item.row_end - item.row_begin;
  switch (made_for(rows)) {
    case 1:
      return decode_heads<T, X, 1>(call, item, with_sink, s, to);
    case 2:
      return decode_heads<T, X, 2>(call, item, with_sink, s, to);
    case 4:
      return decode_heads<T, X, 4>(call, item, with_sink, s, to);
    default:
      return decode_heads<T, X, kDecodeRows>(call, item, with_sink, s, to);
  }
}

// Leaves the states of `rows` rows from `first` on for merge_split_item.
template <class R>
inline void keep_partial(const ForwardCall& call, std::int64_t slot, std::int64_t first,
                         std::int64_t rows, const R* out, const R* ref, const R* sum) {
  const Problem& p = *call.problem;
  const std::size_t at = static_cast<std::size_t>(slot) * Partial<R>::bytes(p);
  const Partial<R> partial(call.partials + at, p);
  const std::int64_t step = padded_dim<R>(p.dim_v);
  for (std::int64_t x = 0; x < rows * step; ++x) partial.out[first * step + x] = out[x];
  for (std::int64_t r = 0; r < rows; ++r) {
    partial.ref[first + r] = ref[r];
    partial.sum[first + r] = sum[r];
  }
}

static void decode_item(const ForwardCall& call, const Item& item, bool with_sink, Arena& arena) {
  const Problem& p = *call.problem;
  ForwardScratch<float> s(arena, p, call.tiles, 1);
  const DecodeScratch to(arena, p, item.kv_heads);
  if (p.dtype == DType::kBFloat16) {
    // Whole vectors of pairs, or none.
    const bool pairs = kHasPairs && p.dim % (2 * kW) == 0 && p.dim_v % (2 * kW) == 0;
    if constexpr (kHasPairs) {
      if (pairs) decode_heads_any<BFloat16, Pair>(call, item, with_sink, s, to);
    }
    if (!pairs) decode_heads_any<BFloat16, float>(call, item, with_sink, s, to);
  } else if constexpr (!kHasPairs) {
    if (p.dtype == DType::kFloat16) {
      decode_heads_any<Float16, float>(call, item, with_sink, s, to);
    } else {
      decode_heads_any<float, float>(call, item, with_sink, s, to);
    }
  }
  const std::int64_t rows = item.row_end - item.row_begin, step = to.step;
  for (std::int64_t n = 0; n < item.kv_heads; ++n) {
    const std::int64_t first = n * made_for(rows);
    const float *out = to.out + first * step, *ref = to.ref + first, *sum = to.sum + first;
    if (item.partial >= 0) {
      keep_partial(call, item.partial + n * item.partial_step, 0, rows, out, ref, sum);
      continue;
    }
    const HeadGroup heads = head_group(p, item.b, item.kv_head + n);
    ForwardItem<float> work{call,    p,   s, heads, p.sequences[static_cast<std::size_t>(item.b)],
                            nullptr, true};
    for (std::int64_t x = 0; x < rows * step; ++x) s.rows[x] = out[x];
    if (work.finish(work.tile(item.row_begin, item.row_end), item.row_begin, ref, sum)) {
      redo_rows(call, {item.b, heads.kv_head, item.row_begin, item.row_end}, s.again, arena);
    }
  }
}

template <class X>
void forward_item(const ForwardCall& call, std::int64_t index, int worker) {
  using R = SumOf<X>;
  const Problem& p = *call.problem;
  const Item& item = call.items[index];
  Arena arena(call.scratch + static_cast<std::size_t>(worker) * call.scratch_bytes);
  const std::int64_t rows = item.row_end - item.row_begin;
  const std::int64_t tiles = (rows + kLanes<R> - 1) / kLanes<R>;
  const Sequence& seq = p.sequences[static_cast<std::size_t>(item.b)];
  // The sink belongs to the whole row: of a split, the first stretch brings it.
  const bool with_sink = item.partial < 0 || item.first;
  if constexpr (sizeof(R) == 4) {
    // Asked of the sequence, not of the item: how work is cut up must not choose the arithmetic.
    if (decodable(p, seq.used.q * p.group)) return decode_item(call, item, with_sink, arena);
  }
  ForwardScratch<X> s(arena, p, call.tiles, tiles);
  for (std::int64_t n = 0; n < item.kv_heads; ++n) {
    const HeadGroup heads = head_group(p, item.b, item.kv_head + n);
    ForwardItem<X> work{call, p, s, heads, seq, nullptr, tiles == 1};
    if (item.partial < 0) {
      const bool any_again = work.run_and_finish(item, with_sink);
      if constexpr (sizeof(R) == 4) {
        if (any_again) redo_rows(call, item, s.again, arena);
      }
      continue;
    }
    work.run(0, rows, item.key_begin, item.key_end, with_sink,
             [&](const QueryTile& q, std::int64_t idx) {
               transpose(s.out + idx * s.out_size, q.vectors * kWidth<R>, p.dim_v, q.rows, s.rows,
                         padded_dim<R>(p.dim_v));
               keep_partial(call, item.partial + n * item.partial_step, q.row_begin, q.rows, s.rows,
                            s.ref + idx * kLanes<R>, s.sum + idx * kLanes<R>);
             });
  }
}

// Rows [row_begin, row_end) of a split, at most one tile: the states of its stretches, merged.
template <class X>
inline void merge_partials(const ForwardCall& call, const Split& split, std::int64_t row_begin,
                           std::int64_t row_end, ForwardScratch<X>& s) {
  using R = SumOf<X>;
  const Problem& p = *call.problem;
  const std::int64_t step = padded_dim<R>(p.dim_v), rows = row_end - row_begin;
  for (std::int64_t r = 0; r < rows; ++r) {
    s.ref[r] = kEmpty<R>;
    s.sum[r] = R(0);
  }
  for (std::int64_t x = 0; x < rows * step; ++x) s.rows[x] = R(0);
  for (std::int64_t n = 0; n < split.count; ++n) {
    const std::size_t at = static_cast<std::size_t>(split.first_partial + n) * Partial<R>::bytes(p);
    const Partial<R> part(call.partials + at, p);
    for (std::int64_t r = 0; r < rows; ++r) {
      // A NaN may stand beside an empty reference: the maximum of scores drops it.
      if (part.ref[row_begin + r] == kEmpty<R> && part.sum[row_begin + r] == R(0)) continue;
      const Weights<R> w = weigh(s.ref[r], part.ref[row_begin + r]);
      s.ref[r] = w.ref;
      s.sum[r] = s.sum[r] * w.a + part.sum[row_begin + r] * w.b;
      R* row = s.rows + r * step;
      const R* from = part.out + (row_begin + r) * step;
      for (std::int64_t d = 0; d < p.dim_v; ++d) row[d] = row[d] * w.a + from[d] * w.b;
    }
  }
}

template <class X>
void merge_split_item(const ForwardCall& call, std::int64_t index, int worker) {
  using R = SumOf<X>;
  const Problem& p = *call.problem;
  const Split& split = call.splits[index];
  Arena arena(call.scratch + static_cast<std::size_t>(worker) * call.scratch_bytes);
  ForwardScratch<X> s(arena, p, call.tiles, 1);
  const Sequence& seq = p.sequences[static_cast<std::size_t>(split.b)];
  ForwardItem<X> work{call, p, s, head_group(p, split.b, split.kv_head), seq, nullptr, true};
  for (std::int64_t r = 0; r < split.rows; r += kLanes<R>) {
    const std::int64_t end = r + kLanes<R> < split.rows ? r + kLanes<R> : split.rows;
    merge_partials(call, split, r, end, s);
    const bool any_again = work.finish(work.tile(r, end), r, s.ref, s.sum);
    if constexpr (sizeof(R) == 4) {
      if (any_again) redo_rows(call, {split.b, split.kv_head, r, end}, s.again, arena);
    }
  }
}

template <class X>
std::size_t forward_scratch_of(const Problem& p, const Tiles& t, std::int64_t tiles) {
  Arena tiled(nullptr), decoding(nullptr);
  ForwardScratch<X>(tiled, p, t, tiles);
  if (sizeof(X) == 4 && decodable(p, 1)) {
    ForwardScratch<float>(decoding, p, t, 1);
    DecodeScratch(decoding, p, p.heads_k);
  }
  for (Arena* arena : {&tiled, &decoding}) {
    if (redone_in_double(p)) ForwardScratch<double>(*arena, p, t, 1);
  }
  return tiled.used() > decoding.used() ? tiled.used() : decoding.used();
}

}  // namespace onefold::cpu::ONEFOLD_ISA
