// merge_states: answers over disjoint sets of keys become the answer over all of them.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "onefold/attention.h"
#include "tests/cpp_api/numbers.h"

namespace onefold::test {
namespace {

// (N, R, D) and (N, R): rows of D numbers, N parts.
struct Parts {
  Numbers outs, lses, out, lse;
  Parts(std::int64_t parts, std::int64_t rows, std::int64_t dim)
      : outs({parts, rows, dim}), lses({parts, rows}), out({rows, dim}), lse({rows}) {}
  void merge() { merge_states({}, outs, lses, out, lse); }
};

TEST(MergeStates, two_parts_by_hand) {
  Parts p(2, 1, 2);
  p.outs = Numbers::of({2, 1, 2}, {8, 0, 4, 1});
  p.lses = Numbers::of({2, 1}, {0, std::log(3.0f)});
  p.merge();
  const double tolerance = 16 * 8 * kUnit;  // the inputs' rounding, times values up to 8
  expect_near(p.out, {5, 0.75}, tolerance);
  expect_near(p.lse, {std::log(4.0)}, tolerance);
}

// Parts of a whole: keys in three stretches, the sink with the first.
TEST(MergeStates, stretches_of_keys_make_the_whole) {
  constexpr std::int64_t kRows = 7, kDim = 4;
  const std::int64_t cuts[] = {0, 5, 6, 30};
  Call whole(1, kRows, 30, 1, 1, kDim);
  const Numbers sinks = Numbers::of({1}, {0.5f});
  whole.a.sinks = sinks;
  whole.run();
  Parts p(3, kRows, kDim);
  for (int n = 0; n < 3; ++n) {
    Attention a = whole.a;
    if (n > 0) a.sinks.reset();
    for (Tensor* t : {&a.k, &a.v}) {
      t->data = static_cast<float*>(t->data) + cuts[n] * kDim;
      t->shape[1] = cuts[n + 1] - cuts[n];
    }
    Tensor out = p.outs, lse = p.lses;
    out.data = static_cast<float*>(out.data) + n * kRows * kDim;
    lse.data = static_cast<float*>(lse.data) + n * kRows;
    out.rank = 4, out.shape = {1, kRows, 1, kDim}, out.stride = {0, kDim, kDim, 1};
    lse.rank = 3, lse.shape = {1, 1, kRows}, lse.stride = {0, 0, 1};
    forward({}, a, out, lse);
  }
  p.merge();
  // Values and scores are below 2; sums of 30 terms, a few operations each, on both sides.
  const double tolerance = 2 * (2 * 30 + 16) * kUnit;
  for (std::int64_t n = 0; n < p.out.size(); ++n) {
    EXPECT_NEAR(p.out.at(n), whole.out.at(n), tolerance);
  }
  for (std::int64_t r = 0; r < kRows; ++r) {
    EXPECT_NEAR(p.lse.at(r), whole.lse.at(r), tolerance * 4);  // lse is below 4
  }
}

// Its out is never read: it holds NaN.
TEST(MergeStates, an_empty_part_changes_no_bit_and_empty_parts_are_empty) {
  Parts some(2, 70, 3), more(4, 70, 3);
  some.outs.wave(1), some.lses.wave(2);
  for (std::int64_t n = 0; n < more.lses.size(); ++n) more.lses.at(n) = -kInf;
  for (int part = 0; part < 2; ++part) {
    const int to = part == 0 ? 1 : 3;
    for (std::int64_t n = 0; n < 210; ++n) {
      more.outs.at(to * 210 + n) = some.outs.at(part * 210 + n);
    }
    for (std::int64_t n = 0; n < 70; ++n) more.lses.at(to * 70 + n) = some.lses.at(part * 70 + n);
  }
  some.merge(), more.merge();
  expect_same_bits(more.out, some.out);
  expect_same_bits(more.lse, some.lse);

  Parts none(2, 70, 3);
  for (std::int64_t n = 0; n < none.lses.size(); ++n) none.lses.at(n) = -kInf;
  none.merge();
  for (const float x : none.out.values()) ASSERT_EQ(x, 0);
  for (const float x : none.lse.values()) ASSERT_EQ(x, -kInf);
}

TEST(MergeStates, one_part_is_itself_and_no_part_is_nothing) {
  Parts one(1, 5, 3);
  one.outs.wave(1), one.lses.wave(2);
  one.merge();
  for (std::int64_t n = 0; n < one.out.size(); ++n) ASSERT_EQ(one.out.at(n), one.outs.at(n));
  for (std::int64_t n = 0; n < one.lse.size(); ++n) {
    ASSERT_NEAR(one.lse.at(n), one.lses.at(n), 2 * kUnit);
  }
  Parts no_rows(3, 0, 3);
  EXPECT_NO_THROW(no_rows.merge());
}

TEST(MergeStates, magnitudes_far_apart_neither_overflow_nor_lose_the_larger) {
  Parts p(3, 2, 1);
  p.outs = Numbers::of({3, 2, 1}, {1, 1, 2, 2, 3, 3});
  p.lses = Numbers::of({3, 2}, {-3e4f, 1e30f, 3e4f, -1e30f, 0, 0});
  p.merge();
  EXPECT_EQ(p.out.at(0), 2);
  EXPECT_EQ(p.out.at(1), 1);
  EXPECT_EQ(p.lse.at(0), 3e4f);
  EXPECT_NEAR(p.lse.at(1), 1e30f, 2 * kUnit * 1e30);
}

TEST(MergeStates, strides_change_no_bit) {
  Parts packed(3, 70, 4), strided(3, 70, 4);
  packed.outs.wave(1), packed.lses.wave(2);
  strided.outs = packed.outs.with_strides({4, 12, 1});
  strided.lses = packed.lses.with_strides({1, -3});
  strided.out = Numbers({70, 4}, {1, 140});
  strided.lse = Numbers({70}, {2});
  packed.merge(), strided.merge();
  expect_same_bits(strided.out, packed.out);
  expect_same_bits(strided.lse, packed.lse);
  EXPECT_TRUE(strided.out.surroundings_untouched());
  EXPECT_TRUE(strided.lse.surroundings_untouched());
}

}  // namespace
}  // namespace onefold::test
