// A priori error bounds of the CPU backend: the oracle's terms times the size of each source here.
//
// u is the unit roundoff inside: 2^-24, or 2^-53 for float64. A sum of n terms errs by gamma_n = n
// u at most; from 32 terms on the probabilistic 6 sqrt(n) u, practically never exceeded (N. J.
// Higham, T. Mary, "A new approach to probabilistic rounding error analysis", SISC 2019). Includes
// reference.h, array.h and GoogleTest.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <string>
#include <string_view>

#include "cpu/cpu.h"
#include "reference/reference.h"
#include "tests/cpu/array.h"

namespace onefold::test {

using Sizes = std::array<double, reference::kNumSources>;

inline double unit_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return 0x1p-53;
    case DType::kFloat16:
      return 0x1p-11;
    case DType::kBFloat16:
      return 0x1p-8;
    default:
      return 0x1p-24;
  }
}
// What storing a tiny number costs: half the smallest subnormal. And below the smallest normal
// number of the arithmetic inside, `asked`'s, nothing is claimed.
inline double tiny_of(DType stored, DType asked) {
  const double inside = asked == DType::kFloat64 ? 0x1p-1022 : 0x1p-126;
  switch (stored) {
    case DType::kFloat64:
      return inside;
    case DType::kFloat16:
      return 0x1p-25;
    case DType::kBFloat16:
      return std::max(inside, 0x1p-134);
    default:
      return std::max(inside, 0x1p-150);
  }
}
inline double gamma(double n, double u) {
  return n < 32 ? n * u / (1 - n * u) : 6 * std::sqrt(n) * u;
}

// What one rounding of a weight, or of dS, to an operand of a product costs.
inline double of_operands(DType dtype) {
  const bool pairs = cpu::facts(1, dtype).isa == std::string_view("avx512_bf16");
  return pairs ? unit_of(dtype) : 0;
}

// `summed`: terms of the sum that makes a gradient; 0 for out and lse.
inline Sizes sizes_of(const Attention& a, std::int64_t dim, std::int64_t dim_v, std::int64_t keys,
                      std::int64_t summed, bool of_lse = false) {
  const DType dtype = a.q.dtype;
  const double u = dtype == DType::kFloat64 ? 0x1p-53 : 0x1p-24;
  const auto at = [](reference::Source source) { return static_cast<std::size_t>(source); };
  using enum reference::Source;
  Sizes s{};
  // scale, its product with q, the sum; then to base 2 (two) and what is added to it (two).
  s[at(kScore)] = gamma(static_cast<double>(dim) + 2, u) + 4 * u;
  // cap: its reciprocal, a product, tanh (4 u: two units in the last place), a product; a slope's
  // product; each addition; to base 2.
  s[at(kAdded)] = (a.softcap > 0 ? 7 * u : 0) + 6 * u;
  s[at(kExponent)] = 2 * u;
  // exp2 (3 u), and 2 u ln 2 for a reference up to 1 above the maximum.
  // Rounded weights are divided by their own sum, lse is that of the others.
  s[at(kWeight)] = 5 * u + (of_lse ? 0 : of_operands(dtype));
  s[at(kSum)] = 2 * gamma(static_cast<double>(keys), u) + 3 * u;
  s[at(kUnderflow)] = dtype == DType::kFloat64 ? 0x1p-1021 : 0x1p-125;  // the same 1 above
  s[at(kOut)] = unit_of(dtype) + 3 * u;
  s[at(kLse)] = 3 * u;  // stored, read, to base 2
  s[at(kProduct)] = gamma(static_cast<double>(dim_v) + 4, u);
  // Products with delta's difference, the cap's slope, scale, a dropout factor.
  s[at(kAccumulate)] = gamma(static_cast<double>(summed), u) + 6 * u + of_operands(dtype);
  return s;
}

// Every element of `got` within its bound; infinities and NaN in the same places.
inline void expect_within_bounds(const std::string& name, const Attention& a, const Array& got,
                                 const reference::Array& want, const reference::Array& terms,
                                 const Sizes& sizes) {
  const DType dtype = got.tensor().dtype;
  const auto count = static_cast<std::size_t>(got.elements());
  ASSERT_EQ(want.data.size(), count) << name;
  ASSERT_EQ(terms.data.size(), count * reference::kNumSources) << name;
  // Second-order terms; and the oracle's own rounding, which in float64 is of the same size.
  const double slack = a.q.dtype == DType::kFloat64 ? 2.2 : 1.1;
  for (std::size_t n = 0; n < count; ++n) {
    const double x = got.get(static_cast<std::int64_t>(n)), exact = want.data[n];
    if (x == exact || (std::isnan(x) && std::isnan(exact))) continue;
    double bound = unit_of(dtype) * std::abs(exact);
    for (std::size_t s = 0; s < sizes.size(); ++s) {
      const double term = terms.data[s * count + n];
      if (term != 0) bound += sizes[s] * term;
    }
    bound = slack * bound + tiny_of(dtype, a.q.dtype);
    ASSERT_TRUE(std::isfinite(x) && std::isfinite(exact) && std::abs(x - exact) <= bound)
        << name << "[" << n << "] is " << x << ", exactly " << exact << ": off by " << x - exact
        << ", at most " << bound << " is explained by rounding";
  }
}

}  // namespace onefold::test
