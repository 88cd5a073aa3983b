// Arithmetic instructions that C++ does not name. One instruction, one function.
//
// Includes scalar.h only.
#pragma once

#include "onefold/algebra/scalar.h"

namespace onefold::ptx {

// 2^x within 2 ulp; subnormal results are 0.
__forceinline__ float ex2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x within 1 ulp, for normal x.
__forceinline__ float rcp_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The smaller; NaN when either is.
__forceinline__ float min_nan(float x, float y) {
  float z;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}

// The same number, but nothing is known about it any more: what depends on it is computed where it
// is used and not kept in registers from before a loop.
__forceinline__ int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// blockIdx.x, read anew: what depends on it is not kept in registers either.
__forceinline__ u32 block_idx() {
  u32 x;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(x));
  return x;
}

// Two floats rounded to nearest even into one register, `low` in the lower half.
__forceinline__ u32 cvt_bf16x2(float low, float high) {
  u32 x;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
  return x;
}
__forceinline__ u32 cvt_f16x2(float low, float high) {
  u32 x;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
  return x;
}
__forceinline__ float cvt_f32_f16(unsigned short x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
}

}  // namespace onefold::ptx
