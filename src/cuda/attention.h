// Attention on a CUDA device: problems become kernel parameters, plans become launches on the
// caller's stream.
//
// Invariant: nothing synchronises, and the host reads no tensor of the device. Includes core, the
// specs and launch.h.
#pragma once

#include <vector>

#include "core/problem.h"
#include "cuda/launch.h"
#include "kernels/forward_spec.h"

namespace onefold::cuda {

// What run_forward launches.
std::vector<jit::Program> programs(const Problem& problem, const kernels::ForwardPlan& plan);

void run_forward(const Problem& problem, const kernels::ForwardPlan& plan,
                 const ForwardTensors& tensors, void* stream, void* workspace);

}  // namespace onefold::cuda
