// Operands of matrix products, and the product itself, for one element type each.
//
// Operand<e> reads fragments of A and B from shared tiles and multiplies. float16 and bfloat16 take
// one instruction of depth 16. float32 takes three tf32 instructions of depth 8: each number is
// split into a tf32 and the rest, and only rest times rest, 2^-24 of the product, is left out.
// Tensor cores truncate the sums that they add to: multiply() leaves that to them, add_product()
// adds with rounding where float32 would show the difference.
// The layouts are those of fragment.h. Includes ptx, registers.cuh, fragment.h, shared_tile.h.
#pragma once

#include "kernels/ptx/memory.cuh"
#include "kernels/ptx/mma.cuh"
#include "kernels/tile/fragment.h"
#include "kernels/tile/registers.cuh"
#include "kernels/tile/shared_tile.h"

namespace onefold::tile {

__forceinline__ int lane_idx() { return static_cast<int>(threadIdx.x) % kWarp; }

template <Element kElement>
struct Operand {  // 16-bit
  static constexpr int kBytes = 2;
  static constexpr int kDepth = 16;       // of one product
  static constexpr int kDepthBytes = 32;  // of it in a row
  static constexpr int kDepthBlocks = 2;  // accumulator blocks that make one operand's depth
  static constexpr int kUnroll = unrolled_depths(kElement);
  static constexpr bool kSumsApart = false;  // each tile's sums are its own until they are whole
  struct A {
    u32 x[4];
  };
  struct B {
    u32 x[2];
  };

  static __forceinline__ A load_a(u32 address) {
    A a;
    ptx::ldmatrix_x4(a.x, address);
    return a;
  }
  static __forceinline__ A load_a_trans(u32 address) {
    A a;
    ptx::ldmatrix_x4_trans(a.x, address);
    return a;
  }
  static __forceinline__ void load_b(u32 address, B (&b)[2]) {
    u32 x[4];
    ptx::ldmatrix_x4(x, address);
    b[0] = {{x[0], x[1]}};
    b[1] = {{x[2], x[3]}};
  }
  // `stride` is that of the tile, which only the 32-bit form needs.
  static __forceinline__ void load_b_trans(u32 address, int /*stride*/, B (&b)[2]) {
    u32 x[4];
    ptx::ldmatrix_x4_trans(x, address);
    b[0] = {{x[0], x[1]}};
    b[1] = {{x[2], x[3]}};
  }
  // Byte offsets of a lane's address from the first element of the operand.
  template <class Tile>
  static __forceinline__ u32 offset_b_trans(int lane) {
    return Tile::offset(b_trans_row(lane), b_trans_byte(lane));
  }

  // Accumulators of kDepthBlocks neighbouring blocks become A.
  static __forceinline__ A from_accumulators(const float (*c)[4]) {
    return {{pack_16<kElement>(c[0][0], c[0][1]), pack_16<kElement>(c[0][2], c[0][3]),
             pack_16<kElement>(c[1][0], c[1][1]), pack_16<kElement>(c[1][2], c[1][3])}};
  }

  static __forceinline__ void multiply(float (&d)[4], const A& a, const B& b) {
    if constexpr (kElement == Element::kFloat16) {
      ptx::mma_m16n8k16_f16(d, a.x, b.x);
    } else {
      ptx::mma_m16n8k16_bf16(d, a.x, b.x);
    }
  }
  static __forceinline__ void add_product(float (&d)[4], const A& a, const B& b) {
    multiply(d, a, b);
  }
};

template <>
struct Operand<Element::kFloat32> {
  static constexpr int kBytes = 4;
  static constexpr int kDepth = 8;
  static constexpr int kDepthBytes = 32;
  static constexpr int kDepthBlocks = 1;
  static constexpr int kUnroll = unrolled_depths(Element::kFloat32);
  static constexpr bool kSumsApart = true;
  struct A {
    u32 high[4], low[4];
  };
  struct B {
    u32 high[2], low[2];
  };

  // The nearest tf32 (halves away from zero) and what is left, exactly. Where the nearest one is an
  // infinity (the number is, or almost) or a NaN, the number itself stands alone: the rest would be
  // NaN.
  static __forceinline__ void split(u32 x, u32& high, u32& low) {
    const u32 nearest = (x + 0x1000u) & 0xffffe000u;
    const bool alone = (nearest & 0x7f800000u) == 0x7f800000u;
    const float rest = __uint_as_float(x) - __uint_as_float(nearest);
    low = alone ? 0u : __float_as_uint(rest);
    high = alone ? x : nearest;
  }

  static __forceinline__ A load_a(u32 address) {
    u32 x[4];
    ptx::ldmatrix_x4(x, address);
    A a;
    for (int idx = 0; idx < 4; ++idx) split(x[idx], a.high[idx], a.low[idx]);
    return a;
  }
  static __forceinline__ void load_b(u32 address, B (&b)[2]) {
    u32 x[4];
    ptx::ldmatrix_x4(x, address);
    for (int idx = 0; idx < 4; ++idx)
      split(x[idx], b[idx / 2].high[idx % 2], b[idx / 2].low[idx % 2]);
  }
  // Depths in pairs, as accumulators have them.
  static __forceinline__ void load_b_trans(u32 address, int stride, B (&b)[2]) {
    for (int block = 0; block < 2; ++block) {
      for (int half = 0; half < 2; ++half) {
        const u32 x = ptx::ld_shared_32(address + half * stride + block * kBlockColumns * kBytes);
        split(x, b[block].high[half], b[block].low[half]);
      }
    }
  }
  template <class Tile>
  static __forceinline__ u32 offset_b_trans(int lane) {
    return Tile::offset(paired_depth(lane, 0), kBytes * (lane / 4));
  }

  static __forceinline__ A from_accumulators(const float (*c)[4]) {
    A a;
    split(__float_as_uint(c[0][0]), a.high[0], a.low[0]);
    split(__float_as_uint(c[0][2]), a.high[1], a.low[1]);
    split(__float_as_uint(c[0][1]), a.high[2], a.low[2]);
    split(__float_as_uint(c[0][3]), a.high[3], a.low[3]);
    return a;
  }

  static __forceinline__ void multiply(float (&d)[4], const A& a, const B& b) {
    // The large part first: where it overflows, it alone says to which infinity.
    ptx::mma_m16n8k8_tf32(d, a.high, b.high);
    ptx::mma_m16n8k8_tf32(d, a.low, b.high);
    ptx::mma_m16n8k8_tf32(d, a.high, b.low);
  }
  static __forceinline__ void add_product(float (&d)[4], const A& a, const B& b) {
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    multiply(sum, a, b);
#pragma unroll
    for (int idx = 0; idx < 4; ++idx) d[idx] += sum[idx];
  }
};

}  // namespace onefold::tile
