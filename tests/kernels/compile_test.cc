// Every row of the plan tables, compiled by NVRTC for every architecture, without a GPU: no spill,
// no local memory, no remark of the compiler, and at least the tensor-core instructions that the
// tiles need. Compiled kernels are kept in the cache that ONEFOLD_CACHE_DIR names, by digest of
// their text, so that a second run compiles nothing.

#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "cuda/program.h"
#include "onefold/error.h"
#include "tests/jit/scratch.h"
#include "tests/plan/cuda_question.h"

namespace onefold::test {
namespace {

struct Planned {
  kernels::ForwardPlan forward;
  kernels::BackwardPlan backward, ordered;
};
Planned plan_of(DType dtype, std::int64_t dim, bool options, const CudaKind& kind) {
  CudaQuestion ask;
  ask.dtype = dtype;
  ask.dim = ask.dim_v = dim;
  ask.options = options;
  const Problem p = ask.problem();
  const BackwardTensors b = ask.backward(p);
  return {plan_cuda_forward(p, ask.forward(p), kind.facts),
          plan_cuda_backward(p, b, false, kind.facts), plan_cuda_backward(p, b, true, kind.facts)};
}

// Tensor-core instructions (HMMA) of a cubin: 16-byte instructions whose lowest 12 bits say so, in
// the sections of code.
std::int64_t count_products(const std::string& cubin) {
  const auto read = [&cubin](std::size_t at, auto& x) {
    if (at + sizeof x > cubin.size()) throw Error(ErrorKind::kRuntime, "a cubin ends early");
    std::memcpy(&x, cubin.data() + at, sizeof x);
  };
  std::uint64_t sections = 0;
  std::uint16_t size = 0, count = 0;
  read(40, sections);
  read(58, size);
  read(60, count);
  std::int64_t products = 0;
  for (std::uint64_t n = 0; n < count; ++n) {
    std::uint64_t flags = 0, begin = 0, bytes = 0;
    read(sections + n * size + 8, flags);
    read(sections + n * size + 24, begin);
    read(sections + n * size + 32, bytes);
    constexpr std::uint64_t kExecutable = 4;
    if ((flags & kExecutable) == 0) continue;
    for (std::uint64_t at = begin; at + 16 <= begin + bytes; at += 16) {
      std::uint16_t low = 0;
      read(at, low);
      products += (low & 0xfff) == 0x23c;
    }
  }
  return products;
}

// Instructions that a product of rows x columns x depth by one warp takes.
std::int64_t products(Element e, std::int64_t rows, std::int64_t columns, std::int64_t depth) {
  const std::int64_t blocks = rows / 16 * (columns / 8);
  return e == Element::kFloat32 ? blocks * (depth / 8) * 3 : blocks * (depth / 16);
}
// The same where the kernel loops over depths.
std::int64_t looped(Element e, std::int64_t rows, std::int64_t columns, std::int64_t depth) {
  const int step = e == Element::kFloat32 ? 8 : 16;
  return products(e, rows, columns, std::min<std::int64_t>(depth, step * unrolled_depths(e)));
}
std::int64_t needed(const kernels::ForwardSpec& s) {
  const int rows = s.tile_q / s.warps;
  return looped(s.element, rows, s.tile_k, s.dim) + products(s.element, rows, s.dim_v, s.tile_k);
}
std::int64_t needed(const kernels::BackwardSpec& s) {
  const int keys = s.warp_keys();
  const std::int64_t of_dq = looped(s.element, s.dq_rows(), s.dq_columns(), s.tile_k);
  return looped(s.element, keys, s.step_q, s.dim) + looped(s.element, keys, s.step_q, s.dim_v) +
         products(s.element, keys, s.dim_v, s.step_q) + products(s.element, keys, s.dim, s.step_q) +
         (s.paired ? 2 : 1) * of_dq;
}
std::int64_t needed(const kernels::ScoreGradientsSpec& s) {
  return looped(s.element, 16, s.tile_k, s.dim) + looped(s.element, 16, s.tile_k, s.dim_v);
}
template <class Spec>
std::int64_t needed(const Spec&) {
  return 0;
}

// What is to be compiled: each program once.
struct Work {
  std::vector<std::pair<jit::Program, std::int64_t>> programs;
  std::set<std::string> seen;

  template <class Spec>
  void add(const Spec& spec) {
    jit::Program program = cuda::program(spec);
    if (seen.insert(jit::identity(program)).second) {
      programs.emplace_back(std::move(program), needed(spec));
    }
  }
  void add(const Planned& plan) {
    add(plan.forward.spec);
    for (const kernels::BackwardPlan* b : {&plan.backward, &plan.ordered}) {
      add(b->spec);
      add(kernels::BackwardRowsSpec{b->spec});
      add(kernels::BackwardDqSpec{b->spec});
      if (b->bias) add(b->bias_spec);
      if (b->bias) add(kernels::GradientSumsSpec{b->spec.arch, b->spec.features.bias});
      if (b->slopes || b->sinks) add(b->rows_spec);
      if (b->slopes || b->sinks) add(kernels::HeadSumsSpec{b->spec.arch});
    }
    for (const Element e : {Element::kFloat32, Element::kBFloat16, Element::kFloat64}) {
      add(kernels::MergeStatesSpec{plan.forward.spec.arch, e, e});
    }
    if (plan.forward.mask.blocks > 0) add(kernels::MaskClassesSpec{plan.forward.spec.arch});
  }
};

void compile_all(const Work& work) {
  std::atomic<std::size_t> next{0};
  std::mutex report;
  const auto one = [&] {
    for (std::size_t n; (n = next++) < work.programs.size();) {
      const auto& [program, least] = work.programs[n];
      std::string wrong;
      try {
        const jit::Binary& binary = jit::get(program);
        const jit::Facts& f = binary.facts;
        if (f.local_bytes > 0 || f.spill_store_bytes > 0) {
          wrong = concat(f.local_bytes, " bytes of local memory, ", f.registers, " registers");
        } else if (!f.warnings.empty()) {
          wrong = f.warnings.front();
        } else if (const std::int64_t found = count_products(binary.cubin); found < least) {
          wrong = concat(found, " tensor-core instructions, at least ", least, " are needed");
        }
      } catch (const std::exception& e) {
        wrong = e.what();
      }
      if (wrong.empty()) continue;
      const std::lock_guard lock(report);
      ADD_FAILURE() << jit::target(program) << ": " << wrong << " in\n" << program.source;
    }
  };
  std::vector<std::thread> pool;
  const unsigned threads = std::max(1u, std::thread::hardware_concurrency());
  for (unsigned n = 0; n < threads; ++n) pool.emplace_back(one);
  for (std::thread& thread : pool) thread.join();
}

class Compile : public testing::TestWithParam<CudaKind> {
 protected:
  void SetUp() override { need_compiler(); }
};

TEST_P(Compile, every_row_of_the_tables_for_bfloat16_needs_no_local_memory) {
  Work work;
  for (const std::int64_t dim : {64, 128, 256}) {
    for (const bool options : {false, true}) {
      work.add(plan_of(DType::kBFloat16, dim, options, GetParam()));
    }
  }
  compile_all(work);
}

// The other formats take the same text; two architectures stand for all.
TEST_P(Compile, the_other_formats_need_no_local_memory) {
  if (GetParam().facts.arch != 800 && GetParam().facts.arch != 900) return;
  Work work;
  for (const bool options : {false, true}) {
    work.add(plan_of(DType::kFloat16, 128, options, GetParam()));
    for (const std::int64_t dim : {64, 128, 256}) {
      work.add(plan_of(DType::kFloat32, dim, options, GetParam()));
    }
  }
  compile_all(work);
}

INSTANTIATE_TEST_SUITE_P(For, Compile, testing::ValuesIn(kCudaKinds),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace onefold::test
