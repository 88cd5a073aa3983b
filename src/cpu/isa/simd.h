// Vectors of rows: the compilers' vector types behind about thirty operations.
//
// Invariant: this header is compiled once per instruction set, inside the namespace named by
// ONEFOLD_ISA and with that set's flags; nothing in it may be shared between sets, so every
// function is a template on, or takes, a vector type whose width is the set's own. Rounding is
// explicit (fma is fma, a * b + c is two roundings): contraction is off. Includes algebra, dtype.h
// and, where a measurement asked for them, intrinsics.
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include <bit>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "core/dtype.h"
#include "onefold/algebra/softmax.h"

namespace onefold::cpu::ONEFOLD_ISA {

#if defined(__AVX512F__)
inline constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
inline constexpr int kVectorBytes = 32;
#else
inline constexpr int kVectorBytes = 16;
#endif

template <class R>
struct VectorOf {
  typedef R type __attribute__((vector_size(kVectorBytes)));
};
template <class R>
using Vec = typename VectorOf<R>::type;
template <class R>
using Int = std::conditional_t<sizeof(R) == 4, std::int32_t, std::int64_t>;
template <class R>
using IntVec = Vec<Int<R>>;
template <class R>
inline constexpr int kWidth = kVectorBytes / static_cast<int>(sizeof(R));

template <class R>
inline Vec<R> splat(R x) {
  return x - Vec<R>{};  // folds to a broadcast; x + 0 would not, because of -0
}
template <class R>
inline Vec<R> load(const R* p) {
  Vec<R> v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
template <class R>
inline void store(R* p, const Vec<R>& v) {
  __builtin_memcpy(p, &v, sizeof v);
}
// As many numbers as a vector of double holds.
template <class R>
inline Vec<double> load_as_double(const R* p) {
  typedef R Some __attribute__((vector_size(kWidth<double> * sizeof(R))));
  Some v;
  __builtin_memcpy(&v, p, sizeof v);
  return __builtin_convertvector(v, Vec<double>);
}
// The same vector, kept in a register: without this g++ 12 reads it again from memory per use. By
// value, because a reference to an array element would put the array on the stack.
template <class V>
inline V pinned(V v) {
#if defined(__x86_64__)
  asm("" : "+v"(v));
#elif defined(__aarch64__)
  asm("" : "+w"(v));
#endif
  return v;
}

inline Vec<float> fma(Vec<float> a, Vec<float> b, Vec<float> c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}
inline Vec<double> fma(Vec<double> a, Vec<double> b, Vec<double> c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_pd(a, b, c);
#elif defined(__AVX2__)
  return _mm256_fmadd_pd(a, b, c);
#else
  return a * b + c;
#endif
}

// A NaN in `b` wins, one in `a` is dropped, as in ScalarArith.
inline Vec<float> max(Vec<float> a, Vec<float> b) {
#if defined(__AVX512F__)
  return _mm512_max_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}
inline Vec<double> max(Vec<double> a, Vec<double> b) { return a > b ? a : b; }
inline Vec<float> min(Vec<float> a, Vec<float> b) {
#if defined(__AVX512F__)
  return _mm512_min_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_min_ps(a, b);
#else
  return a < b ? a : b;
#endif
}
inline Vec<double> min(Vec<double> a, Vec<double> b) { return a < b ? a : b; }

inline Vec<float> ceil(Vec<float> x) {
#if defined(__AVX512F__)
  return _mm512_roundscale_ps(x, 0x0A);
#elif defined(__AVX2__)
  return _mm256_ceil_ps(x);
#else
  for (int lane = 0; lane < kWidth<float>; ++lane) x[lane] = __builtin_ceilf(x[lane]);
  return x;
#endif
}
inline Vec<double> ceil(Vec<double> x) {
  for (int lane = 0; lane < kWidth<double>; ++lane) x[lane] = __builtin_ceil(x[lane]);
  return x;
}

// exp2 = 2^n * 2^f with n the nearest integer and f in [-1/2, 1/2]. The polynomial's constant term
// is exactly 1, so integers are exact. Results below 2^-126 (2^-1022) are flushed to 0; NaN stays.
template <class R>
struct Exp2;
template <>
struct Exp2<float> {
  static constexpr float kLow = -126.0f, kHigh = 127.0f;
  static constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  static constexpr int kShift = 23;
  // Minimax in relative error, 1.1e-7 with these rounded coefficients.
  static constexpr float kCoefficients[] = {0.0013264727f, 0.009671513f, 0.055507336f, 0.24022242f,
                                            0.693147f};
};
template <>
struct Exp2<double> {
  static constexpr double kLow = -1022.0, kHigh = 1023.0;
  static constexpr double kMagic = 6755399441055744.0;  // 1.5 * 2^52
  static constexpr int kShift = 52;
  // (ln 2)^k / k!, k = 13 .. 1: the first term left out is 1e-17.
  static constexpr double kCoefficients[] = {
      1.3691488853904129e-12, 2.5678435993488205e-11, 4.4455382718708116e-10,
      7.0549116208011233e-09, 1.0178086009239699e-07, 1.3215486790144309e-06,
      1.5252733804059841e-05, 1.5403530393381609e-04, 1.3333558146428443e-03,
      9.6181291076284772e-03, 5.5504108664821580e-02, 2.4022650695910071e-01,
      6.9314718055994531e-01};
};

template <class R>
inline Vec<R> exp2_fraction(Vec<R> f) {
  using E = Exp2<R>;
  Vec<R> p = splat<R>(E::kCoefficients[0]);
#pragma GCC unroll 16
  for (std::size_t k = 1; k < sizeof(E::kCoefficients) / sizeof(R); ++k) {
    p = fma(p, f, splat<R>(E::kCoefficients[k]));
  }
  return fma(p, f, splat<R>(R(1)));
}

template <class R>
inline Vec<R> exp2(Vec<R> x) {
  using E = Exp2<R>;
#if defined(__AVX512F__)
  if constexpr (sizeof(R) == 4) {
    const __m512 n = _mm512_roundscale_ps(x, 0x08);
    const __mmask16 kept = _mm512_cmp_ps_mask(x, splat<R>(E::kLow), _CMP_NLT_UQ);
    return _mm512_maskz_scalef_ps(kept, exp2_fraction<R>(x - static_cast<Vec<R>>(n)), n);
  }
#endif
  const Vec<R> y = min(splat<R>(E::kHigh), max(splat<R>(E::kLow), x));
  const Vec<R> shifted = y + splat<R>(E::kMagic);
  const Vec<R> p = exp2_fraction<R>(y - (shifted - splat<R>(E::kMagic)));
  // The low bits of `shifted` are n; moved up and added to those of 1 they become 2^n.
  const Vec<R> one = splat<R>(R(1));
  const IntVec<R> power =
      (std::bit_cast<IntVec<R>>(shifted) << E::kShift) + std::bit_cast<IntVec<R>>(one);
  return x < splat<R>(E::kLow) ? Vec<R>{} : p * std::bit_cast<Vec<R>>(power);
}

inline Vec<double> tanh(Vec<double> x) {
  for (int lane = 0; lane < kWidth<double>; ++lane) x[lane] = __builtin_tanh(x[lane]);
  return x;
}
// Odd polynomial (minimax, 6e-9 relative) below 0.625; 1 - 2 / (e^2x + 1) above. About 2 ulp.
inline Vec<float> tanh(Vec<float> x) {
  using V = Vec<float>;
  const V negative = x < V{} ? splat(-1.0f) : splat(1.0f);
  const V a = x * negative;
  const V z = x * x;
  V p = splat(-0.005528975278139114f);
  p = fma(p, z, splat(0.020483657717704773f));
  p = fma(p, z, splat(-0.05369308590888977f));
  p = fma(p, z, splat(0.133309006690979f));
  p = fma(p, z, splat(-0.3333326280117035f));
  const V small = fma(x * z, p, x);
  const V e = exp2<float>(min(splat(30.0f), a * splat(2.8853900817779268f)));
  const V large = (splat(1.0f) - splat(2.0f) / (e + splat(1.0f))) * negative;
  return a < splat(0.625f) ? small : large;
}

// One vector of elements, as floats.
inline Vec<float> widen(const float* p) { return load(p); }
struct BFloat16 {
  std::uint16_t bits;
};
struct Float16 {
  std::uint16_t bits;
};
inline Vec<float> widen(const BFloat16* p) {
#if defined(__AVX512F__)
  return std::bit_cast<Vec<float>>(_mm512_slli_epi32(
      _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16));
#elif defined(__AVX2__)
  return std::bit_cast<Vec<float>>(_mm256_slli_epi32(
      _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16));
#else
  Vec<float> v;
  for (int lane = 0; lane < kWidth<float>; ++lane) v[lane] = bfloat16_to_float(p[lane].bits);
  return v;
#endif
}
inline Vec<float> widen(const Float16* p) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__)
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  Vec<float> v;
  for (int lane = 0; lane < kWidth<float>; ++lane) v[lane] = float16_to_float(p[lane].bits);
  return v;
#endif
}

// The way back, rounded to nearest even; the baseline has no instruction for it.
#if defined(__AVX2__)
inline void narrow(Float16* p, Vec<float> x) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
#else
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
#endif
}
#endif

template <class T>
inline void gather_row(const T* from, std::int64_t stride, std::int64_t count, T* to) {
  for (std::int64_t d = 0; d < count; ++d) to[d] = from[d * stride];
}

template <class R, class Load>
inline void load_with(R* to, std::int64_t count, std::int64_t stride, Load load) {
  if (stride == 1) {
    for (std::int64_t d = 0; d < count; ++d) to[d] = static_cast<R>(load(d));
  } else {
    for (std::int64_t d = 0; d < count; ++d) to[d] = static_cast<R>(load(d * stride));
  }
}

// A finite number stays finite: minus infinity would hide a key that a float64 bias only lowers.
template <class R>
inline double finite_as(double x) {
  constexpr double kMost = sizeof(R) == 4 ? 3.4028234663852886e38 : 1.7976931348623157e308;
  const double near = x < -kMost ? -kMost : x > kMost ? kMost : x;
  return x - x == 0 ? near : x;
}

// `count` elements of any float dtype and stride, as R.
template <class R>
inline void load_row(R* to, const void* from, DType dtype, std::int64_t stride,
                     std::int64_t count) {
  switch (dtype) {
    case DType::kFloat32:
      return load_with(to, count, stride,
                       [p = static_cast<const float*>(from)](std::int64_t i) { return p[i]; });
    case DType::kBFloat16:
      return load_with(to, count, stride,
                       [p = static_cast<const std::uint16_t*>(from)](std::int64_t i) {
                         return bfloat16_to_float(p[i]);
                       });
    case DType::kFloat16: {
      const auto* p = static_cast<const std::uint16_t*>(from);
      std::int64_t d = 0;
      if constexpr (sizeof(R) == 4) {
        constexpr int kW = kWidth<float>;
        for (; stride == 1 && d + kW <= count; d += kW) {
          store(to + d, widen(reinterpret_cast<const Float16*>(p + d)));
        }
      }
      return load_with(to + d, count - d, stride,
                       [p = p + d * stride](std::int64_t i) { return float16_to_float(p[i]); });
    }
    case DType::kFloat64:
      return load_with(to, count, stride, [p = static_cast<const double*>(from)](std::int64_t i) {
        return finite_as<R>(p[i]);
      });
    default:
      return;
  }
}

template <class R, class Store>
inline void store_with(std::int64_t count, std::int64_t stride, const R* from, Store store) {
  if (stride == 1) {
    for (std::int64_t d = 0; d < count; ++d) store(d, from[d]);
  } else {
    for (std::int64_t d = 0; d < count; ++d) store(d * stride, from[d]);
  }
}

// The way back; 16-bit floats are rounded to nearest even.
template <class R>
inline void store_row(void* to, DType dtype, std::int64_t stride, const R* from,
                      std::int64_t count) {
  switch (dtype) {
    case DType::kFloat32:
      return store_with(count, stride, from, [p = static_cast<float*>(to)](std::int64_t i, R x) {
        p[i] = static_cast<float>(x);
      });
    case DType::kBFloat16:
      return store_with(count, stride, from,
                        [p = static_cast<std::uint16_t*>(to)](std::int64_t i, R x) {
                          p[i] = float_to_bfloat16(static_cast<float>(x));
                        });
    case DType::kFloat16: {
      auto* p = static_cast<std::uint16_t*>(to);
      std::int64_t d = 0;
#if defined(__AVX2__)
      if constexpr (sizeof(R) == 4) {
        constexpr int kW = kWidth<float>;
        for (; stride == 1 && d + kW <= count; d += kW) {
          narrow(reinterpret_cast<Float16*>(p + d), load(from + d));
        }
      }
#endif
      return store_with(count - d, stride, from + d, [p = p + d * stride](std::int64_t i, R x) {
        p[i] = float_to_float16(static_cast<float>(x));
      });
    }
    case DType::kFloat64:
      return store_with(count, stride, from, [p = static_cast<double*>(to)](std::int64_t i, R x) {
        p[i] = static_cast<double>(x);
      });
    default:
      return;
  }
}

// The algebra's functions on vectors of rows.
template <class R>
struct VectorArith {
  using V = Vec<R>;
  using Mask = IntVec<R>;
  using Scalar = R;
  static V splat(R x) { return ONEFOLD_ISA::splat<R>(x); }
  static V exp2(V x) { return ONEFOLD_ISA::exp2<R>(x); }
  static V tanh(V x) { return ONEFOLD_ISA::tanh(x); }
  static V ceil(V x) { return ONEFOLD_ISA::ceil(x); }
  static V fma(V a, V b, V c) { return ONEFOLD_ISA::fma(a, b, c); }
  static V abs(V x) { return x < V{} ? -x : x; }
  static V max(V a, V b) { return ONEFOLD_ISA::max(a, b); }
  static Mask less(V a, V b) { return a < b; }
  static Mask equal(V a, V b) { return a == b; }
  static V select(Mask mask, V yes, V no) { return mask ? yes : no; }
};

}  // namespace onefold::cpu::ONEFOLD_ISA

namespace onefold {

template <>
struct Arith<cpu::ONEFOLD_ISA::Vec<float>> : cpu::ONEFOLD_ISA::VectorArith<float> {};
template <>
struct Arith<cpu::ONEFOLD_ISA::Vec<double>> : cpu::ONEFOLD_ISA::VectorArith<double> {};

}  // namespace onefold
