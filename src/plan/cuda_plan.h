// Which kernel answers a question on a CUDA device, with which tiles and how many blocks.
//
// Invariant: pure; knows the device by its facts only, so that the plan for any device can be made
// and printed anywhere. Includes core and the specs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "core/problem.h"
#include "kernels/backward_spec.h"
#include "kernels/forward_spec.h"
#include "kernels/merge_states_spec.h"

namespace onefold {

struct CudaFacts {
  int arch = 0;  // 800, 900, 1200
  int num_sms = 0;
  std::size_t shared_bytes = 0;         // that one block may have
  std::size_t shared_bytes_per_sm = 0;  // and all blocks of a multiprocessor together
};

// Of the devices of an architecture, for compiling without one; their multiprocessors are unknown.
CudaFacts cuda_facts_of(int arch);

// Throws Error for what no kernel does, as every plan.
void check_supported(const Problem& problem, const CudaFacts& facts);

kernels::ForwardPlan plan_cuda_forward(const Problem& problem, const ForwardTensors& tensors,
                                       const CudaFacts& facts);

// deterministic: the bits of every gradient are the same in every call.
kernels::BackwardPlan plan_cuda_backward(const Problem& problem, const BackwardTensors& tensors,
                                         bool deterministic, const CudaFacts& facts);

// The same for tiles at hand.
kernels::BackwardPlan plan_cuda_backward(const Problem& problem, const BackwardTensors& tensors,
                                         const kernels::BackwardSpec& spec, const CudaFacts& facts);

kernels::MergeStatesSpec plan_cuda_merge(const Tensor& outs, const Tensor& lses, const Tensor& out,
                                         const Tensor& lse, const CudaFacts& facts);

// What explain() prints: the reasons, one a line.
std::string describe_reasons(const Problem& problem, const kernels::ForwardPlan& plan,
                             const CudaFacts& facts);
std::string describe_reasons(const Problem& problem, const kernels::BackwardPlan& plan,
                             const CudaFacts& facts);

}  // namespace onefold
