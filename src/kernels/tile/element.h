// The number formats of tensors, as kernels see them.
//
// Includes scalar.h only.
#pragma once

#include "onefold/algebra/scalar.h"

namespace onefold {

enum class Element : unsigned char { kNone, kFloat32, kFloat16, kBFloat16, kFloat64 };

constexpr int size_bytes(Element e) {
  return e == Element::kFloat64 ? 8 : e == Element::kFloat32 ? 4 : e == Element::kNone ? 0 : 2;
}

// How many depths of a matrix product a loop over depths writes out. In 32 bits each has six
// operands, and with more of them in flight the compiler runs out of registers.
constexpr int unrolled_depths(Element e) { return e == Element::kFloat32 ? 1 : 64; }

}  // namespace onefold
