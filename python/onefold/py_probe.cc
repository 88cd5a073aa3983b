// How many float32 multiply-adds one thread does per second: the yardstick of `onefold bench`.
#include "py_probe.h"

#include <chrono>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace onefold::python {
namespace {

// Each kernel runs `rounds` times kChains independent multiply-adds, more than latency times ports,
// and returns a number that depends on all of them.
constexpr int kChains = 12;
using Kernel = float (*)(long rounds);

float portable_kernel(long rounds) {
  float x[4 * kChains];
  for (float& lane : x) lane = 1.0f;
  for (long r = 0; r < rounds; ++r) {
    for (float& lane : x) lane = lane * 0.999f + 1e-3f;
  }
  float sum = 0;
  for (const float lane : x) sum += lane;
  return sum;
}

#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) float avx2_kernel(long rounds) {
  __m256 x[kChains];
  const __m256 a = _mm256_set1_ps(0.999f), b = _mm256_set1_ps(1e-3f);
  for (__m256& v : x) v = a;
  for (long r = 0; r < rounds; ++r) {
#pragma GCC unroll 12
    for (__m256& v : x) v = _mm256_fmadd_ps(v, a, b);
  }
  __m256 sum = x[0];
  for (int i = 1; i < kChains; ++i) sum = _mm256_add_ps(sum, x[i]);
  return _mm256_cvtss_f32(sum);
}

__attribute__((target("avx512f"))) float avx512_kernel(long rounds) {
  __m512 x[kChains];
  const __m512 a = _mm512_set1_ps(0.999f), b = _mm512_set1_ps(1e-3f);
  for (__m512& v : x) v = a;
  for (long r = 0; r < rounds; ++r) {
#pragma GCC unroll 12
    for (__m512& v : x) v = _mm512_fmadd_ps(v, a, b);
  }
  __m512 sum = x[0];
  for (int i = 1; i < kChains; ++i) sum = _mm512_add_ps(sum, x[i]);
  return _mm512_cvtss_f32(sum);
}
#endif

struct Choice {
  Kernel kernel;
  int lanes;
};

Choice choose() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return {&avx512_kernel, 16};
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return {&avx2_kernel, 8};
#endif
  return {&portable_kernel, 4};
}

}  // namespace

double fma_probe(double seconds) {
  using Clock = std::chrono::steady_clock;
  constexpr long kRounds = 100000;
  const Choice choice = choose();
  volatile float sink = choice.kernel(kRounds);  // wakes the unit up
  const auto start = Clock::now();
  double elapsed = 0, flop = 0;
  while (elapsed < seconds || flop == 0) {
    sink = choice.kernel(kRounds);
    flop += 2.0 * kRounds * kChains * choice.lanes;
    elapsed = std::chrono::duration<double>(Clock::now() - start).count();
  }
  static_cast<void>(sink);
  return flop / elapsed;
}

}  // namespace onefold::python
