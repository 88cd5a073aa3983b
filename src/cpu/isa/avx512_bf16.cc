// AVX-512 with products of bfloat16 pairs: the kernels of bfloat16 alone.
#define ONEFOLD_ISA avx512_bf16
#if defined(__AVX512BF16__)
#include "cpu/isa/body.h"
#else
#include "cpu/kernels.h"
#endif

namespace onefold::cpu {

const Kernels* avx512_bf16_kernels() {
#if defined(__AVX512BF16__)
  return &avx512_bf16::kKernels;
#else
  return nullptr;
#endif
}

}  // namespace onefold::cpu
