// What is asked of the kernel that classifies the tiles of a mask.
//
// Host and device compile it; includes problem_spec.h.
#pragma once

#include "kernels/problem_spec.h"

namespace onefold::kernels {

inline constexpr int kMaskClassesThreads = 128;
struct MaskClassesSpec {
  int arch = 800;
  constexpr bool operator==(const MaskClassesSpec&) const = default;
  constexpr int threads() const { return kMaskClassesThreads; }
  constexpr int shared_bytes() const { return 0; }
};

// The tiles of a mask that are classified: per head of the mask, per query tile.
struct MaskTiles {
  int tile_q = 1, tile_k = 1;
  i64 query_tiles = 0, words = 0, blocks = 0;
};

inline constexpr int kClassesPerWord = 16;

// One block per word: sixteen key tiles of one query tile of one (batch, head) of the mask itself.
struct MaskClassesArguments {
  GridView mask;
  i64 heads = 1, queries = 1, keys = 1;  // extents of the mask, 1 along broadcast axes
  i64 query_tiles = 1, words = 1;        // per head; per query tile
  int tile_q = 1, tile_k = 1;
  u32* classes = nullptr;
};

}  // namespace onefold::kernels
