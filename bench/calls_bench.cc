// What a call costs besides arithmetic: handing out work, planning, the smallest questions,
// merging. `onefold bench` measures the rest, beside what PyTorch has.

#include <benchmark/benchmark.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "cpu/thread_pool.h"
#include "onefold/attention.h"

namespace onefold {
namespace {

constexpr std::int64_t kHeads = 8, kDim = 64;

// One sequence of float32, filled with numbers of size one.
struct Question {
  std::vector<float> q, k, v, out;
  Attention attention;
  Tensor to;

  Question(std::int64_t queries, std::int64_t keys)
      : q(numbers(queries)), k(numbers(keys)), v(numbers(keys)), out(numbers(queries)) {
    const auto rows = [](std::vector<float>& memory, std::int64_t count) {
      return Tensor::packed(memory.data(), DType::kFloat32, {1, count, kHeads, kDim});
    };
    attention.q = rows(q, queries);
    attention.k = rows(k, keys);
    attention.v = rows(v, keys);
    attention.causal = Causal::kBottomRight;
    to = rows(out, queries);
  }

  static std::vector<float> numbers(std::int64_t rows) {
    std::vector<float> x(static_cast<std::size_t>(rows * kHeads * kDim));
    std::uint32_t state = 1;
    for (float& number : x) {
      state = state * 1664525u + 1013904223u;
      number = static_cast<float>(state >> 8) * 0x1p-23f - 1.0f;
    }
    return x;
  }
};

void hand_out_items(benchmark::State& state) {
  set_num_threads(static_cast<int>(state.range(0)));
  const auto pool = cpu::default_pool();
  for ([[maybe_unused]] auto _ : state) {
    pool->parallel_for(
        64, [](void*, std::int64_t idx, int) { benchmark::DoNotOptimize(idx); }, nullptr);
  }
  set_num_threads(0);
}
BENCHMARK(hand_out_items)->ArgName("threads")->Arg(1)->Arg(2)->Arg(4)->UseRealTime();

void plan_forward(benchmark::State& state) {
  const Question question(state.range(0), state.range(0));
  for ([[maybe_unused]] auto _ : state) {
    benchmark::DoNotOptimize(plan({}, question.attention, Direction::kForward));
  }
}
BENCHMARK(plan_forward)->ArgName("tokens")->Arg(1)->Arg(512)->Arg(16384);

void forward_small(benchmark::State& state) {
  const Question question(state.range(0), state.range(1));
  set_num_threads(1);
  for ([[maybe_unused]] auto _ : state) forward({}, question.attention, question.to);
  set_num_threads(0);
}
BENCHMARK(forward_small)
    ->ArgNames({"queries", "keys"})
    ->Args({1, 1})
    ->Args({1, 1024})
    ->Args({16, 16})
    ->Args({64, 64});

void backward_small(benchmark::State& state) {
  const Question question(state.range(0), state.range(0));
  std::vector<float> dout = Question::numbers(state.range(0)), dq = dout, dk = dout, dv = dout;
  std::vector<float> lse(static_cast<std::size_t>(kHeads * state.range(0)));
  const auto like = [&question](std::vector<float>& memory) {
    Tensor t = question.attention.q;
    t.data = memory.data();
    return t;
  };
  const Tensor row_sums = Tensor::packed(lse.data(), DType::kFloat32, {1, kHeads, state.range(0)});
  Gradients gradients;
  gradients.dq = like(dq);
  gradients.dk = like(dk);
  gradients.dv = like(dv);
  set_num_threads(1);
  forward({}, question.attention, question.to, row_sums);
  for ([[maybe_unused]] auto _ : state) {
    backward({}, question.attention, question.to, row_sums, like(dout), std::nullopt, gradients);
  }
  set_num_threads(0);
}
BENCHMARK(backward_small)->ArgName("tokens")->Arg(1)->Arg(16)->Arg(64);

void merge_parts(benchmark::State& state) {
  constexpr std::int64_t kRows = 4096;
  const std::int64_t parts = state.range(0);
  std::vector<float> outs = Question::numbers(parts * kRows / kHeads), out(kRows * kDim);
  std::vector<float> lses(static_cast<std::size_t>(parts * kRows), 0.5f), lse(kRows);
  set_num_threads(1);
  for ([[maybe_unused]] auto _ : state) {
    merge_states({}, Tensor::packed(outs.data(), DType::kFloat32, {parts, kRows, kDim}),
                 Tensor::packed(lses.data(), DType::kFloat32, {parts, kRows}),
                 Tensor::packed(out.data(), DType::kFloat32, {kRows, kDim}),
                 Tensor::packed(lse.data(), DType::kFloat32, {kRows}));
  }
  set_num_threads(0);
  state.SetBytesProcessed(state.iterations() * static_cast<std::int64_t>(outs.size()) * 4);
}
BENCHMARK(merge_parts)->ArgName("parts")->Arg(2)->Arg(8);

}  // namespace
}  // namespace onefold
