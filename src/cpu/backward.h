// Backward, one work item: a chunk of queries of one (sequence, key/value head), or all its chunks.
//
//   for as many chunks of queries as a pass takes: for each stretch of keys, packed once
//     for each chunk, with its own dK and dV: for each query tile, for each key tile
//       scores = K Qt, dP = V dOt, P = 2^(score - lse), dZ = P (dP - delta), delta = dO . O - dLSE
//       dV += P^T dO;  dK += dX^T Q;  dQt += K^T dX
//     sum the chunks in order
//   scale, store
//
// Invariant: every sum is plain, P being final, and in an order that depends on lengths alone.
// Compiled once per instruction set; includes chunk_sums.h.
#pragma once

#include <cmath>

#include "cpu/isa/chunk_sums.h"

namespace onefold::cpu::ONEFOLD_ISA {

// Rows with a larger |lse| (base 2) are weighed again: rounding lse would cost their weights more
// than 2^-14.
inline constexpr double kFarLog2 = 1024;

// In double: a vector of partial sums.
template <class R>
inline double dot(const R* a, const R* b, std::int64_t count) {
  constexpr int kW = kWidth<double>;
  Vec<double> sums{};
  std::int64_t d = 0;
  for (; d + kW <= count; d += kW) sums = fma(load_as_double(a + d), load_as_double(b + d), sums);
  double sum = sum_of_lanes<double>(sums);
  for (; d < count; ++d) sum += double{a[d]} * double{b[d]};
  return sum;
}

template <class X>
struct BackwardItem {
  using R = SumOf<X>;
  static constexpr bool kPairs = kTerms<X> == 2;
  const BackwardCall& call;
  const Problem& p;
  BackwardScratch<X>& s;
  HeadGroup heads;
  Sequence seq;
  R *dk, *dv;              // private sums of the current chunk, [key][d]; null when not wanted
  R *total_dk, *total_dv;  // what they are added to; null where nothing is
  bool want_dq;
  bool want_dz;  // dZ itself is wanted, in s.dz

  QueryTile tile(std::int64_t row_begin, std::int64_t row_end) const {
    return query_tile<R>(heads, row_begin, row_end);
  }

  // `lanes` has been set for the tile.
  void load_queries(const QueryTile& tile, const QueryData<X>& x) {
    const int width = tile.vectors * kWidth<R>;
    const std::int64_t dim_v = padded_dim<R>(p.dim_v);
    for (std::int64_t d = 0; d < round_up(p.dim, kPanel) * width; ++d) x.dqt[d] = R(0);
    touch_lanes(p.q, seq.q_begin, tile, s.lanes, p.dim);
    if (call.t.dout) {
      touch_lanes(call.t.dout, seq.q_begin, tile, s.lanes, p.dim_v);
      touch_lanes(call.t.out, seq.q_begin, tile, s.lanes, p.dim_v);
    }
    *x.shifted = *x.empty = *x.poisoned = false;
    R* q = load_rows(p.q, tile, p.dim, x.q);
    lay_across(q, width, p.dim, score_factor<X>(p).of_queries, s.row, s.operand_rows, x.qt);
    leave_out(q, tile, p.dim, x.q_poison, x);
    if constexpr (kPairs) {
      if (dk) lay_along(q, width, p.dim, x.q);
    }

    R* dout = load_rows(call.t.dout, tile, p.dim_v, x.dout);
    bool only_key[kLanes<R>] = {};
    for (int lane = 0; lane < width; ++lane) {
      x.lse[lane] = x.delta[lane] = x.shift[lane] = x.slope_sum[lane] = x.dz_sum[lane] = R(0);
      if (lane >= tile.rows) continue;
      const std::int64_t h = s.lanes.head[lane], r = seq.q_begin + s.lanes.query[lane];
      double delta = 0;
      if (call.t.dout) {
        load_row(s.row, call.t.out.at(heads.b, r, h), call.t.out.dtype, call.t.out.dim, p.dim_v);
        delta = dot(dout + lane * dim_v, s.row, p.dim_v);
      }
      only_key[lane] = std::isfinite(delta) && sees_one_key<R>(p, heads.b, h, s.lanes.query[lane]);
      if (only_key[lane]) delta = 0;
      if (call.t.dlse) delta -= call.t.dlse.load(heads.b, h, r);
      x.delta[lane] = static_cast<R>(delta);
      x.lse[lane] = static_cast<R>(to_base_2<R>(call.t.lse.load(heads.b, h, r)));
      *x.empty |= x.lse[lane] == kEmpty<R>;
    }
    lay_across(dout, width, p.dim_v, 1.0, s.row, s.operand_rows, x.dot);
    // O of a row that sees one key is that key's V: dP - dO . O is 0, which rounding would hide.
    for (int lane = 0; lane < tile.rows; ++lane) {
      for (std::int64_t d = 0; only_key[lane] && d < operands<X>(p.dim_v); ++d) {
        x.dot[d * width + lane] = X(0);
      }
    }
    leave_out(dout, tile, p.dim_v, x.dout_poison, x);
    if constexpr (kPairs) {
      if (dk) lay_along(dout, width, p.dim_v, x.dout);
    }
  }
  // The tile's rows as numbers, zeros beyond them; in `to` where those are operands.
  R* load_rows(const Rows& from, const QueryTile& tile, std::int64_t dim, X* to) {
    const std::int64_t step = padded_dim<R>(dim);
    R* rows = s.rows;
    if constexpr (!kPairs) rows = to;
    for (int lane = 0; lane < tile.vectors * kWidth<R>; ++lane) {
      const bool live = from && lane < tile.rows;
      R* row = rows + lane * step;
      if (live) {
        load_row(row, from.at(heads.b, seq.q_begin + s.lanes.query[lane], s.lanes.head[lane]),
                 from.dtype, from.dim, dim);
      }
      for (std::int64_t d = live ? dim : 0; d < step; ++d) row[d] = R(0);
    }
    return rows;
  }
  void leave_out(R* rows, const QueryTile& tile, std::int64_t dim, bool* poison,
                 const QueryData<X>& x) {
    for (int lane = 0; lane < tile.rows; ++lane) {
      poison[lane] = clear_if_not_finite(rows + lane * padded_dim<R>(dim), dim);
      *x.poisoned |= poison[lane];
    }
  }
  static bool clear_if_not_finite(R* row, std::int64_t count) {
    if (all_finite(row, count)) return false;
    for (std::int64_t d = 0; d < count; ++d) row[d] = R(0);
    return true;
  }

  // dSink_h = -sum_i P delta_i with P = e^(sink - lse_i), this tile's part of it, once all keys are
  // done. A delta from a stored out is off by its rounding; the row says by how much, since its dZ,
  // the sink's included, add up to dLSE.
  void add_sinks(const QueryTile& tile, const QueryData<X>& x, double* sums) {
    const double units = shift_units();
    for (int lane = 0; lane < tile.rows; ++lane) {
      const std::int64_t h = s.lanes.head[lane], r = seq.q_begin + s.lanes.query[lane];
      const double delta = double{x.delta[lane]}, sink = p.sinks.load(heads.b, h);
      if (sink == kEmpty<double> || x.lse[lane] == kEmpty<R>) continue;  // there is no sink
      const double share =
          x.shift[lane] != R(0)
              ? weight((double{in_shift_units(sink)} - double{x.shift[lane]}) * units,
                       double{x.lse[lane]})
              : weight(sink * kLog2E, call.t.lse.load(heads.b, h, r) * kLog2E);
      const double dlse = call.t.dlse ? call.t.dlse.load(heads.b, h, r) : 0.0;
      const double excess = double{x.dz_sum[lane]} - share * delta - dlse;
      sums[h - heads.first_head] -= share * (delta + excess);
    }
  }

  void pack(std::int64_t key_begin, std::int64_t key_end) {
    const Tiles& t = call.tiles;
    const std::int64_t panel_keys = round_up(t.keys, kPanel), value_depth = operands<X>(t.keys);
    for (std::int64_t j = key_begin; j < key_end; j += t.keys) {
      const std::int64_t idx = (j - key_begin) / t.keys;
      const int count = static_cast<int>(key_end - j < t.keys ? key_end - j : t.keys);
      touch_rows(p.k, heads.b, seq.k_begin + j, heads.kv_head, count, p.dim);
      touch_rows(p.v, heads.b, seq.k_begin + j, heads.kv_head, count, p.dim_v);
      pack_score_panel(p.k, heads.b, seq.k_begin + j, heads.kv_head, count, p.dim, s.operand_rows,
                       s.k_panels + idx * panel_keys * operands<X>(p.dim));
      pack_score_panel(p.v, heads.b, seq.k_begin + j, heads.kv_head, count, p.dim_v, s.operand_rows,
                       s.v_panels + idx * panel_keys * operands<X>(p.dim_v));
      PoisonList poison{0, s.poison_keys + idx * t.keys};
      if (want_dq) {
        pack_value_panel(p.k, heads.b, seq.k_begin + j, heads.kv_head, count, value_depth, p.dim,
                         s.operand_rows, s.kt_panels + idx * value_depth * round_up(p.dim, kPanel),
                         poison);
      }
      s.poison_counts[idx] = poison.count;
    }
  }

  // weights: scores -> P (after dropout); dscores: dP -> dX; dz when wanted; slope sums. Without
  // kOptions nothing is wanted but dX, and scores are only scaled: a third of the time, as nothing
  // is decided per vector.
  template <int N, bool kOptions>
  void differentiate(std::int64_t key_begin, const Reach<N>& reach, bool border, bool staged,
                     const QueryData<X>& x) {
    constexpr int kRow = N * kWidth<R>;
    using V = Vec<R>;
    const Variant& variant = p.variant;
    // Read once: what is stored below could be anything for all the compiler knows.
    const bool natural = kOptions && !variant.scale_only();
    const bool dropout = kOptions && variant.dropout();
    const bool has_slopes = kOptions && variant.has_slopes;
    const bool with_sinks = kOptions && call.sink_sums != nullptr;
    const bool store_dz = kOptions && want_dz, shifted = kOptions && *x.shifted;
    const bool with_addend = kOptions && staged;
    R *const weights = s.weights, *const dscores = s.dscores;
    const V one = splat<R>(R(1)), kept = splat<R>(static_cast<R>(keep_scale(variant)));
    for (int n = 0; n < N; ++n) {
      const int column = n * kWidth<R>;
      const V against = anchor(load(x.lse + column)), delta = load(x.delta + column);
      const V shift = load(x.shift + column);
      IntVec<R> first{}, last{};
      if (border) {
        first = load(s.lanes.first_key + column);
        last = load(s.lanes.last_key + column);
      }
      At<V> at{};
      V position{}, slope_sum{}, dz_sum{};
      if (has_slopes) {
        at.slope = load(s.lanes.slope + column);
        position = load(s.lanes.position + column);
      }
      const int num_keys = reach.keys[n];
      for (int key = 0; key < num_keys; ++key) {
        const int where = key * kRow + column;
        V score_2 = load(weights + where), slope = one, dp = load(dscores + where);
        if (with_addend) at.bias = load(s.addend + where);
        if (natural) {
          if (has_slopes) {
            at.distance = VectorArith<R>::abs(position - splat<R>(static_cast<R>(key_begin + key)));
          }
          const Dual<V> z = score(variant, Dual<V>{score_2, one}, at);
          score_2 = shifted ? (z.value - shift) * splat<R>(R(kLog2E)) : to_base_2<R>(z.value);
          slope = z.slope;
        }
        if (shifted && !natural) score_2 -= shift;
        V weight = weight_from(score_2, against);
        // At most 1: what exceeds it is the rounding of a large lse.
        weight = weight > one ? one : weight;
        V dropped = weight;
        if (dropout) {
          const V factor = load(s.dropout + where) * kept;
          dropped = weight * factor;
          dp = dp * factor;
        }
        V dz = weight * (dp - delta);
        V dx = natural ? dz * slope : dz;
        if (with_addend || border) {
          IntVec<R> seen = splat<Int<R>>(-1);
          if (with_addend) seen = at.bias != splat<R>(kEmpty<R>);
          if (border) {
            const IntVec<R> j = splat<Int<R>>(key);
            seen = seen & (j >= first) & (j < last);
          }
          dropped = seen ? dropped : V{};
          dz = seen ? dz : V{};
          dx = seen ? dx : V{};
        }
        if (has_slopes) slope_sum = fma(dz, at.distance, slope_sum);
        if (with_sinks) dz_sum += dz;
        if (store_dz) store(s.dz + where, dz);
        store(weights + where, dropped);
        store(dscores + where, dx);
      }
      if (!kOptions) continue;
      store(x.slope_sum + column, load(x.slope_sum + column) + slope_sum);
      store(x.dz_sum + column, load(x.dz_sum + column) + dz_sum);
    }
  }

  // Weights and dX as pairs: neighbouring lanes, for the sums over queries, and keys, for dQ. There
  // are zeros after the last key.
  template <int N>
  void pair_up(int num_keys) {
    if constexpr (kPairs) {
      constexpr int kRow = N * kWidth<R>;
      const std::int64_t along = dk ? round_up(num_keys, kOuterRows) * kRow : 0;
      narrow_row(s.weights, along, s.weights_by_lane);
      narrow_row(s.dscores, along, s.dscores_by_lane);
      for (std::int64_t key = 0; want_dq && key < num_keys; key += 2) {
        interleave_rows(s.dscores + key * kRow, s.dscores + (key + 1) * kRow, kRow,
                        s.dscores_by_key + key / 2 * kRow);
      }
    }
  }

  // What the matrix products left out because it is not finite, for the pairs that see each other.
  void add_poisoned(const QueryTile& tile, std::int64_t tile_begin, KeyCut cut,
                    const PoisonList& poison, const R* addend, const QueryData<X>& x) {
    const std::int64_t key_begin = tile_begin + cut.first;
    const int num_keys = cut.count;
    const int width = tile.vectors * kWidth<R>;
    const std::int64_t dim = padded_dim<R>(p.dim), dim_v = padded_dim<R>(p.dim_v);
    for (int idx = 0; want_dq && idx < poison.count; ++idx) {
      const int key = poison.keys[idx] - cut.first;
      if (key < 0 || key >= num_keys) continue;
      load_row(s.row, p.k.at(heads.b, seq.k_begin + key_begin + key, heads.kv_head), p.k.dtype,
               p.k.dim, p.dim);
      for (int lane = 0; lane < tile.rows; ++lane) {
        if (!lane_sees(s.lanes, addend, width, lane, key)) continue;
        const R dx = s.dscores[key * width + lane];
        for (std::int64_t d = 0; d < p.dim; ++d) x.dqt[d * width + lane] += dx * s.row[d];
      }
    }
    for (int lane = 0; dk && lane < tile.rows; ++lane) {
      const std::int64_t h = s.lanes.head[lane], r = seq.q_begin + s.lanes.query[lane];
      if (x.q_poison[lane]) {
        load_row(s.row, p.q.at(heads.b, r, h), p.q.dtype, p.q.dim, p.dim);
        add_row(num_keys, key_begin, width, lane, addend, s.dscores, s.row, p.dim, dim, dk);
      }
      if (x.dout_poison[lane]) {
        load_row(s.row, call.t.dout.at(heads.b, r, h), call.t.dout.dtype, call.t.dout.dim, p.dim_v);
        add_row(num_keys, key_begin, width, lane, addend, s.weights, s.row, p.dim_v, dim_v, dv);
      }
    }
  }
  void add_row(int num_keys, std::int64_t key_begin, int width, int lane, const R* addend,
               const R* factors, const R* row, std::int64_t dim, std::int64_t step, R* sums) {
    for (int key = 0; key < num_keys; ++key) {
      if (!lane_sees(s.lanes, addend, width, lane, key)) continue;
      R* to = sums + (key_begin + key) * step;
      for (std::int64_t d = 0; d < dim; ++d) to[d] += factors[key * width + lane] * row[d];
    }
  }

  // The keys of a key tile that a query tile may see, and what hides some of them.
  template <int N>
  struct Stage {
    KeyCut cut;
    Reach<N> reach;
    bool border, add;
    bool poison;  // rows were left out of the packed keys or of the tile
  };
  // Leaves their products in s.weights.
  template <int N>
  Stage<N> stage(const QueryTile& tile, std::int64_t tile_begin, int tile_keys, std::int64_t panel,
                 const QueryData<X>& x) {
    constexpr int kRow = N * kWidth<R>;
    const Stage<N> kNothing{{0, 0}, Reach<N>(0), false, false, false};
    const KeyCut cut = cut_keys(p, tile, tile_begin, tile_keys);
    if (cut.count == 0) return kNothing;
    const std::int64_t key_begin = tile_begin + cut.first;
    const TileClass band = tile_class(p.variant, seq.used, tile.query_begin, tile.query_end,
                                      key_begin, key_begin + cut.count);
    if (band == TileClass::kEmpty) return kNothing;
    TileClass options = TileClass::kFull;
    if (p.bias || p.mask) {
      options = stage_addend(p, tile, key_begin, cut.count, s.lanes, s.row, s.addend);
      if (options == TileClass::kEmpty) return kNothing;
    }
    // A tile with lanes to spare hides them like a border does.
    const bool border = band == TileClass::kPartial || tile.rows < kRow || *x.empty;
    const bool poison = s.poison_counts[panel] > 0 || *x.poisoned;
    if (border || poison) set_intervals(p, tile, key_begin, cut.count, s.lanes);
    // All scores of a row may be minus infinity by themselves. It sees nothing, like a hidden one.
    for (int lane = 0; *x.empty && lane < tile.rows; ++lane) {
      if (x.lse[lane] == kEmpty<R>) s.lanes.last_key[lane] = s.lanes.first_key[lane] = 0;
    }
    const Reach<N> reach = band == TileClass::kPartial && !want_dz
                               ? reach_of<N>(p, tile, key_begin, cut.count, s.lanes)
                               : Reach<N>(cut.count);
    const std::int64_t panel_keys = round_up(call.tiles.keys, kPanel);
    Vec<R> unused[N] = {};
    const std::int64_t depth = operands<X>(p.dim);
    score_product<X, N, Layout::kPanels>(s.k_panels + (panel * panel_keys + cut.first) * depth, 0,
                                         x.qt, p.dim, reach, score_factor<X>(p).of_scores,
                                         s.weights, unused);
    return {cut, reach, border, p.variant.has_bias || options == TileClass::kPartial, poison};
  }

  // Adds a key tile to x.shift and x.sum, the state of every row.
  template <int N>
  void weigh(const QueryTile& tile, std::int64_t tile_begin, int tile_keys, std::int64_t panel,
             const QueryData<X>& x) {
    const Stage<N> seen = stage<N>(tile, tile_begin, tile_keys, panel, x);
    if (seen.cut.count == 0) return;
    Vec<R> top[N];
    modify_scores<R, N, Units::kNatural>(p, s.lanes, s.weights, seen.add ? s.addend : nullptr,
                                         seen.reach, seen.border, tile_begin + seen.cut.first, top);
    const Vec<R> units = splat(static_cast<R>(shift_units()));
    for (int n = 0; n < N; ++n) {
      const int column = n * kWidth<R>;
      Softmax<Vec<R>> state{load(x.shift + column), load(x.sum + column)};
      raise(state, top[n], units, MaximumGauge{});
      const Vec<R> against = anchor(state.ref);
      for (int key = 0; key < seen.reach.keys[n]; ++key) {
        state.sum += weight_from(load(s.weights + key * N * kWidth<R> + column), against, units);
      }
      store(x.shift + column, state.ref);
      store(x.sum + column, state.sum);
    }
  }
  // What a shift times this is in base 2: shifts are in natural units unless scores only are
  // scaled.
  double shift_units() const { return p.variant.scale_only() ? 1.0 : kLog2E; }
  // Rounded once, for a shift and for what is compared with it.
  R in_shift_units(double sink) const {
    return static_cast<R>(p.variant.scale_only() ? to_base_2<R>(sink) : sink);
  }

  // Weighs rows with a far lse again, as forward did. Returns whether there were any: then the
  // packed keys are gone.
  bool weigh_far_rows(const QueryTile& tile, const QueryData<X>& x) {
    const auto far = [&](int lane) {
      return std::fabs(x.lse[lane]) > R(kFarLog2) && std::isfinite(x.lse[lane]);
    };
    for (int lane = 0; lane < tile.rows; ++lane) *x.shifted |= far(lane);
    if (!*x.shifted) return false;
    for (int lane = 0; lane < tile.vectors * kWidth<R>; ++lane) {
      const double sink = p.sinks ? p.sinks.load(heads.b, s.lanes.head[lane]) : kEmpty<double>;
      x.shift[lane] = in_shift_units(sink);
      x.sum[lane] = sink == kEmpty<double> ? R(0) : R(1);
    }
    const Tiles& t = call.tiles;
    const TileRange all = kv_range(p.variant, seq.used, tile.query_begin, tile.query_end);
    for (std::int64_t j = all.begin / t.keys * t.keys; j < all.end; j += t.keys) {
      const int count = static_cast<int>(clamp(seq.used.k - j, 0, t.keys));
      pack(j, j + count);
      if (kTileVectors == 3 && tile.vectors == 3) weigh<kTileVectors>(tile, j, count, 0, x);
      if (tile.vectors == 2) weigh<2>(tile, j, count, 0, x);
      if (tile.vectors == 1) weigh<1>(tile, j, count, 0, x);
    }
    for (int lane = 0; lane < tile.vectors * kWidth<R>; ++lane) {
      const bool again = lane < tile.rows && far(lane) && x.sum[lane] > R(0);
      if (again) x.lse[lane] = static_cast<R>(std::log2(double{x.sum[lane]}));
      if (!again) x.shift[lane] = R(0);
    }
    return true;
  }

  // One (query tile, key tile). Returns the keys that were attended to; s.dz holds their dZ.
  template <int N>
  KeyCut attend(const QueryTile& tile, std::int64_t tile_begin, int tile_keys, std::int64_t panel,
                const QueryData<X>& x) {
    constexpr int kRow = N * kWidth<R>;
    const Tiles& t = call.tiles;
    const auto [cut, reach, border, add, poison] = stage<N>(tile, tile_begin, tile_keys, panel, x);
    if (cut.count == 0) return {0, 0};
    const std::int64_t key_begin = tile_begin + cut.first;
    const int num_keys = cut.count;
    const std::int64_t panel_keys = round_up(t.keys, kPanel);
    if (call.t.dout) {
      Vec<R> unused[N] = {};
      const X* v = s.v_panels + (panel * panel_keys + cut.first) * operands<X>(p.dim_v);
      score_product<X, N, Layout::kPanels>(v, 0, x.dot, p.dim_v, reach, R(1), s.dscores, unused);
    } else {  // dP is 0, whatever v holds
      for (int y = 0; y < num_keys * kRow; ++y) s.dscores[y] = R(0);
    }
    if (p.variant.dropout()) {
      draw_dropout(p, tile, key_begin, num_keys, s.lanes, s.dropout);
    }
    const bool options = !p.variant.scale_only() || p.variant.dropout() || call.sink_sums ||
                         want_dz || *x.shifted || add;
    if (options) {
      differentiate<N, true>(key_begin, reach, border, add, x);
    } else {
      differentiate<N, false>(key_begin, reach, border, add, x);
    }

    for (std::int64_t y = num_keys * kRow; y < round_up(num_keys, kOuterRows) * kRow; ++y) {
      s.weights[y] = s.dscores[y] = R(0);
    }
    if constexpr (kPairs) pair_up<N>(num_keys);
    if (dk) {
      const std::int64_t dim = padded_dim<R>(p.dim), dim_v = padded_dim<R>(p.dim_v);
      if (call.t.dout) {
        outer_product(s.weights_by_lane, x.dout, dim_v, reach, dv + key_begin * dim_v);
      }
      outer_product(s.dscores_by_lane, x.q, dim, reach, dk + key_begin * dim);
    }
    if (want_dq) {
      Vec<R> keep[N];
      for (int n = 0; n < N; ++n) keep[n] = splat<R>(R(1));
      const std::int64_t value_depth = operands<X>(t.keys);
      const X* kt = s.kt_panels + panel * value_depth * round_up(p.dim, kPanel) +
                    cut.first / kTerms<X> * kPanel;
      value_product<X, N, Layout::kPanels>(kt, value_depth, s.dscores_by_key, p.dim, reach, keep,
                                           x.dqt);
    }
    if (poison) {
      const PoisonList keys{s.poison_counts[panel], s.poison_keys + panel * t.keys};
      add_poisoned(tile, tile_begin, cut, keys, add ? s.addend : nullptr, x);
    }
    return cut;
  }
  KeyCut attend_any(const QueryTile& tile, std::int64_t key_begin, int num_keys, std::int64_t panel,
                    const QueryData<X>& x) {
    if constexpr (kTileVectors == 3) {
      if (tile.vectors == 3) return attend<3>(tile, key_begin, num_keys, panel, x);
    }
    if (tile.vectors == 2) return attend<2>(tile, key_begin, num_keys, panel, x);
    return attend<1>(tile, key_begin, num_keys, panel, x);
  }

  void store_bias_gradient(const QueryTile& tile, std::int64_t key_begin, int num_keys) {
    const int width = tile.vectors * kWidth<R>;
    const Grid& g = call.t.dbias;
    for (int lane = 0; lane < tile.rows; ++lane) {
      for (int key = 0; key < num_keys; ++key) s.row[key] = s.dz[key * width + lane];
      const std::int64_t at = g.offset(heads.b, s.lanes.head[lane], s.lanes.query[lane], key_begin);
      store_row(static_cast<std::byte*>(g.data) + at * size_bytes(g.dtype), g.dtype, g.stride[3],
                s.row, num_keys);
    }
  }

  void store_dq(const QueryTile& tile, const QueryData<X>& x) {
    const int width = tile.vectors * kWidth<R>;
    const std::int64_t step = padded_dim<R>(p.dim);
    touch_lanes(call.t.dq, seq.q_begin, tile, s.lanes, p.dim);
    transpose(x.dqt, width, p.dim, tile.rows, s.rows, step);
    for (int lane = 0; lane < tile.rows; ++lane) {
      R* row = s.rows + lane * step;
      scale_row(row, row, p.dim, p.variant.scale);
      store_row(call.t.dq.at(heads.b, seq.q_begin + s.lanes.query[lane], s.lanes.head[lane]),
                call.t.dq.dtype, call.t.dq.dim, row, p.dim);
    }
  }

  // What a pass takes of one chunk, at most pass_tiles tiles. A chunk that is larger is taken in
  // several passes.
  struct Piece {
    std::int64_t chunk, row_begin, row_end, first_tile;
    KeyInterval keys;   // of the whole chunk, in whole tiles
    bool begins, ends;  // the chunk
    std::int64_t tiles() const { return (row_end - row_begin + kLanes<R> - 1) / kLanes<R>; }
  };

  static void clear(R* sums, KeyInterval keys, std::int64_t dim) {
    for (std::int64_t x = keys.begin * dim; x < keys.end * dim; ++x) sums[x] = R(0);
  }
  static void add(R* to, const R* sums, KeyInterval keys, std::int64_t dim) {
    for (std::int64_t x = keys.begin * dim; x < keys.end * dim; ++x) to[x] += sums[x];
  }

  // Pieces against all their keys: every stretch is packed once for all of them, and the private
  // sums of its keys are cleared, formed and added while they are in cache. A tile is loaded with
  // the first stretch and left after the last one; where there is one, all take turns in one slot.
  void pass(const Piece* pieces, int count) {
    const Tiles& t = call.tiles;
    const std::int64_t dim = padded_dim<R>(p.dim), dim_v = padded_dim<R>(p.dim_v);
    KeyInterval all = pieces[0].keys;
    for (int n = 1; n < count; ++n) {
      if (pieces[n].keys.begin < all.begin) all.begin = pieces[n].keys.begin;
      if (pieces[n].keys.end > all.end) all.end = pieces[n].keys.end;
    }
    const bool one_slot = all.end - all.begin <= t.super_keys;
    std::int64_t super = all.begin;
    do {
      const std::int64_t super_end =
          super + t.super_keys < all.end ? super + t.super_keys : all.end;
      const std::int64_t key_end = super_end < seq.used.k ? super_end : seq.used.k;
      pack(super, key_end);
      for (int n = 0; n < count; ++n) {
        const Piece& piece = pieces[n];
        const KeyInterval keys{super > piece.keys.begin ? super : piece.keys.begin,
                               super_end < piece.keys.end ? super_end : piece.keys.end};
        if (dk && piece.begins) {
          clear(dk, keys, dim);
          clear(dv, keys, dim_v);
        }
        for (std::int64_t idx = 0; idx < piece.tiles(); ++idx) {
          const QueryTile q = tile(piece.row_begin + idx * kLanes<R>, piece.row_end);
          const QueryData<X> x = s.query_data(p, one_slot ? 0 : piece.first_tile + idx);
          set_lanes(p, q, s.lanes);
          if (super == all.begin) {
            load_queries(q, x);
            if (weigh_far_rows(q, x)) pack(super, key_end);
          }
          for (std::int64_t j = keys.begin; j < keys.end; j += t.keys) {
            const int num_keys = static_cast<int>(key_end - j < t.keys ? key_end - j : t.keys);
            const KeyCut cut = attend_any(q, j, num_keys, (j - super) / t.keys, x);
            if (cut.count > 0 && call.wants.bias_in_main_pass()) {
              store_bias_gradient(q, j + cut.first, cut.count);
            }
          }
          if (super_end == all.end) finish(piece, q, x);
        }
        if (total_dk && piece.ends) {
          add(total_dk, dk, keys, dim);
          add(total_dv, dv, keys, dim_v);
        }
      }
      super += t.super_keys;
    } while (super < all.end);
  }

  void finish(const Piece& piece, const QueryTile& q, const QueryData<X>& x) {
    const std::int64_t at =
        ((heads.b * p.heads_k + heads.kv_head) * call.num_chunks + piece.chunk) * p.group;
    if (want_dq) store_dq(q, x);
    if (call.sink_sums) add_sinks(q, x, call.sink_sums + at);
    for (int lane = 0; call.slope_sums && lane < q.rows; ++lane) {
      call.slope_sums[at + s.lanes.head[lane] - heads.first_head] -= double{x.slope_sum[lane]};
    }
  }

  // Chunks of queries, in order.
  void run(std::int64_t first_chunk, std::int64_t end_chunk) {
    const std::int64_t rows = chunk_rows(seq.used.q), step = s.pass_tiles * kLanes<R>;
    Piece pieces[kPassTiles];
    int count = 0;
    std::int64_t tiles = 0;
    for (std::int64_t idx = first_chunk; idx < end_chunk; ++idx) {
      const std::int64_t i0 = idx * rows, i1 = i0 + rows < seq.used.q ? i0 + rows : seq.used.q;
      if (i0 >= i1) break;
      const TileRange seen = kv_range(p.variant, seq.used, i0, i1);
      const KeyInterval keys{seen.begin / call.tiles.keys * call.tiles.keys,
                             round_up(seen.end, call.tiles.keys)};
      const std::int64_t begin = i0 * p.group, end = i1 * p.group;
      for (std::int64_t r = begin; r < end; r += step) {
        const std::int64_t row_end = r + step < end ? r + step : end;
        Piece piece{idx, r, row_end, tiles, keys, r == begin, row_end == end};
        if (tiles + piece.tiles() > s.pass_tiles) {
          pass(pieces, count);
          count = 0;
          piece.first_tile = tiles = 0;
        }
        pieces[count++] = piece;
        tiles += piece.tiles();
      }
    }
    if (count > 0) pass(pieces, count);
  }
};

template <class X>
void backward_item(const BackwardCall& call, std::int64_t index, int worker) {
  using R = SumOf<X>;
  const Problem& p = *call.problem;
  const Item& item = call.items[index];
  const Sequence& seq = p.sequences[static_cast<std::size_t>(item.b)];
  const bool by_chunk = call.by_chunk;
  const bool totals = call.wants.dkv && !by_chunk && call.num_chunks > 1;
  Arena arena(call.scratch + static_cast<std::size_t>(worker) * call.scratch_bytes);
  BackwardScratch<X> s(arena, p, call.tiles, pass_tiles_of<R>(p, by_chunk ? 1 : call.num_chunks),
                       call.wants.dkv && !by_chunk, totals, call.wants.bias_in_main_pass());
  const std::int64_t dim = padded_dim<R>(p.dim), dim_v = padded_dim<R>(p.dim_v);
  BackwardItem<X> work{call,
                       p,
                       s,
                       head_group(p, item.b, item.kv_head),
                       seq,
                       nullptr,
                       nullptr,
                       nullptr,
                       nullptr,
                       bool(call.t.dq),
                       call.wants.bias_in_main_pass()};
  if (by_chunk) {  // item.row_begin is the chunk
    if (call.wants.dkv) {
      R* sums = reinterpret_cast<R*>(call.chunk_sums);
      const std::int64_t idx =
          (item.b * p.heads_k + item.kv_head) * call.num_chunks + item.row_begin;
      work.dk = sums + idx * chunk_elements_of<R>(p);
      work.dv = work.dk + round_up(p.longest_k, kMostTileKeys) * dim;
    }
    work.run(item.row_begin, item.row_begin + 1);
    return;
  }
  if (call.wants.dkv) {
    work.dk = s.chunk_dk;
    work.dv = s.chunk_dv;
  }
  R *dk = totals ? s.total_dk : s.chunk_dk, *dv = totals ? s.total_dv : s.chunk_dv;
  if (call.wants.dkv) {  // all that no pass clears
    const TileRange seen = kv_range(p.variant, seq.used, 0, seq.used.q);
    const std::int64_t keys = round_up(seq.used.k, call.tiles.keys);
    const KeyInterval before{0, totals ? keys : seen.begin}, behind{totals ? keys : seen.end, keys};
    for (const KeyInterval& rest : {before, behind}) {
      work.clear(dk, rest, dim);
      work.clear(dv, rest, dim_v);
    }
  }
  if (totals) {
    work.total_dk = dk;
    work.total_dv = dv;
  }
  work.run(0, call.num_chunks);
  if (!call.wants.dkv) return;
  const Item all{item.b, item.kv_head, 0, seq.used.k};
  store_key_gradient<R>(call, all, call.t.dk, dk, p.dim, p.variant.scale, s.row);
  store_key_gradient<R>(call, all, call.t.dv, dv, p.dim_v, 1.0, s.row);
}

}  // namespace onefold::cpu::ONEFOLD_ISA
