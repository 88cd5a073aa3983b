// Products of whole tiles by one warp, from shared memory and from registers.
//
// Accumulators are numbers [row tile][block][4] in the layout of fragment.h. Addresses are those of
// the lane (lane_address). Includes operand.cuh.
#pragma once

#include "kernels/tile/operand.cuh"

namespace onefold::tile {

template <int kRowTiles, int kBlocks>
__forceinline__ void clear(float (&d)[kRowTiles][kBlocks][4]) {
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
      for (int idx = 0; idx < 4; ++idx) d[m][n][idx] = 0.0f;
    }
  }
}

// Where a lane reads A, B and transposed B of a tile at `address`.
template <class Tile>
__forceinline__ u32 a_address(u32 address, int first_row) {
  const int lane = lane_idx();
  return address + Tile::offset(first_row + a_row(lane), a_byte(lane));
}
template <class Tile>
__forceinline__ u32 b_address(u32 address) {
  const int lane = lane_idx();
  return address + Tile::offset(b_row(lane), b_byte(lane));
}
template <class Op, class Tile>
__forceinline__ u32 b_trans_address(u32 address) {
  return address + Op::template offset_b_trans<Tile>(lane_idx());
}

// D += A B^T: rows of A against rows of B, along all of their bytes.
template <class Op, class TileA, class TileB, int kRowTiles, int kBlocks>
__forceinline__ void multiply_rows(float (&d)[kRowTiles][kBlocks][4], u32 a_at, u32 b_at) {
  static_assert(TileA::kRowBytes == TileB::kRowBytes && kBlocks % 2 == 0);
#pragma unroll Op::kUnroll
  for (int byte = 0; byte < TileA::kRowBytes; byte += Op::kDepthBytes) {
    typename Op::A a[kRowTiles];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      a[m] = Op::load_a(TileA::move(a_at, kBlockRows * m, byte));
    }
#pragma unroll
    for (int n = 0; n < kBlocks; n += 2) {
      typename Op::B b[2];
      Op::load_b(TileB::move(b_at, kBlockColumns * n, byte), b);
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        Op::add_product(d[m][n], a[m], b[0]);
        Op::add_product(d[m][n + 1], a[m], b[1]);
      }
    }
  }
}

// The same with A in registers.
template <class Op, class TileB, int kRowTiles, int kBlocks, int kSteps>
__forceinline__ void multiply_rows(float (&d)[kRowTiles][kBlocks][4],
                                   const typename Op::A (&a)[kRowTiles][kSteps], u32 b_at) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int n = 0; n < kBlocks; n += 2) {
      typename Op::B b[2];
      Op::load_b(TileB::move(b_at, kBlockColumns * n, step * Op::kDepthBytes), b);
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        Op::add_product(d[m][n], a[m][step], b[0]);
        Op::add_product(d[m][n + 1], a[m][step], b[1]);
      }
    }
  }
}

// D += A B for one depth of A, B in a tile as it is.
template <class Op, class TileB, int kRowTiles, int kBlocks>
__forceinline__ void multiply_depth(float (&d)[kRowTiles][kBlocks][4],
                                    const typename Op::A (&a)[kRowTiles], u32 b_at) {
  static_assert(kBlocks % 2 == 0);
#pragma unroll
  for (int n = 0; n < kBlocks; n += 2) {
    typename Op::B b[2];
    Op::load_b_trans(TileB::move(b_at, 0, kBlockColumns * n * Op::kBytes), TileB::kStride, b);
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      Op::multiply(d[m][n], a[m], b[0]);
      Op::multiply(d[m][n + 1], a[m], b[1]);
    }
  }
}

// D += W B: accumulators W (columns are the depth) against a tile that holds B as it is.
// prepare(block) is called for every block of W just before its turn.
template <class Op, class TileB, int kRowTiles, int kDepthBlocks, int kBlocks, class Prepare>
__forceinline__ void multiply_weights(float (&d)[kRowTiles][kBlocks][4],
                                      const float (&w)[kRowTiles][kDepthBlocks][4], u32 b_at,
                                      Prepare&& prepare) {
  constexpr int kSteps = kDepthBlocks / Op::kDepthBlocks;
  typename Op::A a[kSteps][kRowTiles];
  const auto operand = [&](int step) {
#pragma unroll
    for (int block = 0; block < Op::kDepthBlocks; ++block) prepare(step * Op::kDepthBlocks + block);
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      a[step][m] = Op::from_accumulators(&w[m][step * Op::kDepthBlocks]);
    }
  };
  const auto b_of = [&](int step, int n) {
    return TileB::move(b_at, kBlockColumns * Op::kDepthBlocks * step,
                       kBlockColumns * n * Op::kBytes);
  };
  if constexpr (Op::kSumsApart) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) operand(step);
#pragma unroll
    for (int n = 0; n < kBlocks; n += 2) {
      float sum[kRowTiles][2][4];
      clear(sum);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        multiply_depth<Op, TileB>(sum, a[step], b_of(step, n));
      }
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int idx = 0; idx < 8; ++idx) d[m][n + idx / 4][idx % 4] += sum[m][idx / 4][idx % 4];
      }
    }
  } else {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      operand(step);
      multiply_depth<Op, TileB>(d, a[step], b_of(step, 0));
    }
  }
}

}  // namespace onefold::tile
