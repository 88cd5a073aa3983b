// A tensor as every front end hands it over: a pointer, a dtype, a shape, strides and a device.
//
// Invariant: a Tensor borrows its memory and owns nothing. Strides count elements, may be 0 or
// negative, and are 64-bit, as is every product with them. Includes error.h and the standard
// library.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>

#include "onefold/error.h"

namespace onefold {

enum class DType : std::uint8_t {
  kFloat64,
  kFloat32,
  kFloat16,
  kBFloat16,
  kBool,  // one byte, zero is false
  kInt32,
  kInt64,
};

constexpr int size_bytes(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
    case DType::kInt64:
      return 8;
    case DType::kFloat32:
    case DType::kInt32:
      return 4;
    case DType::kFloat16:
    case DType::kBFloat16:
      return 2;
    case DType::kBool:
      return 1;
  }
  return 0;
}

constexpr const char* name(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return "float64";
    case DType::kFloat32:
      return "float32";
    case DType::kFloat16:
      return "float16";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kBool:
      return "bool";
    case DType::kInt32:
      return "int32";
    case DType::kInt64:
      return "int64";
  }
  return "?";
}

enum class DeviceType : std::uint8_t { kCpu, kCuda };

struct Device {
  DeviceType type = DeviceType::kCpu;
  int index = 0;
  bool operator==(const Device&) const = default;
};

inline constexpr int kMaxRank = 4;

struct Tensor {
  void* data = nullptr;  // may be null only when the tensor has no elements
  DType dtype = DType::kFloat32;
  int rank = 0;
  std::array<std::int64_t, kMaxRank> shape{};   // the first `rank` entries count
  std::array<std::int64_t, kMaxRank> stride{};  // in elements
  Device device{};

  std::int64_t elements() const {
    std::int64_t count = 1;
    for (int axis = 0; axis < rank; ++axis) {
      if (shape[axis] == 0) return 0;
    }
    for (int axis = 0; axis < rank; ++axis) count *= shape[axis];
    return count;
  }

  // A row-major tensor over `data`, of at most kMaxRank axes.
  static Tensor packed(void* data, DType dtype, std::initializer_list<std::int64_t> shape) {
    if (shape.size() > kMaxRank) {
      invalid("a tensor has ", shape.size(), " axes: at most ", kMaxRank, " work");
    }
    Tensor t;
    t.data = data;
    t.dtype = dtype;
    t.rank = static_cast<int>(shape.size());
    int axis = 0;
    for (const std::int64_t extent : shape) t.shape[axis++] = extent;
    std::int64_t step = 1;
    for (axis = t.rank - 1; axis >= 0; --axis) {
      t.stride[axis] = step;
      if (__builtin_mul_overflow(step, t.shape[axis], &step)) {
        invalid("a packed tensor has 2^63 elements or more from axis ", axis, " on: fewer work");
      }
    }
    return t;
  }
};

}  // namespace onefold
