// Weights from the first warp of a pair to the second, through shared memory: each lane its own
// numbers, 16 bytes at a time, in float16 or float32.
//
// Invariant: barrier 1 + pair lies between give() and for_each(); the first warp arrives and goes
// on, the second waits. The next give() comes after the block's barrier. Includes tile, ptx.
#pragma once

#include "kernels/ptx/memory.cuh"
#include "kernels/tile/operand.cuh"

namespace onefold::kernels {

template <Element kElement, int kRowTiles, int kBlocks>
struct HandOver {
  static constexpr int kChunkBlocks = kElement == Element::kFloat32 ? 1 : 2;
  u32 base;  // of the exchange
  int pair, lane;

  __forceinline__ u32 at(int m, int block) const {
    return base + 16 * (((pair * kRowTiles + m) * kBlocks + block) / kChunkBlocks * 32 + lane);
  }
  __forceinline__ void give(const float (&x)[kRowTiles][kBlocks][4]) const {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int block = 0; block < kBlocks; block += kChunkBlocks) {
        uint4 words;
        if constexpr (kElement == Element::kFloat32) {
          words = make_uint4(__float_as_uint(x[m][block][0]), __float_as_uint(x[m][block][1]),
                             __float_as_uint(x[m][block][2]), __float_as_uint(x[m][block][3]));
        } else {
          words = make_uint4(ptx::cvt_f16x2(x[m][block][0], x[m][block][1]),
                             ptx::cvt_f16x2(x[m][block][2], x[m][block][3]),
                             ptx::cvt_f16x2(x[m][block + 1][0], x[m][block + 1][1]),
                             ptx::cvt_f16x2(x[m][block + 1][2], x[m][block + 1][3]));
        }
        ptx::st_shared_128(at(m, block), words);
      }
    }
    ptx::bar_arrive(1 + pair, 64);
  }
  // The same as operand A of the product along the columns, for another warp than the second.
  __forceinline__ typename tile::Operand<kElement>::A operand(int m, int block) const {
    const uint4 words = ptx::ld_shared_128(at(m, block));
    if constexpr (kElement == Element::kFloat16) return {{words.x, words.y, words.z, words.w}};
    const u32 word[4] = {words.x, words.y, words.z, words.w};
    typename tile::Operand<kElement>::A a;
#pragma unroll
    for (int idx = 0; idx < 4; ++idx) {
      a.x[idx] = tile::pack_16<kElement>(tile::unpack_16<Element::kFloat16>(word[idx]),
                                         tile::unpack_16<Element::kFloat16>(word[idx] >> 16));
    }
    return a;
  }
  __forceinline__ void wait() const { ptx::bar_sync(1 + pair, 64); }
  // body(m, block, weights of that block)
  template <class Body>
  __forceinline__ void for_each(Body&& body) const {
#pragma unroll
    for (int block = 0; block < kBlocks; block += kChunkBlocks) {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        const uint4 words = ptx::ld_shared_128(at(m, block));
        const u32 word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (int chunk = 0; chunk < kChunkBlocks; ++chunk) {
          float x[4];
#pragma unroll
          for (int idx = 0; idx < 4; ++idx) {
            if constexpr (kElement == Element::kFloat32) {
              x[idx] = __uint_as_float(word[idx]);
            } else {
              x[idx] =
                  tile::unpack_16<Element::kFloat16>(word[2 * chunk + idx / 2] >> 16 * (idx % 2));
            }
          }
          body(m, block + chunk, x);
        }
      }
    }
  }
};

}  // namespace onefold::kernels
