// AVX-512 (F, BW, DQ, VL).
#define ONEFOLD_ISA avx512
#if defined(__AVX512F__)
#include "cpu/isa/body.h"
#else
#include "cpu/kernels.h"
#endif

namespace onefold::cpu {

const Kernels* avx512_kernels() {
#if defined(__AVX512F__)
  return &avx512::kKernels;
#else
  return nullptr;
#endif
}

}  // namespace onefold::cpu
