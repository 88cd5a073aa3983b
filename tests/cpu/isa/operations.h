// The vector operations of one instruction set, as plain functions that a test may call.
//
// Invariant: operations.cc is compiled once per set with that set's flags and defines one table;
// like the kernels, it shares no inline function with anybody, so it includes no test framework.
// Includes tensor.h and the standard library.
#pragma once

#include <cstdint>

#include "onefold/tensor.h"

namespace onefold::test {

// Of vectors of R. Pointers are to one vector, `width` numbers, unless said otherwise.
template <class R>
struct VectorOperations {
  int width;
  void (*splat)(R x, R* to);
  void (*fma)(const R* a, const R* b, const R* c, R* to);
  void (*max)(const R* a, const R* b, R* to);
  void (*min)(const R* a, const R* b, R* to);
  void (*ceil)(const R* x, R* to);
  void (*abs)(const R* x, R* to);
  void (*exp2)(const R* x, R* to);
  void (*tanh)(const R* x, R* to);
  void (*select_less)(const R* a, const R* b, R* to);   // a where a < b, else b
  void (*select_equal)(const R* a, const R* b, R* to);  // a where a == b, else 0

  // Of rows of any length.
  void (*load_row)(R* to, const void* from, DType dtype, std::int64_t stride, std::int64_t count);
  void (*store_row)(void* to, DType dtype, std::int64_t stride, const R* from, std::int64_t count);
  void (*transpose)(const R* from, std::int64_t from_step, std::int64_t rows, std::int64_t columns,
                    R* to, std::int64_t to_step);
  bool (*all_finite)(const R* row, std::int64_t count);
};

struct Operations {
  VectorOperations<float> of_float;
  VectorOperations<double> of_double;
  // One vector of elements, as floats; of its lanes, the sum and the most.
  void (*widen_float)(const float* from, float* to);
  void (*widen_bfloat16)(const std::uint16_t* from, float* to);
  void (*widen_float16)(const std::uint16_t* from, float* to);
  // A row of float16, stored.
  void (*store_float16)(std::uint16_t* to, const float* from, std::int64_t count);
  float (*sum_lanes)(const float* x);
  float (*max_lane)(const float* x);
  // The sums of 8 and of most_sums vectors that lie one after another.
  void (*sums_of_8)(const float* x, float* to);
  void (*sums_of_most)(const float* x, float* to);
  int most_sums;
  // bfloat16 in pairs, the earlier in the low half. A product of one vector, added to c; a row of
  // floats, rounded; two rows, element by element; one vector of either row (twice as many), put
  // in order again after it was widened.
  void (*multiply_pairs)(const std::int32_t* a, const std::int32_t* b, const float* c, float* to);
  void (*narrow_row)(const float* from, std::int64_t count, std::int32_t* to);
  void (*interleave_rows)(const float* low, const float* high, std::int64_t count,
                          std::int32_t* to);
  void (*interleave)(const std::int32_t* first, const std::int32_t* second, float* lows);
};

// Absent where this build lacks the set.
namespace avx512_bf16 {
[[gnu::weak]] const Operations& operations();
}
namespace avx512 {
[[gnu::weak]] const Operations& operations();
}
namespace avx2 {
[[gnu::weak]] const Operations& operations();
}
namespace baseline {
[[gnu::weak]] const Operations& operations();
}

}  // namespace onefold::test
