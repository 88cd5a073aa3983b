// A tensor in hostile memory: any strides, and bytes of 0xFF (a NaN of every float dtype) wherever
// no element lies.
//
// Invariant: the allocation ends where the view ends, so that the address sanitizer sees a step
// beyond. Includes core/dtype.h, random.h and the standard library.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "core/dtype.h"
#include "onefold/tensor.h"
#include "tests/algebra/random.h"

namespace onefold::test {

using Shape = std::vector<std::int64_t>;

enum class Layout {
  kPacked,  // row-major
  kRead,    // any order of axes, gaps, negative and zero strides
  kWrite,   // the same without zero strides
};

class Array {
 public:
  Array() = default;
  Array(DType dtype, const Shape& shape, Layout layout, Random& random) {
    tensor_.dtype = dtype;
    tensor_.rank = static_cast<int>(shape.size());
    std::vector<int> order(shape.size());  // from the innermost axis in memory outwards
    std::iota(order.rbegin(), order.rend(), 0);
    const bool hostile = layout != Layout::kPacked && random.chance(0.7);
    if (hostile && random.chance(0.3)) {
      for (std::size_t x = order.size(); x > 1; --x) {
        std::swap(order[x - 1],
                  order[static_cast<std::size_t>(random.integer(0, static_cast<int>(x) - 1))]);
      }
    }
    std::int64_t step = hostile && random.chance(0.2) ? random.integer(2, 3) : 1;
    std::int64_t low = 0, high = 0;
    for (const int axis : order) {
      const auto at = static_cast<std::size_t>(axis);
      const std::int64_t extent = shape[at];
      tensor_.shape[at] = extent;
      if (hostile && random.chance(0.3)) step += random.integer(1, 7);
      tensor_.stride[at] = step;
      if (hostile && layout == Layout::kRead && random.chance(0.1)) tensor_.stride[at] = 0;
      if (hostile && random.chance(0.15)) tensor_.stride[at] = -tensor_.stride[at];
      const std::int64_t reach = (std::max<std::int64_t>(extent, 1) - 1) * tensor_.stride[at];
      (reach < 0 ? low : high) += reach;
      step = std::max<std::int64_t>(step * std::max<std::int64_t>(extent, 1), 1);
    }
    const std::int64_t lead = hostile ? random.integer(0, 9) : 0;  // any alignment an element has
    bytes_ = static_cast<std::size_t>((lead + high - low + 1) * size_bytes(dtype));
    memory_.reset(new std::byte[bytes_]);
    std::memset(memory_.get(), 0xFF, bytes_);
    tensor_.data = memory_.get() + (lead - low) * size_bytes(dtype);
  }

  const Tensor& tensor() const { return tensor_; }
  std::int64_t elements() const { return tensor_.elements(); }

  // Calls body(n, offset) for every element, n counting in row-major order.
  template <class Body>
  void each(Body&& body) const {
    const std::int64_t count = elements();
    for (std::int64_t n = 0; n < count; ++n) body(n, offset(n));
  }
  std::int64_t offset(std::int64_t n) const {
    std::int64_t at = 0;
    for (int axis = tensor_.rank - 1; axis >= 0; --axis) {
      const auto a = static_cast<std::size_t>(axis);
      at += n % tensor_.shape[a] * tensor_.stride[a];
      n /= tensor_.shape[a];
    }
    return at;
  }

  double get(std::int64_t n) const { return load_number(tensor_.data, tensor_.dtype, offset(n)); }
  void set(std::int64_t n, double x) {
    const std::int64_t at = offset(n);
    switch (tensor_.dtype) {
      case DType::kBool:
        static_cast<std::uint8_t*>(tensor_.data)[at] = x != 0;
        return;
      case DType::kInt32:
        static_cast<std::int32_t*>(tensor_.data)[at] = static_cast<std::int32_t>(x);
        return;
      case DType::kInt64:
        static_cast<std::int64_t*>(tensor_.data)[at] = static_cast<std::int64_t>(x);
        return;
      default:
        store_number(tensor_.data, tensor_.dtype, at, x);
    }
  }
  template <class Draw>
  Array& fill(Draw&& draw) {
    each([&](std::int64_t n, std::int64_t) { set(n, draw()); });
    return *this;
  }

  // The elements' bits in row-major order.
  std::vector<std::byte> bits() const {
    const auto size = static_cast<std::size_t>(size_bytes(tensor_.dtype));
    std::vector<std::byte> result(static_cast<std::size_t>(elements()) * size);
    each([&](std::int64_t n, std::int64_t at) {
      std::memcpy(result.data() + static_cast<std::size_t>(n) * size, address(at), size);
    });
    return result;
  }
  // Whether every byte outside the view is still what it was at first.
  bool surroundings_untouched() const {
    std::vector<bool> inside(bytes_, false);
    each([&](std::int64_t, std::int64_t at) {
      const auto first = static_cast<std::size_t>(address(at) - memory_.get());
      for (int x = 0; x < size_bytes(tensor_.dtype); ++x) inside[first + x] = true;
    });
    for (std::size_t x = 0; x < bytes_; ++x) {
      if (!inside[x] && memory_[x] != std::byte{0xFF}) return false;
    }
    return true;
  }

 private:
  std::byte* address(std::int64_t offset) const {
    return static_cast<std::byte*>(tensor_.data) + offset * size_bytes(tensor_.dtype);
  }

  Tensor tensor_;
  std::unique_ptr<std::byte[]> memory_;
  std::size_t bytes_ = 0;
};

}  // namespace onefold::test
