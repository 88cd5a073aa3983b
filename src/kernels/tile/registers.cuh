// Numbers as the kernels keep them: a float whose exponential is the hardware's.
//
// Mufu makes the formulas of the algebra and of the variant, templates on the number, compile to
// one instruction for exp2 and for max. tanh and log2 are the accurate ones. Includes softmax.h and
// ptx/math.
#pragma once

#include "kernels/ptx/math.cuh"
#include "kernels/tile/element.h"
#include "onefold/algebra/softmax.h"

namespace onefold {

struct Mufu {
  float x;
};

__forceinline__ Mufu operator+(Mufu a, Mufu b) { return {a.x + b.x}; }
__forceinline__ Mufu operator-(Mufu a, Mufu b) { return {a.x - b.x}; }
__forceinline__ Mufu operator*(Mufu a, Mufu b) { return {a.x * b.x}; }

template <>
struct Arith<Mufu> {
  using Mask = bool;
  using Scalar = float;
  static __forceinline__ Mufu splat(float x) { return {x}; }
  static __forceinline__ Mufu exp2(Mufu a) { return {ptx::ex2_approx(a.x)}; }
  static __forceinline__ Mufu log2(Mufu a) { return {::log2f(a.x)}; }
  static __forceinline__ Mufu tanh(Mufu a) { return {::tanhf(a.x)}; }
  static __forceinline__ Mufu fma(Mufu a, Mufu b, Mufu c) { return {::fmaf(a.x, b.x, c.x)}; }
  static __forceinline__ Mufu abs(Mufu a) { return {::fabsf(a.x)}; }
  // A NaN on either side is dropped; it comes back as the weight of its score.
  static __forceinline__ Mufu max(Mufu a, Mufu b) { return {::fmaxf(a.x, b.x)}; }
  static __forceinline__ bool less(Mufu a, Mufu b) { return a.x < b.x; }
  static __forceinline__ bool equal(Mufu a, Mufu b) { return a.x == b.x; }
  static __forceinline__ Mufu select(bool mask, Mufu yes, Mufu no) { return mask ? yes : no; }
};

}  // namespace onefold

namespace onefold::tile {

// The number in the lower half of a register.
template <Element kElement>
__forceinline__ float unpack_16(u32 x) {
  if constexpr (kElement == Element::kFloat16) {
    return ptx::cvt_f32_f16(static_cast<unsigned short>(x));
  }
  return __uint_as_float(x << 16);
}

template <Element kElement>
__forceinline__ float load_element(const void* data, i64 index) {
  if constexpr (kElement == Element::kFloat32) return static_cast<const float*>(data)[index];
  if constexpr (kElement == Element::kFloat64) {
    return static_cast<float>(static_cast<const double*>(data)[index]);
  }
  return unpack_16<kElement>(u32{static_cast<const unsigned short*>(data)[index]});
}

// Two neighbours of a 16-bit row in one register.
template <Element kElement>
__forceinline__ u32 pack_16(float low, float high) {
  if constexpr (kElement == Element::kFloat16) return ptx::cvt_f16x2(low, high);
  return ptx::cvt_bf16x2(low, high);
}

template <Element kElement>
__forceinline__ void store_element(void* data, i64 index, float x) {
  if constexpr (kElement == Element::kFloat32) {
    static_cast<float*>(data)[index] = x;
  } else if constexpr (kElement == Element::kFloat64) {
    static_cast<double*>(data)[index] = x;
  } else {
    static_cast<unsigned short*>(data)[index] =
        static_cast<unsigned short>(pack_16<kElement>(x, 0.0f));
  }
}

}  // namespace onefold::tile
