// Merges partial results over disjoint sets of keys: one warp, one row.
//
// The normaliser is a fold in float64, out a sum in the order of the parts, in float32 unless
// something is float64. A part that saw nothing is skipped. Includes merge_states_spec.h,
// registers.cuh.
#pragma once

#include "kernels/merge_states_spec.h"
#include "kernels/tile/registers.cuh"

namespace onefold::kernels {

template <Element kElement>
__forceinline__ double load_wide(const void* data, i64 index) {
  if constexpr (kElement == Element::kFloat64) return static_cast<const double*>(data)[index];
  return double{tile::load_element<kElement>(data, index)};
}
template <Element kElement>
__forceinline__ void store_wide(void* data, i64 index, double x) {
  if constexpr (kElement == Element::kFloat64) {
    static_cast<double*>(data)[index] = x;
  } else {
    tile::store_element<kElement>(data, index, static_cast<float>(x));
  }
}

template <MergeStatesSpec kSpec>
__forceinline__ void merge_states(const MergeStatesArguments& args) {
  constexpr bool kWide = kSpec.wide();
  const i64 row = i64{blockIdx.x} * kMergeStatesWarps + threadIdx.x / 32;
  const int lane = static_cast<int>(threadIdx.x % 32);
  if (row >= args.rows) return;
  const auto part_lse = [&](i64 part) {
    const i64 at = part * args.lses_stride[0] + row * args.lses_stride[1];
    // Rounded before anything is subtracted from it: two uses must give one number.
    return __dmul_rn(load_wide<kSpec.lses>(args.lses, at), kLog2E);
  };
  Softmax<double> total;
  for (i64 part = 0; part < args.parts; ++part) {
    total = merge(total, SoftmaxFold<double>::lift(part_lse(part)));
  }
  const double of_row = lse(total);
  for (i64 d = lane; d < args.dim; d += 32) {
    double wide = 0.0;
    float narrow = 0.0f;
    for (i64 part = 0; part < args.parts; ++part) {
      const double share = part_lse(part);
      if (share == kEmpty<double>) continue;
      const i64 at =
          part * args.outs_stride[0] + row * args.outs_stride[1] + d * args.outs_stride[2];
      const double x = load_wide<kSpec.outs>(args.outs, at);
      const double factor = weight(share, of_row);
      if constexpr (kWide) {
        wide += factor * x;
      } else {
        narrow = ::fmaf(static_cast<float>(factor), static_cast<float>(x), narrow);
      }
    }
    store_wide<kSpec.out>(args.out, row * args.out_stride[0] + d * args.out_stride[1],
                          kWide ? wide : double{narrow});
  }
  if (lane == 0) store_wide<kSpec.lse>(args.lse, row * args.lse_stride, of_row * kLn2);
}

}  // namespace onefold::kernels
