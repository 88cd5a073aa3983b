// Attention on a CUDA device: problems become kernel parameters, plans become launches on the
// caller's stream.
//
// Invariant: nothing synchronises, and the host reads no tensor of the device. Includes core, the
// specs and launch.h.
#pragma once

#include <vector>

#include "core/problem.h"
#include "cuda/launch.h"
#include "kernels/backward_spec.h"
#include "kernels/forward_spec.h"
#include "kernels/merge_states_spec.h"

namespace onefold::cuda {

// Where launches go: to a stream of the problem's device, or, when only what they need is asked,
// nowhere, and their programs into a list.
struct Launches {
  Launches(void* to) : stream(to) {}
  explicit Launches(std::vector<jit::Program>& list) : programs(&list) {}

  void* stream = nullptr;
  std::vector<jit::Program>* programs = nullptr;
};

void run_forward(const Problem& problem, const kernels::ForwardPlan& plan,
                 const ForwardTensors& tensors, const Launches& to, void* workspace);
void run_backward(const Problem& problem, const kernels::BackwardPlan& plan,
                  const BackwardTensors& tensors, const Launches& to, void* workspace);

// Tensors that have been checked.
void merge_states(const Tensor& outs, const Tensor& lses, const Tensor& out, const Tensor& lse,
                  const kernels::MergeStatesSpec& spec, void* stream);

}  // namespace onefold::cuda
