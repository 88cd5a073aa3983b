#include "cpu/cpu.h"

#if defined(__linux__)
#include <unistd.h>
#endif
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "cpu/kernels.h"
#include "onefold/algebra/softmax.h"

namespace onefold::cpu {
namespace {

struct InstructionSet {
  const char* name;
  const Kernels* kernels;  // null: not in this build
  struct {
    const char* name;
    const Kernels* kernels;
  } other;  // of all dtypes but bfloat16, where `kernels` are for that alone

  bool serves(DType dtype) const { return other.kernels == nullptr || dtype == DType::kBFloat16; }
  const Kernels& kernels_of(DType dtype) const { return serves(dtype) ? *kernels : *other.kernels; }
  const char* name_of(DType dtype) const { return serves(dtype) ? name : other.name; }
};

std::vector<InstructionSet> instruction_sets() {
  std::vector<InstructionSet> sets;
#if defined(__x86_64__)
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;  // clang 14's builtin does not know f16c
  const bool f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && f16c;
  const InstructionSet wide{"avx512", avx512_kernels(), {}};
  if (avx512 && avx2) sets.push_back(wide);
  if (avx512 && avx2 && __builtin_cpu_supports("avx512bf16")) {
    // Twice the multiply-adds of float32 on AMD's Zen 5, half as many on Intel's: there, only when
    // it is asked for.
    const bool fast = __builtin_cpu_is("amd");
    const InstructionSet pairs{"avx512_bf16", avx512_bf16_kernels(), {wide.name, wide.kernels}};
    sets.insert(fast ? sets.begin() : sets.end(), pairs);
  }
  if (avx2) sets.push_back({"avx2", avx2_kernels(), {}});
#endif
  sets.push_back({"baseline", baseline_kernels(), {}});
  return sets;
}

InstructionSet choose_instruction_set() {
  const char* forced = std::getenv("ONEFOLD_BACKEND");
  const bool any = forced == nullptr || *forced == '\0' || std::strcmp(forced, "cpu") == 0;
  std::string offered;
  for (const InstructionSet& set : instruction_sets()) {
    if (set.kernels == nullptr) continue;
    if (any || std::strcmp(forced, set.name) == 0) return set;
    offered += std::string(offered.empty() ? "" : ", ") + set.name;
  }
  invalid("ONEFOLD_BACKEND is ", forced, ": this build and processor offer ", offered);
}

// A failure is not remembered: a process may mend its environment and call again.
const InstructionSet& chosen() {
  static const InstructionSet set = choose_instruction_set();
  return set;
}

std::int64_t l2_bytes() {
  long bytes = 0;
#if defined(__linux__) && defined(_SC_LEVEL2_CACHE_SIZE)
  bytes = sysconf(_SC_LEVEL2_CACHE_SIZE);
#endif
  return bytes > 0 ? bytes : 512 * 1024;
}

template <class Function>
void for_each(Executor& executor, std::int64_t count, Function&& function) {
  if (count == 0) return;
  if (count == 1) return function(0, 0);
  executor.parallel_for(
      count,
      [](void* context, std::int64_t idx, int worker) {
        (*static_cast<std::remove_reference_t<Function>*>(context))(idx, worker);
      },
      &function);
}

using Axes = std::array<std::int64_t, 4>;

// Zeros, whose bits are zero in every dtype, over the outer `axes` axes of blocks of bytes.
void clear_blocks(std::byte* data, const Axes& extent, const Axes& stride_bytes, int axes,
                  std::int64_t block_bytes, int axis = 0) {
  if (axis == axes) {
    std::memset(data, 0, static_cast<std::size_t>(block_bytes));
    return;
  }
  for (std::int64_t idx = 0; idx < extent[axis]; ++idx) {
    clear_blocks(data + idx * stride_bytes[axis], extent, stride_bytes, axes, block_bytes,
                 axis + 1);
  }
}

// The inner axes that lie packed are one block.
void clear(void* data, DType dtype, const Axes& extent, const Axes& stride) {
  std::int64_t block_bytes = size_bytes(dtype);
  Axes stride_bytes{};
  for (int axis = 0; axis < 4; ++axis) {
    if (extent[axis] == 0) return;
    stride_bytes[axis] = stride[axis] * size_bytes(dtype);
  }
  int axes = 4;
  while (axes > 0 && (extent[axes - 1] == 1 || stride_bytes[axes - 1] == block_bytes)) {
    block_bytes *= extent[--axes];
  }
  clear_blocks(static_cast<std::byte*>(data), extent, stride_bytes, axes, block_bytes);
}

// Every row of a tensor; those that are used are written again.
void clear_rows(const Problem& p, const Rows& rows, std::int64_t count, std::int64_t heads,
                std::int64_t dim) {
  if (!rows) return;
  clear(rows.data, rows.dtype, {p.packed ? 1 : p.batch, count, heads, dim},
        {rows.batch, rows.row, rows.head, rows.dim});
}

// Minus infinity as the lse of every row.
template <class Number>
void clear_lse(const Problem& p, const Numbers& lse) {
  for (std::int64_t b = 0; b < (p.packed ? 1 : p.batch); ++b) {
    for (std::int64_t h = 0; h < p.heads_q; ++h) {
      Number* row = static_cast<Number*>(lse.data) + b * lse.batch + h * lse.head;
      for (std::int64_t r = 0; r < p.rows_q; ++r) row[r * lse.row] = kEmpty<Number>;
    }
  }
}

// What `work` gets done per second, by its own account, over about `seconds`; a first run is not
// counted.
template <class Work>
double rate_of(double seconds, Work&& work) {
  using Clock = std::chrono::steady_clock;
  work();
  const auto start = Clock::now();
  double done = 0;
  std::chrono::duration<double> elapsed{};
  do {
    done += work();
    elapsed = Clock::now() - start;
  } while (elapsed.count() < seconds);
  return done / elapsed.count();
}

// dSlopes or dSinks from the items' sums, in the order (b, chunk), in double.
void store_numbers(const Problem& p, const Numbers& to, const double* sums,
                   std::int64_t num_chunks) {
  const bool batched = to.per_sequence;
  for (std::int64_t target = 0; target < (batched ? p.batch : 1); ++target) {
    for (std::int64_t h = 0; h < p.heads_q; ++h) {
      double sum = 0;
      const auto sequences = static_cast<std::int64_t>(p.sequences.size());  // none: all are 0
      const std::int64_t end = batched ? std::min(target + 1, sequences) : sequences;
      for (std::int64_t b = batched ? target : 0; b < end; ++b) {
        for (std::int64_t c = 0; c < num_chunks; ++c) {
          const std::int64_t unit = (b * p.heads_k + h / p.group) * num_chunks + c;
          sum += sums[unit * p.group + h % p.group];
        }
      }
      to.store(target, h, 0, sum);
    }
  }
}

}  // namespace

const char* instruction_set() { return chosen().name; }

CpuFacts facts(int threads, DType dtype) {
  const Kernels& k = chosen().kernels_of(dtype);
  return {chosen().name_of(dtype), threads,           l2_bytes(),         k.lanes_float,
          k.lanes_double,          k.forward_scratch, k.backward_scratch, k.chunk_bytes,
          k.partial_bytes,         k.not_decoding};
}

void run_forward(const Problem& p, const CpuWork& work, const Rows& out, const Numbers& lse,
                 Executor& executor, std::byte* workspace) {
  if (p.padded) {
    clear_rows(p, out, p.rows_q, p.heads_q, p.dim_v);
    if (lse) lse.dtype == DType::kFloat64 ? clear_lse<double>(p, lse) : clear_lse<float>(p, lse);
  }
  const Kernels& kernels = chosen().kernels_of(p.dtype);
  ForwardCall call{};
  call.problem = &p;
  call.tiles = work.tiles;
  call.out = out;
  call.lse = lse;
  call.items = work.items.data();
  call.splits = work.splits.data();
  call.partials = workspace;
  call.scratch = workspace + work.partials_bytes;
  call.scratch_bytes = work.scratch_bytes;
  for_each(executor, static_cast<std::int64_t>(work.items.size()),
           [&](std::int64_t idx, int worker) { kernels.forward(call, idx, worker); });
  for_each(executor, static_cast<std::int64_t>(work.splits.size()),
           [&](std::int64_t idx, int worker) { kernels.merge_split(call, idx, worker); });
}

void run_backward(const Problem& p, const CpuWork& work, const BackwardTensors& tensors,
                  Executor& executor, std::byte* workspace) {
  bool some_empty = p.padded || p.sequences.empty();
  for (const Sequence& s : p.sequences) some_empty |= s.used.q == 0 || s.used.k == 0;
  if (some_empty) {
    clear_rows(p, tensors.dq, p.rows_q, p.heads_q, p.dim);
    clear_rows(p, tensors.dk, p.rows_k, p.heads_k, p.dim);
    clear_rows(p, tensors.dv, p.rows_k, p.heads_k, p.dim_v);
  }
  if (const Grid& g = tensors.dbias) clear(g.data, g.dtype, g.extent, g.stride);

  std::byte* numbers = workspace;
  std::byte* chunk_sums = numbers + work.number_sums_bytes;
  std::memset(numbers, 0, work.number_sums_bytes);
  auto* slope_sums = reinterpret_cast<double*>(numbers);
  auto* sink_sums = slope_sums + work.number_sums_bytes / sizeof(double) / 2;
  BackwardCall call{};
  call.problem = &p;
  call.tiles = work.tiles;
  call.t = tensors;
  call.items = work.items.data();
  call.scratch = chunk_sums + work.chunk_sums_bytes;
  call.scratch_bytes = work.scratch_bytes;
  call.wants = work.wants;
  call.by_chunk = work.by_chunk;
  call.num_chunks = work.num_chunks;
  call.chunk_sums = chunk_sums;
  call.slope_sums = work.wants.dslopes ? slope_sums : nullptr;
  call.sink_sums = work.wants.dsinks ? sink_sums : nullptr;

  const Kernels& kernels = chosen().kernels_of(p.dtype);
  for_each(executor, static_cast<std::int64_t>(work.items.size()),
           [&](std::int64_t idx, int worker) { kernels.backward(call, idx, worker); });
  if (work.by_chunk && work.wants.dkv) {
    const std::int64_t step = 256;
    const std::int64_t blocks = (p.longest_k + step - 1) / step;
    for_each(executor, p.batch * p.heads_k * blocks, [&](std::int64_t idx, int worker) {
      const std::int64_t head = idx / blocks, begin = idx % blocks * step;
      const std::int64_t b = head / p.heads_k;
      const std::int64_t used = p.sequences[static_cast<std::size_t>(b)].used.k;
      const Item keys{b, head % p.heads_k, begin, begin + step < used ? begin + step : used};
      if (keys.row_begin < keys.row_end) kernels.reduce_chunks(call, keys, worker);
    });
  }
  if (work.wants.dbias_broadcast) {
    for_each(executor, kernels.bias_items(call),
             [&](std::int64_t idx, int worker) { kernels.bias_gradient(call, idx, worker); });
  }
  if (tensors.dslopes) store_numbers(p, tensors.dslopes, slope_sums, work.num_chunks);
  if (tensors.dsinks) store_numbers(p, tensors.dsinks, sink_sums, work.num_chunks);
}

// All parts at once against the largest lse, in double: the error does not grow with the number of
// parts, and an empty part changes nothing.
void merge_states(const Tensor& outs, const Tensor& lses, const Tensor& out, const Tensor& lse,
                  Executor& executor) {
  const std::int64_t parts = outs.shape[0], rows = outs.shape[1], dim = outs.shape[2];
  constexpr std::int64_t kBlock = 64;
  struct Share {
    std::int64_t part;
    double lse, weight;
  };
  const auto merge_row = [&](std::int64_t r, std::vector<Share>& shares) {
    shares.clear();
    Softmax<double> state;
    for (std::int64_t n = 0; n < parts; ++n) {
      const double part_lse =
          load_number(lses.data, lses.dtype, n * lses.stride[0] + r * lses.stride[1]) * kLog2E;
      if (part_lse == kEmpty<double>) continue;
      state.ref = Arith<double>::max(state.ref, part_lse);
      shares.push_back({n, part_lse, 0.0});
    }
    const double against = anchor(state.ref);
    for (Share& share : shares) {
      share.weight = weight_from(share.lse, against);
      state.sum += share.weight;
    }
    for (std::int64_t d = 0; d < dim; ++d) {
      double sum = 0;
      for (const Share& share : shares) {
        const std::int64_t at =
            share.part * outs.stride[0] + r * outs.stride[1] + d * outs.stride[2];
        sum += share.weight * load_number(outs.data, outs.dtype, at);
      }
      store_number(out.data, out.dtype, r * out.stride[0] + d * out.stride[1],
                   state.sum == 0 ? 0.0 : sum / state.sum);
    }
    const double merged = onefold::lse(state);
    store_number(lse.data, lse.dtype, r * lse.stride[0], merged * kLn2);
  };
  for_each(executor, (rows + kBlock - 1) / kBlock, [&](std::int64_t block, int) {
    std::vector<Share> shares;
    shares.reserve(static_cast<std::size_t>(parts));
    const std::int64_t end = std::min(rows, (block + 1) * kBlock);
    for (std::int64_t r = block * kBlock; r < end; ++r) merge_row(r, shares);
  });
}

double fma_rate(double seconds) {
  constexpr std::int64_t kRounds = 100000;
  return rate_of(seconds, [&kernels = chosen().kernels_of(DType::kFloat32)] {
    return kernels.fma_probe(kRounds);
  });
}

double read_rate(const std::vector<std::span<const std::byte>>& memory, double seconds) {
  const Kernels& kernels = chosen().kernels_of(DType::kFloat32);
  return rate_of(seconds, [&] {
    std::int64_t bytes = 0;
    for (const auto& part : memory) {
      bytes += kernels.read_probe(part.data(), static_cast<std::int64_t>(part.size()));
    }
    return static_cast<double>(bytes);
  });
}

}  // namespace onefold::cpu
