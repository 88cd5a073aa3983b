// Questions to a CUDA device that need not exist: tensors at addresses that nobody reads.
//
// Includes the public headers and cuda_plan.h.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "onefold/attention.h"
#include "plan/cuda_plan.h"

namespace onefold::test {

struct CudaKind {
  const char* name;
  CudaFacts facts;
};
// One of each size of shared memory and each way of adding, and the others.
inline constexpr CudaKind kCudaKinds[] = {
    {"sm_80", {800, 108, 163 * 1024, 164 * 1024}},   {"sm_86", {860, 84, 99 * 1024, 100 * 1024}},
    {"sm_89", {890, 128, 99 * 1024, 100 * 1024}},    {"sm_90", {900, 132, 227 * 1024, 228 * 1024}},
    {"sm_100", {1000, 148, 227 * 1024, 228 * 1024}}, {"sm_120", {1200, 170, 99 * 1024, 100 * 1024}},
};

inline Tensor cuda_tensor(int number, DType dtype, std::initializer_list<std::int64_t> shape) {
  Tensor t =
      Tensor::packed(reinterpret_cast<void*>(std::uintptr_t(number + 1) << 40), dtype, shape);
  t.device = {DeviceType::kCuda, 0};
  return t;
}

// What a question asks for besides causal; any of them together.
enum : unsigned {
  kSoftcap = 1,
  kSlopes = 2,
  kBias = 4,
  kMask = 8,
  kDropout = 16,
  kSinks = 32,
  kAllOptions = 63,
};

struct CudaQuestion {
  DType dtype = DType::kBFloat16;
  std::int64_t batch = 2, sq = 300, sk = 500, heads = 4, kv_heads = 2, dim = 64, dim_v = 64;
  unsigned options = 0;

  Attention attention() const {
    Attention a{.q = cuda_tensor(0, dtype, {batch, sq, heads, dim}),
                .k = cuda_tensor(1, dtype, {batch, sk, kv_heads, dim}),
                .v = cuda_tensor(2, dtype, {batch, sk, kv_heads, dim_v}),
                .causal = Causal::kBottomRight};
    if (options & kSoftcap) a.softcap = 3;
    if (options & kDropout) a.dropout_p = 0.1;
    if (options & kSlopes) a.alibi_slopes = cuda_tensor(3, DType::kFloat32, {heads});
    if (options & kSinks) a.sinks = cuda_tensor(4, DType::kFloat32, {heads});
    if (options & kBias) a.bias = cuda_tensor(5, dtype, {heads, sq, sk});
    if (options & kMask) a.mask = cuda_tensor(6, DType::kBool, {sq, sk});
    return a;
  }
  Tensor out(int number = 7) const { return cuda_tensor(number, dtype, {batch, sq, heads, dim_v}); }
  Tensor lse() const { return cuda_tensor(8, DType::kFloat32, {batch, heads, sq}); }

  Problem problem() const { return make_problem(attention(), {DeviceType::kCuda, 0}); }
  ForwardTensors forward(const Problem& p) const {
    return make_forward(p, attention(), out(), lse());
  }
  BackwardTensors backward(const Problem& p) const {
    Gradients g{cuda_tensor(9, dtype, {batch, sq, heads, dim}),
                cuda_tensor(10, dtype, {batch, sk, kv_heads, dim}),
                cuda_tensor(11, dtype, {batch, sk, kv_heads, dim_v})};
    if (options & kBias) g.dbias = cuda_tensor(12, dtype, {heads, sq, sk});
    if (options & kSlopes) g.dslopes = cuda_tensor(13, DType::kFloat32, {heads});
    if (options & kSinks) g.dsinks = cuda_tensor(14, DType::kFloat32, {heads});
    return make_backward(p, attention(), out(), lse(), out(15), std::nullopt, g);
  }
};

}  // namespace onefold::test
