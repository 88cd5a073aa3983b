// The table of one instruction set: included by exactly one translation unit per set, which names
// ONEFOLD_ISA and is compiled with the set's flags.
#pragma once

#include "cpu/bias_gradient.h"
#include "cpu/forward.h"

namespace onefold::cpu::ONEFOLD_ISA {

// Calls `function` with a value of the type that the products of a problem take. Where they take
// pairs, these kernels are asked for nothing else.
template <class Function>
inline auto with_operands(const Problem& p, Function&& function) {
  if constexpr (kHasPairs) {
    return function(Pair{});
  } else {
    return p.dtype == DType::kFloat64 ? function(double{}) : function(float{});
  }
}

static std::size_t forward_scratch(const Problem& p, const Tiles& t, std::int64_t tiles_per_item) {
  return with_operands(p, [&]<class X>(X) { return forward_scratch_of<X>(p, t, tiles_per_item); });
}

static std::size_t backward_scratch(const Problem& p, const Tiles& t, const BackwardWants& wants,
                                    bool by_chunk, std::int64_t num_chunks) {
  return with_operands(p, [&]<class X>(X) {
    Arena main(nullptr);
    BackwardScratch<X>(main, p, t, pass_tiles_of<SumOf<X>>(p, by_chunk ? 1 : num_chunks),
                       wants.dkv && !by_chunk, wants.dkv && !by_chunk && num_chunks > 1,
                       wants.bias_in_main_pass());
    Arena bias(nullptr);
    BackwardScratch<X>(bias, p, t, 1, false, false, true);
    bias.take<SumOf<X>>(std::int64_t{t.keys} * kLanes<SumOf<X>>);
    return wants.dbias_broadcast && bias.used() > main.used() ? bias.used() : main.used();
  });
}

static std::size_t chunk_bytes(const Problem& p) {
  return with_operands(p, [&]<class X>(X) {
    return static_cast<std::size_t>(chunk_elements_of<SumOf<X>>(p)) * sizeof(SumOf<X>);
  });
}

static void forward(const ForwardCall& call, std::int64_t item, int worker) {
  with_operands(*call.problem, [&]<class X>(X) { forward_item<X>(call, item, worker); });
}
static void merge_split(const ForwardCall& call, std::int64_t split, int worker) {
  with_operands(*call.problem, [&]<class X>(X) { merge_split_item<X>(call, split, worker); });
}
static std::size_t partial_bytes(const Problem& p) {
  return with_operands(p, [&]<class X>(X) { return Partial<SumOf<X>>::bytes(p); });
}
static void backward(const BackwardCall& call, std::int64_t item, int worker) {
  with_operands(*call.problem, [&]<class X>(X) { backward_item<X>(call, item, worker); });
}
static void reduce_chunks(const BackwardCall& call, const Item& keys, int worker) {
  with_operands(*call.problem, [&]<class X>(X) { reduce_chunks_of<SumOf<X>>(call, keys, worker); });
}
static std::int64_t bias_items(const BackwardCall& call) {
  return with_operands(*call.problem,
                       [&]<class X>(X) { return BiasTiles<SumOf<X>>(call).count(); });
}
static void bias_gradient(const BackwardCall& call, std::int64_t item, int worker) {
  with_operands(*call.problem, [&]<class X>(X) { bias_gradient_item<X>(call, item, worker); });
}

// Twelve independent chains of multiply-adds: enough to hide a latency of 4 or 5 on two ports.
static double fma_probe(std::int64_t rounds) {
  constexpr int kChains = 12;
  Vec<float> x[kChains];
  for (int i = 0; i < kChains; ++i) x[i] = splat(1.0f + static_cast<float>(i));
  const Vec<float> a = splat(0.999f), c = splat(0.001f);
  for (std::int64_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 16
    for (int i = 0; i < kChains; ++i) {
      x[i] = pinned(fma(x[i], a, c));
    }
  }
  Vec<float> sum{};
  for (int i = 0; i < kChains; ++i) sum += x[i];
  [[maybe_unused]] volatile float used = sum[0];
  return 2.0 * kChains * kWidth<float> * static_cast<double>(rounds);
}

// Front to back: several streams at once or asking ahead made it no faster.
static std::int64_t read_probe(const void* data, std::int64_t bytes) {
  using I = Int<float>;
  constexpr std::int64_t kVectors = 8, kStep = kVectors * kWidth<float>;
  const auto* from = static_cast<const I*>(data);
  const std::int64_t count = bytes / static_cast<std::int64_t>(sizeof(I)) / kStep * kStep;
  Vec<I> seen[kVectors]{};
  for (std::int64_t at = 0; at < count; at += kStep) {
#pragma GCC unroll 8
    for (std::int64_t i = 0; i < kVectors; ++i) seen[i] |= load(from + at + i * kWidth<float>);
  }
  for (std::int64_t i = 1; i < kVectors; ++i) seen[0] |= seen[i];
  [[maybe_unused]] volatile I used = seen[0][0];
  return count * static_cast<std::int64_t>(sizeof(I));
}

static constexpr Kernels kKernels{kLanes<float>, kLanes<double>, forward_scratch, backward_scratch,
                                  chunk_bytes,   partial_bytes,  not_decoding,    forward,
                                  merge_split,   backward,       reduce_chunks,   bias_items,
                                  bias_gradient, fma_probe,      read_probe};

}  // namespace onefold::cpu::ONEFOLD_ISA
