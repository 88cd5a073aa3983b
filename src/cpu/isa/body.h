// The table of one instruction set: included by exactly one translation unit per set, which names
// ONEFOLD_ISA and is compiled with the set's flags.
#pragma once

#include "cpu/bias_gradient.h"
#include "cpu/forward.h"

namespace onefold::cpu::ONEFOLD_ISA {

static bool in_double(const Problem& p) { return p.dtype == DType::kFloat64; }

static std::size_t backward_scratch(const Problem& p, const Tiles& t, const BackwardWants& wants,
                                    bool by_chunk, std::int64_t num_chunks) {
  const auto bytes = [&]<class R>(R) {
    Arena main(nullptr);
    BackwardScratch<R>(main, p, t, wants.dkv && !by_chunk, wants.dkv && !by_chunk && num_chunks > 1,
                       wants.bias_in_main_pass());
    Arena bias(nullptr);
    BackwardScratch<R>(bias, p, t, false, false, true);
    bias.take<R>(std::int64_t{t.keys} * kLanes<R>);
    return wants.dbias_broadcast && bias.used() > main.used() ? bias.used() : main.used();
  };
  return in_double(p) ? bytes(double{}) : bytes(float{});
}

static std::size_t chunk_bytes(const Problem& p) {
  return in_double(p) ? static_cast<std::size_t>(chunk_elements_of<double>(p)) * sizeof(double)
                      : static_cast<std::size_t>(chunk_elements_of<float>(p)) * sizeof(float);
}

static void forward(const ForwardCall& call, std::int64_t item, int worker) {
  in_double(*call.problem) ? forward_item<double>(call, item, worker)
                           : forward_item<float>(call, item, worker);
}
static void merge_split(const ForwardCall& call, std::int64_t split, int worker) {
  in_double(*call.problem) ? merge_split_item<double>(call, split, worker)
                           : merge_split_item<float>(call, split, worker);
}
static std::size_t partial_bytes(const Problem& p) {
  return in_double(p) ? Partial<double>::bytes(p) : Partial<float>::bytes(p);
}
static void backward(const BackwardCall& call, std::int64_t item, int worker) {
  in_double(*call.problem) ? backward_item<double>(call, item, worker)
                           : backward_item<float>(call, item, worker);
}
static void reduce_chunks(const BackwardCall& call, const Item& keys, int worker) {
  in_double(*call.problem) ? reduce_chunks_of<double>(call, keys, worker)
                           : reduce_chunks_of<float>(call, keys, worker);
}
static std::int64_t bias_items(const BackwardCall& call) {
  return in_double(*call.problem) ? BiasTiles<double>(call).count()
                                  : BiasTiles<float>(call).count();
}
static void bias_gradient(const BackwardCall& call, std::int64_t item, int worker) {
  in_double(*call.problem) ? bias_gradient_item<double>(call, item, worker)
                           : bias_gradient_item<float>(call, item, worker);
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

static constexpr Kernels kKernels{kLanes<float>,    kLanes<double>, forward_scratch_of,
                                  backward_scratch, chunk_bytes,    partial_bytes,
                                  not_decoding,     forward,        merge_split,
                                  backward,         reduce_chunks,  bias_items,
                                  bias_gradient,    fma_probe,      read_probe};

}  // namespace onefold::cpu::ONEFOLD_ISA
