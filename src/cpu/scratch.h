// What one work item needs beside its tensors: packed keys, the tile in flight, the states of its
// rows; in backward private sums, and the query side of a pass.
//
// Compiled once per instruction set; includes scores.h and pack.h.
#pragma once

#include "cpu/isa/pack.h"
#include "cpu/scores.h"

namespace onefold::cpu::ONEFOLD_ISA {

// ---- forward ----

template <class X>
struct ForwardScratch {
  using R = SumOf<X>;
  static constexpr bool kPairs = kTerms<X> == 2;
  X *k_panels, *v_panels, *operand_rows, *weights;
  R *row, *rows, *scores, *addend, *dropout;
  int *poison_counts, *poison_keys;
  bool* again;  // per row of the item: to be done in double
  X* qt;        // per query tile of the item, as all below
  R *out, *ref, *sum;
  R* mass;  // the sum of the weights as they were multiplied with V; null where that is sum
  LaneFacts<R> lanes;
  ScoreFactor<X> factor;
  std::int64_t qt_size, out_size;

  ForwardScratch(Arena& arena, const Problem& p, const Tiles& t, std::int64_t tiles_per_item)
      : lanes(arena, kLanes<R>), factor(score_factor<X>(p)) {
    const std::int64_t key_tiles = t.super_keys / t.keys;
    const std::int64_t panel_keys = round_up(t.keys, kPanel);
    const std::int64_t padded_v = round_up(p.dim_v, kPanel);
    const std::int64_t depth = operands<X>(p.dim), value_depth = operands<X>(t.keys);
    qt_size = round_up(depth * kLanes<R>, 16);
    out_size = padded_v * kLanes<R>;
    // Either layout: panels, or rows padded to whole vectors.
    k_panels = arena.take<X>(key_tiles * panel_keys * padded_dim<R>(depth) + kPanelSlack);
    v_panels =
        arena.take<X>(key_tiles * value_depth * (padded_v + padded_dim<R>(p.dim_v)) + kPanelSlack);
    poison_counts = arena.take<int>(key_tiles);
    poison_keys = arena.take<int>(t.super_keys);
    again = arena.take<bool>(tiles_per_item * kLanes<R>);
    row = arena.take<R>(round_up(p.dim > padded_v ? p.dim : padded_v, 64) + t.keys);
    rows = arena.take<R>(padded_dim<R>(p.dim > p.dim_v ? p.dim : p.dim_v) *
                         (kLanes<R> > kPanelRows ? kLanes<R> : kPanelRows));
    scores = arena.take<R>(panel_keys * kLanes<R>);
    if constexpr (kPairs) {
      const std::int64_t most = padded_dim<R>(p.dim > padded_v ? p.dim : padded_v);
      operand_rows = arena.take<X>(most * kLanes<R>);
      weights = arena.take<X>(operands<X>(panel_keys) * kLanes<R>);
    } else {
      operand_rows = rows;
      weights = scores;
    }
    addend = arena.take<R>(p.bias || p.mask ? t.keys * kLanes<R> : 0);
    dropout = arena.take<R>(p.variant.dropout() ? t.keys * kLanes<R> : 0);
    qt = arena.take<X>(tiles_per_item * qt_size);
    out = arena.take<R>(tiles_per_item * out_size);
    ref = arena.take<R>(tiles_per_item * kLanes<R>);
    sum = arena.take<R>(tiles_per_item * kLanes<R>);
    mass = kPairs ? arena.take<R>(tiles_per_item * kLanes<R>) : nullptr;
  }
};

// ---- backward ----

inline constexpr int kPassTiles = 48;  // query tiles of one pass, at most

// Those of an item with so many chunks.
template <class R>
inline std::int64_t pass_tiles_of(const Problem& p, std::int64_t chunks) {
  const std::int64_t rows = chunk_rows(p.longest_q);
  const std::int64_t queries = rows < p.longest_q ? rows : p.longest_q;
  const std::int64_t tiles = chunks * ((queries * p.group + kLanes<R> - 1) / kLanes<R>);
  return tiles < 1 ? 1 : tiles < kPassTiles ? tiles : kPassTiles;
}

// The query side of one tile, prepared once per pass.
template <class X>
struct QueryData {
  using R = SumOf<X>;
  X *qt, *dot;                   // [d][lane]: q times the score factor; dout
  X *q, *dout;                   // [lane][d]: as they are, for the sums over queries
  R* dqt;                        // [d][lane]
  R *lse, *delta;                // base 2; dO . O - dLSE
  R *shift, *sum;                // of rows weighed again: taken from every score first; the
                                 // sum of weights against it, whose log2 then is lse
  R *slope_sum, *dz_sum;         // sum of dZ * distance; of dZ
  bool *q_poison, *dout_poison;  // rows left out of q and dout because they are not finite
  // For the tile: some row was left out; was weighed again; has no weights.
  bool *poisoned, *shifted, *empty;

  QueryData(Arena& arena, const Problem& p) {
    constexpr int kL = kLanes<R>;
    qt = arena.take<X>(operands<X>(p.dim) * kL);
    dot = arena.take<X>(operands<X>(p.dim_v) * kL);
    q = arena.take<X>(padded_dim<R>(p.dim) * operands<X>(kL));
    dout = arena.take<X>(padded_dim<R>(p.dim_v) * operands<X>(kL));
    dqt = arena.take<R>(round_up(p.dim, kPanel) * kL);
    lse = arena.take<R>(kL);
    delta = arena.take<R>(kL);
    shift = arena.take<R>(kL);
    sum = arena.take<R>(kL);
    slope_sum = arena.take<R>(kL);
    dz_sum = arena.take<R>(kL);
    q_poison = arena.take<bool>(kL);
    dout_poison = arena.take<bool>(kL);
    poisoned = arena.take<bool>(1);
    shifted = arena.take<bool>(1);
    empty = arena.take<bool>(1);
  }
};

template <class X>
struct BackwardScratch {
  using R = SumOf<X>;
  X *k_panels, *v_panels, *kt_panels, *operand_rows;
  R *row, *rows;
  int *poison_counts, *poison_keys;
  R *weights, *dscores, *dz, *addend, *dropout;
  // The same as operands, along lanes and along keys; in place where those are numbers.
  X *weights_by_lane, *dscores_by_lane, *dscores_by_key;
  R *chunk_dk, *chunk_dv, *total_dk, *total_dv;  // [key][d], private
  LaneFacts<R> lanes;
  ScoreFactor<X> factor;
  std::byte* query_block;
  std::size_t query_bytes;
  std::int64_t pass_tiles;

  // num_tiles: of a pass. chunk_*: when items are heads. total_*: when a head has several chunks.
  BackwardScratch(Arena& arena, const Problem& p, const Tiles& t, std::int64_t num_tiles,
                  bool chunks, bool totals, bool with_dz)
      : lanes(arena, kLanes<R>), factor(score_factor<X>(p)), pass_tiles(num_tiles) {
    constexpr int kL = kLanes<R>;
    const std::int64_t key_tiles = t.super_keys / t.keys;
    const std::int64_t panel_keys = round_up(t.keys, kPanel);
    const std::int64_t dim = padded_dim<R>(p.dim), dim_v = padded_dim<R>(p.dim_v);
    k_panels = arena.take<X>(key_tiles * panel_keys * operands<X>(p.dim) + kPanelSlack);
    v_panels = arena.take<X>(key_tiles * panel_keys * operands<X>(p.dim_v) + kPanelSlack);
    kt_panels = arena.take<X>(key_tiles * operands<X>(t.keys) * round_up(p.dim, kPanel));
    poison_counts = arena.take<int>(key_tiles);
    poison_keys = arena.take<int>(t.super_keys);
    row = arena.take<R>((dim > dim_v ? dim : dim_v) + t.keys + kPanel);
    rows = arena.take<R>((dim > dim_v ? dim : dim_v) * (kL > kPanelRows ? kL : kPanelRows));
    weights = arena.take<R>(panel_keys * kL);
    dscores = arena.take<R>(panel_keys * kL);
    if constexpr (kTerms<X> == 2) {
      operand_rows = arena.take<X>(padded_dim<R>(dim > dim_v ? dim : dim_v) * kL);
      weights_by_lane = arena.take<X>(panel_keys * operands<X>(kL));
      dscores_by_lane = arena.take<X>(panel_keys * operands<X>(kL));
      dscores_by_key = arena.take<X>(operands<X>(panel_keys) * kL);
    } else {
      operand_rows = rows;
      weights_by_lane = weights;
      dscores_by_lane = dscores_by_key = dscores;
    }
    dz = arena.take<R>(with_dz ? t.keys * kL : 0);
    addend = arena.take<R>(p.bias || p.mask ? t.keys * kL : 0);
    dropout = arena.take<R>(p.variant.dropout() ? t.keys * kL : 0);
    const std::int64_t keys = round_up(p.longest_k, t.keys);
    chunk_dk = arena.take<R>(chunks ? keys * dim : 0);
    chunk_dv = arena.take<R>(chunks ? keys * dim_v : 0);
    total_dk = arena.take<R>(totals ? keys * dim : 0);
    total_dv = arena.take<R>(totals ? keys * dim_v : 0);
    Arena one(nullptr);
    QueryData<X>(one, p);
    query_bytes = one.used();
    query_block = arena.take<std::byte>(static_cast<std::int64_t>(query_bytes) * pass_tiles);
  }
  QueryData<X> query_data(const Problem& p, std::int64_t idx) const {
    Arena arena(query_block + static_cast<std::size_t>(idx) * query_bytes);
    return QueryData<X>(arena, p);
  }
};

}  // namespace onefold::cpu::ONEFOLD_ISA
