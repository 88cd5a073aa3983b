// Who a thread of a block is, and where its numbers go.
//
// Invariant: warp is the same register for all lanes of a warp, so that branches on it are known to
// be uniform. Kernels derive from Worker. Includes sequence.h and tile.
#pragma once

#include "kernels/block/sequence.h"
#include "kernels/tile/fragment.h"
#include "kernels/tile/operand.cuh"
#include "kernels/tile/reduce.cuh"

namespace onefold::kernels {

struct Worker {
  int thread = static_cast<int>(threadIdx.x);
  int warp = __shfl_sync(tile::kAllLanes, thread / 32, 0);
  int lane = thread % 32;

  // The number of this block in the order in which blocks begin; `word` is in shared memory.
  __forceinline__ u32 draw(u32* ticket, u32& word) const {
    if (thread == 0) word = atomicAdd(ticket, 1u);
    __syncthreads();
    const u32 drawn = word;
    __syncthreads();
    return drawn;
  }
};

// Multiplies a tile of rows, by kThreads threads.
template <class Tile, Element kElement, int kThreads>
__forceinline__ void multiply_tile(u32 base, int thread, float factor) {
  for (int idx = thread; idx < Tile::kBytes / 4; idx += kThreads) {
    const u32 x = ptx::ld_shared_32(base + 4 * idx);
    u32 y;
    if constexpr (kElement == Element::kFloat32) {
      y = __float_as_uint(__uint_as_float(x) * factor);
    } else {
      y = tile::pack_16<kElement>(tile::unpack_16<kElement>(x) * factor,
                                  tile::unpack_16<kElement>(x >> 16) * factor);
    }
    ptx::st_shared_32(base + 4 * idx, y);
  }
}

// Accumulators of a warp go to the rows of a tile that begin at `base`, each number as of(number).
template <class Tile, Element kElement, int kRowTiles, int kBlocks, class Of>
__forceinline__ void stage_rows(u32 base, int lane, const float (&x)[kRowTiles][kBlocks][4],
                                Of&& of) {
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        const u32 to = base + Tile::offset(16 * m + 8 * half + lane / 4,
                                           (8 * block + 2 * (lane % 4)) * size_bytes(kElement));
        const float low = of(x[m][block][2 * half]), high = of(x[m][block][2 * half + 1]);
        if constexpr (kElement == Element::kFloat32) {
          ptx::st_shared_64(to, __float_as_uint(low), __float_as_uint(high));
        } else {
          ptx::st_shared_32(to, tile::pack_16<kElement>(low, high));
        }
      }
    }
  }
  __syncwarp();
}

}  // namespace onefold::kernels
