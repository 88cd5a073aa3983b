// What the algebra needs of a number: a handful of functions on float and double.
//
// Invariant: the formulas of the algebra are templates on T and take every function from Arith<T>,
// defined here for float and double; SIMD vectors and device registers bring their own. This header
// holds the project's one #ifdef on the compiler, because NVRTC has no standard headers.
#pragma once

#ifndef __CUDACC_RTC__
#include <cmath>
#include <cstdint>
#endif

namespace onefold {

#ifdef __CUDACC_RTC__
using i32 = int;
using u32 = unsigned int;
using i64 = long long;
using u64 = unsigned long long;
namespace math {
inline float exp2(float x) { return ::exp2f(x); }
inline float log2(float x) { return ::log2f(x); }
inline float tanh(float x) { return ::tanhf(x); }
inline float ceil(float x) { return ::ceilf(x); }
inline float fma(float a, float b, float c) { return ::fmaf(a, b, c); }
inline double exp2(double x) { return ::exp2(x); }
inline double log2(double x) { return ::log2(x); }
inline double tanh(double x) { return ::tanh(x); }
inline double ceil(double x) { return ::ceil(x); }
inline double fma(double a, double b, double c) { return ::fma(a, b, c); }
}  // namespace math
#else
using i32 = std::int32_t;
using u32 = std::uint32_t;
using i64 = std::int64_t;
using u64 = std::uint64_t;
namespace math {
using std::ceil;
using std::exp2;
using std::fma;
using std::log2;
using std::tanh;
}  // namespace math
#endif

inline constexpr double kLog2E = 1.4426950408889634074;
inline constexpr double kLn2 = 0.69314718055994530942;

// The reference of the empty set, and the score of a hidden key: minus infinity.
template <class T>
inline constexpr T kEmpty = -static_cast<T>(__builtin_bit_cast(float, 0x7f800000u));

// Scalars: a mask is a bool. T's own mask type is Arith<T>::Mask.
template <class T>
struct ScalarArith {
  using Mask = bool;
  using Scalar = T;
  static T splat(T x) { return x; }
  static T exp2(T x) { return math::exp2(x); }
  static T log2(T x) { return math::log2(x); }
  static T tanh(T x) { return math::tanh(x); }
  static T ceil(T x) { return math::ceil(x); }
  static T fma(T a, T b, T c) { return math::fma(a, b, c); }
  static T abs(T x) { return x > T(0) ? x : T(0) - x; }
  // A NaN in `b` wins, one in `a` is dropped: pass the running value first.
  static T max(T a, T b) { return a > b ? a : b; }
  static bool less(T a, T b) { return a < b; }
  static bool equal(T a, T b) { return a == b; }
  static T select(bool mask, T yes, T no) { return mask ? yes : no; }
};

template <class T>
struct Arith;
template <>
struct Arith<float> : ScalarArith<float> {};
template <>
struct Arith<double> : ScalarArith<double> {};

}  // namespace onefold
