// bfloat16 in pairs: two neighbours of a sum in one 32-bit word, which some processors multiply and
// add at twice the speed of floats.
//
// Invariant: a product of pairs adds the two exact products to a float, each addition rounded to
// nearest; where the processor has an instruction for it, subnormal operands and sums count as
// zero. Compiled once per instruction set, used where kHasPairs; includes simd.h.
#pragma once

#include "cpu/isa/simd.h"

namespace onefold::cpu::ONEFOLD_ISA {

// The earlier neighbour lies in the low half.
using Pair = std::int32_t;

// What a product adds up, and how many of its terms one operand holds.
template <class X>
using SumOf = std::conditional_t<std::is_same_v<X, Pair>, float, X>;
template <class X>
inline constexpr int kTerms = std::is_same_v<X, Pair> ? 2 : 1;
// Operands of a sum of `terms`; the last may be half empty, which is half zero.
template <class X>
constexpr std::int64_t operands(std::int64_t terms) {
  return (terms + kTerms<X> - 1) / kTerms<X>;
}

inline Vec<float> multiply_add(Vec<float> a, Vec<float> b, Vec<float> c) { return fma(a, b, c); }
inline Vec<double> multiply_add(Vec<double> a, Vec<double> b, Vec<double> c) {
  return fma(a, b, c);
}

#if defined(__AVX512BF16__)
inline constexpr bool kHasPairs = true;
#else
inline constexpr bool kHasPairs = false;
#endif

inline Vec<float> low_of(Vec<Pair> pairs) { return std::bit_cast<Vec<float>>(pairs << 16); }
inline Vec<float> high_of(Vec<Pair> pairs) {
  return std::bit_cast<Vec<float>>(pairs & static_cast<Pair>(0xFFFF0000));
}
inline Pair pair_of(float low, float high) {
  return static_cast<Pair>(std::uint32_t{float_to_bfloat16(high)} << 16 | float_to_bfloat16(low));
}

inline Vec<float> multiply_add(Vec<Pair> a, Vec<Pair> b, Vec<float> c) {
#if defined(__AVX512BF16__)
  return _mm512_dpbf16_ps(c, std::bit_cast<__m512bh>(a), std::bit_cast<__m512bh>(b));
#else
  return fma(high_of(a), high_of(b), fma(low_of(a), low_of(b), c));
#endif
}

// Each lane a pair of those of two vectors, rounded to nearest even.
inline Vec<Pair> pairs_of(Vec<float> low, Vec<float> high) {
#if defined(__AVX512BF16__)
  const __m512i both = std::bit_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
  const __m512i halves =
      _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                       21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return std::bit_cast<Vec<Pair>>(_mm512_permutexvar_epi16(halves, both));
#else
  Vec<Pair> pairs;
  for (int lane = 0; lane < kWidth<float>; ++lane) pairs[lane] = pair_of(low[lane], high[lane]);
  return pairs;
#endif
}

// The pairs that two rows of two-byte numbers form, element by element, in the order that costs one
// instruction each; `in_order` puts what was made of them straight.
struct Interleaved {
  Vec<Pair> low, high;
};
inline Interleaved interleave(Vec<Pair> first, Vec<Pair> second) {
#if defined(__AVX512BF16__)
  const auto a = std::bit_cast<__m512i>(first), b = std::bit_cast<__m512i>(second);
  return {std::bit_cast<Vec<Pair>>(_mm512_unpacklo_epi16(a, b)),
          std::bit_cast<Vec<Pair>>(_mm512_unpackhi_epi16(a, b))};
#else
  constexpr int kW = kWidth<float>;
  Interleaved all;
  for (int lane = 0; lane < kW; ++lane) {
    const std::uint32_t a = static_cast<std::uint32_t>(first[lane]);
    const std::uint32_t b = static_cast<std::uint32_t>(second[lane]);
    Vec<Pair>& to = lane < kW / 2 ? all.low : all.high;
    to[2 * lane % kW] = static_cast<Pair>(b << 16 | (a & 0xFFFF));
    to[2 * lane % kW + 1] = static_cast<Pair>((b & 0xFFFF0000) | a >> 16);
  }
  return all;
#endif
}
inline void in_order(Vec<float>& low, Vec<float>& high) {
#if defined(__AVX512BF16__)
  const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i eight = _mm512_set1_epi32(8);
  const __m512 a = low, b = high;
  low = _mm512_permutex2var_ps(a, first, b);
  high = _mm512_permutex2var_ps(a, _mm512_add_epi32(first, eight), b);
#else
  (void)low, (void)high;
#endif
}

// A vector of floats as bfloat16s, rounded to nearest even, and what they are.
inline Vec<float> round_to_bfloat16(Vec<float> x, std::uint16_t* to) {
#if defined(__AVX512BF16__)
  const auto half = std::bit_cast<__m256i>(_mm512_cvtneps_pbh(x));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), half);
#else
  for (int lane = 0; lane < kWidth<float>; ++lane) to[lane] = float_to_bfloat16(x[lane]);
#endif
  return widen(reinterpret_cast<const BFloat16*>(to));
}

// count floats as pairs of neighbours, rounded to nearest even; an odd one is followed by zero.
inline void narrow_row(const float* from, std::int64_t count, Pair* to) {
  std::int64_t d = 0;
#if defined(__AVX512BF16__)
  constexpr int kW = kWidth<float>;
  for (; d + 2 * kW <= count; d += 2 * kW) {
    store(to + d / 2,
          std::bit_cast<Vec<Pair>>(_mm512_cvtne2ps_pbh(load(from + d + kW), load(from + d))));
  }
#endif
  for (; d < count; d += 2) to[d / 2] = pair_of(from[d], d + 1 < count ? from[d + 1] : 0.0f);
}

// count bfloat16s of any stride as pairs of neighbours.
inline void load_pairs(const std::uint16_t* from, std::int64_t stride, std::int64_t count,
                       Pair* to) {
  if (stride == 1) {
    if (count % 2 != 0) to[count / 2] = 0;
    __builtin_memcpy(to, from, static_cast<std::size_t>(count) * sizeof *from);
    return;
  }
  for (std::int64_t d = 0; d < count; d += 2) {
    const std::uint32_t high = d + 1 < count ? from[(d + 1) * stride] : 0;
    to[d / 2] = static_cast<Pair>(high << 16 | from[d * stride]);
  }
}

// Each element of two rows of `count` as a pair; a null row counts as zeros.
inline void interleave_rows(const std::uint16_t* low, const std::uint16_t* high,
                            std::int64_t stride, std::int64_t count, Pair* to) {
  if (stride == 1 && low && high) {
    for (std::int64_t d = 0; d < count; ++d) {
      to[d] = static_cast<Pair>(std::uint32_t{high[d]} << 16 | low[d]);
    }
    return;
  }
  for (std::int64_t d = 0; d < count; ++d) {
    const std::uint32_t above = high ? high[d * stride] : 0, below = low ? low[d * stride] : 0;
    to[d] = static_cast<Pair>(above << 16 | below);
  }
}
inline void interleave_rows(const float* low, const float* high, std::int64_t count, Pair* to) {
  constexpr int kW = kWidth<float>;
  std::int64_t d = 0;
  for (; d + kW <= count; d += kW) store(to + d, pairs_of(load(low + d), load(high + d)));
  for (; d < count; ++d) to[d] = pair_of(low[d], high[d]);
}

// Whether no element is infinite or NaN.
inline bool all_finite(const std::uint16_t* row, std::int64_t stride, std::int64_t count) {
  constexpr std::uint16_t kInfinite = 0x7F80;
  std::uint16_t some = 0;
  const auto look = [&](std::uint16_t x) { some |= (x & kInfinite) == kInfinite; };
  if (stride == 1) {
    for (std::int64_t d = 0; d < count; ++d) look(row[d]);
  } else {
    for (std::int64_t d = 0; d < count; ++d) look(row[d * stride]);
  }
  return some == 0;
}

}  // namespace onefold::cpu::ONEFOLD_ISA
