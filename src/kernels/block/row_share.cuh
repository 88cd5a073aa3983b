// Rows that two warps share: each computes the scores of half the keys of a tile and has half the
// columns of O, so that K and V are read from shared memory for twice the rows. What one makes of
// its scores the other needs too: weights go through shared memory as operands, each lane its own
// 16 bytes, and rarely the maxima of rows.
//
// Invariant: barrier 1 + warp tells that the weights of that warp are there, barrier 9 + pair that
// both warps are. Between two uses of the same memory lies the block's barrier. Includes tile, ptx.
#pragma once

#include "kernels/forward_spec.h"
#include "kernels/tile/product.cuh"
#include "kernels/tile/reduce.cuh"

namespace onefold::kernels {

// In shared memory, where rows are shared.
template <ForwardSpec kSpec, bool kShared = (kSpec.sharing > 1)>
struct RowExchange {};
template <ForwardSpec kSpec>
struct RowExchange<kSpec, true> {
  static constexpr int kFragments = kSpec.tile_k / 32 * kSpec.pair_rows() / 16;
  alignas(16) unsigned char weights[kSpec.warps * kFragments * 32 * 16];
  float of_rows[kSpec.warps * kSpec.pair_rows()];
};

template <ForwardSpec kSpec>
struct RowShare {
  using Op = tile::Operand<kSpec.element>;
  static constexpr int kRows = kSpec.pair_rows(), kRowTiles = kRows / 16;
  static constexpr int kKeys = kSpec.tile_k / 2, kSteps = kKeys / 16;
  using OfRows = float[kRowTiles][2];  // of a thread
  u32 weights, of_rows;
  int warp, lane;

  __forceinline__ RowShare(RowExchange<kSpec>& exchange, int this_warp, int this_lane)
      : weights(ptx::shared_address(&exchange.weights)),
        of_rows(ptx::shared_address(&exchange.of_rows)),
        warp(this_warp),
        lane(this_lane) {}

  __forceinline__ void meet() const { ptx::bar_sync(9 + warp / 2, 64); }

  // Numbers of rows, the same in the four lanes of a row: both warps receive operation(x, y).
  template <class Operation>
  __forceinline__ void reduce(OfRows& x, Operation operation) const {
    for_rows([&](int m, int half, u32 row) {
      if (lane % 4 == 0) ptx::st_shared_32(row_at(warp, row), __float_as_uint(x[m][half]));
    });
    meet();
    for_rows([&](int m, int half, u32 row) {
      const float other = __uint_as_float(ptx::ld_shared_32(row_at(warp ^ 1, row)));
      x[m][half] = operation(x[m][half], other);
    });
  }

  // Bits about rows, the same in the four lanes of a row: both warps receive what either has.
  __forceinline__ u32 of_both(u32 bits) const {
    const u32 row = lane / 4;
    if (lane % 4 == 0) ptx::st_shared_32(row_at(warp, row), bits);
    meet();
    return bits | ptx::ld_shared_32(row_at(warp ^ 1, row));
  }

  // D += W V for the keys of this warp and then for those of the other. v_at: where this lane reads
  // the first key of the tile, in the columns of this warp.
  template <class VTile, int kBlocks, int kOutBlocks>
  __forceinline__ void absorb(float (&d)[kRowTiles][kOutBlocks][4],
                              const float (&w)[kRowTiles][kBlocks][4], u32 v_at) const {
    static_assert(kBlocks == 2 * kSteps);
    typename Op::A a[kSteps][kRowTiles];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        const typename Op::A& mine = a[step][m] = Op::from_accumulators(&w[m][2 * step]);
        ptx::st_shared_128(weights_at(warp, step, m),
                           make_uint4(mine.x[0], mine.x[1], mine.x[2], mine.x[3]));
      }
    }
    ptx::bar_arrive(1 + warp, 64);
    const int first = warp % 2 * kKeys;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      tile::multiply_depth<Op, VTile>(d, a[step], v_at + VTile::offset(first + 16 * step, 0));
    }
    ptx::bar_sync(1 + (warp ^ 1), 64);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      typename Op::A other[kRowTiles];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        const uint4 words = ptx::ld_shared_128(weights_at(warp ^ 1, step, m));
        other[m] = {{words.x, words.y, words.z, words.w}};
      }
      tile::multiply_depth<Op, VTile>(d, other, v_at + VTile::offset(kKeys - first + 16 * step, 0));
    }
  }

 private:
  __forceinline__ u32 weights_at(int of, int step, int m) const {
    return weights + 16 * (((of * kSteps + step) * kRowTiles + m) * 32 + lane);
  }
  __forceinline__ u32 row_at(int of, u32 row) const { return of_rows + 4 * (of * kRows + row); }
  template <class Body>
  __forceinline__ void for_rows(Body&& body) const {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) body(m, half, 16 * m + 8 * half + lane / 4);
    }
  }
};

}  // namespace onefold::kernels
