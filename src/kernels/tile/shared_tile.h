// A tile of rows in shared memory.
//
// Invariant: rows are padded by 16 bytes, so that eight consecutive rows start in eight different
// groups of four banks: ldmatrix, 16-byte copies and the scattered 32-bit loads of 32-bit tiles are
// free of conflicts. An exclusive-or swizzle does the same without padding but costs an operation
// and a register per address where a padded row is base plus constant. Host and device; includes
// element.h.
#pragma once

#include "kernels/tile/element.h"

namespace onefold::tile {

inline constexpr int kRowPadding = 16;

// kRowBytes is a multiple of 32.
template <int kTileRows, int kTileRowBytes>
struct SharedTile {
  static_assert(kTileRowBytes % 32 == 0);
  static constexpr int kRows = kTileRows;
  static constexpr int kRowBytes = kTileRowBytes;
  static constexpr int kStride = kRowBytes + kRowPadding;  // bytes
  static constexpr int kBytes = kRows * kStride;
  static constexpr int offset(int row, int byte) { return row * kStride + byte; }

  alignas(16) unsigned char bytes[kBytes];
};

constexpr int shared_tile_bytes(int rows, int row_bytes) {
  return rows * (row_bytes + kRowPadding);
}

}  // namespace onefold::tile
