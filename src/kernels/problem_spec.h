// What every attention kernel is told: at compile time what the variant does, at run time where the
// tensors lie. Host and device compile it.
//
// Invariant: plain data without pointers to the host. Strides count elements and are 64-bit.
// Includes variant.h and tile/element.h.
#pragma once

#include "core/variant.h"
#include "kernels/tile/element.h"

namespace onefold::kernels {

// What changes a score or drops a weight. Bands, lengths and sinks are known at run time only.
struct Features {
  bool softcap = false;
  bool slopes = false;
  Element bias = Element::kNone;
  bool mask = false;
  bool dropout = false;

  constexpr bool operator==(const Features&) const = default;
  constexpr bool scale_only() const { return !softcap && !slopes && bias == Element::kNone; }
  constexpr bool plain() const { return scale_only() && !mask && !dropout; }
  constexpr bool hides() const { return mask || bias != Element::kNone; }
};

// q, k, v, out and their gradients. Packed tensors have batch stride 0.
struct RowsView {
  void* data = nullptr;
  i64 batch = 0, row = 0, head = 0, dim = 1;
};

// Bias, mask and their gradients, indexed by (b, h, i, j); a broadcast axis has stride 0.
struct GridView {
  void* data = nullptr;
  i64 batch = 0, head = 0, query = 0, key = 0;
};

// float32 per (b, h) or (b, h, row): slopes, sinks, lse and their gradients.
struct NumbersView {
  float* data = nullptr;
  i64 batch = 0, head = 0, row = 0;
};

// An index tensor, int32 or int64; absent when bytes is 0.
struct IndexView {
  const void* data = nullptr;
  i64 stride = 0;
  int bytes = 0;
};

// Where sequences begin and what of them is used. Read on the device and clamped there.
struct SequencesView {
  IndexView cu_q, cu_k, used_q, used_k;
  i64 batch = 0, rows_q = 0, rows_k = 0;
};

// What a small kernel found in the mask, 2 bits per (query tile, key tile): 0 all hidden, 1 mixed,
// 2 all visible. Sixteen key tiles share a word. Strides in words, 0 along broadcast axes. What
// lies beyond the last tile is like it, as the mask itself is read: tile 0 where an axis is
// broadcast, and inside the mask where a sequence is longer than it.
struct MaskClassesView {
  const u32* words = nullptr;
  i64 batch = 0, head = 0, query_tile = 0;
  int last_query = 0, last_key = 0;

  const u32* row(i64 b, int h, int query) const {
    return words + b * batch + h * head + (query < last_query ? query : last_query) * query_tile;
  }
  u32 at(const u32* row, int key) const {
    if (key > last_key) key = last_key;
    return row[key / 16] >> 2 * (key % 16) & 3u;
  }
};

// What forward and backward are both told.
struct ProblemView {
  RowsView q, k, v;
  GridView bias, mask;
  Lengths readable{kUnbounded, kUnbounded};  // extents of bias and mask
  NumbersView slopes, sinks;
  MaskClassesView mask_classes;
  SequencesView sequences;
  int heads_q = 0, heads_k = 0, group = 1;
  int dim = 0, dim_v = 0;
  int query_tiles = 0;  // per head: of one sequence, or of all packed ones together
  Variant variant;
  const u64* seed = nullptr;  // of dropout, on the device; else it is in the variant

  // A score is q.k times scale_sign (1, -1 or 0), scale_power and score_factor, which is positive,
  // and 1 where the scale is 0: comparing scores and hiding them then needs no case. scale_power is
  // 1, or for a scale that is hardly in float32 a power of two that is taken before the product:
  // forward multiplies q by it and by the sign, backward k.
  float scale_sign = 1;
  float scale_power = 1;
  float score_factor = 0;
  float score_factor_log2 = 0;  // the same times log2(e)
};

// Tiles that one head needs: of one sequence, or of all packed ones and the rows beyond them.
static inline i64 tiles_per_head(i64 total_rows, i64 tile_rows, bool packed, i64 batch) {
  if (packed) return total_rows / tile_rows + batch + 1;
  return (total_rows + tile_rows - 1) / tile_rows;
}

}  // namespace onefold::kernels
