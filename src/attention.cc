// The API, body by body: a question becomes a Problem, the Problem a plan, the plan runs.
// Start reading here.
#include "onefold/attention.h"

#include <algorithm>
#include <cstdlib>
#include <new>
#include <stdexcept>
#include <system_error>

#include "core/problem.h"
#include "cpu/cpu.h"
#include "cpu/thread_pool.h"
#include "cuda/attention.h"
#include "cuda/program.h"
#include "plan/cuda_plan.h"
#include "plan/plan.h"

namespace onefold {
namespace {

constexpr std::size_t kAlignment = 64;

std::shared_ptr<void> heap(std::size_t bytes) {
  const std::size_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  void* p = std::aligned_alloc(kAlignment, rounded);
  if (p == nullptr) {
    throw Error(ErrorKind::kRuntime, concat("no memory for a workspace of ", bytes, " bytes"));
  }
  return {p, std::free};
}

// Each calling thread keeps its last workspace up to this size: fresh pages cost a decoding step as
// much as its arithmetic.
constexpr std::size_t kMostKeptBytes = std::size_t{32} << 20;
std::shared_ptr<void> kept_or_new(std::size_t bytes) {
  thread_local std::shared_ptr<void> kept;
  thread_local std::size_t kept_bytes = 0;
  if (bytes > kMostKeptBytes) return heap(bytes);
  if (bytes > kept_bytes) {
    kept.reset();
    kept_bytes = 0;
    kept = heap(bytes);
    kept_bytes = bytes;
  }
  // A call inside a call (an executor that runs another question) must not share it.
  return kept.use_count() == 1 ? kept : heap(bytes);
}

std::shared_ptr<void> workspace(const Context& context, std::size_t bytes) {
  if (bytes == 0) return nullptr;
  if (!context.allocate) return kept_or_new(bytes);
  std::shared_ptr<void> p = context.allocate(bytes);
  if (!p || reinterpret_cast<std::uintptr_t>(p.get()) % kAlignment != 0) {
    invalid("Context::allocate gave ", p ? "memory that is not 64-byte aligned" : "nothing",
            " for ", bytes, " bytes: 64-byte aligned memory is needed");
  }
  return p;
}

// The executor of one call: the caller's, or the pool of the moment kept alive until the end.
struct CallExecutor {
  std::shared_ptr<Executor> own;
  Executor* executor;

  explicit CallExecutor(const Context& context)
      : own(context.executor ? nullptr : cpu::default_pool()),
        executor(context.executor ? context.executor : own.get()) {
    if (executor->concurrency() < 1) {
      invalid("Context::executor has concurrency ", executor->concurrency(), ": at least 1");
    }
  }
};

bool on_cuda(const Context& context) { return context.device.type == DeviceType::kCuda; }

std::shared_ptr<void> cuda_workspace(const Context& context, std::int64_t bytes) {
  const auto size = static_cast<std::size_t>(bytes);
  if (size == 0) return nullptr;
  if (!context.allocate) return cuda::allocate(size, context.device.index, context.stream);
  return workspace(context, size);
}

CudaFacts cuda_facts(const Context& context) {
  const cuda::DeviceFacts& f = cuda::device_facts(context.device.index);
  return {f.arch, f.num_sms, f.shared_bytes, f.shared_bytes_per_sm};
}

// A line per device, or why there is none.
std::string cuda_info() {
  std::string why_not, text;
  if (cuda::find_driver(&why_not) == nullptr) return concat("no CUDA: ", why_not, "\n");
  for (int device = 0; device < cuda::device_count(); ++device) {
    const cuda::DeviceFacts& f = cuda::device_facts(device);
    text += concat("backend cuda, device ", device, ": ", f.name, ", compute capability ",
                   f.arch / 100, ".", f.arch / 10 % 10, ", ", f.num_sms, " multiprocessors\n");
  }
  return text;
}

// Gradients that count as laid out like inputs.
BackwardTensors like_inputs(const Problem& p, const Gradients& wanted) {
  BackwardTensors t;
  if (wanted.dq) t.dq = p.q;
  if (wanted.dk) t.dk = p.k;
  if (wanted.dv) t.dv = p.v;
  if (wanted.dbias) t.dbias = p.bias;
  if (wanted.dslopes) t.dslopes = p.slopes;
  if (wanted.dsinks) t.dsinks = p.sinks;
  return t;
}

// The plan of a question on CUDA, as if out were packed like q.
Plan cuda_plan(const Context& context, const Problem& problem, const Gradients* wanted) {
  const CudaFacts facts = cuda_facts(context);
  Plan result;
  result.backend = "cuda";
  if (wanted != nullptr) {
    const kernels::BackwardPlan plan =
        plan_cuda_backward(problem, like_inputs(problem, *wanted), wanted->deterministic, facts);
    result.kernel = "portable_backward " + cuda::text(plan.spec);
    result.work_items = plan.blocks;
    result.workspace_bytes = static_cast<std::size_t>(plan.workspace_bytes);
    result.why = describe_reasons(problem, plan, facts);
    return result;
  }
  const kernels::ForwardPlan plan = plan_cuda_forward(problem, {}, facts);
  result.kernel = "portable_forward " + cuda::text(plan.spec);
  result.work_items = plan.blocks;
  result.workspace_bytes = static_cast<std::size_t>(plan.workspace_bytes);
  result.why = describe_reasons(problem, plan, facts);
  return result;
}

// The programs that answer a question on such a device: gradients as wanted, or forward without.
// Outputs count as laid out like inputs.
std::vector<jit::Program> cuda_programs(const Problem& problem, const Gradients* wanted,
                                        const CudaFacts& facts) {
  std::vector<jit::Program> programs;
  const cuda::Launches to(programs);
  std::byte nowhere{};
  if (wanted == nullptr) {
    cuda::run_forward(problem, plan_cuda_forward(problem, {}, facts), {}, to, &nowhere);
    return programs;
  }
  const BackwardTensors tensors = like_inputs(problem, *wanted);
  const kernels::BackwardPlan plan =
      plan_cuda_backward(problem, tensors, wanted->deterministic, facts);
  cuda::run_backward(problem, plan, tensors, to, &nowhere);
  return programs;
}

std::string text(const jit::Binary& binary) {
  return concat(binary.name, " for ", binary.target, ", ", binary.facts.registers, " registers");
}

std::vector<std::string> make_ready(const Context& context, const Attention& attention,
                                    const Gradients* wanted) {
  const Problem problem = make_problem(attention, context.device);
  std::vector<std::string> ready;
  if (!on_cuda(context)) return ready;
  for (const jit::Program& program : cuda_programs(problem, wanted, cuda_facts(context))) {
    ready.push_back(text(*cuda::load(program, context.device.index, context.stream).binary));
  }
  return ready;
}

std::vector<std::string> compile_ahead(int arch, const Attention& attention,
                                       const Gradients* wanted) {
  const Problem problem = make_problem(attention, {DeviceType::kCuda, attention.q.device.index});
  std::vector<std::string> built;
  for (const jit::Program& program : cuda_programs(problem, wanted, cuda_facts_of(arch))) {
    built.push_back(text(jit::get(program)));
  }
  return built;
}

// A question that its device answers: this one, or where there is none here, the newest known.
Problem checked_problem(const Context& context, const Attention& attention) {
  Problem problem = make_problem(attention, context.device);
  if (on_cuda(context)) {
    constexpr int kNewestArch = 1210;
    const bool here = cuda::find_driver(nullptr) != nullptr;
    check_supported(problem, here ? cuda_facts(context) : cuda_facts_of(kNewestArch));
  }
  return problem;
}

BackwardWants wanted(const Problem& p, const BackwardTensors& t) {
  BackwardWants w;
  w.dq = bool(t.dq);
  w.dkv = t.dk || t.dv;
  w.dslopes = bool(t.dslopes);
  w.dsinks = bool(t.dsinks);
  w.dbias = bool(t.dbias);
  const std::array<std::int64_t, 4> full{p.batch, p.heads_q, p.longest_q, p.longest_k};
  for (int axis = 0; w.dbias && axis < 4; ++axis) {
    w.dbias_broadcast |= t.dbias.extent[axis] == 1 && full[axis] > 1;
  }
  return w;
}

Plan plan_of(const Context& context, const Attention& attention, const Gradients* gradients) {
  const Problem problem = make_problem(attention, context.device);
  if (on_cuda(context)) return cuda_plan(context, problem, gradients);
  const CallExecutor call(context);
  const CpuFacts facts = cpu::facts(call.executor->concurrency(), problem.dtype);
  const CpuWork work =
      gradients == nullptr
          ? plan_forward(problem, facts)
          : plan_backward(problem, wanted(problem, like_inputs(problem, *gradients)), facts);
  Plan result;
  result.backend = "cpu";
  result.kernel = describe_kernel(problem, work, facts);
  result.work_items = static_cast<std::int64_t>(work.items.size());
  result.workspace_bytes = work.workspace_bytes;
  result.why = describe_reasons(problem, work, facts);
  return result;
}

// What leaves a public function is an Error, or whatever the caller's own executor or allocator
// threw that is none of these.
[[noreturn]] void rethrow_as_error() {
  try {
    throw;
  } catch (const std::bad_alloc&) {
    throw Error(ErrorKind::kRuntime, "the call needs more memory than there is to have");
  } catch (const std::length_error&) {
    throw Error(ErrorKind::kRuntime, "the call needs more memory than can be addressed");
  } catch (const std::system_error& error) {
    throw Error(ErrorKind::kRuntime, concat("the system refused: ", error.what()));
  }
}

}  // namespace

Plan plan(const Context& context, const Attention& attention, Direction direction) try {
  if (direction > Direction::kBackward) {
    invalid("direction is ", static_cast<int>(direction),
            ": a value of onefold::Direction is needed");
  }
  const Gradients all{
      attention.q,    attention.k, attention.v, attention.bias, attention.alibi_slopes,
      attention.sinks};
  return plan_of(context, attention, direction == Direction::kBackward ? &all : nullptr);
} catch (...) {
  rethrow_as_error();
}
Plan plan(const Context& context, const Attention& attention, const Gradients& gradients) try {
  return plan_of(context, attention, &gradients);
} catch (...) {
  rethrow_as_error();
}

std::vector<std::string> warm_up(const Context& context, const Attention& attention) try {
  return make_ready(context, attention, nullptr);
} catch (...) {
  rethrow_as_error();
}
std::vector<std::string> warm_up(const Context& context, const Attention& attention,
                                 const Gradients& gradients) try {
  return make_ready(context, attention, &gradients);
} catch (...) {
  rethrow_as_error();
}

std::vector<std::string> prebuild(int arch, const Attention& attention) try {
  return compile_ahead(arch, attention, nullptr);
} catch (...) {
  rethrow_as_error();
}
std::vector<std::string> prebuild(int arch, const Attention& attention,
                                  const Gradients& gradients) try {
  return compile_ahead(arch, attention, &gradients);
} catch (...) {
  rethrow_as_error();
}

void forward(const Context& context, const Attention& attention, const Tensor& out,
             const std::optional<Tensor>& lse) try {
  const Problem problem = make_problem(attention, context.device);
  const ForwardTensors to = make_forward(problem, attention, out, lse);
  if (on_cuda(context)) {
    const kernels::ForwardPlan plan = plan_cuda_forward(problem, to, cuda_facts(context));
    const std::shared_ptr<void> memory = cuda_workspace(context, plan.workspace_bytes);
    return cuda::run_forward(problem, plan, to, context.stream, memory.get());
  }
  const CallExecutor call(context);
  const CpuWork work =
      plan_forward(problem, cpu::facts(call.executor->concurrency(), problem.dtype));
  const std::shared_ptr<void> memory = workspace(context, work.workspace_bytes);
  cpu::run_forward(problem, work, to.out, to.lse, *call.executor,
                   static_cast<std::byte*>(memory.get()));
} catch (...) {
  rethrow_as_error();
}

void backward(const Context& context, const Attention& attention, const Tensor& out,
              const Tensor& lse, const std::optional<Tensor>& dout,
              const std::optional<Tensor>& dlse, const Gradients& gradients) try {
  const Problem problem = make_problem(attention, context.device);
  const BackwardTensors tensors =
      make_backward(problem, attention, out, lse, dout, dlse, gradients);
  if (on_cuda(context)) {
    const kernels::BackwardPlan plan =
        plan_cuda_backward(problem, tensors, gradients.deterministic, cuda_facts(context));
    const std::shared_ptr<void> memory = cuda_workspace(context, plan.workspace_bytes);
    return cuda::run_backward(problem, plan, tensors, context.stream, memory.get());
  }
  const CallExecutor call(context);
  const CpuWork work = plan_backward(problem, wanted(problem, tensors),
                                     cpu::facts(call.executor->concurrency(), problem.dtype));
  const std::shared_ptr<void> memory = workspace(context, work.workspace_bytes);
  cpu::run_backward(problem, work, tensors, *call.executor, static_cast<std::byte*>(memory.get()));
} catch (...) {
  rethrow_as_error();
}

void check(const Context& context, const Attention& attention,
           const std::optional<Tensor>& out) try {
  const Problem problem = checked_problem(context, attention);
  if (out) make_forward(problem, attention, *out, std::nullopt);
} catch (...) {
  rethrow_as_error();
}

void check(const Context& context, const Attention& attention, const Tensor& out, const Tensor& lse,
           const std::optional<Tensor>& dout, const std::optional<Tensor>& dlse) try {
  const Problem problem = checked_problem(context, attention);
  make_backward(problem, attention, out, lse, dout, dlse, {});
} catch (...) {
  rethrow_as_error();
}

void check_merge_states(const Context& context, const Tensor& outs, const Tensor& lses,
                        const Tensor& out, const Tensor& lse) try {
  check_merge(outs, lses, out, lse, context.device);
} catch (...) {
  rethrow_as_error();
}

void merge_states(const Context& context, const Tensor& outs, const Tensor& lses, const Tensor& out,
                  const Tensor& lse) try {
  check_merge(outs, lses, out, lse, context.device);
  if (on_cuda(context)) {
    return cuda::merge_states(outs, lses, out, lse,
                              plan_cuda_merge(outs, lses, out, lse, cuda_facts(context)),
                              context.stream);
  }
  const CallExecutor call(context);
  cpu::merge_states(outs, lses, out, lse, *call.executor);
} catch (...) {
  rethrow_as_error();
}

void set_num_threads(std::int64_t count) try {
  constexpr std::int64_t kMostThreads = 4096;
  if (count < 0 || count > kMostThreads) {
    invalid("count is ", count, ": from 0 (all there are) to ", kMostThreads, " is needed");
  }
  cpu::set_pool_threads(static_cast<int>(count));
} catch (...) {
  rethrow_as_error();
}

int num_threads() try { return cpu::pool_threads(); } catch (...) {
  rethrow_as_error();
}

std::string info() try {
  const CpuFacts facts = cpu::facts(num_threads());
  return concat("onefold ", ONEFOLD_VERSION, "\n", "backend cpu, instruction set ",
                cpu::instruction_set(), ", ", facts.threads,
                facts.threads == 1 ? " thread" : " threads", " of ", cpu::available_processors(),
                " available, L2 cache ", facts.l2_bytes / 1024, " KiB\n", cuda_info());
} catch (...) {
  rethrow_as_error();
}

}  // namespace onefold
