// Which tiles of a boolean mask are all hidden, mixed or all visible; see MaskClassesView.
//
// Includes mask_classes_spec.h.
#pragma once

#include "kernels/mask_classes_spec.h"

namespace onefold::kernels {

__forceinline__ void mask_classes(const MaskClassesArguments& args) {
  const i64 word = blockIdx.x % args.words;
  i64 rest = blockIdx.x / args.words;
  const i64 query_tile = rest % args.query_tiles;
  rest /= args.query_tiles;
  const i64 h = rest % args.heads, b = rest / args.heads;
  const i64 i0 = query_tile * args.tile_q;
  const i64 i1 = i0 + args.tile_q < args.queries ? i0 + args.tile_q : args.queries;
  const auto* mask =
      static_cast<const unsigned char*>(args.mask.data) + b * args.mask.batch + h * args.mask.head;
  u32 classes = 0;
  for (int idx = 0; idx < kClassesPerWord; ++idx) {
    const i64 j0 = (word * kClassesPerWord + idx) * args.tile_k;
    const i64 j1 = j0 + args.tile_k < args.keys ? j0 + args.tile_k : args.keys;
    const int columns = static_cast<int>(j1 > j0 ? j1 - j0 : 0);
    bool visible = false, hidden = false;
    if (columns > 0) {
      const int count = static_cast<int>(i1 - i0) * columns;
      for (int at = threadIdx.x; at < count; at += kMaskClassesThreads) {
        const i64 i = i0 + at / columns, j = j0 + at % columns;
        const bool seen = mask[i * args.mask.query + j * args.mask.key] != 0;
        visible |= seen;
        hidden |= !seen;
      }
    }
    visible = __syncthreads_or(visible);
    hidden = __syncthreads_or(hidden);
    classes |= (visible ? hidden ? 1u : 2u : 0u) << 2 * idx;
  }
  if (threadIdx.x == 0) args.classes[blockIdx.x] = classes;
}

}  // namespace onefold::kernels
