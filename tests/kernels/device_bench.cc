// Times the kernels on a CUDA device over the usual table of shapes, for the plan's own tiles and
// for others beside them. Not a unit test, since it needs a device.
//
//   device_bench [--dims 64,128] [--tokens 16384] [--rounds 5] [--tiles]
//
// --tiles also times tiles that the plan does not choose. bf16, hidden size 2048, TFLOP/s as
// 4 B H Sq Sk D, half when causal.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "cuda/attention.h"
#include "cuda/device.h"
#include "cuda/program.h"
#include "onefold/error.h"
#include "plan/cuda_plan.h"

namespace onefold::test {
namespace {

using Clock = std::chrono::steady_clock;

struct Options {
  std::vector<int> dims{64, 128, 256};
  std::int64_t tokens = 16384;
  int rounds = 5;
  bool tiles = false;
};

void synchronise() {
  const cuda::DeviceGuard guard(0);
  cuda::check(cuda::driver().cuStreamSynchronize(nullptr), "synchronise");
}

struct Buffer {
  std::shared_ptr<void> memory;
  explicit Buffer(std::size_t bytes) : memory(cuda::allocate(bytes, 0, nullptr)) {}
};

// bf16, about N(0, 1), from a short host pattern copied all over.
Buffer normal_buffer(std::int64_t elements) {
  static const std::vector<std::uint16_t> pattern = [] {
    std::vector<std::uint16_t> values(1 << 20);
    std::uint64_t state = 1;
    for (auto& value : values) {
      double sum = -6;
      for (int n = 0; n < 12; ++n) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        sum += double(state >> 40) * 0x1p-24;
      }
      value = float_to_bfloat16(float(sum));
    }
    return values;
  }();
  Buffer buffer(static_cast<std::size_t>(elements) * 2);
  const cuda::DeviceGuard guard(0);
  for (std::int64_t at = 0; at < elements;) {
    const std::int64_t count =
        std::min<std::int64_t>(elements - at, std::int64_t(pattern.size()) - 7 * (at % 13));
    cuda::check(
        cuda::driver().cuMemcpyAsync(
            reinterpret_cast<cuda::CUdeviceptr>(buffer.memory.get()) + at * 2,
            reinterpret_cast<cuda::CUdeviceptr>(pattern.data()), std::size_t(count) * 2, nullptr),
        "copy");
    at += count;
  }
  synchronise();
  return buffer;
}

struct Tile {
  int tile_q, tile_k, warps, stages, blocks;
  bool q_in_registers;
};

std::vector<Tile> candidates(int dim) {
  if (dim == 64) {
    return {{128, 64, 4, 2, 2, false},  {128, 64, 4, 2, 2, true},  {128, 64, 4, 1, 2, true},
            {128, 128, 4, 1, 2, false}, {128, 64, 4, 2, 3, false}, {64, 64, 4, 2, 4, true},
            {256, 64, 8, 2, 1, true},   {128, 64, 8, 2, 2, true},  {128, 32, 4, 2, 2, true}};
  }
  if (dim == 128) {
    return {{128, 64, 4, 2, 2, false}, {128, 64, 4, 1, 2, false}, {128, 32, 4, 2, 2, false},
            {64, 64, 4, 1, 3, false},  {64, 64, 4, 2, 2, true},   {128, 64, 8, 2, 1, false},
            {128, 64, 8, 1, 2, false}, {256, 64, 8, 1, 1, false}, {128, 96, 4, 1, 2, false}};
  }
  return {{64, 64, 4, 1, 2, false},  {64, 32, 4, 2, 2, false}, {128, 64, 8, 1, 1, false},
          {128, 32, 8, 2, 1, false}, {64, 48, 4, 1, 2, false}, {128, 48, 8, 1, 1, false}};
}

double milliseconds(const Problem& p, const kernels::ForwardPlan& plan, const ForwardTensors& t) {
  synchronise();
  const auto start = Clock::now();
  constexpr int kCalls = 4;
  for (int n = 0; n < kCalls; ++n) cuda::run_forward(p, plan, t, nullptr, nullptr);
  synchronise();
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count() / kCalls;
}

void bench(const Options& o, int dim, std::int64_t seqlen, bool causal) {
  const std::int64_t batch = o.tokens / seqlen, heads = 2048 / dim;
  const std::int64_t elements = o.tokens * heads * dim;
  const Device device{DeviceType::kCuda, 0};
  Buffer q = normal_buffer(elements), k = normal_buffer(elements), v = normal_buffer(elements);
  Buffer out(std::size_t(elements) * 2), lse(std::size_t(o.tokens * heads) * 4);
  const auto tensor = [&](const Buffer& b) {
    Tensor t = Tensor::packed(b.memory.get(), DType::kBFloat16, {batch, seqlen, heads, dim});
    t.device = device;
    return t;
  };
  Attention a{.q = tensor(q), .k = tensor(k), .v = tensor(v)};
  if (causal) a.causal = Causal::kBottomRight;
  Tensor l = Tensor::packed(lse.memory.get(), DType::kFloat32, {batch, heads, seqlen});
  l.device = device;
  const Problem p = make_problem(a, device);
  const ForwardTensors t = make_forward(p, a, tensor(out), l);
  const cuda::DeviceFacts& f = cuda::device_facts(0);
  const CudaFacts facts{f.arch, f.num_sms, f.shared_bytes, f.shared_bytes_per_sm};
  const kernels::ForwardPlan base = plan_cuda_forward(p, t, facts);
  std::vector<kernels::ForwardPlan> plans{base};
  if (o.tiles) {
    plans.clear();
    for (const Tile& c : candidates(dim)) {
      kernels::ForwardPlan plan = base;
      plan.spec.tile_q = c.tile_q;
      plan.spec.tile_k = c.tile_k;
      plan.spec.warps = c.warps;
      plan.spec.stages = c.stages;
      plan.spec.blocks_per_sm = c.blocks;
      plan.spec.q_in_registers = c.q_in_registers;
      plan.query_tiles = (seqlen + c.tile_q - 1) / c.tile_q;
      plan.blocks = plan.query_tiles * heads * batch;
      if (plan.spec.invalid() == nullptr &&
          std::size_t(plan.spec.shared_bytes()) <= f.shared_bytes) {
        plans.push_back(plan);
      }
    }
  }
  std::vector<std::vector<double>> times(plans.size());
  for (int round = -1; round < o.rounds; ++round) {
    for (std::size_t n = 0; n < plans.size(); ++n) {
      const double ms = milliseconds(p, plans[n], t);
      if (round >= 0) times[n].push_back(ms);
    }
  }
  const double flops =
      4.0 * double(batch * heads) * double(seqlen) * double(seqlen) * dim * (causal ? 0.5 : 1.0);
  for (std::size_t n = 0; n < plans.size(); ++n) {
    std::sort(times[n].begin(), times[n].end());
    const kernels::ForwardSpec& s = plans[n].spec;
    std::printf("fwd d%-3d %-6s %6lld  %4dx%-3d w%d s%d b%d %s %8.3f ms %7.1f TFLOP/s\n", dim,
                causal ? "causal" : "full", static_cast<long long>(seqlen), s.tile_q, s.tile_k,
                s.warps, s.stages, s.blocks_per_sm, s.q_in_registers ? "qr" : "  ",
                times[n][times[n].size() / 2], flops / times[n][times[n].size() / 2] * 1e-9);
  }
  std::fflush(stdout);
}

}  // namespace
}  // namespace onefold::test

int main(int count, char** words) {
  onefold::test::Options o;
  for (int n = 1; n < count; ++n) {
    const std::string word = words[n];
    const auto value = [&] { return ++n < count ? words[n] : ""; };
    if (word == "--dims") {
      o.dims.clear();
      for (char* at = words[++n]; *at != 0; at += *at == ',') {
        o.dims.push_back(int(std::strtol(at, &at, 10)));
      }
    }
    if (word == "--tokens") o.tokens = std::atoll(value());
    if (word == "--rounds") o.rounds = std::atoi(value());
    if (word == "--tiles") o.tiles = true;
  }
  for (const int dim : o.dims) {
    for (const bool causal : {false, true}) {
      if (o.tiles) {
        for (const std::int64_t seqlen : {1024, 8192}) {
          onefold::test::bench(o, dim, seqlen, causal);
        }
        continue;
      }
      for (const std::int64_t seqlen : {512, 1024, 2048, 4096, 8192, 16384}) {
        onefold::test::bench(o, dim, seqlen, causal);
      }
    }
  }
  return 0;
}
