// Numbers that are none, and numbers at the ends of the range, anywhere in any question: what is
// not finite reaches the rows that see it and no other, and what is finite stays so.

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "reference/reference.h"
#include "tests/cpu/backend.h"
#include "tests/cpu/bounds.h"
#include "tests/cpu/question.h"

namespace onefold::test {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

class SpecialValues : public Backend {};

// A few elements of `t` become one of `values`.
void sprinkle(Question& x, const char* name, Array& t, const std::vector<double>& values,
              Random& random) {
  if (t.elements() == 0) return;
  const int count = random.integer(1, 3);
  for (int n = 0; n < count; ++n) {
    const double value = values[random.bits() % values.size()];
    const auto at =
        static_cast<std::int64_t>(random.bits() % static_cast<std::uint64_t>(t.elements()));
    t.set(at, value);
    x.text += concat(" ", name, "[", at, "]=", t.get(at));
  }
}

bool same_kind(double got, double want) { return std::isfinite(got) == std::isfinite(want); }

void expect_same_kind(const char* name, const Array& got, const reference::Array& want) {
  for (std::int64_t n = 0; n < got.elements(); ++n) {
    ASSERT_TRUE(same_kind(got.get(n), want.data[static_cast<std::size_t>(n)]))
        << name << "[" << n << "] is " << got.get(n) << ", exactly "
        << want.data[static_cast<std::size_t>(n)];
  }
}

TEST_F(SpecialValues, what_is_not_finite_reaches_the_rows_that_see_it_and_no_other) {
  for_random_cases(affordable(3000), [](Random& random) {
    Question x = draw_question(random, 5e4);
    draw_cotangents(x, random);
    const std::vector<double> none{kNaN, kInfinity, -kInfinity};
    if (random.chance(0.3)) sprinkle(x, "q", x.q, none, random);
    if (random.chance(0.3)) sprinkle(x, "k", x.k, none, random);
    if (random.chance(0.3)) sprinkle(x, "v", x.v, none, random);
    if (random.chance(0.2)) sprinkle(x, "dout", x.dout, none, random);
    if (random.chance(0.2)) sprinkle(x, "dlse", x.dlse, none, random);
    if (x.a.bias && random.chance(0.4)) sprinkle(x, "bias", x.bias, none, random);
    if (x.a.sinks && random.chance(0.6)) sprinkle(x, "sinks", x.sinks, none, random);
    if (x.a.alibi_slopes && random.chance(0.4)) sprinkle(x, "slopes", x.slopes, {kNaN}, random);
    SCOPED_TRACE(x.text);
    HostileContext context(random);
    const Answer answer = run_forward(context.context, x, random);
    const reference::Forward want = reference::forward(x.a);
    expect_same_kind("lse", answer.lse, want.lse);
    expect_same_kind("out", answer.out, want.out);
    if (HasFatalFailure()) return;
    const Derived got = run_backward(context.context, x, answer, {}, random);
    const reference::Backward g = reference::backward(x.a, x.dout.tensor(), x.dlse.tensor());
    expect_same_kind("dq", *got.dq, g.dq);
    expect_same_kind("dk", *got.dk, g.dk);
    expect_same_kind("dv", *got.dv, g.dv);
    if (got.dbias) expect_same_kind("dbias", *got.dbias, *g.dbias);
    if (got.dslopes) expect_same_kind("dslopes", *got.dslopes, *g.dslopes);
    if (got.dsinks) expect_same_kind("dsinks", *got.dsinks, *g.dsinks);
  });
}

// However a row comes to see no key: its sink, if it is one, is all there is.
TEST_F(SpecialValues, a_row_that_sees_its_sink_alone_is_that_sink) {
  enum Way { kNoKeys, kMask, kBias, kWindow, kLongMask, kLongWindow, kWays };
  const double sinks[] = {0.5, -3, 700, -1e30, 2e38, 3e38, -3e38, -kInfinity, kInfinity, kNaN};
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat64}) {
    for (int n = 0; n < kWays * static_cast<int>(std::size(sinks)) * 4; ++n) {
      const int way = n / 4 % kWays;
      const double sink = sinks[n / 4 / kWays];
      const bool cap = n % 2 != 0, drop = n % 4 >= 2;
      Random random(static_cast<std::uint64_t>(n));
      const bool many = way == kLongMask || way == kLongWindow;
      Question x;
      x.dtype = dtype;
      x.heads = 2;
      x.dim = x.dim_v = 16;
      x.q_extent = many ? 1 : 5;
      x.k_extent = way == kNoKeys ? 0 : many ? 2100 : 7;
      x.q_lengths = x.q_used = {x.q_extent};
      x.k_lengths = x.k_used = {x.k_extent};
      draw_inputs(x, random);
      draw_cotangents(x, random);
      x.a.q = x.q.tensor(), x.a.k = x.k.tensor(), x.a.v = x.v.tensor();
      if (cap) x.a.softcap = 2;
      if (drop) x.a.dropout_p = n % 8 >= 6 ? 1 : 0.5;
      x.sinks = Array(DType::kFloat32, {2}, Layout::kPacked, random);
      x.sinks.fill([&] { return sink; });
      x.a.sinks = x.sinks.tensor();
      if (way == kMask || way == kLongMask) {
        x.mask = Array(DType::kBool, {x.k_extent}, Layout::kPacked, random);
        x.mask.fill([] { return 0.0; });
        x.a.mask = x.mask.tensor();
      }
      if (way == kBias) {
        x.bias = Array(DType::kFloat32, {x.q_extent, 1}, Layout::kPacked, random);
        x.bias.fill([] { return -kInfinity; });
        x.a.bias = x.bias.tensor();
      }
      if (way == kWindow || way == kLongWindow) x.a.window_right = -x.k_extent;
      SCOPED_TRACE(concat("way ", way, " sink ", sink, cap ? " softcap" : "", " dropout ",
                          x.a.dropout_p, " ", name(dtype)));
      HostileContext context(random);
      const Answer answer = run_forward(context.context, x, random);
      const Derived got = run_backward(context.context, x, answer, {}, random);
      const bool number = std::isfinite(sink) || sink == -kInfinity;
      const double stored = x.sinks.get(0);
      double dlse[2] = {};
      for (std::int64_t at = 0; at < 2 * x.q_extent; ++at) {
        dlse[at / x.q_extent] += x.dlse.get(at);
        const double lse = answer.lse.get(at);
        if (!number) {
          ASSERT_TRUE(std::isnan(lse)) << lse;
        } else if (sink == -kInfinity) {
          ASSERT_EQ(lse, sink);
        } else {
          ASSERT_NEAR(lse, stored, 4 * 0x1p-24 * std::abs(stored));
        }
      }
      answer.out.each([&](std::int64_t at, std::int64_t) {
        const double out = answer.out.get(at);
        ASSERT_TRUE(number || x.a.dropout_p == 1 ? out == 0 : std::isnan(out)) << out;
      });
      for (const Array* gradient : {&*got.dq, &*got.dk, &*got.dv}) {
        gradient->each([&](std::int64_t at, std::int64_t) { ASSERT_EQ(gradient->get(at), 0); });
      }
      for (std::int64_t h = 0; h < 2; ++h) {
        const double dsink = got.dsinks->get(h);
        if (!number) {
          ASSERT_TRUE(std::isnan(dsink)) << dsink;
        } else {
          // P is 1 within the rounding of an lse that is not weighed again.
          const double exact = sink == -kInfinity ? 0 : dlse[h];
          ASSERT_NEAR(dsink, exact, 0x1p-12 * (std::abs(exact) + 1));
        }
      }
      if (HasFatalFailure()) return;
    }
  }
}

// One sequence, head dims 16, two key/value heads and two query heads for each.
Question few_rows(DType dtype, std::int64_t queries, std::int64_t keys, Random& random) {
  Question x;
  x.dtype = dtype;
  x.heads = 4, x.kv_heads = 2;
  x.dim = x.dim_v = 16;
  x.q_extent = queries, x.k_extent = keys;
  x.q_lengths = x.q_used = {queries};
  x.k_lengths = x.k_used = {keys};
  draw_inputs(x, random);
  draw_cotangents(x, random);
  x.a.q = x.q.tensor(), x.a.k = x.k.tensor(), x.a.v = x.v.tensor();
  return x;
}

// Every element of out is off by at most `most_error` of the exact one.
template <class MostError>
void expect_out(const Question& x, Random& random, const MostError& most_error) {
  HostileContext context(random);
  const Answer answer = run_forward(context.context, x, random);
  const reference::Forward want = reference::forward(x.a);
  answer.out.each([&](std::int64_t at, std::int64_t) {
    const double exact = want.out.data[static_cast<std::size_t>(at)];
    ASSERT_NEAR(answer.out.get(at), exact, most_error(exact));
  });
}

// Decoding, splits, tiles; each row ends in double, one after the other in the same workspace.
TEST_F(SpecialValues, rows_that_are_done_again_are_right_whatever_path_they_took) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const std::int64_t queries : {1, 4, 5, 8, 9, 30}) {
      for (const std::int64_t keys : {3, 1100}) {
        Random random(static_cast<std::uint64_t>(queries * keys));
        Question x = few_rows(dtype, queries, keys, random);
        x.bias = Array(DType::kFloat32, {1}, Layout::kPacked, random);
        x.bias.fill([] { return std::numeric_limits<float>::lowest(); });
        x.a.bias = x.bias.tensor();
        SCOPED_TRACE(concat(name(dtype), " ", queries, " ", keys));
        expect_out(x, random, [dtype](double exact) {
          return 1.01 * unit_of(dtype) * std::abs(exact) + 1e-9;
        });
        if (HasFailure()) return;
      }
    }
  }
}

TEST_F(SpecialValues, a_mean_of_values_at_the_end_of_the_range_is_finite) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    const double most = dtype == DType::kFloat16    ? 65504
                        : dtype == DType::kBFloat16 ? 0x1.FEp127
                                                    : std::numeric_limits<float>::max();
    for (const std::int64_t queries : {1, 4, 5, 8, 9, 30}) {
      for (const std::int64_t keys : {2, 65, 1100}) {
        Random random(static_cast<std::uint64_t>(queries * keys));
        Question x = few_rows(dtype, queries, keys, random);
        const bool same = random.chance(0.5);
        x.v.fill([&] { return same || random.chance(0.5) ? most : -most; });
        SCOPED_TRACE(concat(name(dtype), " ", queries, " ", keys));
        // Scores of 16 products round, so weights do by 2^-20, and the mean with them.
        expect_out(x, random, [&](double) { return (0x1p-18 + unit_of(dtype)) * most; });
        if (HasFailure()) return;
      }
    }
  }
}

}  // namespace
}  // namespace onefold::test
