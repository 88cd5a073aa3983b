// The plan tables, compiled by NVRTC for every architecture, without a GPU: no spill, no local
// memory, no remark of the compiler, and at least the tensor-core instructions that the tiles need.
//
// Compiled kernels are kept in the cache that ONEFOLD_CACHE_DIR names, by digest of their text, so
// that a second run compiles nothing. The tests called all_of_... take half an hour the first time:
// ctest leaves them out, and this program by itself, without arguments, runs them.

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <new>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
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
Planned plan_of(DType dtype, std::int64_t dim, unsigned options, const CudaKind& kind) {
  CudaQuestion ask;
  ask.dtype = dtype;
  ask.dim = ask.dim_v = dim;
  ask.options = options;
  const Problem p = ask.problem();
  const BackwardTensors b = ask.backward(p);
  return {plan_cuda_forward(p, ask.forward(p), kind.facts),
          plan_cuda_backward(p, b, false, kind.facts), plan_cuda_backward(p, b, true, kind.facts)};
}

constexpr DType kFormats[] = {DType::kBFloat16, DType::kFloat16, DType::kFloat32};
constexpr std::int64_t kDims[] = {64, 128, 256};  // the largest of each row of the tables

// One option and two, sinks beside them: they are not compiled in, but their gradient is.
std::vector<unsigned> ones_and_twos() {
  std::vector<unsigned> all;
  for (unsigned one = kSoftcap; one <= kDropout; one *= 2) {
    for (unsigned two = one; two <= kDropout; two *= 2) all.push_back(one | two | kSinks);
  }
  return all;
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
  const int queries = s.step_q / s.sharing;  // of a warp's scores
  return looped(s.element, keys, queries, s.dim) + looped(s.element, keys, queries, s.dim_v) +
         products(s.element, keys, s.dim_v / s.sharing, s.step_q) +
         products(s.element, keys, s.dim / s.sharing, s.step_q) + (s.paired ? 2 : 1) * of_dq;
}
std::int64_t needed(const kernels::ScoreGradientsSpec& s) {
  return looped(s.element, 16, s.tile_k, s.dim) + looped(s.element, 16, s.tile_k, s.dim_v);
}
template <class Spec>
std::int64_t needed(const Spec&) {
  return 0;
}

// Bytes of local memory that a program may have. 255 registers are not quite enough for 16 rows of
// 256 numbers in three parts: what does not change in the loop lies in memory (docs/cuda.md). Other
// versions of NVRTC than the one the tiles were chosen with allot registers differently.
constexpr std::string_view kChosenWith = "13.0";
constexpr std::int64_t kMostOfWide = 16, kMostOfOthers = 32;
template <class Spec>
std::int64_t allowed(const Spec& spec) {
  if constexpr (requires { spec.features; }) {
    const bool wide = std::max(spec.dim, spec.dim_v) > 128;
    if (spec.element == Element::kFloat32 && wide) return kMostOfWide;
  }
  return 0;
}

// What is to be compiled: each program once.
struct Item {
  jit::Program program;
  std::int64_t products, local_bytes;
};
struct Work {
  std::vector<Item> programs;
  std::set<std::string> seen;

  template <class Spec>
  void add(const Spec& spec) {
    jit::Program program = cuda::program(spec);
    if (seen.insert(jit::identity(program)).second) {
      programs.push_back({std::move(program), needed(spec), allowed(spec)});
    }
  }
  // The kernels that options are compiled into.
  void add_main(const Planned& plan) {
    const kernels::BackwardPlan& b = plan.backward;
    add(plan.forward.spec);
    add(b.spec);
    if (b.bias) add(b.bias_spec);
    if (b.slopes || b.sinks) add(b.rows_spec);
  }
  void add(const Planned& plan) {
    add_main(plan);
    const kernels::BackwardPlan& b = plan.backward;
    add(plan.ordered.spec);
    add(kernels::BackwardRowsSpec{b.spec});
    add(kernels::BackwardDqSpec{b.spec});
    if (b.bias) add(kernels::GradientSumsSpec{b.spec.arch, b.spec.features.bias});
    if (b.slopes || b.sinks) add(kernels::HeadSumsSpec{b.spec.arch});
    for (const Element e : {Element::kFloat32, Element::kBFloat16, Element::kFloat64}) {
      add(kernels::MergeStatesSpec{plan.forward.spec.arch, e, e});
    }
    if (plan.forward.mask.blocks > 0) add(kernels::MaskClassesSpec{plan.forward.spec.arch});
  }
};

// What is wrong with a program once it is compiled; nothing: nothing.
std::string judge(const Item& item) {
  try {
    const jit::Binary& binary = jit::get(item.program);
    const jit::Facts& f = binary.facts;
    const std::int64_t other = binary.nvrtc == kChosenWith ? 0 : kMostOfOthers;
    if (f.local_bytes > std::max(item.local_bytes, other)) {
      return concat(f.local_bytes, " bytes of local memory, ", f.registers, " registers");
    }
    if (!f.warnings.empty()) return f.warnings.front();
    const std::int64_t found = count_products(binary.cubin);
    if (found < item.products) {
      return concat(found, " tensor-core instructions, at least ", item.products, " are needed");
    }
  } catch (const std::exception& e) {
    return e.what();
  }
  return "";
}

// In several processes, because NVRTC compiles one kernel at a time in each: they share a counter,
// and each leaves what it has to complain about in a file of its own.
void compile_all(const Work& work) {
  const std::size_t count = work.programs.size();
  const std::size_t size = sizeof(std::atomic<std::size_t>);
  void* const shared =
      mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(shared, MAP_FAILED);
  auto* const next = new (shared) std::atomic<std::size_t>{0};
  static_assert(std::atomic<std::size_t>::is_always_lock_free);
  const ScratchFolder scratch;
  const unsigned processes = std::max(1u, std::thread::hardware_concurrency());
  const auto file = [&](unsigned n) { return scratch.path() / std::to_string(n); };
  std::vector<pid_t> children;
  for (unsigned n = 0; n < processes; ++n) {
    children.push_back(start_child([&] {
      std::string complaints;
      for (std::size_t idx; (idx = (*next)++) < count;) {
        const jit::Program& program = work.programs[idx].program;
        const std::string wrong = judge(work.programs[idx]);
        if (wrong.empty()) continue;
        complaints += concat(jit::target(program), ": ", wrong, " in\n", program.source, "\n");
      }
      write_text(file(n), complaints);
      return 0;
    }));
  }
  for (unsigned n = 0; n < processes; ++n) {
    EXPECT_EQ(exit_status(children[n]), 0);
    EXPECT_EQ(read_text(file(n)), "");
  }
  EXPECT_GE(next->load(), count);
  munmap(shared, size);
}

struct Numbered : CudaKind {
  unsigned number = 0;
};
std::vector<Numbered> numbered() {
  std::vector<Numbered> all;
  for (const CudaKind& kind : kCudaKinds) all.push_back({kind, static_cast<unsigned>(all.size())});
  return all;
}

// One with and one without vector additions to memory.
bool has_pairs(const CudaKind& kind) { return kind.facts.arch == 800 || kind.facts.arch == 900; }
constexpr const char* kPairsOn = "compute capabilities 8.0 and 9.0 stand for all";

class Compile : public testing::TestWithParam<Numbered> {
 protected:
  void SetUp() override { need_compiler(); }
};

// Plain and with all options in turn: every row of the tables in every format is compiled plain for
// half of the architectures, and with all options for the other half.
TEST_P(Compile, rows_of_the_tables_need_no_local_memory) {
  Work work;
  unsigned n = GetParam().number;
  for (const DType dtype : kFormats) {
    for (const std::int64_t dim : kDims) {
      work.add(plan_of(dtype, dim, n++ % 2 == 0 ? 0u : unsigned{kAllOptions}, GetParam()));
    }
  }
  compile_all(work);
}

// Two architectures share the sets of options, and format and head dim go around.
TEST_P(Compile, one_and_two_options_need_no_local_memory) {
  if (!has_pairs(GetParam())) GTEST_SKIP() << kPairsOn;
  Work work;
  const std::vector<unsigned> sets = ones_and_twos();
  for (std::size_t n = GetParam().facts.arch == 800 ? 0 : 1; n < sets.size(); n += 2) {
    work.add_main(plan_of(kFormats[n % 3], kDims[n / 3 % 3], sets[n], GetParam()));
  }
  compile_all(work);
}

TEST_P(Compile, all_of_the_rows_of_the_tables_need_no_local_memory) {
  Work work;
  for (const DType dtype : kFormats) {
    for (const std::int64_t dim : kDims) {
      for (const unsigned options : {0u, unsigned{kAllOptions}}) {
        work.add(plan_of(dtype, dim, options, GetParam()));
      }
    }
  }
  compile_all(work);
}

TEST_P(Compile, all_of_one_and_two_options_need_no_local_memory) {
  if (!has_pairs(GetParam())) GTEST_SKIP() << kPairsOn;
  Work work;
  for (const unsigned options : ones_and_twos()) {
    for (const DType dtype : kFormats) {
      for (const std::int64_t dim : kDims) {
        work.add_main(plan_of(dtype, dim, options, GetParam()));
      }
    }
  }
  compile_all(work);
}

INSTANTIATE_TEST_SUITE_P(For, Compile, testing::ValuesIn(numbered()),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace onefold::test
