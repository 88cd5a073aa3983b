// Tensors with memory of their own, for tests that see the public API alone.
//
// Invariant: memory between and around the elements holds NaN, and says so if it was written.
// Includes <onefold/...>, GoogleTest and the standard library.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <vector>

#include "onefold/attention.h"

namespace onefold::test {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr double kUnit = 0x1p-24;  // of float32

// float32 numbers, in row-major order whatever the strides.
class Numbers {
 public:
  using Shape = std::vector<std::int64_t>;

  Numbers() : Numbers({0}) {}
  // Strides in elements; packed when absent.
  explicit Numbers(const Shape& shape, std::vector<std::int64_t> strides = {}) {
    if (strides.empty()) {
      strides.resize(shape.size());
      std::int64_t step = 1;
      for (std::size_t axis = shape.size(); axis-- > 0; step *= shape[axis]) strides[axis] = step;
    }
    tensor_.rank = static_cast<int>(shape.size());
    std::int64_t low = 0, high = 0;
    for (std::size_t axis = 0; axis < shape.size(); ++axis) {
      tensor_.shape[axis] = shape[axis];
      tensor_.stride[axis] = strides[axis];
      const std::int64_t reach = std::max<std::int64_t>(shape[axis] - 1, 0) * strides[axis];
      (reach < 0 ? low : high) += reach;
    }
    memory_.assign(static_cast<std::size_t>(high - low + 1 + 2 * kMargin), std::nanf(""));
    tensor_.data = memory_.data() + kMargin - low;
  }
  static Numbers of(const Shape& shape, const std::vector<float>& values) {
    Numbers numbers(shape);
    EXPECT_EQ(static_cast<std::int64_t>(values.size()), numbers.size());
    for (std::int64_t n = 0; n < numbers.size(); ++n) {
      numbers.at(n) = values[static_cast<std::size_t>(n)];
    }
    return numbers;
  }
  Numbers(const Numbers&) = delete;
  Numbers& operator=(const Numbers&) = delete;
  Numbers(Numbers&&) = default;  // the memory stays where it is
  Numbers& operator=(Numbers&&) = default;

  const Tensor& tensor() const { return tensor_; }
  operator const Tensor&() const { return tensor_; }
  operator std::optional<Tensor>() const { return tensor_; }
  std::int64_t size() const { return tensor_.elements(); }

  float& at(std::int64_t n) { return static_cast<float*>(tensor_.data)[offset(n)]; }
  float at(std::int64_t n) const { return static_cast<float*>(tensor_.data)[offset(n)]; }
  // A wave that is different for every phase: numbers from -1 to 1 without structure.
  Numbers& wave(double phase) {
    for (std::int64_t n = 0; n < size(); ++n) {
      at(n) = static_cast<float>(std::sin(phase + 1.7 * static_cast<double>(n)));
    }
    return *this;
  }
  std::vector<float> values() const {
    std::vector<float> all(static_cast<std::size_t>(size()));
    for (std::int64_t n = 0; n < size(); ++n) all[static_cast<std::size_t>(n)] = at(n);
    return all;
  }
  // The same numbers with other strides.
  Numbers with_strides(const std::vector<std::int64_t>& strides) const {
    Numbers copy(Shape(tensor_.shape.begin(), tensor_.shape.begin() + tensor_.rank), strides);
    for (std::int64_t n = 0; n < size(); ++n) copy.at(n) = at(n);
    return copy;
  }
  bool surroundings_untouched() const {
    std::vector<float> outside = memory_;
    const std::ptrdiff_t first = static_cast<const float*>(tensor_.data) - memory_.data();
    for (std::int64_t n = 0; n < size(); ++n) {
      outside[static_cast<std::size_t>(first + offset(n))] = std::nanf("");
    }
    return std::all_of(outside.begin(), outside.end(), [](float x) { return std::isnan(x); });
  }

 private:
  static constexpr std::int64_t kMargin = 64;

  std::int64_t offset(std::int64_t n) const {
    std::int64_t to = 0;
    for (int axis = tensor_.rank - 1; axis >= 0; --axis) {
      to += n % tensor_.shape[static_cast<std::size_t>(axis)] *
            tensor_.stride[static_cast<std::size_t>(axis)];
      n /= tensor_.shape[static_cast<std::size_t>(axis)];
    }
    return to;
  }

  Tensor tensor_;
  std::vector<float> memory_;
};

inline void expect_same_bits(const Numbers& got, const Numbers& want) {
  const std::vector<float> x = got.values(), y = want.values();
  ASSERT_EQ(x.size(), y.size());
  EXPECT_TRUE(x.empty() || std::memcmp(x.data(), y.data(), x.size() * sizeof(float)) == 0);
}
inline void expect_near(const Numbers& got, const std::vector<double>& want, double tolerance) {
  ASSERT_EQ(got.size(), static_cast<std::int64_t>(want.size()));
  for (std::int64_t n = 0; n < got.size(); ++n) {
    EXPECT_NEAR(got.at(n), want[static_cast<std::size_t>(n)], tolerance) << "element " << n;
  }
}

// A question with everything around it: (B, Sq, Hq, D) and (B, Sk, Hk, D), values of D too.
struct Call {
  Numbers q, k, v, out, lse, dout, dlse, dq, dk, dv;
  Attention a;

  Call(std::int64_t batch, std::int64_t queries, std::int64_t keys, std::int64_t heads,
       std::int64_t kv_heads, std::int64_t dim)
      : q({batch, queries, heads, dim}),
        k({batch, keys, kv_heads, dim}),
        v({batch, keys, kv_heads, dim}),
        out({batch, queries, heads, dim}),
        lse({batch, heads, queries}),
        dout({batch, queries, heads, dim}),
        dlse({batch, heads, queries}),
        dq({batch, queries, heads, dim}),
        dk({batch, keys, kv_heads, dim}),
        dv({batch, keys, kv_heads, dim}) {
    q.wave(1), k.wave(2), v.wave(3), dout.wave(4), dlse.wave(5);
    point();
  }
  // To be called again when q, k or v was replaced.
  void point() { a.q = q, a.k = k, a.v = v; }

  Gradients gradients() const { return {dq, dk, dv, {}, {}, {}}; }
  void run(const Context& context = {}) {
    forward(context, a, out, lse);
    backward(context, a, out, lse, dout, dlse, gradients());
  }
};
inline void expect_same_bits(const Call& got, const Call& want) {
  expect_same_bits(got.out, want.out);
  expect_same_bits(got.lse, want.lse);
  expect_same_bits(got.dq, want.dq);
  expect_same_bits(got.dk, want.dk);
  expect_same_bits(got.dv, want.dv);
}

}  // namespace onefold::test
