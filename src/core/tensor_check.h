// Whether a tensor is one: its fields hold what they may, and every element has an address.
//
// Invariant: after check_tensor the number of elements and every product of an index with a stride,
// in elements and in bytes, fit in 64 bits, so that nobody behind it has to look again. Includes
// the public headers.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "onefold/attention.h"

namespace onefold {

// "(2, 128, 8, 64)"
std::string shape_text(const Tensor& tensor);

// The bytes that a tensor with elements reaches from `data` on, [low, high) with low <= 0; of the
// axes [first_axis, rank) alone. Nothing when that does not fit in 64 bits.
struct Reach {
  std::int64_t low, high;
};
std::optional<Reach> reach_of(const Tensor& tensor, int first_axis = 0);

// Throw onefold::Error with one sentence: a field outside its set, extents or strides beyond what
// can be counted or addressed, no memory or one that is misaligned, another device than the call's.
void check_tensor(const Tensor& tensor, const char* name, Device device);
void check_device(Device device);

}  // namespace onefold
