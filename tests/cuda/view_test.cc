// How a problem's scale becomes what the kernels multiply by.

#include "cuda/view.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "tests/plan/cuda_question.h"

namespace onefold::cuda {
namespace {

kernels::ProblemView view_of(double scale) {
  test::CudaQuestion question;
  question.dtype = DType::kFloat32;
  Attention a = question.attention();
  a.scale = scale;
  return view(make_problem(a, {DeviceType::kCuda, 0}));
}

TEST(View, AScaleKeepsItsDigitsWhereverItLies) {
  for (int exponent = -240; exponent <= 127; ++exponent) {
    for (const double sign : {1.0, -1.0}) {
      const double scale = sign * std::ldexp(exponent == 127 ? 1.3 : 1.7182818284590452, exponent);
      const kernels::ProblemView v = view_of(scale);
      int power = 0;
      EXPECT_EQ(std::frexp(v.scale_power, &power), 0.5f) << scale;
      EXPECT_EQ(v.scale_sign, sign) << scale;
      const double shared = double{v.scale_sign} * v.scale_power;
      EXPECT_NEAR(shared * v.score_factor / scale, 1, 0x1p-24) << scale;
      EXPECT_NEAR(shared * v.score_factor_log2 / (scale * kLog2E), 1, 0x1p-24) << scale;
      // So is what the kernels derive of it: the lag, and the scale of gradients.
      EXPECT_TRUE(std::isnormal(kernels::kLagLog2 / v.score_factor_log2)) << scale;
      EXPECT_TRUE(std::isnormal(v.score_factor_log2)) << scale;
    }
  }
}

TEST(View, AnOrdinaryScaleTakesNoPower) {
  for (const double scale : {1.0, -0.125, 1e-30, 3e-30, 1e38}) {
    EXPECT_EQ(view_of(scale).scale_power, 1.0f) << scale;
  }
}

TEST(View, AScaleOfNothingHidesInTheSign) {
  for (const double scale : {0.0, -0.0, 1e-90, -1e-300}) {
    const kernels::ProblemView v = view_of(scale);
    EXPECT_EQ(v.scale_sign, 0.0f) << scale;
    EXPECT_EQ(v.score_factor, 1.0f) << scale;
  }
}

}  // namespace
}  // namespace onefold::cuda
