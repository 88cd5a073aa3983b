// AVX2 with FMA and F16C.
#define ONEFOLD_ISA avx2
#if defined(__AVX2__)
#include "cpu/isa/body.h"
#else
#include "cpu/kernels.h"
#endif

namespace onefold::cpu {

const Kernels* avx2_kernels() {
#if defined(__AVX2__)
  return &avx2::kKernels;
#else
  return nullptr;
#endif
}

}  // namespace onefold::cpu
