// A tile of rows in shared memory.
//
// Invariant: eight consecutive rows start in eight different groups of four banks, so that ldmatrix
// is free of conflicts. Padded rows are followed by 16 bytes: an address is base plus constant.
// Swizzled rows are whole lines of 128 bytes, whose 16-byte chunks change places: chunk c of row r
// lies where chunk c ^ r % 8 would. Asynchronous copies write them faster, probably since no line
// of theirs reaches into two, but addresses take registers. Host and device; includes element.h.
#pragma once

#include "kernels/tile/element.h"

namespace onefold::tile {

inline constexpr int kRowPadding = 16;
inline constexpr int kLine = 128;

// kRowBytes is a multiple of 32, or of a line where rows are swizzled.
template <int kTileRows, int kTileRowBytes, bool kSwizzled = false>
struct SharedTile {
  static_assert(kTileRowBytes % (kSwizzled ? kLine : 32) == 0);
  static constexpr int kRows = kTileRows;
  static constexpr int kRowBytes = kTileRowBytes;
  static constexpr int kStride = kRowBytes + (kSwizzled ? 0 : kRowPadding);  // bytes
  static constexpr int kBytes = kRows * kStride;
  static constexpr int offset(int row, int byte) {
    return row * kStride + (kSwizzled ? byte ^ row % 8 * 16 : byte);
  }
  // What lies `rows` (a multiple of 8) and `byte` (a multiple of 32) behind `address`. Where that
  // is not the beginning of a line, the sum of the two may not carry into the next.
  static constexpr u32 move(u32 address, int rows, int byte) {
    if (!kSwizzled) return address + static_cast<u32>(offset(rows, byte));
    const u32 across = static_cast<u32>(byte) & 96u;
    return (across == 0 ? address : address ^ across) +
           static_cast<u32>(rows * kStride + byte / kLine * kLine);
  }

  alignas(kSwizzled ? kLine : 16) unsigned char bytes[kBytes];
};

constexpr int shared_tile_bytes(int rows, int row_bytes, bool swizzled = false) {
  return rows * (row_bytes + (swizzled ? 0 : kRowPadding));
}
// Of what holds swizzled tiles.
constexpr int whole_lines(int bytes) { return (bytes + kLine - 1) / kLine * kLine; }

}  // namespace onefold::tile
