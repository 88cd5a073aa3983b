// One element of any dtype, read or written as a number.
//
// Invariant: 16-bit floats are rounded to nearest even, once. These scalar routines serve options,
// index arrays and edges; inner loops have vector forms in cpu/isa/simd.h. Includes tensor.h only.
#pragma once

#include <bit>
#include <cstdint>

#include "onefold/tensor.h"

namespace onefold {

static inline float bfloat16_to_float(std::uint16_t bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

static inline std::uint16_t float_to_bfloat16(float x) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
  if (x != x) return static_cast<std::uint16_t>((bits >> 16) | 0x40u);  // keep it a quiet NaN
  return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

static inline float float16_to_float(std::uint16_t bits) {
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000u) << 16;
  const std::uint32_t rest = bits & 0x7fffu;
  if (rest >= 0x7c00u) return std::bit_cast<float>(sign | 0x7f800000u | ((rest & 0x3ffu) << 13));
  if (rest >= 0x400u) return std::bit_cast<float>(sign | ((rest << 13) + 0x38000000u));
  // Subnormal: the integer `rest` counts units of 2^-24.
  const float magnitude = static_cast<float>(rest) * 5.9604644775390625e-8f;
  return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(magnitude));
}

static inline std::uint16_t float_to_float16(float x) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t rest = bits & 0x7fffffffu;
  if (rest > 0x7f800000u) return static_cast<std::uint16_t>(sign | 0x7e00u);
  if (rest >= 0x477ff000u) return static_cast<std::uint16_t>(sign | 0x7c00u);  // rounds to infinity
  if (rest < 0x38800000u) {  // subnormal result: adding 1/2 puts the rounding point at 2^-24
    const float shifted = std::bit_cast<float>(rest) + 0.5f;
    return static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(shifted) - 0x3f000000u));
  }
  const std::uint32_t rounded = rest - 0x38000000u + 0xfffu + ((rest >> 13) & 1u);
  return static_cast<std::uint16_t>(sign | (rounded >> 13));
}

static inline double load_number(const void* data, DType dtype, std::int64_t index) {
  switch (dtype) {
    case DType::kFloat64:
      return static_cast<const double*>(data)[index];
    case DType::kFloat32:
      return static_cast<const float*>(data)[index];
    case DType::kFloat16:
      return float16_to_float(static_cast<const std::uint16_t*>(data)[index]);
    case DType::kBFloat16:
      return bfloat16_to_float(static_cast<const std::uint16_t*>(data)[index]);
    case DType::kBool:
      return static_cast<const std::uint8_t*>(data)[index] != 0;
    case DType::kInt32:
      return static_cast<const std::int32_t*>(data)[index];
    case DType::kInt64:
      return static_cast<double>(static_cast<const std::int64_t*>(data)[index]);
  }
  return 0;
}

static inline std::int64_t load_integer(const void* data, DType dtype, std::int64_t index) {
  return dtype == DType::kInt32 ? static_cast<const std::int32_t*>(data)[index]
                                : static_cast<const std::int64_t*>(data)[index];
}

// float64 keeps x; every other float dtype rounds it through float32, where the kernels compute.
static inline void store_number(void* data, DType dtype, std::int64_t index, double x) {
  switch (dtype) {
    case DType::kFloat64:
      static_cast<double*>(data)[index] = x;
      return;
    case DType::kFloat32:
      static_cast<float*>(data)[index] = static_cast<float>(x);
      return;
    case DType::kFloat16:
      static_cast<std::uint16_t*>(data)[index] = float_to_float16(static_cast<float>(x));
      return;
    case DType::kBFloat16:
      static_cast<std::uint16_t*>(data)[index] = float_to_bfloat16(static_cast<float>(x));
      return;
    default:
      return;
  }
}

constexpr bool is_float(DType dtype) {
  return dtype == DType::kFloat64 || dtype == DType::kFloat32 || dtype == DType::kFloat16 ||
         dtype == DType::kBFloat16;
}
constexpr bool is_index(DType dtype) { return dtype == DType::kInt32 || dtype == DType::kInt64; }

}  // namespace onefold
