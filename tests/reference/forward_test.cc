// What the oracle means by each option: cases computed by hand, exact identities, refusals.

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "onefold/error.h"
#include "reference/reference.h"
#include "tests/algebra/random.h"
#include "tests/reference/random_question.h"

namespace onefold::test {
namespace {

using reference::Backward;
using reference::Forward;

Tensor of(std::vector<double>& data, std::initializer_list<std::int64_t> shape) {
  const Tensor t = Tensor::packed(data.data(), DType::kFloat64, shape);
  EXPECT_EQ(t.elements(), static_cast<std::int64_t>(data.size()));
  return t;
}

// One sequence, one head: q (sq), k (sk), v (sk), head dims 1, scale 1.
struct Small {
  std::vector<double> q, k, v;
  Attention a;
  Small(std::vector<double> q_in, std::vector<double> k_in, std::vector<double> v_in)
      : q(std::move(q_in)), k(std::move(k_in)), v(std::move(v_in)) {
    const auto rows = [](const auto& x) { return static_cast<std::int64_t>(x.size()); };
    a.q = of(q, {1, rows(q), 1, 1});
    a.k = of(k, {1, rows(k), 1, 1});
    a.v = of(v, {1, rows(v), 1, 1});
    a.scale = 1.0;
  }
};

constexpr double kRounding = 16 * 0x1p-53;  // a handful of operations on numbers below 8

TEST(Oracle, two_keys_by_hand) {
  // Scores 0 and log 3: weights 1/4 and 3/4, out 8/4 + 12/4, lse log 4.
  Small s({1}, {0, std::log(3.0)}, {8, 4});
  const Forward f = reference::forward(s.a);
  EXPECT_NEAR(f.out.data[0], 5.0, 2 * kRounding);
  EXPECT_NEAR(f.lse.data[0], std::log(4.0), kRounding);
  EXPECT_EQ(f.out.shape, (Shape{1, 1, 1, 1}));
  EXPECT_EQ(f.lse.shape, (Shape{1, 1, 1}));

  // dout 2, dlse 1: dV = P dout; dP = (16, 8), delta 10, dZ = P (dP - 10 + 1) = (7/4, -3/4);
  // dq = sum dZ k, dk = dZ q.
  std::vector<double> dout = {2}, dlse = {1};
  const Backward g = reference::backward(s.a, of(dout, {1, 1, 1, 1}), of(dlse, {1, 1, 1}));
  EXPECT_NEAR(g.dv.data[0], 0.5, kRounding);
  EXPECT_NEAR(g.dv.data[1], 1.5, kRounding);
  EXPECT_NEAR(g.dk.data[0], 1.75, 4 * kRounding);
  EXPECT_NEAR(g.dk.data[1], -0.75, 4 * kRounding);
  EXPECT_NEAR(g.dq.data[0], -0.75 * std::log(3.0), 4 * kRounding);
}

TEST(Oracle, the_default_scale_is_one_over_the_root_of_the_head_dim) {
  std::vector<double> q(4, 1.0), k(8, 1.0), v = {0, 4};
  for (int d = 0; d < 4; ++d) k[d] = 0;
  Attention a;
  a.q = of(q, {1, 1, 1, 4});
  a.k = of(k, {1, 2, 1, 4});
  a.v = of(v, {1, 2, 1, 1});
  const double e = std::exp(4.0 / 2.0);  // scores 0 and 4 / sqrt(4)
  EXPECT_NEAR(reference::forward(a).lse.data[0], std::log(1 + e), kRounding);
}

TEST(Oracle, a_sink_is_one_more_key_with_value_zero) {
  Small s({1}, {0, std::log(2.0)}, {8, 4});
  std::vector<double> sink = {std::log(5.0)}, dout = {4}, dlse = {0.5};
  s.a.sinks = of(sink, {1});
  const Forward f = reference::forward(s.a);
  EXPECT_NEAR(f.out.data[0], (8 + 2 * 4) / 8.0, kRounding);
  EXPECT_NEAR(f.lse.data[0], std::log(8.0), kRounding);
  const Backward g = reference::backward(s.a, of(dout, {1, 1, 1, 1}), of(dlse, {1, 1, 1}));
  EXPECT_NEAR(g.dsinks->data[0], 5 / 8.0 * (0.5 - 4 * 2), 4 * kRounding);
  sink[0] = -kInfinity;  // no sink
  EXPECT_NEAR(reference::forward(s.a).lse.data[0], std::log(3.0), kRounding);
  EXPECT_EQ(reference::backward(s.a, of(dout, {1, 1, 1, 1}), std::nullopt).dsinks->data[0], 0.0);
}

TEST(Oracle, the_cap_comes_after_scale_and_before_the_bias) {
  Small s({1}, {6, -6}, {1, 0});
  std::vector<double> bias = {-3, 5};
  s.a.scale = 0.5;
  s.a.softcap = 2;
  s.a.bias = of(bias, {2});
  const double z0 = 2 * std::tanh(1.5) - 3, z1 = 2 * std::tanh(-1.5) + 5;
  const Forward f = reference::forward(s.a);
  EXPECT_NEAR(f.lse.data[0], std::log(std::exp(z0) + std::exp(z1)), kRounding);
  EXPECT_NEAR(f.out.data[0], 1 / (1 + std::exp(z1 - z0)), kRounding);
}

TEST(Oracle, alibi_counts_from_the_bottom_right_diagonal_of_the_used_lengths) {
  // Distances of a single query to keys 0, 1, 2 of three are 2, 1, 0; of two used keys 1, 0. The
  // alignment of the causal border does not matter.
  Small s({0}, {0, 0, 0}, {1, 0, 0});
  std::vector<double> slope = {0.5};
  s.a.alibi_slopes = of(slope, {1});
  EXPECT_NEAR(reference::forward(s.a).lse.data[0], std::log(std::exp(-1.0) + std::exp(-0.5) + 1),
              kRounding);
  std::int32_t used = 2;
  s.a.seqused_k = Tensor::packed(&used, DType::kInt32, {1});
  EXPECT_NEAR(reference::forward(s.a).lse.data[0], std::log(std::exp(-0.5) + 1), kRounding);
  s.a.causal = Causal::kTopLeft;  // sees key 0 alone, still at distance 1
  EXPECT_NEAR(reference::forward(s.a).lse.data[0], -0.5, kRounding);
}

// With one-hot values and zero queries a row of out is 1 / count at the keys it sees.
std::vector<bool> seen(const Forward& f, std::int64_t row, std::int64_t keys) {
  std::vector<bool> all;
  for (std::int64_t j = 0; j < keys; ++j) all.push_back(f.out.data[row * keys + j] > 0);
  return all;
}

TEST(Oracle, visibility_is_the_plain_inequality_for_every_border_and_window) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
  constexpr std::int64_t kLeast = std::numeric_limits<std::int64_t>::min();
  const std::vector<std::optional<std::int64_t>> windows = {
      std::nullopt, 0, 1, 3, -1, -2, 2147483647, -2147483648, kMost, kLeast, kLeast + 1};
  for (std::int64_t sq = 1; sq <= 4; ++sq) {
    for (std::int64_t sk = 1; sk <= 5; ++sk) {
      std::vector<double> q(sq, 0.0), k(sk, 0.0), v(sk * sk, 0.0);
      for (std::int64_t j = 0; j < sk; ++j) v[j * sk + j] = 1;
      Attention a;
      a.q = of(q, {1, sq, 1, 1});
      a.k = of(k, {1, sk, 1, 1});
      a.v = of(v, {1, sk, 1, sk});
      for (const Causal causal : {Causal::kNone, Causal::kBottomRight, Causal::kTopLeft}) {
        for (const auto& left : windows) {
          for (const auto& right : windows) {
            a.causal = causal;
            a.window_left = left;
            a.window_right = right;
            const Forward f = reference::forward(a);
            for (std::int64_t i = 0; i < sq; ++i) {
              const long double diagonal = i + (causal == Causal::kTopLeft ? 0 : sk - sq);
              std::vector<bool> expected;
              for (std::int64_t j = 0; j < sk; ++j) {
                bool visible = causal == Causal::kNone || j <= diagonal;
                if (left) visible = visible && j >= diagonal - static_cast<long double>(*left);
                if (right) visible = visible && j <= diagonal + static_cast<long double>(*right);
                expected.push_back(visible);
              }
              EXPECT_EQ(seen(f, i, sk), expected)
                  << "Sq " << sq << ", Sk " << sk << ", causal " << static_cast<int>(causal)
                  << ", left " << (left ? std::to_string(*left) : "-") << ", right "
                  << (right ? std::to_string(*right) : "-") << ", row " << i;
            }
          }
        }
      }
    }
  }
}

TEST(Oracle, a_row_without_keys_is_empty_and_a_sink_fills_only_its_lse) {
  Small s({1, 2}, {}, {});
  std::vector<double> sink = {0.5}, dout = {kNaN, kNaN}, dlse = {2, 3};
  Forward f = reference::forward(s.a);
  EXPECT_EQ(f.out.data, (std::vector<double>{0, 0}));
  EXPECT_EQ(f.lse.data, (std::vector<double>{-kInfinity, -kInfinity}));
  Backward g = reference::backward(s.a, of(dout, {1, 2, 1, 1}), of(dlse, {1, 1, 2}));
  EXPECT_EQ(g.dq.data, (std::vector<double>{0, 0}));
  s.a.sinks = of(sink, {1});
  dout = {1, 1};
  f = reference::forward(s.a);
  EXPECT_EQ(f.out.data, (std::vector<double>{0, 0}));
  EXPECT_EQ(f.lse.data, (std::vector<double>{0.5, 0.5}));
  g = reference::backward(s.a, of(dout, {1, 2, 1, 1}), of(dlse, {1, 1, 2}));
  EXPECT_EQ(g.dsinks->data[0], 5.0);  // the sum of dlse
}

TEST(Oracle, hidden_rows_are_empty_and_have_no_gradient_however_they_are_hidden) {
  for (const int how : {0, 1, 2, 3, 4}) {
    SCOPED_TRACE(how);
    Small s({1, 2}, {1, 3}, {5, 7});
    std::vector<double> bias = {-kInfinity, -kInfinity, 0, 0};
    std::vector<std::uint8_t> mask = {0, 0, 1, 1};
    std::vector<double> dout = {kNaN, 1}, dlse = {kNaN, 1};
    std::int64_t used = 0;
    if (how == 0) s.a.bias = of(bias, {2, 2});
    if (how == 1) s.a.mask = Tensor::packed(mask.data(), DType::kBool, {2, 2});
    if (how == 2) s.a.window_left = -3;  // every key lies left of what is left
    if (how == 3) s.a.seqused_k = Tensor::packed(&used, DType::kInt64, {1});
    if (how == 4) s.k = {-kInfinity, -kInfinity};  // the scores themselves
    if (how >= 2) dout[1] = dlse[1] = kNaN;        // both rows are empty
    const Forward f = reference::forward(s.a);
    EXPECT_EQ(f.out.data[0], 0.0);
    EXPECT_EQ(f.lse.data[0], -kInfinity);
    EXPECT_EQ(std::isinf(f.lse.data[1]), how >= 2);
    const Backward g = reference::backward(s.a, of(dout, {1, 2, 1, 1}), of(dlse, {1, 1, 2}));
    EXPECT_EQ(g.dq.data[0], 0.0);
    for (const double x : g.dk.data) EXPECT_FALSE(std::isnan(x));
    for (const double x : g.dv.data) EXPECT_FALSE(std::isnan(x));
    if (g.dbias) {
      EXPECT_EQ(g.dbias->data[0], 0.0);
      EXPECT_EQ(g.dbias->data[1], 0.0);
    }
  }
}

TEST(Oracle, rows_beyond_the_used_length_are_empty_even_with_a_sink) {
  Small s({1, kNaN, kNaN}, {1, 2}, {3, 4});
  std::vector<double> sink = {1}, dout = {1, kNaN, kNaN}, dlse = {1, kNaN, kNaN};
  std::int32_t used = 1;
  s.a.sinks = of(sink, {1});
  s.a.seqused_q = Tensor::packed(&used, DType::kInt32, {1});
  const Forward f = reference::forward(s.a);
  EXPECT_TRUE(std::isfinite(f.lse.data[0]));
  for (const int row : {1, 2}) {
    EXPECT_EQ(f.out.data[row], 0.0);
    EXPECT_EQ(f.lse.data[row], -kInfinity);
  }
  const Backward g = reference::backward(s.a, of(dout, {1, 3, 1, 1}), of(dlse, {1, 1, 3}));
  EXPECT_EQ(g.dq.data[1], 0.0);
  EXPECT_EQ(g.dq.data[2], 0.0);
  EXPECT_TRUE(std::isfinite(g.dsinks->data[0]));
}

TEST(Oracle, what_is_no_number_reaches_the_rows_that_see_it_and_no_other) {
  for (const double bad : {kNaN, kInfinity}) {
    for (const bool in_k : {true, false}) {
      SCOPED_TRACE(testing::Message() << bad << (in_k ? " in k" : " in v"));
      Small s({1, 1}, {1, 2}, {3, 4});
      (in_k ? s.k : s.v)[1] = bad;
      s.a.causal = Causal::kBottomRight;  // row 0 sees key 0, row 1 both
      const Forward f = reference::forward(s.a);
      EXPECT_EQ(f.out.data[0], 3.0);
      EXPECT_EQ(f.lse.data[0], 1.0);
      EXPECT_FALSE(std::isfinite(f.out.data[1]));
      EXPECT_EQ(std::isnan(f.lse.data[1]), in_k);
      std::vector<double> dout = {1, 0};
      const Backward g = reference::backward(s.a, of(dout, {1, 2, 1, 1}), std::nullopt);
      EXPECT_EQ(g.dq.data[0], 0.0);  // one key: constant
      EXPECT_TRUE(std::isnan(g.dq.data[1]));
    }
  }
  Small s({kNaN, 1}, {1, 2}, {3, 4});
  const Forward f = reference::forward(s.a);
  EXPECT_TRUE(std::isnan(f.out.data[0]));
  EXPECT_TRUE(std::isnan(f.lse.data[0]));
  EXPECT_TRUE(std::isfinite(f.out.data[1]));
}

TEST(Oracle, a_key_hidden_by_mask_or_bias_is_never_read_into_a_row) {
  for (const bool by_mask : {true, false}) {
    Small s({1}, {1, kNaN}, {3, kInfinity});
    std::vector<std::uint8_t> mask = {1, 0};
    std::vector<double> bias = {0, -kInfinity}, dout = {1};
    if (by_mask) {
      s.a.mask = Tensor::packed(mask.data(), DType::kBool, {2});
      bias[1] = kNaN;  // of a key that the mask hides
    }
    s.a.bias = of(bias, {2});
    const Forward f = reference::forward(s.a);
    EXPECT_EQ(f.out.data[0], 3.0);
    EXPECT_EQ(f.lse.data[0], 1.0);
    const Backward g = reference::backward(s.a, of(dout, {1, 1, 1, 1}), std::nullopt);
    EXPECT_EQ(g.dk.data[1], 0.0);
    EXPECT_EQ(g.dv.data[1], 0.0);
    EXPECT_EQ(g.dbias->data[1], 0.0);
  }
}

TEST(Oracle, enormous_scores_choose_the_largest_and_ties_share) {
  for (const double size : {1e5, 1e30, 1e300}) {
    Small s({1}, {size, -size, size / 2, size}, {8, 1, 1, 4});
    const Forward f = reference::forward(s.a);
    EXPECT_EQ(f.out.data[0], 6.0);
    EXPECT_NEAR(f.lse.data[0], size + std::log(2.0), size * 0x1p-52);
  }
}

TEST(Oracle, the_smallest_finite_bias_is_an_ordinary_one) {
  Small s({1}, {0.5, 0.25}, {8, 4});
  std::vector<double> bias(2, std::numeric_limits<float>::lowest());
  s.a.bias = of(bias, {2});
  const Forward f = reference::forward(s.a);
  EXPECT_EQ(f.out.data[0], 6.0);  // the bias absorbs the scores
  EXPECT_EQ(f.lse.data[0], bias[0]);
}

TEST(Oracle, scale_zero_is_the_mean_of_the_visible_values) {
  Small s({3, 3}, {1, 5, 7}, {2, 4, 9});
  s.a.scale = 0.0;
  s.a.causal = Causal::kBottomRight;
  const Forward f = reference::forward(s.a);
  EXPECT_NEAR(f.out.data[0], 3.0, kRounding);
  EXPECT_NEAR(f.out.data[1], 5.0, kRounding);
}

TEST(Oracle, a_negative_scale_is_that_of_minus_q) {
  for_random_cases(30, [](Random& random) {
    RandomQuestion question(random);
    question.attention.scale = -0.75;
    const Forward negative = reference::forward(question.attention);
    for (double* x : elements(question.attention.q)) *x = -*x;
    question.attention.scale = 0.75;
    const Forward positive = reference::forward(question.attention);
    EXPECT_EQ(negative.out.data, positive.out.data);
    EXPECT_EQ(negative.lse.data, positive.lse.data);
  });
}

TEST(Oracle, query_heads_of_a_group_share_their_key_head) {
  // Four query heads on two key heads: keys 1.0 and 2.0, values 10 and 20.
  std::vector<double> q = {1, 2, 3, 4}, k = {1, 2}, v = {10, 20};
  Attention a;
  a.q = of(q, {1, 1, 4, 1});
  a.k = of(k, {1, 1, 2, 1});
  a.v = of(v, {1, 1, 2, 1});
  const Forward f = reference::forward(a);
  EXPECT_EQ(f.out.data, (std::vector<double>{10, 10, 20, 20}));
  EXPECT_EQ(f.lse.data, (std::vector<double>{1, 2, 6, 8}));
  std::vector<double> dout = {1, 2, 4, 8};
  const Backward g = reference::backward(a, of(dout, {1, 1, 4, 1}), std::nullopt);
  EXPECT_EQ(g.dv.data, (std::vector<double>{3, 12}));
}

TEST(Oracle, a_packed_sequence_is_the_same_problem_alone) {
  std::vector<double> q = {1, 2, 3, kNaN}, k = {1, 2, 3, 4, kNaN}, v = {5, 6, 7, 8, kNaN};
  std::array<std::int64_t, 4> cu_q = {0, 1, 1, 3}, cu_k = {0, 2, 3, 4};
  Attention packed;
  packed.q = of(q, {4, 1, 1});
  packed.k = of(k, {5, 1, 1});
  packed.v = of(v, {5, 1, 1});
  packed.causal = Causal::kBottomRight;
  packed.cu_seqlens_q = Tensor::packed(cu_q.data(), DType::kInt64, {4});
  packed.cu_seqlens_k = Tensor::packed(cu_k.data(), DType::kInt64, {4});
  const Forward f = reference::forward(packed);
  Small first({1}, {1, 2}, {5, 6}), third({2, 3}, {4}, {8});
  first.a.causal = third.a.causal = Causal::kBottomRight;
  EXPECT_EQ(f.out.data[0], reference::forward(first.a).out.data[0]);
  EXPECT_EQ(f.lse.data[0], reference::forward(first.a).lse.data[0]);
  // Two queries on one key: the first sees nothing.
  EXPECT_EQ(f.out.data[1], 0.0);
  EXPECT_EQ(f.lse.data[1], -kInfinity);
  EXPECT_EQ(f.out.data[2], 8.0);
  EXPECT_EQ(f.lse.data[2], reference::forward(third.a).lse.data[1]);
  EXPECT_EQ(f.out.data[3], 0.0);  // behind the last offset
  EXPECT_EQ(f.lse.data[3], -kInfinity);
}

TEST(Oracle, a_broadcast_bias_is_the_expanded_one_and_its_gradient_the_sum) {
  std::vector<double> q = {1, 2, 3, 4}, k = {1, -1, 2, 0.5}, v = {1, 2, 3, 4};
  std::vector<double> bias = {0.5, -0.25}, dout = {1, -1, 2, 0.5};
  Attention a;
  a.q = of(q, {1, 2, 2, 1});
  a.k = of(k, {1, 2, 2, 1});
  a.v = of(v, {1, 2, 2, 1});
  std::vector<double> expanded;
  for (int n = 0; n < 4; ++n) expanded.insert(expanded.end(), bias.begin(), bias.end());
  Attention wide = a;
  a.bias = of(bias, {1, 2});  // over the keys
  wide.bias = of(expanded, {1, 2, 2, 2});
  EXPECT_EQ(reference::forward(a).out.data, reference::forward(wide).out.data);
  const Backward narrow = reference::backward(a, of(dout, {1, 2, 2, 1}), std::nullopt);
  const Backward full = reference::backward(wide, of(dout, {1, 2, 2, 1}), std::nullopt);
  EXPECT_EQ(narrow.dbias->shape, (Shape{1, 2}));
  for (const int j : {0, 1}) {
    double sum = 0;
    for (int n = 0; n < 4; ++n) sum += full.dbias->data[2 * n + j];
    EXPECT_NEAR(narrow.dbias->data[j], sum, kRounding);
  }
}

// ---- dropout ----

// D. E. Shaw Research, Random123, known answers of philox4x32-10.
TEST(Oracle, philox_gives_the_known_answers) {
  using Words = std::array<std::uint32_t, 4>;
  constexpr std::uint32_t kOnes = 0xffffffff;
  EXPECT_EQ(reference::philox4x32_10({0, 0, 0, 0}, {0, 0}),
            (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(reference::philox4x32_10({kOnes, kOnes, kOnes, kOnes}, {kOnes, kOnes}),
            (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(reference::philox4x32_10({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
                                     {0xa4093822, 0x299f31d0}),
            (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Oracle, dropout_keeps_what_the_generator_says_and_leaves_lse_alone) {
  constexpr std::int64_t kBatch = 2, kRows = 5, kKeys = 7, kHeads = 3;
  std::vector<double> q(kBatch * kRows * kHeads, 0.0), k(kBatch * kKeys, 0.0);
  std::vector<double> v(kBatch * kKeys * kKeys, 0.0);
  for (int b = 0; b < kBatch; ++b) {
    for (int j = 0; j < kKeys; ++j) v[(b * kKeys + j) * kKeys + j] = 1;
  }
  Attention a;
  a.q = of(q, {kBatch, kRows, kHeads, 1});
  a.k = of(k, {kBatch, kKeys, 1, 1});
  a.v = of(v, {kBatch, kKeys, 1, kKeys});
  a.dropout_p = 0.375;
  a.seed = 0x0123456789abcdef;
  const Forward f = reference::forward(a);
  int kept = 0;
  for (std::uint32_t b = 0; b < kBatch; ++b) {
    for (std::uint32_t i = 0; i < kRows; ++i) {
      for (std::uint32_t h = 0; h < kHeads; ++h) {
        for (std::uint32_t j = 0; j < kKeys; ++j) {
          const auto words =
              reference::philox4x32_10({i / 2, j / 2, h, b}, {0x89abcdef, 0x01234567});
          const bool keeps = words[2 * (i % 2) + j % 2] >= 0x60000000;  // 3/8 of 2^32
          const double out = f.out.data[((b * kRows + i) * kHeads + h) * kKeys + j];
          EXPECT_NEAR(out, keeps ? 1 / (0.625 * kKeys) : 0, kRounding);
          kept += keeps ? 1 : 0;
        }
      }
    }
  }
  EXPECT_GT(kept, 0);
  EXPECT_LT(kept, kBatch * kRows * kHeads * kKeys);
  for (const double lse : f.lse.data) EXPECT_NEAR(lse, std::log(7.0), kRounding);
}

TEST(Oracle, a_seed_in_a_tensor_is_the_same_seed) {
  for_random_cases(20, [](Random& random) {
    RandomQuestion question(random);
    Attention& a = question.attention;
    a.dropout_p = 0.5;
    a.seed = random.bits();
    const Forward by_number = reference::forward(a);
    std::int64_t seed = static_cast<std::int64_t>(a.seed);
    a.seed = 0;
    a.seed_tensor = Tensor::packed(&seed, DType::kInt64, {1});
    EXPECT_EQ(reference::forward(a).out.data, by_number.out.data);
    a.seed_tensor = Tensor::packed(&seed, DType::kInt64, {});
    EXPECT_EQ(reference::forward(a).out.data, by_number.out.data);
    a.seed_tensor->dtype = DType::kInt32;
    EXPECT_THROW(reference::forward(a), Error);
  });
}

TEST(Oracle, a_word_at_the_threshold_is_kept_and_the_one_below_dropped) {
  Small s({1}, {1}, {4});
  const double word = reference::philox4x32_10({0, 0, 0, 0}, {7, 0})[0];
  s.a.seed = 7;
  s.a.dropout_p = word * 0x1p-32;
  EXPECT_NEAR(reference::forward(s.a).out.data[0], 4 / (1 - s.a.dropout_p), kRounding);
  s.a.dropout_p = (word + 1) * 0x1p-32;
  EXPECT_EQ(reference::forward(s.a).out.data[0], 0.0);
}

TEST(Oracle, everything_dropped_gives_zeros_and_an_ordinary_lse) {
  Small s({1}, {0, std::log(3.0)}, {kNaN, 4});
  std::vector<double> dout = {2}, dlse = {1};
  s.a.dropout_p = 1;
  const Forward f = reference::forward(s.a);
  EXPECT_EQ(f.out.data[0], 0.0);
  EXPECT_NEAR(f.lse.data[0], std::log(4.0), kRounding);
  const Backward g = reference::backward(s.a, of(dout, {1, 1, 1, 1}), of(dlse, {1, 1, 1}));
  EXPECT_EQ(g.dv.data, (std::vector<double>{0, 0}));
  EXPECT_NEAR(g.dk.data[1], 0.75, kRounding);  // through lse alone
}

// ---- types ----

// out of a single key is its value: what was read from the bits.
template <class Word>
double read_back(DType dtype, Word bits) {
  Word one[1] = {bits};
  Word zero[1] = {0};
  Attention a;
  a.q = Tensor::packed(zero, dtype, {1, 1, 1, 1});
  a.k = Tensor::packed(zero, dtype, {1, 1, 1, 1});
  a.v = Tensor::packed(one, dtype, {1, 1, 1, 1});
  return reference::forward(a).out.data[0];
}

TEST(Oracle, sixteen_bit_numbers_are_read_exactly) {
  const auto half = [](int bits) {
    return read_back(DType::kFloat16, static_cast<std::uint16_t>(bits));
  };
  EXPECT_EQ(half(0x3c00), 1.0);
  EXPECT_EQ(half(0xc000), -2.0);
  EXPECT_EQ(half(0x3555), 0x1.554p-2);
  EXPECT_EQ(half(0x7bff), 65504.0);
  EXPECT_EQ(half(0x0400), 0x1p-14);
  EXPECT_EQ(half(0x0001), 0x1p-24);
  EXPECT_EQ(half(0x83ff), -0x1.ff8p-15);
  EXPECT_EQ(half(0xfc00), -kInfinity);
  EXPECT_TRUE(std::isnan(half(0x7e00)));
  const auto brain = [](int bits) {
    return read_back(DType::kBFloat16, static_cast<std::uint16_t>(bits));
  };
  EXPECT_EQ(brain(0x3f80), 1.0);
  EXPECT_EQ(brain(0xc049), -3.140625);
  EXPECT_EQ(brain(0x0001), 0x1p-133);
  EXPECT_EQ(brain(0x7f80), kInfinity);
  EXPECT_TRUE(std::isnan(brain(0x7fc0)));
  EXPECT_EQ(read_back(DType::kFloat32, std::uint32_t{0x00000001}), 0x1p-149);
}

TEST(Oracle, empty_problems_give_empty_arrays) {
  std::vector<double> memory(2 * 5 * 6, 1.0);
  for (const int axis : {0, 1, 2}) {  // no sequence, no query, no head
    Shape q = {2, 3, 2, 4}, k = {2, 5, 1, 4}, v = {2, 5, 1, 6};
    q[axis] = 0;
    if (axis != 1) k[axis] = v[axis] = 0;
    const auto tensor = [&](const Shape& s) {
      return Tensor::packed(memory.data(), DType::kFloat64, {s[0], s[1], s[2], s[3]});
    };
    Attention a;
    a.q = tensor(q);
    a.k = tensor(k);
    a.v = tensor(v);
    const Forward f = reference::forward(a);
    EXPECT_TRUE(f.out.data.empty());
    EXPECT_TRUE(f.lse.data.empty());
    EXPECT_EQ(reference::backward(a, std::nullopt, std::nullopt).dq.shape, q);
  }
  // Without a head dim every score is an empty sum: the mean of v.
  std::vector<double> v = {2, 4};
  Attention a;
  a.q = Tensor::packed(nullptr, DType::kFloat64, {1, 1, 1, 0});
  a.k = Tensor::packed(nullptr, DType::kFloat64, {1, 2, 1, 0});
  a.v = of(v, {1, 2, 1, 1});
  EXPECT_EQ(reference::forward(a).out.data[0], 3.0);
}

}  // namespace
}  // namespace onefold::test
