// Which tensors may share memory: an output has memory of its own.
//
// Invariant: two tensors that share an element are never called apart. Views that interleave
// without sharing one (the slices of a packed qkv) are told apart when they repeat with a common
// step. Tensors have passed check_tensor. Includes the public headers.
#pragma once

#include <array>
#include <optional>

#include "onefold/attention.h"

namespace onefold {

// False only when no byte belongs to both.
bool may_overlap(const Tensor& x, const Tensor& y);

// The tensors of one call, as they are read and written.
class Footprint {
 public:
  void reads(const char* name, const Tensor& tensor);
  void reads(const char* name, const std::optional<Tensor>& tensor);
  // Throws when the tensor shares memory with one that was named before, or repeats an element of
  // its own.
  void writes(const char* name, const Tensor& tensor);
  void writes(const char* name, const std::optional<Tensor>& tensor);

 private:
  struct Named {
    const char* name;
    const Tensor* tensor;
  };
  std::array<Named, 24> seen_{};
  int count_ = 0;
};

}  // namespace onefold
