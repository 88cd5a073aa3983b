// The fixture of tests that call one instruction set's vector operations, ONEFOLD_BACKEND's.
//
// Includes operations.h, backend.h and GoogleTest.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "tests/cpu/backend.h"
#include "tests/cpu/isa/operations.h"

namespace onefold::test {

class Vectors : public Backend {
 protected:
  void SetUp() override {
    Backend::SetUp();
    if (IsSkipped()) return;
    isa_ = cpu::instruction_set();
    const Operations& (*find)() = isa_ == "avx512_bf16" ? &avx512_bf16::operations
                                  : isa_ == "avx512"    ? &avx512::operations
                                  : isa_ == "avx2"      ? &avx2::operations
                                                        : &baseline::operations;
    ASSERT_NE(find, nullptr) << "no operations of " << isa_;
    operations_ = &find();
  }

  const Operations& operations() const { return *operations_; }
  template <class R>
  const VectorOperations<R>& of() const {
    if constexpr (sizeof(R) == 4) {
      return operations_->of_float;
    } else {
      return operations_->of_double;
    }
  }
  const std::string& isa() const { return isa_; }
  bool fused() const { return isa_ != "baseline"; }  // whether fma rounds once

 private:
  const Operations* operations_ = nullptr;
  std::string isa_;
};

// The same number: bit for bit, or both NaN.
template <class R>
bool same(R x, R y) {
  return std::memcmp(&x, &y, sizeof x) == 0 || (std::isnan(x) && std::isnan(y));
}

// Numbers at which operations tend to go wrong.
template <class R>
std::vector<R> odd_numbers() {
  using Limits = std::numeric_limits<R>;
  std::vector<R> x = {R(0), R(0.5), R(1), R(1.5), R(2.5), R(1) / 3, R(126), R(127), R(1e30)};
  for (const R y : {Limits::min(), Limits::denorm_min(), Limits::max(), Limits::epsilon(),
                    Limits::infinity(), Limits::quiet_NaN(), R(1) / Limits::epsilon()}) {
    x.push_back(y);
  }
  const std::size_t positive = x.size();
  for (std::size_t n = 0; n < positive; ++n) x.push_back(-x[n]);
  return x;
}

// Calls operation(x, y) on whole vectors of x, the last filled up with its last number.
template <class R, class Operation>
std::vector<R> mapped(int width, std::vector<R> x, Operation&& operation) {
  const std::size_t count = x.size(), w = static_cast<std::size_t>(width);
  x.resize((count + w - 1) / w * w, x.back());
  std::vector<R> y(x.size());
  for (std::size_t n = 0; n < x.size(); n += w) operation(x.data() + n, y.data() + n);
  y.resize(count);
  return y;
}

}  // namespace onefold::test
