// The CPU backend: chooses the instruction set, lays out the workspace, hands items to an executor.
//
// Invariant: results do not depend on the executor, on who runs an item, or on the workspace's
// previous content. Includes core and the public headers.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "core/work.h"

namespace onefold::cpu {

// The instruction set in use: the fastest there is, or ONEFOLD_BACKEND's.
const char* instruction_set();

// What of it serves a dtype, cache sizes, and the kernels' own facts. `threads` is that of the
// executor of the call.
CpuFacts facts(int threads, DType dtype = DType::kFloat32);

void run_forward(const Problem& problem, const CpuWork& work, const Rows& out, const Numbers& lse,
                 Executor& executor, std::byte* workspace);
void run_backward(const Problem& problem, const CpuWork& work, const BackwardTensors& tensors,
                  Executor& executor, std::byte* workspace);

// outs (N, R, D) and lses (N, R) into out (R, D) and lse (R); shapes have been checked.
void merge_states(const Tensor& outs, const Tensor& lses, const Tensor& out, const Tensor& lse,
                  Executor& executor);

// float32 multiply-adds of the calling thread with the chosen instruction set, in floating-point
// operations per second, measured for about `seconds`: the yardstick of benchmarks.
double fma_rate(double seconds);

// Bytes per second that the calling thread reads of these pieces of memory, in turn, measured for
// about `seconds`: the yardstick of what is bound by memory.
double read_rate(const std::vector<std::span<const std::byte>>& memory, double seconds);

}  // namespace onefold::cpu
