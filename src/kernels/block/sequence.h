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

// The first tile of packed sequence b.
static inline i64 first_packed_tile(const IndexView& cu, i64 b, i64 total, i64 tile_rows) {
  return clamp(index_at(cu, b), 0, total) / tile_rows + b;
}

// The sequence (or what lies beyond them, b == batch) that owns tile `tile` of a packed head.
// Offsets that do not ascend may give a negative tile, which has no rows.
static inline TileAt packed_tile(const IndexView& cu, i64 batch, i64 total, i64 tile_rows,
                                 i64 tile) {
  i64 low = 0, high = batch;  // the last b whose tiles begin at or before `tile`
  while (low < high) {
    const i64 middle = (low + high + 1) / 2;
    if (first_packed_tile(cu, middle, total, tile_rows) <= tile) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return {low, tile - first_packed_tile(cu, low, total, tile_rows)};
}

// The (sequence, query head) that a tile belongs to.
struct HeadAt {
  i64 b;
  int h, kv_head;
  Lengths n;
};

// A tile of query rows of one head: its first row, local; the rows of its sequence, used or not;
// and where the tile and the keys of the sequence begin in the tensors.
struct QueryTile {
  HeadAt at;
  int row0, num_rows;
  i64 q_row, k_row;

  bool present() const { return row0 >= 0 && row0 < num_rows; }
};
// A tile of one head, of those of all batch entries.
struct HeadTile {
  u32 head, tile;
};
// Item `item` when each head has num_tiles tiles and heads go in step, `in_step` of them at a time:
// the first tile of each, then the second of each, and so on.
static inline HeadTile head_tile_at(u32 item, u32 num_tiles, u32 num_heads, u32 in_step) {
  const u32 first = item / (num_tiles * in_step) * in_step;
  const u32 heads = num_heads - first < in_step ? num_heads - first : in_step;
  const u32 rest = item - first * num_tiles;
  return {first + rest % heads, rest / heads};
}
// How many heads have tiles: packed sequences share theirs.
static inline u32 heads_of(const IndexView& cu, i64 batch, int num_heads) {
  return static_cast<u32>(num_heads) * (cu.bytes != 0 ? 1 : static_cast<u32>(batch));
}

// Tile `item` of all heads; in descending order within a head when `descending`.
static inline QueryTile query_tile_at(const ProblemView& p, u32 item, int tile_rows,
                                      int heads_in_step = 1, bool descending = false) {
  const u32 num_tiles = static_cast<u32>(p.query_tiles), num_heads = static_cast<u32>(p.heads_q);
  const HeadTile of =
      head_tile_at(item, num_tiles, heads_of(p.sequences.cu_q, p.sequences.batch, p.heads_q),
                   static_cast<u32>(heads_in_step));
  const u32 tile = descending ? num_tiles - 1 - of.tile : of.tile;
  QueryTile t;
  t.at.h = static_cast<int>(of.head % num_heads);
  t.at.kv_head = t.at.h / p.group;
  TileAt where{of.head / num_heads, tile};
  if (p.sequences.cu_q.bytes != 0) {
    where = packed_tile(p.sequences.cu_q, p.sequences.batch, p.sequences.rows_q, tile_rows, tile);
  }
  t.at.b = where.b;
  const Sequence seq = sequence_at(p.sequences, where.b);
  t.at.n = {static_cast<int>(seq.used.q), static_cast<int>(seq.used.k)};
  t.num_rows = static_cast<int>(seq.q_rows);
  t.row0 = static_cast<int>(where.tile) * tile_rows;
  t.q_row = seq.q_begin + t.row0;
  t.k_row = seq.k_begin;
  return t;
}

// Blocks that own tiles of keys add to dQ of a tile of rows one after the other, the last keys
// first: how many come before that of key tile `key_tile`, when tiles that see none of the rows are
// left out. Rows [i0, i1).
static inline i64 turns_before(const Variant& v, Lengths n, i64 i0, i64 i1, i64 key_tile,
                               i64 tile_k) {
  return (kv_range(v, n, i0, i1).end - 1) / tile_k - key_tile;
}

// Tiles of query rows numbered through, head by head: the number of tile 0 of head h in sequence b.
static inline i64 row_tile(const ProblemView& p, i64 b, i64 h, i64 tile_rows) {
  if (p.sequences.cu_q.bytes == 0) return (b * p.heads_q + h) * p.query_tiles;
  return h * p.query_tiles + first_packed_tile(p.sequences.cu_q, b, p.sequences.rows_q, tile_rows);
}

}  // namespace onefold::kernels
