// What is asked of the kernel that merges partial results.
//
// Host and device compile it; includes tile/element.h.
#pragma once

#include "kernels/tile/element.h"

namespace onefold::kernels {

inline constexpr int kMergeStatesWarps = 4;  // one row each
struct MergeStatesSpec {
  int arch = 800;
  Element outs = Element::kFloat32, out = Element::kFloat32;
  Element lses = Element::kFloat32, lse = Element::kFloat32;  // float32 or float64

  constexpr bool operator==(const MergeStatesSpec&) const = default;
  constexpr int threads() const { return 32 * kMergeStatesWarps; }
  constexpr int shared_bytes() const { return 0; }
  constexpr bool wide() const { return outs == Element::kFloat64 || out == Element::kFloat64; }
};

// (part, row, d), (part, row), (row, d), (row); strides in elements.
struct MergeStatesArguments {
  const void* outs = nullptr;
  const void* lses = nullptr;
  void* out = nullptr;
  void* lse = nullptr;
  i64 outs_stride[3] = {0, 0, 0}, lses_stride[2] = {0, 0}, out_stride[2] = {0, 0}, lse_stride = 0;
  i64 parts = 0, rows = 0, dim = 0;
};

}  // namespace onefold::kernels
