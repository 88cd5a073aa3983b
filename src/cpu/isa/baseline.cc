// What every processor of the architecture has.
#define ONEFOLD_ISA baseline
#include "cpu/isa/body.h"

namespace onefold::cpu {

const Kernels* baseline_kernels() { return &baseline::kKernels; }

}  // namespace onefold::cpu
