// Which sequence a block works on, from index tensors that only the device reads.
//
// Invariant: whatever the index tensors hold, what comes out lies inside the tensors. Packed
// sequences share one row of tiles without anyone summing their lengths: the tiles of sequence b
// begin at floor(cu[b] / tile) + b, which leaves room for every tile of the sequences before it.
// Host and device; includes problem_spec.h.
#pragma once

#include "kernels/problem_spec.h"

namespace onefold::kernels {

static inline i64 index_at(const IndexView& view, i64 idx) {
  if (view.bytes == 4) return static_cast<const i32*>(view.data)[idx * view.stride];
  return static_cast<const i64*>(view.data)[idx * view.stride];
}

struct Stretch {
  i64 begin, rows;
};
// Rows of sequence b; b == batch is what lies beyond the last offset.
static inline Stretch stretch_at(const IndexView& cu, i64 b, i64 batch, i64 total) {
  if (cu.bytes == 0) return {0, total};
  const i64 begin = clamp(index_at(cu, b), 0, total);
  const i64 end = b == batch ? total : clamp(index_at(cu, b + 1), begin, total);
  return {begin, end - begin};
}

// Where sequence b lies in the tensors and how much of it is used.
struct Sequence {
  i64 q_begin, k_begin;
  Lengths used;
  i64 q_rows, k_rows;
};
static inline Sequence sequence_at(const SequencesView& s, i64 b) {
  const Stretch q = stretch_at(s.cu_q, b, s.batch, s.rows_q);
  const Stretch k = stretch_at(s.cu_k, b, s.batch, s.rows_k);
  Lengths used{q.rows, k.rows};
  if (b == s.batch) used = {0, 0};
  if (b < s.batch && s.used_q.bytes != 0) used.q = clamp(index_at(s.used_q, b), 0, q.rows);
  if (b < s.batch && s.used_k.bytes != 0) used.k = clamp(index_at(s.used_k, b), 0, k.rows);
  return {q.begin, k.begin, used, q.rows, k.rows};
}

// A tile of one sequence.
struct TileAt {
  i64 b;
  i64 tile;
};

// Tiles that one head needs: of one sequence, or of all packed ones and the rows beyond them.
static inline i64 tiles_per_head(i64 total_rows, i64 tile_rows, bool packed, i64 batch) {
  if (packed) return total_rows / tile_rows + batch + 1;
  return (total_rows + tile_rows - 1) / tile_rows;
}

// The sequence (or what lies beyond them, b == batch) that owns tile `tile` of a packed head. Offsets
// that do not ascend may give a negative tile, which has no rows.
static inline TileAt packed_tile(const IndexView& cu, i64 batch, i64 total, i64 tile_rows,
                                 i64 tile) {
  i64 low = 0, high = batch;  // the last b whose tiles begin at or before `tile`
  while (low < high) {
    const i64 middle = (low + high + 1) / 2;
    const i64 begin = clamp(index_at(cu, middle), 0, total) / tile_rows + middle;
    if (begin <= tile) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return {low, tile - (clamp(index_at(cu, low), 0, total) / tile_rows + low)};
}

}  // namespace onefold::kernels
