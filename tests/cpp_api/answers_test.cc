// forward and backward as a C++ program calls them: answers computed by hand, what may be left out,
// where results may be written, and sizes of nothing.

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <optional>
#include <vector>

#include "onefold/attention.h"
#include "tests/cpp_api/numbers.h"

namespace onefold::test {
namespace {

// A few dozen operations on numbers below 32, each rounded: what the cases by hand may be off by.
constexpr double kRounding = 32 * 32 * kUnit;

// One query 1 against keys 0 and log 3, values 8 and 4, scale 1: weights 1/4 and 3/4.
Call two_keys() {
  Call c(1, 1, 2, 1, 1, 1);
  c.q = Numbers::of({1, 1, 1, 1}, {1});
  c.k = Numbers::of({1, 2, 1, 1}, {0, std::log(3.0f)});
  c.v = Numbers::of({1, 2, 1, 1}, {8, 4});
  c.dout = Numbers::of({1, 1, 1, 1}, {2});
  c.dlse = Numbers::of({1, 1, 1}, {1});
  c.a.scale = 1.0;
  c.point();
  return c;
}

TEST(Answers, two_keys_by_hand) {
  Call c = two_keys();
  c.run();
  expect_near(c.out, {5}, kRounding);
  expect_near(c.lse, {std::log(4.0)}, kRounding);
  // dV = P dout; dP = dout v = (16, 8); delta = dout out = 10; dZ = P (dP - delta + dlse).
  expect_near(c.dv, {0.5, 1.5}, kRounding);
  expect_near(c.dk, {1.75, -0.75}, kRounding);
  expect_near(c.dq, {-0.75 * std::log(3.0)}, kRounding);
}

TEST(Answers, options_by_hand) {
  const auto out_of = [](void (*set)(Attention&)) {
    Call c = two_keys();
    set(c.a);
    forward({}, c.a, c.out);
    return static_cast<double>(c.out.at(0));
  };
  EXPECT_NEAR(out_of([](Attention& a) { a.scale = 0.0; }), 6, kRounding);
  EXPECT_NEAR(out_of([](Attention& a) { a.scale = -1.0; }), 7, kRounding);
  EXPECT_NEAR(out_of([](Attention& a) { a.causal = Causal::kTopLeft; }), 8, kRounding);
  EXPECT_NEAR(out_of([](Attention& a) { a.causal = Causal::kBottomRight; }), 5, kRounding);
  EXPECT_NEAR(out_of([](Attention& a) { a.window_left = 0; }), 4, kRounding);
  EXPECT_NEAR(out_of([](Attention& a) { a.dropout_p = 1.0; }), 0, kRounding);
  const double capped = std::exp(0.5 * std::tanh(std::log(3.0) / 0.5));
  EXPECT_NEAR(out_of([](Attention& a) { a.softcap = 0.5; }), (8 + 4 * capped) / (1 + capped),
              kRounding);
}

TEST(Answers, tensors_as_options_by_hand) {
  Call c = two_keys();
  const Numbers bias = Numbers::of({1, 1, 1, 2}, {std::log(3.0f), 0});
  c.a.bias = bias;
  c.run();
  expect_near(c.out, {6}, kRounding);
  c = two_keys();
  const Numbers sinks = Numbers::of({1}, {std::log(4.0f)});
  c.a.sinks = sinks;
  c.run();
  expect_near(c.out, {2.5}, kRounding);
  expect_near(c.lse, {std::log(8.0)}, kRounding);
  c = two_keys();
  const Numbers slopes = Numbers::of({1}, {std::log(3.0f)});  // key 0 is one away
  c.a.alibi_slopes = slopes;
  c.run();
  expect_near(c.out, {4.4}, kRounding);
  c = two_keys();
  bool visible[2] = {true, false};
  c.a.mask = Tensor::packed(visible, DType::kBool, {1, 2});
  c.run();
  expect_near(c.out, {8}, kRounding);
}

// With one key its value is the answer: exact in 16 bits, where the algebra's rounding is
// invisible.
TEST(Answers, every_float_dtype_works) {
  std::uint16_t one_bf16 = 0x3f80, two_bf16 = 0x4000, got_bf16 = 0xffff;
  std::uint16_t one_f16 = 0x3c00, two_f16 = 0x4000, got_f16 = 0xffff;
  double one = 1, two = 2, got = -1, lse = -1;
  const auto ask = [](void* x, void* y, void* to, DType dtype,
                      const std::optional<Tensor>& lse_to) {
    Attention a;
    a.q = a.k = Tensor::packed(x, dtype, {1, 1, 1, 1});
    a.v = Tensor::packed(y, dtype, {1, 1, 1, 1});
    forward({}, a, Tensor::packed(to, dtype, {1, 1, 1, 1}), lse_to);
  };
  ask(&one_bf16, &two_bf16, &got_bf16, DType::kBFloat16, std::nullopt);
  EXPECT_EQ(got_bf16, two_bf16);
  ask(&one_f16, &two_f16, &got_f16, DType::kFloat16, std::nullopt);
  EXPECT_EQ(got_f16, two_f16);
  ask(&one, &two, &got, DType::kFloat64, Tensor::packed(&lse, DType::kFloat64, {1, 1, 1}));
  EXPECT_NEAR(got, 2, 8 * 0x1p-53);
  EXPECT_NEAR(lse, 1, 8 * 0x1p-53);
}

// ---- what may be left out ----

TEST(Answers, lse_and_gradients_are_optional_and_absent_cotangents_are_zeros) {
  Call all(2, 33, 40, 4, 2, 16);
  all.run();
  Call c(2, 33, 40, 4, 2, 16);
  forward({}, c.a, c.out);
  expect_same_bits(c.out, all.out);
  backward({}, c.a, all.out, all.lse, all.dout, all.dlse, {{}, c.dk, {}, {}, {}, {}});
  expect_same_bits(c.dk, all.dk);
  for (const float x : c.dq.values()) ASSERT_TRUE(std::isnan(x)) << "dq was not asked for";
  backward({}, c.a, all.out, all.lse, all.dout, all.dlse, {});

  Call absent(2, 33, 40, 4, 2, 16), zeros(2, 33, 40, 4, 2, 16);
  for (std::int64_t n = 0; n < zeros.dlse.size(); ++n) zeros.dlse.at(n) = 0;
  zeros.run();
  absent.run();
  backward({}, absent.a, absent.out, absent.lse, absent.dout, {}, absent.gradients());
  expect_same_bits(absent, zeros);
  for (std::int64_t n = 0; n < zeros.dout.size(); ++n) zeros.dout.at(n) = 0;
  zeros.dlse.wave(5);
  zeros.run();
  backward({}, absent.a, absent.out, absent.lse, {}, absent.dlse, absent.gradients());
  expect_same_bits(absent.dq, zeros.dq);
  expect_same_bits(absent.dk, zeros.dk);
  for (std::int64_t n = 0; n < absent.dv.size(); ++n) ASSERT_EQ(absent.dv.at(n), 0);
}

// ---- where tensors lie ----

TEST(Answers, strides_of_inputs_and_outputs_change_no_bit_and_nothing_between_is_written) {
  Call packed(2, 30, 50, 4, 2, 16), strided(2, 30, 50, 4, 2, 16);
  packed.run();
  // (B, H, S, D) seen as (B, S, H, D); rows with gaps; rows backwards; the last axis first.
  strided.q = packed.q.with_strides({30 * 4 * 16, 16, 30 * 16, 1});
  strided.k = packed.k.with_strides({50 * 2 * 20, 2 * 20, 20, 1});
  strided.v = packed.v.with_strides({50 * 2 * 16, -2 * 16, 16, 1});
  strided.dout = packed.dout.with_strides({1, 2, 60, 240});
  strided.out = Numbers({2, 30, 4, 16}, {1, 2, 60, 240});
  strided.dq = Numbers({2, 30, 4, 16}, {30 * 4 * 17, 4 * 17, 17, 1});
  strided.dk = Numbers({2, 50, 2, 16}, {-50 * 2 * 16, 2 * 16, 16, 1});
  strided.dv = Numbers({2, 50, 2, 16}, {50 * 2 * 32, 2 * 32, 32, 2});
  strided.lse = Numbers({2, 4, 30}, {1, 60, 2});
  strided.point();
  strided.run();
  expect_same_bits(strided, packed);
  for (const Numbers* written :
       {&strided.out, &strided.lse, &strided.dq, &strided.dk, &strided.dv}) {
    EXPECT_TRUE(written->surroundings_untouched());
  }
}

TEST(Answers, a_stride_of_zero_repeats_a_tensor) {
  Call repeated(3, 20, 30, 2, 2, 8), copied(3, 20, 30, 2, 2, 8);
  repeated.k = Numbers({3, 30, 2, 8}, {0, 16, 8, 1});
  repeated.k.wave(6);  // the last writer of each element stays
  copied.k = repeated.k.with_strides({});
  repeated.point(), copied.point();
  repeated.run(), copied.run();
  expect_same_bits(repeated, copied);
}

// out and a gradient may lie in one allocation, side by side and interleaved.
TEST(Answers, outputs_may_interleave_as_long_as_they_share_no_element) {
  Call apart(1, 20, 20, 2, 2, 8), mixed(1, 20, 20, 2, 2, 8);
  apart.run();
  std::vector<float> memory(3 * 20 * 2 * 8, std::nanf(""));
  const auto third = [&memory](int n) {
    Tensor t = Tensor::packed(memory.data() + n, DType::kFloat32, {1, 20, 2, 8});
    for (std::int64_t& stride : t.stride) stride *= 3;
    return t;
  };
  forward({}, mixed.a, mixed.out, mixed.lse);
  backward({}, mixed.a, mixed.out, mixed.lse, mixed.dout, mixed.dlse,
           {third(0), third(1), third(2), {}, {}, {}});
  for (std::int64_t n = 0; n < apart.dq.size(); ++n) {
    const auto at = static_cast<std::size_t>(3 * n);
    ASSERT_EQ(memory[at], apart.dq.at(n));
    ASSERT_EQ(memory[at + 1], apart.dk.at(n));
    ASSERT_EQ(memory[at + 2], apart.dv.at(n));
  }
}

TEST(Answers, packed_sequences_are_answered_as_each_alone) {
  Call one(1, 5, 9, 2, 1, 8), other(1, 12, 3, 2, 1, 8);
  Numbers q({17, 2, 8}), k({12, 1, 8}), v({12, 1, 8}), out({17, 2, 8}), lse({2, 17});
  const auto put = [](const Numbers& from, Numbers& to, std::int64_t first) {
    for (std::int64_t n = 0; n < from.size(); ++n) to.at(first + n) = from.at(n);
  };
  put(one.q, q, 0), put(other.q, q, 5 * 16);
  put(one.k, k, 0), put(other.k, k, 9 * 8);
  put(one.v, v, 0), put(other.v, v, 9 * 8);
  std::int32_t cu_q[] = {0, 5, 17};
  std::int64_t cu_k[] = {0, 9, 12};
  Attention a;
  a.q = q, a.k = k, a.v = v;
  a.cu_seqlens_q = Tensor::packed(cu_q, DType::kInt32, {3});
  a.cu_seqlens_k = Tensor::packed(cu_k, DType::kInt64, {3});
  for (Attention* x : {&a, &one.a, &other.a}) x->causal = Causal::kBottomRight;
  forward({}, a, out, lse);
  one.run(), other.run();
  for (std::int64_t n = 0; n < out.size(); ++n) {
    ASSERT_EQ(out.at(n), n < 5 * 16 ? one.out.at(n) : other.out.at(n - 5 * 16));
  }
  for (std::int64_t h = 0; h < 2; ++h) {
    for (std::int64_t r = 0; r < 17; ++r) {
      ASSERT_EQ(lse.at(h * 17 + r), r < 5 ? one.lse.at(h * 5 + r) : other.lse.at(h * 12 + r - 5));
    }
  }
}

// ---- nothing ----

TEST(Answers, sizes_of_nothing_give_empty_results_and_need_no_memory) {
  const auto empty = [](Call c) {
    for (Tensor* t : {&c.a.q, &c.a.k, &c.a.v}) {
      if (t->elements() == 0) t->data = nullptr;
    }
    EXPECT_NO_THROW(c.run());
    return c;
  };
  empty(Call(0, 3, 4, 2, 1, 8));
  empty(Call(2, 0, 4, 2, 1, 8));
  empty(Call(2, 3, 4, 0, 0, 8));

  const Call no_keys = empty(Call(2, 3, 0, 2, 1, 8));
  for (const float x : no_keys.out.values()) ASSERT_EQ(x, 0);
  for (const float x : no_keys.lse.values()) ASSERT_EQ(x, -kInf);
  for (const float x : no_keys.dq.values()) ASSERT_EQ(x, 0);

  const Call no_queries = empty(Call(2, 0, 4, 2, 1, 8));
  for (const float x : no_queries.dk.values()) ASSERT_EQ(x, 0);
  for (const float x : no_queries.dv.values()) ASSERT_EQ(x, 0);

  // Head dim 0: every score is 0.
  const Call no_dim = empty(Call(1, 2, 4, 1, 1, 0));
  expect_near(no_dim.lse, {std::log(4.0), std::log(4.0)}, kRounding);
}

TEST(Answers, a_row_that_sees_nothing_is_zero_and_its_neighbours_are_not_disturbed) {
  Call c(1, 6, 4, 1, 1, 8), less(1, 4, 4, 1, 1, 8);
  c.a.causal = less.a.causal = Causal::kBottomRight;  // rows 0 and 1 of six come before every key
  for (std::int64_t n = 0; n < less.q.size(); ++n) {
    less.q.at(n) = c.q.at(n + 16);
    less.dout.at(n) = c.dout.at(n + 16);
  }
  for (std::int64_t n = 0; n < 4; ++n) less.dlse.at(n) = c.dlse.at(n + 2);
  c.run(), less.run();
  for (std::int64_t n = 0; n < 16; ++n) {
    EXPECT_EQ(c.out.at(n), 0);
    EXPECT_EQ(c.dq.at(n), 0);
  }
  EXPECT_EQ(c.lse.at(0), -kInf);
  EXPECT_EQ(c.lse.at(1), -kInf);
  expect_same_bits(c.dk, less.dk);
  expect_same_bits(c.dv, less.dv);
}

}  // namespace
}  // namespace onefold::test
