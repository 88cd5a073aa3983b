// From products q.k to what softmax sees: the variant applied to a warp's tile of accumulators. And
// where the rows of a head lie.
//
// Invariant: a score is modified by score() of variant.h and hidden by selection, so that nothing
// at a hidden position has an effect. kKeysInRows tells which way a tile lies: its rows are queries
// and its columns keys, or the other way round. Includes sequence.h, tile.
#pragma once

#include "kernels/block/sequence.h"
#include "kernels/tile/copy.cuh"
#include "kernels/tile/fragment.h"
#include "kernels/tile/operand.cuh"
#include "kernels/tile/registers.cuh"

namespace onefold::kernels {

// Rows from `row` on of one head, of which `count` exist and `most` are wanted. Packed tensors have
// no batch.
template <Element kElement>
__forceinline__ tile::GlobalRows rows_of(const ProblemView& p, const RowsView& view, i64 b, i64 row,
                                         int head, int count, int most, int num_columns) {
  const i64 batch = p.sequences.cu_q.bytes != 0 ? 0 : b;
  char* data = static_cast<char*>(view.data) +
               (batch * view.batch + row * view.row + head * view.head) * size_bytes(kElement);
  return {data, view.row, view.dim, count < most ? count : most, num_columns};
}

// The variant as compiled for kFeatures, for one head.
template <Features kFeatures>
struct Scores {
  const ProblemView& p;
  HeadAt at;
  Modifier<Mufu> modifier;
  Mufu slope;

  __forceinline__ Scores(const ProblemView& problem, const HeadAt& head)
      : p(problem), at(head), modifier{}, slope{0.0f} {
    modifier.capped = kFeatures.softcap;
    modifier.biased = kFeatures.bias != Element::kNone;
    modifier.sloped = kFeatures.slopes;
    if constexpr (kFeatures.softcap) {
      modifier.inverse_cap = {static_cast<float>(1.0 / p.variant.softcap)};
      modifier.cap = {static_cast<float>(p.variant.softcap)};
    }
    if constexpr (kFeatures.slopes) {
      // Packed rows beyond the last offset belong to no sequence.
      if (head.n.q > 0) slope = {p.slopes.data[head.b * p.slopes.batch + head.h * p.slopes.head]};
    }
  }

  // Scores are natural where something is added to them; else they are products q.k.
  static constexpr bool kNatural = !kFeatures.scale_only();
  // What takes them to base 2.
  static __forceinline__ float to_base_2(const ProblemView& p) {
    return kNatural ? static_cast<float>(kLog2E) : p.score_factor_log2;
  }

  // The bias, slope and distance of one position.
  __forceinline__ At<Mufu> load(i64 i, i64 j, float distance) const {
    At<Mufu> position{{0.0f}, slope, {distance}};
    if constexpr (kFeatures.bias != Element::kNone) {
      const i64 where =
          at.b * p.bias.batch + at.h * p.bias.head + i * p.bias.query + j * p.bias.key;
      position.bias = {tile::load_element<kFeatures.bias>(p.bias.data, where)};
    }
    return position;
  }
  __forceinline__ bool masked(i64 i, i64 j) const {
    const i64 where = at.b * p.mask.batch + at.h * p.mask.head + i * p.mask.query + j * p.mask.key;
    return static_cast<const unsigned char*>(p.mask.data)[where] == 0;
  }
  // By bias or mask; for places that look at few positions.
  __forceinline__ bool hidden(i64 i, i64 j) const {
    bool result = hides(load(i, j, 0.0f));
    if constexpr (kFeatures.mask) result |= masked(i, j);
    return result;
  }
  static __forceinline__ bool hides(const At<Mufu>& position) {
    return kFeatures.bias != Element::kNone && position.bias.x == kEmpty<float>;
  }
};

// Positions of a warp's tile: 16 kRowTiles rows from local position `row0`, 8 kBlocks columns from
// `column0`.
template <bool kKeysInRows, int kRowTiles, int kBlocks>
struct TilePositions {
  i64 row0, column0;
  Lengths n;

  // What depends on the lane is computed for each tile anew: kept, it would cost registers.
  int lane = ptx::opaque(tile::lane_idx());

  __forceinline__ i64 row(int m, int half) const { return row0 + 16 * m + 8 * half + lane / 4; }
  __forceinline__ int column(int block, int odd) const { return 8 * block + 2 * (lane % 4) + odd; }

  // body(m, block, idx, i, j, distance) for every number of this thread. i and j are pulled inside
  // the sequence and below `readable`, so that what is loaded there exists; distance is
  // |i + Sk - Sq - j|.
  template <class Body>
  __forceinline__ void for_each(Lengths readable, Body&& body) const {
    const Lengths most{readable.q < n.q ? readable.q : n.q, readable.k < n.k ? readable.k : n.k};
    const i64 num_rows = kKeysInRows ? most.k : most.q;
    const i64 num_columns = kKeysInRows ? most.q : most.k;
    const i64 last = num_columns - 1 - column0;
    const int last_column = last < 8 * kBlocks ? static_cast<int>(last) : 8 * kBlocks;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const i64 r = row(m, half), safe_row = r < num_rows ? r : num_rows - 1;
        const i64 along = kKeysInRows ? column0 + n.k - n.q - r : column0 - (r + n.k - n.q);
        const float offset = static_cast<float>(along);
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
          for (int odd = 0; odd < 2; ++odd) {
            const int c = column(block, odd);
            const i64 safe_column = column0 + (c < last_column ? c : last_column);
            body(m, block, 2 * half + odd, kKeysInRows ? safe_column : safe_row,
                 kKeysInRows ? safe_row : safe_column, ::fabsf(offset + static_cast<float>(c)));
          }
        }
        // Loads of the next row are not begun before: all at once would need too many registers.
        __syncwarp();
      }
    }
  }

  // body(m, block, idx, visible) by the band and the lengths.
  template <class Body>
  __forceinline__ void for_each_visible(const Variant& variant, Body&& body) const {
    const TileBand band =
        kKeysInRows ? query_band(variant, n, row0, column0) : key_band(variant, n, row0, column0);
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int r = 16 * m + 8 * half + lane / 4;
        const int first = max(band.first + r, 0), end = min(band.end + r, band.limit);
        // One comparison a number: an interval as an offset below a length.
        const int shift = 2 * (lane % 4) - first;
        u32 count = end > first ? static_cast<u32>(end - first) : 0u;
        if (kKeysInRows && row0 + r >= n.k) count = 0;
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
          for (int odd = 0; odd < 2; ++odd) {
            body(m, block, 2 * half + odd, static_cast<u32>(shift + 8 * block + odd) < count);
          }
        }
      }
    }
  }
};

// Dropout of a warp's tile: body(m, block, idx, kept). Lanes whose rows differ in the last bit
// share draws: the even one draws for even blocks, the odd one for odd blocks, and they trade
// halves.
template <bool kKeysInRows, int kRowTiles, int kBlocks, class Body>
__forceinline__ void for_each_kept(const TilePositions<kKeysInRows, kRowTiles, kBlocks>& tile,
                                   const HeadAt& at, u64 seed, u32 threshold, Body&& body) {
  const bool odd_row = tile.lane / 4 % 2 == 1;
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const i64 row = tile.row(m, half);
#pragma unroll
      for (int block = 0; block < kBlocks; block += 2) {
        const i64 column = tile.column0 + tile.column(block + odd_row, 0);
        const i64 i = kKeysInRows ? column : row, j = kKeysInRows ? row : column;
        const Philox drawn = philox(static_cast<u32>(i / 2), static_cast<u32>(j / 2),
                                    static_cast<u32>(at.h), static_cast<u32>(at.b), seed);
        // Words of a draw are 2 (i % 2) + j % 2: mine in column 0 and 1, and those of the other
        // row.
        constexpr int kStep = kKeysInRows ? 2 : 1, kRow = kKeysInRows ? 1 : 2;
        u32 mine[2], theirs[2];
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          const u32 of_even = drawn.word[odd * kStep], of_odd = drawn.word[kRow + odd * kStep];
          mine[odd] = odd_row ? of_odd : of_even;
          theirs[odd] = __shfl_xor_sync(0xffffffffu, odd_row ? of_even : of_odd, 4);
        }
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          const u32 even_block = odd_row ? theirs[odd] : mine[odd];
          const u32 odd_block = odd_row ? mine[odd] : theirs[odd];
          body(m, block, 2 * half + odd, even_block >= threshold);
          body(m, block + 1, 2 * half + odd, odd_block >= threshold);
        }
      }
    }
  }
}

}  // namespace onefold::kernels
