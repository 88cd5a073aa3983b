// Attention on a CUDA device: problems become kernel parameters, plans become launches on the
// caller's stream.
//
// Invariant: nothing synchronises, and the host reads no tensor of the device. Includes core, the
// specs and launch.h.
#pragma once

#include "core/problem.h"
#include "cuda/launch.h"
#include "kernels/backward_spec.h"
#include "kernels/forward_spec.h"
#include "kernels/merge_states_spec.h"

namespace onefold::cuda {

void run_forward(const Problem& problem, const kernels::ForwardPlan& plan,
                 const ForwardTensors& tensors, void* stream, void* workspace);
void run_backward(const Problem& problem, const kernels::BackwardPlan& plan,
                  const BackwardTensors& tensors, void* stream, void* workspace);

// Tensors that have been checked.
void merge_states(const Tensor& outs, const Tensor& lses, const Tensor& out, const Tensor& lse,
                  const kernels::MergeStatesSpec& spec, void* stream);

}  // namespace onefold::cuda
