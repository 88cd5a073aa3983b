// The sums of dQ of a tile of rows in global memory, and the turns in which blocks add to them.
//
// Invariant: they lie as the accumulators of the warps that own them do, warp by warp, block by
// block; a block has four neighbours a lane, or where there is no vector addition 32 neighbours a
// number. Includes backward_spec.h, product.cuh, ptx.
#pragma once

#include "kernels/backward_spec.h"
#include "kernels/ptx/memory.cuh"
#include "kernels/tile/product.cuh"

namespace onefold::kernels {

template <BackwardSpec kSpec>
struct DqSums {
  static constexpr bool kVectors = kSpec.arch >= 900;
  static constexpr int kRowTiles = kSpec.dq_rows() / 16, kBlocks = kSpec.dq_columns() / 8;
  static constexpr int kWarpNumbers = kSpec.dq_rows() * kSpec.dq_columns();
  static constexpr int kWarps = kSpec.warps_q() * kSpec.warps_d();  // that own some
  using Accumulators = float[kRowTiles][kBlocks][4];

  // `to`: the sums of this warp.
  static __forceinline__ void add(float* to, const Accumulators& dq, int lane) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        float* at = to + (m * kBlocks + block) * 128;
        if constexpr (kVectors) {
          ptx::red_add_f32x4(at + 4 * lane, dq[m][block]);
        } else {
#pragma unroll
          for (int idx = 0; idx < 4; ++idx) {
            ptx::red_add_f32(at + 32 * idx + lane, dq[m][block][idx]);
          }
        }
      }
    }
  }
  // `block`: its number in the tile.
  static __forceinline__ void load(const float* sums, int block, float (&x)[4], int lane) {
    if constexpr (kVectors) {
      const float4 four = *reinterpret_cast<const float4*>(sums + block * 128 + 4 * lane);
      x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
    } else {
      for (int number = 0; number < 4; ++number) {
        x[number] = sums[block * 128 + 32 * number + lane];
      }
    }
  }

  // By a warp: until so many blocks have had their turn.
  static __forceinline__ void await_turn(const u32* turn, i64 before, int lane) {
    if (lane == 0) {
      while (ptx::ld_acquire(turn) != static_cast<u32>(before)) {
      }
    }
    __syncwarp();
  }
};

}  // namespace onefold::kernels
