// Numbers in shared tiles that are not finite: 0 * NaN inside a product would carry them to rows
// that do not see them, so they are taken out and given back to the rows that do.
//
// Includes operand.cuh.
#pragma once

#include "kernels/tile/operand.cuh"

namespace onefold::tile {

__forceinline__ bool finite(float x) { return x - x == 0.0f; }

// Whether a word holds a number that is not finite: its exponent is all ones, and adding one to it
// reaches the sign.
template <Element kElement>
__forceinline__ u32 exponent_overflow(u32 x) {
  if constexpr (kElement == Element::kFloat32) return (x & 0x7f800000u) + 0x00800000u;
  if constexpr (kElement == Element::kFloat16) return (x & 0x7c007c00u) + 0x04000400u;
  return (x & 0x7f807f80u) + 0x00800080u;
}

// Whether this thread's share of the tile has a number that is not finite.
template <class Tile, Element kElement, int kThreads>
__forceinline__ bool has_poison(u32 base, int thread) {
  constexpr int kRowChunks = Tile::kRowBytes / 16;
  u32 found = 0;
#pragma unroll 4
  for (int idx = thread; idx < Tile::kRows * kRowChunks; idx += kThreads) {
    const uint4 x =
        ptx::ld_shared_128(base + Tile::offset(idx / kRowChunks, 16 * (idx % kRowChunks)));
    found |= exponent_overflow<kElement>(x.x) | exponent_overflow<kElement>(x.y) |
             exponent_overflow<kElement>(x.z) | exponent_overflow<kElement>(x.w);
  }
  return (found & (kElement == Element::kFloat32 ? 0x80000000u : 0x80008000u)) != 0;
}

// Zeros for what is not finite, by kThreads threads; found(row) for every word that had some.
template <class Tile, Element kElement, int kThreads, class Found>
__forceinline__ void take_poison(u32 base, int thread, Found&& found) {
  constexpr int kRowWords = Tile::kRowBytes / 4;
#pragma unroll 1
  for (int idx = thread; idx < Tile::kRows * kRowWords; idx += kThreads) {
    const u32 where = base + Tile::offset(idx / kRowWords, 4 * (idx % kRowWords));
    const u32 x = ptx::ld_shared_32(where);
    u32 y = x;
    if constexpr (kElement == Element::kFloat32) {
      if (!finite(__uint_as_float(x))) y = 0;
    } else {
      if (!finite(unpack_16<kElement>(x))) y &= 0xffff0000u;
      if (!finite(unpack_16<kElement>(x >> 16))) y &= 0x0000ffffu;
    }
    if (y == x) continue;
    ptx::st_shared_32(where, y);
    found(idx / kRowWords);
  }
}

// A word of a row with what is not finite of `low` and `high` added.
template <Element kElement>
__forceinline__ u32 add_poison(u32 x, float low, float high) {
  low = finite(low) ? 0.0f : low;
  high = finite(high) ? 0.0f : high;
  if constexpr (kElement == Element::kFloat32) return __float_as_uint(__uint_as_float(x) + low);
  return pack_16<kElement>(unpack_16<kElement>(x) + low, unpack_16<kElement>(x >> 16) + high);
}

// Calls body(word, low, high) for the words of a row in global memory that are not finite, each by
// one lane of the warp.
template <Element kElement, class Body>
__forceinline__ void for_poison(const char* row, i64 dim, int num_columns, Body&& body) {
  constexpr int kPerWord = 4 / size_bytes(kElement);
#pragma unroll 1
  for (int column = lane_idx() * kPerWord; column < num_columns; column += kWarp * kPerWord) {
    const float low = load_element<kElement>(row, column * dim);
    float high = 0.0f;
    if (kPerWord == 2 && column + 1 < num_columns) {
      high = load_element<kElement>(row, (column + 1) * dim);
    }
    if (!finite(low) || !finite(high)) body(column / kPerWord, low, high);
  }
}

}  // namespace onefold::tile
