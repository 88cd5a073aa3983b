// Accumulators whose rows are the depth of the next product: stored to shared memory by the warps
// that own the rows, read as operand A by warps that own columns.
//
// 16-bit numbers lie as the accumulators do and are transposed by the matrix load. 32-bit ones,
// which it cannot transpose, are stored transposed, depths in the pairs that load_b_trans wants
// (fragment.h). Includes product.cuh.
#pragma once

#include "kernels/tile/product.cuh"

namespace onefold::tile {

template <Element kElement, int kDepth, int kColumns>
struct TransposedTile {
  using Op = Operand<kElement>;
  using Tile = SharedTile<kDepth, kColumns * Op::kBytes>;
  Tile tile;

  // Two neighbours of a row, `column` even.
  static __forceinline__ void store(u32 base, int depth, int column, float x, float y) {
    ptx::st_shared_32(base + Tile::offset(depth, column * Op::kBytes), pack_16<kElement>(x, y));
  }
  // Where a lane reads A whose rows are columns from `column` on.
  static __forceinline__ u32 address(u32 base, int column) {
    const int lane = lane_idx();
    return base + Tile::offset(a_trans_row(lane), a_trans_byte(lane) + column * Op::kBytes);
  }
  static __forceinline__ typename Op::A load(u32 address, int row, int depth) {
    return Op::load_a_trans(address + Tile::offset(depth, row * Op::kBytes));
  }
};

template <int kDepth, int kColumns>
struct TransposedTile<Element::kFloat32, kDepth, kColumns> {
  using Op = Operand<Element::kFloat32>;
  using Tile = SharedTile<kColumns, kDepth * Op::kBytes>;
  Tile tile;

  static __forceinline__ void store(u32 base, int depth, int column, float x, float y) {
    const int place = depth / 8 * 8 + place_of_depth(depth % 8);
    ptx::st_shared_32(base + Tile::offset(column, place * Op::kBytes), __float_as_uint(x));
    ptx::st_shared_32(base + Tile::offset(column + 1, place * Op::kBytes), __float_as_uint(y));
  }
  static __forceinline__ u32 address(u32 base, int column) { return a_address<Tile>(base, column); }
  static __forceinline__ Op::A load(u32 address, int row, int depth) {
    return Op::load_a(address + Tile::offset(row, depth * Op::kBytes));
  }
};

// Accumulators of a warp, whose rows are depths from `depth` on, into a transposed tile.
template <class Transposed, int kRowTiles, int kBlocks>
__forceinline__ void store_transposed(u32 base, const float (&x)[kRowTiles][kBlocks][4], int depth,
                                      int column) {
  const int lane = lane_idx();
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = depth + 16 * m + 8 * half + lane / 4;
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        Transposed::store(base, row, column + 8 * block + 2 * (lane % 4), x[m][block][2 * half],
                          x[m][block][2 * half + 1]);
      }
    }
  }
}

// D += A B with A in a transposed tile and B as it is; kBlocks is even.
template <class Transposed, class TileB, int kDepth, int kRowTiles, int kBlocks>
__forceinline__ void multiply_transposed(float (&d)[kRowTiles][kBlocks][4], u32 a_at, u32 b_at) {
  using Op = typename Transposed::Op;
#pragma unroll Op::kUnroll
  for (int depth = 0; depth < kDepth; depth += Op::kDepth) {
    typename Op::A a[kRowTiles];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) a[m] = Transposed::load(a_at, kBlockRows * m, depth);
    multiply_depth<Op, TileB>(d, a, b_at + TileB::offset(depth, 0));
  }
}

}  // namespace onefold::tile
