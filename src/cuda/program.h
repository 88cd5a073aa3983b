// Specs become program text.
//
// Invariant: a spec's text is the program, the log line and the key of caches. Includes the specs
// and jit.h.
#pragma once

#include <string>

#include "jit/jit.h"
#include "kernels/backward_spec.h"
#include "kernels/forward_spec.h"
#include "kernels/mask_classes_spec.h"
#include "kernels/merge_states_spec.h"

namespace onefold::cuda {

// "{.arch = 900, .element = Element::kBFloat16, ...}"
std::string text(const kernels::ForwardSpec& spec);
std::string text(const kernels::BackwardSpec& spec);

jit::Program program(const kernels::ForwardSpec& spec);
jit::Program program(const kernels::BackwardSpec& spec);
jit::Program program(const kernels::BackwardRowsSpec& spec);
jit::Program program(const kernels::BackwardDqSpec& spec);
jit::Program program(const kernels::ScoreGradientsSpec& spec);
jit::Program program(const kernels::GradientSumsSpec& spec);
jit::Program program(const kernels::HeadSumsSpec& spec);
jit::Program program(const kernels::MergeStatesSpec& spec);
jit::Program program(const kernels::MaskClassesSpec& spec);

}  // namespace onefold::cuda
