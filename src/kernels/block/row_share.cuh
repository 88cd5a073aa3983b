// Two warps of a block that share rows: each has half of the keys of a tile and half of the columns
// of out, and tells the other its weights and what it knows of the rows.
//
// Invariant: what is given before tell() or meet() may be taken after hear() or meet(), and is given
// anew only after a barrier of the whole block. Weights go as operands, each lane its own. Barriers
// 1 to 3 of each pair lie behind each other from 1 on. Includes tile, ptx.
#pragma once

#include "kernels/ptx/memory.cuh"
#include "kernels/tile/operand.cuh"

namespace onefold::kernels {

template <Element kElement, int kRowTiles, int kSteps>
struct RowShare {
  using Op = tile::Operand<kElement>;
  static constexpr int kRows = 16 * kRowTiles;
  static constexpr int kWeightsBytes = kSteps * kRowTiles * 512;
  static constexpr int kBytes = kWeightsBytes + 4 * kRows + 16;  // of a warp
  u32 base;
  int group, part, lane;

  __forceinline__ u32 at(int of) const { return base + (2 * group + of) * kBytes; }
  __forceinline__ u32 weights_at(int of, int step, int m) const {
    return at(of) + 512 * (step * kRowTiles + m) + 16 * lane;
  }
  __forceinline__ u32 rows_at(int of) const { return at(of) + kWeightsBytes; }

  __forceinline__ void give_weights(int step, int m, const typename Op::A& a) const {
    ptx::st_shared_128(weights_at(part, step, m), make_uint4(a.x[0], a.x[1], a.x[2], a.x[3]));
  }
  __forceinline__ typename Op::A take_weights(int step, int m) const {
    const uint4 x = ptx::ld_shared_128(weights_at(1 - part, step, m));
    return {{x.x, x.y, x.z, x.w}};
  }
  // A number of every row, the same in the four lanes that have it.
  __forceinline__ void give_rows(const float (&x)[kRowTiles][2]) const {
    if (lane % 4 != 0) return;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      ptx::st_shared_64(rows_at(part) + 4 * (lane / 4 * 2 * kRowTiles + 2 * m),
                        __float_as_uint(x[m][0]), __float_as_uint(x[m][1]));
    }
  }
  __forceinline__ void take_rows(float (&x)[kRowTiles][2]) const {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      const float2 two =
          ptx::ld_shared_f32x2(rows_at(1 - part) + 4 * (lane / 4 * 2 * kRowTiles + 2 * m));
      x[m][0] = two.x, x[m][1] = two.y;
    }
  }
  __forceinline__ void give_word(u32 x) const {
    if (lane == 0) ptx::st_shared_32(rows_at(part) + 4 * kRows, x);
  }
  __forceinline__ u32 take_word() const { return ptx::ld_shared_32(rows_at(1 - part) + 4 * kRows); }

  __forceinline__ void tell() const { ptx::bar_arrive(1 + 3 * group + part, 64); }
  __forceinline__ void hear() const { ptx::bar_sync(1 + 3 * group + 1 - part, 64); }
  __forceinline__ void meet() const { ptx::bar_sync(3 + 3 * group, 64); }
};

}  // namespace onefold::kernels
