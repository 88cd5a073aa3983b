// Every gradient of the oracle against differences of its forward, over random combinations of all
// options, layouts and lengths.
//
// The derivative comes from central differences with steps h, 2h and 4h, extrapolated twice; what
// the second extrapolation changed bounds its error, beside the rounding of the loss over h.

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "reference/reference.h"
#include "tests/algebra/random.h"
#include "tests/reference/random_question.h"

namespace onefold::test {
namespace {

constexpr double kStep = 0x1p-8;

struct Loss {
  double value = 0;
  double magnitude = 0;  // of the terms that were added
};

// sum(out * dout) + sum(lse * dlse) over rows that exist and see something.
Loss loss(const RandomQuestion& question) {
  const reference::Forward f = reference::forward(question.attention);
  Loss sum;
  const auto add = [&](const std::vector<double>& values, const Tensor& cotangent) {
    const std::vector<double*> weights = elements(cotangent);
    for (std::size_t n = 0; n < values.size(); ++n) {
      if (std::isinf(values[n]) || std::isnan(*weights[n])) continue;  // no variable
      sum.value += values[n] * *weights[n];
      sum.magnitude += std::abs(values[n] * *weights[n]);
    }
  };
  add(f.out.data, question.dout);
  add(f.lse.data, question.dlse);
  return sum;
}

void expect_derivative(const RandomQuestion& question, double* x, double gradient) {
  const double at = *x;
  double magnitude = 0;
  const auto slope = [&](double step) {
    *x = at + step;
    const Loss above = loss(question);
    *x = at - step;
    const Loss below = loss(question);
    *x = at;
    magnitude = std::max({magnitude, above.magnitude, below.magnitude});
    return (above.value - below.value) / (2 * step);
  };
  const double d1 = slope(kStep), d2 = slope(2 * kStep), d4 = slope(4 * kStep);
  const double once = (4 * d1 - d2) / 3, once_coarse = (4 * d2 - d4) / 3;
  const double twice = (16 * once - once_coarse) / 15;
  // Both sides sum up to about a hundred products of three or four roundings.
  const double rounding = 400 * 0x1p-53 * (magnitude + std::abs(at)) / kStep;
  EXPECT_NEAR(gradient, twice, std::abs(twice - once) + rounding);
}

// The elements of one input and what backward says of them.
void expect_gradient(const char* name, const RandomQuestion& question, const Tensor& input,
                     const reference::Array& gradient) {
  SCOPED_TRACE(name);
  ASSERT_EQ(gradient.shape, shape_of(input));
  const std::vector<double*> variables = elements(input);
  ASSERT_EQ(gradient.data.size(), variables.size());
  for (std::size_t n = 0; n < variables.size(); ++n) {
    SCOPED_TRACE("element " + std::to_string(n));
    if (std::isfinite(*variables[n])) {
      expect_derivative(question, variables[n], gradient.data[n]);
    } else {  // NaN where nothing may be read, or a key hidden by minus infinity
      EXPECT_EQ(gradient.data[n], 0.0);
    }
  }
}

TEST(Oracle, gradients_are_those_of_finite_differences) {
  for_random_cases(150, [](Random& random) {
    RandomQuestion question(random);
    SCOPED_TRACE(question.text);
    const Attention& a = question.attention;
    const reference::Backward g = reference::backward(a, question.dout, question.dlse);
    expect_gradient("q", question, a.q, g.dq);
    expect_gradient("k", question, a.k, g.dk);
    expect_gradient("v", question, a.v, g.dv);
    ASSERT_EQ(g.dbias.has_value(), a.bias.has_value());
    ASSERT_EQ(g.dslopes.has_value(), a.alibi_slopes.has_value());
    ASSERT_EQ(g.dsinks.has_value(), a.sinks.has_value());
    if (a.bias) expect_gradient("bias", question, *a.bias, *g.dbias);
    if (a.alibi_slopes) expect_gradient("alibi_slopes", question, *a.alibi_slopes, *g.dslopes);
    if (a.sinks) expect_gradient("sinks", question, *a.sinks, *g.dsinks);
  });
}

TEST(Oracle, an_absent_cotangent_counts_as_zero) {
  for_random_cases(50, [](Random& random) {
    RandomQuestion question(random);
    SCOPED_TRACE(question.text);
    const Attention& a = question.attention;
    const reference::Backward both = reference::backward(a, question.dout, question.dlse);
    const reference::Backward of_out = reference::backward(a, question.dout, std::nullopt);
    const reference::Backward of_lse = reference::backward(a, std::nullopt, question.dlse);
    const auto expect_sum = [](const reference::Array& all, const reference::Array& x,
                               const reference::Array& y) {
      for (std::size_t n = 0; n < all.data.size(); ++n) {
        EXPECT_NEAR(all.data[n], x.data[n] + y.data[n],
                    200 * 0x1p-53 * (std::abs(x.data[n]) + std::abs(y.data[n]) + 1));
      }
    };
    expect_sum(both.dq, of_out.dq, of_lse.dq);
    expect_sum(both.dk, of_out.dk, of_lse.dk);
    expect_sum(both.dv, of_out.dv, of_lse.dv);
    for (const double x : of_lse.dv.data) EXPECT_EQ(x, 0.0);
    const reference::Backward neither = reference::backward(a, std::nullopt, std::nullopt);
    for (const double x : neither.dq.data) EXPECT_EQ(x, 0.0);
    for (const double x : neither.dk.data) EXPECT_EQ(x, 0.0);
  });
}

}  // namespace
}  // namespace onefold::test
