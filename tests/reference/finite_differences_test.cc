// The oracle against finite differences in float64: every gradient, options drawn at random.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <random>
#include <vector>

#include "onefold/attention.h"
#include "reference/reference.h"

namespace onefold {
namespace {

struct Numbers {
  std::vector<double> data;
  Tensor tensor;
};

class Draw {
 public:
  explicit Draw(unsigned seed) : engine_(seed) {}
  int between(int low, int high) {
    return low + static_cast<int>(engine_() % static_cast<unsigned>(high - low + 1));
  }
  bool one_in(int n) { return between(1, n) == 1; }
  Numbers normal(std::initializer_list<std::int64_t> shape) {
    Numbers n;
    n.tensor = Tensor::packed(nullptr, DType::kFloat64, shape);
    n.data.resize(static_cast<std::size_t>(n.tensor.elements()));
    for (double& x : n.data) x = gauss_(engine_);
    n.tensor.data = n.data.data();
    return n;
  }

 private:
  std::mt19937 engine_;
  std::normal_distribution<double> gauss_;
};

double inner(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (std::isfinite(a[i])) sum += a[i] * b[i];  // an empty row's lse is no variable
  }
  return sum;
}

// Steps of 1e-5 leave about 1e-10 of truncation and 1e-11 of rounding for values of order 1; sums
// of up to 60 such terms stay below this.
constexpr double kMost = 2e-8;

TEST(Oracle, gradients_are_those_of_finite_differences) {
  for (unsigned seed = 0; seed < 150; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Draw draw(seed);
    const int B = 2, Hk = draw.between(1, 2), H = Hk * draw.between(1, 2);
    const int Sq = draw.between(1, 5), Sk = draw.between(0, 6);
    const int D = draw.between(1, 4), Dv = draw.between(1, 4);
    Numbers q = draw.normal({B, Sq, H, D}), k = draw.normal({B, Sk, Hk, D});
    Numbers v = draw.normal({B, Sk, Hk, Dv}), dout = draw.normal({B, Sq, H, Dv});
    Numbers dlse = draw.normal({B, H, Sq}), sinks = draw.normal({H});
    Numbers slopes = draw.one_in(2) ? draw.normal({H}) : draw.normal({B, H});
    Numbers bias = draw.normal({draw.one_in(2) ? 1 : B, draw.one_in(2) ? 1 : H,
                                draw.one_in(2) ? 1 : Sq, draw.one_in(2) ? 1 : Sk});
    std::array<bool, 6> mask{true, false, true, true, false, true};
    Attention a;
    a.q = q.tensor;
    a.k = k.tensor;
    a.v = v.tensor;
    a.causal = static_cast<Causal>(draw.between(0, 2));
    if (draw.one_in(3)) a.scale = draw.between(-1, 1) * 0.7;
    if (draw.one_in(2)) a.softcap = 1.5;
    if (draw.one_in(2)) a.bias = bias.tensor;
    if (draw.one_in(2)) a.alibi_slopes = slopes.tensor;
    if (draw.one_in(2)) a.sinks = sinks.tensor;
    if (draw.one_in(3)) a.mask = Tensor::packed(mask.data(), DType::kBool, {Sk});
    if (draw.one_in(3)) a.window_left = draw.between(-1, 3);
    if (draw.one_in(3)) a.window_right = draw.between(-1, 3);
    if (draw.one_in(3)) a.dropout_p = 0.3;

    const auto loss = [&] {
      const reference::Forward f = reference::forward(a);
      return inner(f.out.data, dout.data) + inner(f.lse.data, dlse.data);
    };
    const reference::Backward g = reference::backward(a, dout.tensor, dlse.tensor);
    const auto check = [&](const char* name, std::vector<double>& x,
                           const std::vector<double>& gradient) {
      ASSERT_EQ(x.size(), gradient.size()) << name;
      for (std::size_t i = 0; i < x.size(); ++i) {
        const double at = x[i], step = 1e-5;
        x[i] = at + step;
        const double above = loss();
        x[i] = at - step;
        const double below = loss();
        x[i] = at;
        EXPECT_NEAR((above - below) / (2 * step), gradient[i], kMost) << name << "[" << i << "]";
      }
    };
    check("q", q.data, g.dq.data);
    check("k", k.data, g.dk.data);
    check("v", v.data, g.dv.data);
    if (a.bias) check("bias", bias.data, g.dbias->data);
    if (a.alibi_slopes) check("slopes", slopes.data, g.dslopes->data);
    if (a.sinks) check("sinks", sinks.data, g.dsinks->data);
  }
}

TEST(Oracle, two_keys_by_hand) {
  // Scores 0 and log 3: weights 1/4 and 3/4.
  std::vector<double> q{1}, k{0, std::log(3.0)}, v{8, 4};
  Attention a;
  a.q = Tensor::packed(q.data(), DType::kFloat64, {1, 1, 1, 1});
  a.k = Tensor::packed(k.data(), DType::kFloat64, {1, 2, 1, 1});
  a.v = Tensor::packed(v.data(), DType::kFloat64, {1, 2, 1, 1});
  const reference::Forward f = reference::forward(a);
  EXPECT_NEAR(f.out.data[0], 5.0, 1e-15);
  EXPECT_NEAR(f.lse.data[0], std::log(4.0), 1e-15);
}

TEST(Oracle, a_row_without_keys_is_empty_and_a_sink_fills_only_its_lse) {
  std::vector<double> q{1}, sink{0.5};
  Attention a;
  a.q = Tensor::packed(q.data(), DType::kFloat64, {1, 1, 1, 1});
  a.k = a.v = Tensor::packed(nullptr, DType::kFloat64, {1, 0, 1, 1});
  EXPECT_EQ(reference::forward(a).out.data[0], 0.0);
  EXPECT_EQ(reference::forward(a).lse.data[0], -INFINITY);
  a.sinks = Tensor::packed(sink.data(), DType::kFloat64, {1});
  EXPECT_EQ(reference::forward(a).out.data[0], 0.0);
  EXPECT_EQ(reference::forward(a).lse.data[0], 0.5);
}

TEST(Oracle, a_hidden_key_is_never_read_into_a_row) {
  std::vector<double> q{1, 1}, k{1, NAN}, v{2, INFINITY};
  Attention a;
  a.q = Tensor::packed(q.data(), DType::kFloat64, {1, 2, 1, 1});
  a.k = Tensor::packed(k.data(), DType::kFloat64, {1, 2, 1, 1});
  a.v = Tensor::packed(v.data(), DType::kFloat64, {1, 2, 1, 1});
  a.causal = Causal::kBottomRight;
  const reference::Forward f = reference::forward(a);
  EXPECT_EQ(f.out.data[0], 2.0);
  EXPECT_TRUE(std::isnan(f.out.data[1]));
  EXPECT_TRUE(std::isnan(f.lse.data[1]));
}

// D. E. Shaw Research, Random123, known answers of philox4x32-10.
TEST(Oracle, philox_gives_the_known_answers) {
  using Words = std::array<std::uint32_t, 4>;
  EXPECT_EQ(reference::philox4x32_10({0, 0, 0, 0}, {0, 0}),
            (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  const std::uint32_t ones = 0xffffffff;
  EXPECT_EQ(reference::philox4x32_10({ones, ones, ones, ones}, {ones, ones}),
            (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
}

}  // namespace
}  // namespace onefold
