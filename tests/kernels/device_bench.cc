// Times the kernels on a CUDA device over the usual table of shapes, for the plan's own tiles and
// for others beside them. Not a unit test, since it needs a device.
//
//   device_bench [--dims 64,128] [--tokens 16384] [--rounds 5] [--tiles] [--backward]
//                [--seqlens 1024,8192] [--compile]
//
// --tiles times tiles that the plan does not choose, --backward the backward pass, --compile
// nothing: it compiles for compute capability 9.0, for a cache to take along. bf16, hidden size
// 2048, TFLOP/s as 4 B H Sq Sk D, backward 2.5 times that, half when causal.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
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
  std::vector<std::int64_t> dims{64, 128, 256}, seqlens;
  std::int64_t tokens = 16384;
  int rounds = 5;
  bool tiles = false, backward = false, compile = false;
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
  int sharing = 1;
  bool padded = false;
};

std::vector<Tile> candidates(int dim) {
  if (dim == 64) {
    return {{128, 64, 4, 2, 2, false},         {128, 64, 4, 2, 2, true},
            {128, 64, 4, 2, 2, true, 1, true}, {128, 64, 4, 1, 2, true},
            {128, 128, 4, 1, 2, false},        {128, 64, 4, 2, 3, false},
            {64, 64, 4, 2, 4, true},           {256, 64, 8, 2, 1, true},
            {128, 64, 8, 2, 2, true},          {128, 32, 4, 2, 2, true}};
  }
  if (dim == 128) {
    return {
        {128, 64, 4, 2, 2, false}, {128, 64, 4, 1, 2, false}, {128, 64, 4, 1, 2, false, 1, true},
        {64, 64, 4, 1, 3, false},  {64, 64, 4, 2, 2, true},   {128, 64, 8, 2, 1, false},
        {128, 64, 8, 1, 2, false}, {256, 64, 8, 1, 1, false}, {128, 96, 4, 1, 2, false}};
  }
  return {{64, 64, 4, 1, 2, false},     {64, 64, 4, 1, 2, false, 1, true},
          {64, 64, 4, 1, 2, false, 2},  {64, 64, 4, 1, 2, false, 2, true},
          {64, 32, 4, 2, 2, false},     {128, 64, 8, 1, 1, false},
          {128, 64, 8, 1, 1, false, 2}, {128, 64, 8, 2, 1, false},
          {64, 48, 4, 1, 2, false}};
}

struct BackwardTile {
  int tile_q, tile_k, step_q, warps;
  bool paired;
  int stages, blocks;
};
std::vector<BackwardTile> backward_candidates(std::int64_t dim) {
  if (dim == 64) {
    return {{32, 128, 32, 4, false, 2, 2}, {64, 128, 32, 4, false, 2, 2},
            {64, 128, 32, 4, false, 1, 2}, {64, 128, 64, 8, true, 2, 1},
            {32, 128, 32, 8, true, 2, 1},  {64, 128, 64, 8, false, 2, 1},
            {64, 64, 64, 4, false, 2, 2}};
  }
  if (dim == 128) {
    return {{32, 128, 32, 8, true, 2, 1},  {64, 128, 64, 8, true, 2, 1},
            {64, 128, 64, 8, false, 2, 1}, {64, 128, 32, 8, false, 2, 1},
            {32, 128, 32, 8, false, 2, 1}, {32, 64, 32, 4, true, 2, 2},
            {64, 64, 64, 4, false, 1, 2}};
  }
  return {{32, 64, 32, 8, true, 2, 1}, {64, 64, 64, 8, true, 1, 1}, {64, 64, 64, 8, true, 2, 1}};
}

template <class Call>
double milliseconds(Call&& call) {
  synchronise();
  const auto start = Clock::now();
  constexpr int kCalls = 4;
  for (int n = 0; n < kCalls; ++n) call();
  synchronise();
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count() / kCalls;
}

// What is timed, in turn, and its name.
struct Entry {
  std::string name;
  std::function<void()> call;
  std::vector<double> times{};
};

void report(const Options& o, std::vector<Entry>& entries, const std::string& what, double flops) {
  for (int round = -1; round < o.rounds; ++round) {
    for (Entry& entry : entries) {
      const double ms = milliseconds(entry.call);
      if (round >= 0) entry.times.push_back(ms);
    }
  }
  for (Entry& entry : entries) {
    std::sort(entry.times.begin(), entry.times.end());
    const double ms = entry.times[entry.times.size() / 2];
    std::printf("%s  %s %8.3f ms %7.1f TFLOP/s\n", what.c_str(), entry.name.c_str(), ms,
                flops / ms * 1e-9);
  }
  std::fflush(stdout);
}

CudaFacts facts_of(const Options& o) {
  if (o.compile) return {900, 132, 227 * 1024, 228 * 1024};
  const cuda::DeviceFacts& f = cuda::device_facts(0);
  return {f.arch, f.num_sms, f.shared_bytes, f.shared_bytes_per_sm};
}
template <class Spec>
bool possible(const Spec& spec, const CudaFacts& facts) {
  return spec.invalid() == nullptr && std::size_t(spec.shared_bytes()) <= facts.shared_bytes;
}
template <class Spec>
void show_compiled(const Spec& spec) {
  const jit::Facts& f = jit::get(cuda::program(spec)).facts;
  std::printf("%3d registers, %lld bytes local  %s\n", f.registers,
              static_cast<long long>(f.local_bytes), cuda::text(spec).c_str());
}

void bench(const Options& o, std::int64_t dim, std::int64_t seqlen, bool causal) {
  const std::int64_t batch = o.tokens / seqlen, heads = 2048 / dim;
  const std::int64_t elements = o.compile ? 0 : o.tokens * heads * dim;
  const Device device{DeviceType::kCuda, 0};
  std::vector<Buffer> buffers;
  int places = 0;  // of memory that is never touched
  const auto memory = [&](bool random) -> void* {
    if (o.compile) return reinterpret_cast<void*>(std::uintptr_t(++places) << 40);
    if (random) {
      buffers.push_back(normal_buffer(elements));
    } else {
      buffers.emplace_back(std::size_t(elements) * 2);
    }
    return buffers.back().memory.get();
  };
  const auto tensor = [&](bool random) {
    Tensor t = Tensor::packed(memory(random), DType::kBFloat16, {batch, seqlen, heads, dim});
    t.device = device;
    return t;
  };
  Attention a{.q = tensor(true), .k = tensor(true), .v = tensor(true)};
  if (causal) a.causal = Causal::kBottomRight;
  const Tensor out = tensor(false);
  Tensor lse = Tensor::packed(memory(false), DType::kFloat32, {batch, heads, seqlen});
  lse.device = device;
  const Problem p = make_problem(a, device);
  const ForwardTensors t = make_forward(p, a, out, lse);
  const CudaFacts facts = facts_of(o);
  const kernels::ForwardPlan base = plan_cuda_forward(p, t, facts);
  const double flops = 4.0 * double(batch * heads) * double(seqlen) * double(seqlen) * double(dim) *
                       (causal ? 0.5 : 1.0);
  char what[80];
  std::snprintf(what, sizeof what, "%s d%-3d %-6s %6d", o.backward ? "bwd" : "fwd", int(dim),
                causal ? "causal" : "full", int(seqlen));
  std::vector<Entry> entries;
  char name[80];
  if (!o.backward) {
    const auto add = [&](const kernels::ForwardPlan& plan) {
      const kernels::ForwardSpec& s = plan.spec;
      if (o.compile) return show_compiled(s);
      std::snprintf(name, sizeof name, "%4dx%-3d w%d s%d b%d %s share%d %s", s.tile_q, s.tile_k,
                    s.warps, s.stages, s.blocks_per_sm, s.q_in_registers ? "qr" : "  ", s.sharing,
                    s.swizzled ? "swizzled" : "padded");
      entries.push_back(
          {name, [&p, plan, &t] { cuda::run_forward(p, plan, t, nullptr, nullptr); }});
    };
    if (!o.tiles) add(base);
    for (const Tile& c : o.tiles ? candidates(int(dim)) : std::vector<Tile>{}) {
      kernels::ForwardPlan plan = base;
      plan.spec.tile_q = c.tile_q;
      plan.spec.tile_k = c.tile_k;
      plan.spec.warps = c.warps;
      plan.spec.stages = c.stages;
      plan.spec.blocks_per_sm = c.blocks;
      plan.spec.q_in_registers = c.q_in_registers;
      plan.spec.sharing = c.sharing;
      plan.spec.swizzled = !c.padded && plan.spec.can_be_swizzled();
      plan.query_tiles = (seqlen + c.tile_q - 1) / c.tile_q;
      plan.blocks = plan.query_tiles * heads * batch;
      if (possible(plan.spec, facts)) add(plan);
    }
    if (!o.compile) report(o, entries, what, flops);
    return;
  }
  const Tensor dout = tensor(true);
  const Gradients gradients{tensor(false), tensor(false), tensor(false)};
  const BackwardTensors b = make_backward(p, a, out, lse, dout, std::nullopt, gradients);
  std::shared_ptr<void> workspace;
  std::int64_t workspace_bytes = 0;
  const auto add = [&](const kernels::BackwardPlan& plan) {
    const kernels::BackwardSpec& s = plan.spec;
    if (o.compile) {
      jit::get(cuda::program(kernels::BackwardRowsSpec{s}));
      jit::get(cuda::program(kernels::BackwardDqSpec{s}));
      return show_compiled(s);
    }
    workspace_bytes = std::max(workspace_bytes, plan.workspace_bytes);
    std::snprintf(name, sizeof name, "%4dx%-3d/%-2d w%d %s s%d b%d %s", s.tile_q, s.tile_k,
                  s.step_q, s.warps, s.paired ? "pair" : "    ", s.stages, s.blocks_per_sm,
                  s.ordered ? "ordered" : "       ");
    entries.push_back({name, [&p, plan, &b, &workspace] {
                         cuda::run_backward(p, plan, b, nullptr, workspace.get());
                       }});
  };
  if (!o.tiles) {
    add(plan_cuda_backward(p, b, false, facts));
    add(plan_cuda_backward(p, b, true, facts));
  }
  for (const BackwardTile& c : o.tiles ? backward_candidates(dim) : std::vector<BackwardTile>{}) {
    kernels::BackwardSpec spec = plan_cuda_backward(p, b, false, facts).spec;
    spec.tile_q = c.tile_q;
    spec.tile_k = c.tile_k;
    spec.step_q = c.step_q;
    spec.warps = c.warps;
    spec.paired = c.paired;
    spec.stages = c.stages;
    spec.blocks_per_sm = c.blocks;
    if (possible(spec, facts)) add(plan_cuda_backward(p, b, spec, facts));
  }
  if (o.compile) return;
  workspace = cuda::allocate(std::size_t(workspace_bytes), 0, nullptr);
  cuda::run_forward(p, base, t, nullptr, nullptr);
  report(o, entries, what, 2.5 * flops);
}

std::vector<std::int64_t> numbers_of(const char* text) {
  std::vector<std::int64_t> all;
  for (char* at = const_cast<char*>(text); *at != 0; at += *at == ',') {
    all.push_back(std::strtol(at, &at, 10));
  }
  return all;
}

}  // namespace
}  // namespace onefold::test

int main(int count, char** words) {
  onefold::test::Options o;
  for (int n = 1; n < count; ++n) {
    const std::string word = words[n];
    const auto value = [&] { return ++n < count ? words[n] : ""; };
    if (word == "--dims") o.dims = onefold::test::numbers_of(value());
    if (word == "--seqlens") o.seqlens = onefold::test::numbers_of(value());
    if (word == "--tokens") o.tokens = std::atoll(value());
    if (word == "--rounds") o.rounds = std::atoi(value());
    if (word == "--tiles") o.tiles = true;
    if (word == "--backward") o.backward = true;
    if (word == "--compile") o.compile = true;
  }
  if (o.seqlens.empty() && o.tiles) o.seqlens = {1024, 8192};
  if (o.seqlens.empty()) o.seqlens = {512, 1024, 2048, 4096, 8192, 16384};
  if (o.compile) o.seqlens = {1024};
  for (const std::int64_t dim : o.dims) {
    for (const bool causal : {false, true}) {
      if (o.compile && causal) continue;
      for (const std::int64_t seqlen : o.seqlens) onefold::test::bench(o, dim, seqlen, causal);
    }
  }
  return 0;
}
