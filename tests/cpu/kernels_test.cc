// Forward and backward against the oracle: options, shapes and layouts drawn together, every
// element within its a priori bound.

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "reference/reference.h"
#include "tests/cpu/backend.h"
#include "tests/cpu/bounds.h"
#include "tests/cpu/question.h"

namespace onefold::test {
namespace {

class Kernels : public Backend {};

// How many numbers make one element of a gradient, at most.
std::int64_t rows_of_a_key(const Question& x) { return x.longest(x.q_used) * x.group(); }
std::int64_t all_pairs(const Question& x) {
  std::int64_t pairs = 0;
  for (std::size_t b = 0; b < x.q_used.size(); ++b) pairs += x.q_used[b] * x.k_used[b];
  return pairs * x.heads;
}

void expect_forward(const Question& x, const Answer& answer) {
  const reference::Forward want = reference::forward(x.a);
  const reference::ForwardTerms terms = reference::forward_terms(x.a);
  const auto sizes = [&](bool of_lse) {
    return sizes_of(x.a, x.dim, x.dim_v, x.longest(x.k_used), 0, of_lse);
  };
  expect_within_bounds("out", x.a, answer.out, want.out, terms.out, sizes(false));
  expect_within_bounds("lse", x.a, answer.lse, want.lse, terms.lse, sizes(true));
  EXPECT_TRUE(answer.out.surroundings_untouched()) << "out";
  EXPECT_TRUE(answer.lse.surroundings_untouched()) << "lse";
}

void expect_backward(const Question& x, const Derived& got, const Wanted& wanted) {
  std::optional<Tensor> dout, dlse;
  if (wanted.dout) dout = x.dout.tensor();
  if (wanted.dlse) dlse = x.dlse.tensor();
  const reference::Backward want = reference::backward(x.a, dout, dlse);
  const reference::BackwardTerms terms = reference::backward_terms(x.a, dout, dlse);
  const auto check = [&](const char* name, const std::optional<Array>& array,
                         const reference::Array& exact, const reference::Array& term,
                         std::int64_t summed) {
    if (!array) return;
    const Sizes sizes = sizes_of(x.a, x.dim, x.dim_v, x.longest(x.k_used), summed);
    expect_within_bounds(name, x.a, *array, exact, term, sizes);
    EXPECT_TRUE(array->surroundings_untouched()) << name;
  };
  check("dq", got.dq, want.dq, terms.dq, x.longest(x.k_used));
  check("dk", got.dk, want.dk, terms.dk, rows_of_a_key(x));
  check("dv", got.dv, want.dv, terms.dv, rows_of_a_key(x));
  if (got.dbias) check("dbias", got.dbias, *want.dbias, *terms.dbias, all_pairs(x));
  if (got.dslopes) check("dslopes", got.dslopes, *want.dslopes, *terms.dslopes, all_pairs(x));
  if (got.dsinks) check("dsinks", got.dsinks, *want.dsinks, *terms.dsinks, all_pairs(x));
}

void run_and_check(Question& x, Random& random) {
  SCOPED_TRACE(x.text);
  draw_cotangents(x, random);
  HostileContext context(random);
  const Answer answer = run_forward(context.context, x, random);
  expect_forward(x, answer);
  if (::testing::Test::HasFatalFailure()) return;
  const Wanted wanted = draw_wanted(random);
  expect_backward(x, run_backward(context.context, x, answer, wanted, random), wanted);
}

TEST_F(Kernels, random_questions_are_answered_within_their_bounds) {
  for_random_cases(affordable(400), [](Random& random) {
    Question x = draw_question(random, 4e5);
    run_and_check(x, random);
  });
}

// Larger ones: several key tiles, query tiles, items and heads at once.
TEST_F(Kernels, larger_questions_are_answered_within_their_bounds) {
  for_random_cases(affordable(25), [](Random& random) {
    Question x = draw_question(random, 8e6);
    run_and_check(x, random);
  });
}

// Few rows against many keys, whose stretches are attended to apart and merged.
TEST_F(Kernels, long_decodes_are_answered_within_their_bounds) {
  for_random_cases(affordable(30), [](Random& random) {
    const std::int64_t dims[] = {1, 8, 16, 24, 32, 64};
    Question x;
    x.dtype = draw_float(random);
    x.kv_heads = random.integer(1, 3);
    x.heads = x.kv_heads * random.integer(1, 4);
    x.dim = dims[random.integer(0, 5)];
    x.dim_v = random.chance(0.7) ? x.dim : dims[random.integer(0, 5)];
    x.batch = random.integer(1, 2);
    x.q_lengths.assign(static_cast<std::size_t>(x.batch), random.integer(1, 4));
    x.k_lengths.assign(static_cast<std::size_t>(x.batch), random.integer(900, 2600));
    x.q_extent = x.q_lengths[0];
    x.k_extent = x.k_lengths[0];
    shrink(x, 2e6);
    draw_used(x, random);
    draw_inputs(x, random);
    x.a.q = x.q.tensor(), x.a.k = x.k.tensor(), x.a.v = x.v.tensor();
    draw_score_options(x, random);
    draw_visibility(x, random);
    if (random.chance(0.3)) x.a.window_left = random.integer(0, 1500);
    x.text = describe(x);
    run_and_check(x, random);
  });
}

// Queries enough for several chunks of dK and dV.
TEST_F(Kernels, long_query_sequences_are_answered_within_their_bounds) {
  for_random_cases(affordable(10), [](Random& random) {
    Question x;
    x.dtype = draw_float(random);
    x.heads = random.integer(1, 2);
    x.dim = x.dim_v = random.integer(1, 12);
    x.q_extent = random.integer(513, 1700);
    x.k_extent = random.integer(1, 150);
    x.q_lengths = {x.q_extent};
    x.k_lengths = {x.k_extent};
    draw_used(x, random);
    draw_inputs(x, random);
    x.a.q = x.q.tensor(), x.a.k = x.k.tensor(), x.a.v = x.v.tensor();
    draw_score_options(x, random);
    draw_visibility(x, random);
    x.text = describe(x);
    run_and_check(x, random);
  });
}

// Head dims at and beside every vector and panel border, both sides drawn apart.
TEST_F(Kernels, every_head_dim_works) {
  Random random(base_seed() + 5);
  for (std::int64_t dim = 1; dim <= 576; dim += dim < 68 ? 1 : random.integer(1, 90)) {
    for (const DType dtype :
         {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64}) {
      Question x;
      x.dtype = dtype;
      x.dim = dim;
      x.dim_v = random.chance(0.5) ? dim : random.integer(1, 80);
      x.q_extent = random.integer(1, 20);
      x.k_extent = random.integer(1, 20);
      x.q_lengths = {x.q_extent};
      x.k_lengths = {x.k_extent};
      draw_used(x, random);
      draw_inputs(x, random);
      x.a.q = x.q.tensor(), x.a.k = x.k.tensor(), x.a.v = x.v.tensor();
      x.text = describe(x);
      run_and_check(x, random);
      if (HasFailure()) return;
    }
  }
}

// All 16 patterns of axes that are 1 or full, in every dtype, with the gradient.
TEST_F(Kernels, every_broadcast_of_bias_and_mask_works) {
  for (int pattern = 0; pattern < 16; ++pattern) {
    for (const DType dtype :
         {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64}) {
      SCOPED_TRACE(concat("pattern ", pattern));
      Random random(base_seed() + 100 + static_cast<std::uint64_t>(pattern));
      Question x;
      x.dtype = dtype == DType::kFloat64 ? dtype : DType::kFloat32;
      x.batch = 2;
      x.kv_heads = 2, x.heads = 4;
      x.dim = x.dim_v = 5;
      x.q_extent = random.integer(2, 70);
      x.k_extent = random.integer(2, 70);
      x.q_lengths.assign(2, x.q_extent);
      x.k_lengths.assign(2, x.k_extent);
      draw_used(x, random);
      draw_inputs(x, random);
      x.a.q = x.q.tensor(), x.a.k = x.k.tensor(), x.a.v = x.v.tensor();
      Shape shape{2, 4, x.q_extent, x.k_extent};
      for (std::size_t axis = 0; axis < 4; ++axis) {
        if (pattern & (1 << axis)) shape[axis] = 1;
      }
      x.bias = Array(dtype, shape, x.read, random);
      x.bias.fill([&] { return random.normal(); });
      x.mask = Array(DType::kBool, shape, x.read, random);
      x.mask.fill([&] { return random.chance(0.8) ? 1.0 : 0.0; });
      x.a.bias = x.bias.tensor();
      if (random.chance(0.5)) x.a.mask = x.mask.tensor();
      x.text = describe(x);
      run_and_check(x, random);
      if (HasFailure()) return;
    }
  }
}

}  // namespace
}  // namespace onefold::test
