// Reductions over the four threads that share a row of accumulators.
//
// Every thread of the four receives the same bits. Includes algebra/scalar.h.
#pragma once

#include "onefold/algebra/scalar.h"

namespace onefold::tile {

inline constexpr u32 kAllLanes = 0xffffffffu;

template <class Operation>
__forceinline__ float quad_reduce(float x, Operation operation) {
  x = operation(x, __shfl_xor_sync(kAllLanes, x, 1));
  return operation(x, __shfl_xor_sync(kAllLanes, x, 2));
}
__forceinline__ float quad_max(float x) {
  return quad_reduce(x, [](float a, float b) { return ::fmaxf(a, b); });
}
__forceinline__ float quad_sum(float x) {
  return quad_reduce(x, [](float a, float b) { return a + b; });
}

}  // namespace onefold::tile
