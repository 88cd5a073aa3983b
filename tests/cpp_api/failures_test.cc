// What leaves the public functions: an onefold::Error with one sentence, whatever went wrong
// inside.

#include <gtest/gtest.h>

#include <array>
#include <new>
#include <stdexcept>
#include <string>
#include <system_error>

#include "onefold/attention.h"

namespace onefold::test {
namespace {

// Fails like a machine that has nothing left to give.
template <class Failure>
struct Failing final : Executor {
  Failure failure;
  explicit Failing(Failure what) : failure(what) {}
  int concurrency() const override { return 2; }
  void parallel_for(std::int64_t, Body, void*) override { throw failure; }
};

struct Case {
  static constexpr int kRows = 8, kHeads = 2, kDim = 4;
  std::array<float, kRows * kHeads * kDim> numbers{}, result{};
  std::array<float, kRows * kHeads> lses{};

  static Tensor rows(void* data) {
    return Tensor::packed(data, DType::kFloat32, {1, kRows, kHeads, kDim});
  }
  Tensor lse() { return Tensor::packed(lses.data(), DType::kFloat32, {1, kHeads, kRows}); }
  Attention question() {
    Attention a;
    a.q = a.k = a.v = rows(numbers.data());
    return a;
  }
};

template <class Call>
void expect_runtime_error(const char* sentence, const Call& call) {
  try {
    call();
    ADD_FAILURE() << "no error: " << sentence;
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kRuntime);
    EXPECT_NE(std::string(error.what()).find(sentence), std::string::npos) << error.what();
  }
}

template <class Failure>
void expect_of_every_call(const char* sentence, const Failure& failure) {
  Case c;
  Failing<Failure> executor(failure);
  Context context;
  context.executor = &executor;
  Gradients gradients;
  std::array<float, Case::kRows * Case::kHeads * Case::kDim> dq{};
  gradients.dq = c.rows(dq.data());
  const Tensor out = c.rows(c.result.data());
  expect_runtime_error(sentence, [&] { forward(context, c.question(), out); });
  expect_runtime_error(sentence,
                       [&] { backward(context, c.question(), out, c.lse(), out, {}, gradients); });
  std::array<float, 200 * Case::kDim> parts{}, part_lses{}, merged{}, merged_lses{};
  const Tensor outs = Tensor::packed(parts.data(), DType::kFloat32, {2, 100, 4});
  const Tensor lses = Tensor::packed(part_lses.data(), DType::kFloat32, {2, 100});
  const Tensor to = Tensor::packed(merged.data(), DType::kFloat32, {100, 4});
  const Tensor to_lse = Tensor::packed(merged_lses.data(), DType::kFloat32, {100});
  expect_runtime_error(sentence, [&] { merge_states(context, outs, lses, to, to_lse); });
}

TEST(Errors, memory_that_is_not_there_is_an_error_of_ours) {
  expect_of_every_call("needs more memory than there is", std::bad_alloc());
  expect_of_every_call("needs more memory than can be addressed", std::length_error("vector"));
}

TEST(Errors, a_refusal_of_the_system_is_an_error_of_ours_and_says_which) {
  const auto again = std::make_error_code(std::errc::resource_unavailable_try_again);
  expect_of_every_call("the system refused: Resource temporarily", std::system_error(again));
}

TEST(Errors, what_the_callers_own_executor_throws_stays_what_it_is) {
  struct Mine : std::runtime_error {
    using std::runtime_error::runtime_error;
  };
  Case c;
  Failing<Mine> executor(Mine("mine"));
  Context context;
  context.executor = &executor;
  EXPECT_THROW(forward(context, c.question(), c.rows(c.result.data())), Mine);
}

}  // namespace
}  // namespace onefold::test
