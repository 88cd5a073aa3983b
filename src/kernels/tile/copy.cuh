// Rows between global memory and a shared tile, by all threads of a block or by some.
//
// Invariant: rows and columns that are not there are zeros in the tile, and are neither read nor
// written in global memory. Aligned rows go by 16-byte copies that are asynchronous on the way in;
// others element by element. Includes ptx/memory, registers.cuh, shared_tile.h.
#pragma once

#include "kernels/ptx/memory.cuh"
#include "kernels/tile/registers.cuh"
#include "kernels/tile/shared_tile.h"

namespace onefold::tile {

// Rows in global memory: `data` is element 0 of the first row, strides are in elements.
struct GlobalRows {
  char* data;
  i64 row, dim;
  int num_rows, num_columns;
};

// Copies by kThreads threads, of which this is number `thread`. kWhole: all columns are there.
template <class Tile, Element kElement, int kThreads, bool kAligned, bool kWhole>
struct RowCopy {
  static constexpr int kSize = size_bytes(kElement);
  static constexpr int kChunkElements = 16 / kSize;
  static constexpr int kChunks = Tile::kRowBytes / 16;  // of a row
  // Neighbouring threads take neighbouring chunks: a power of two of them, at most 128 bytes.
  static constexpr int kLargestPower = kChunks & -kChunks;
  static constexpr int kThreadsPerRow = kLargestPower < 8 ? kLargestPower : 8;
  static constexpr int kChunksPerThread = kChunks / kThreadsPerRow;
  static constexpr int kRowsPerPass = kThreads / kThreadsPerRow;
  static constexpr int kPasses = (Tile::kRows + kRowsPerPass - 1) / kRowsPerPass;

  // body(row, chunk, pass, step) for every chunk of this thread: row0 + pass * kRowsPerPass and
  // chunk0 + step.
  template <class Body>
  static __forceinline__ void for_chunks(int thread, Body&& body) {
    const int row0 = thread / kThreadsPerRow, chunk0 = thread % kThreadsPerRow;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int row = row0 + pass * kRowsPerPass;
      if (Tile::kRows % kRowsPerPass != 0 && row >= Tile::kRows) break;
#pragma unroll
      for (int idx = 0; idx < kChunksPerThread; ++idx) {
        body(row, chunk0 + idx * kThreadsPerRow, pass, idx * kThreadsPerRow);
      }
    }
  }
  static __forceinline__ bool present(const GlobalRows& rows, int row, int chunk) {
    return row < rows.num_rows && (kWhole || chunk * kChunkElements < rows.num_columns);
  }

  // Where a thread starts to read, and where it starts to write.
  static __forceinline__ const char* source(const GlobalRows& rows, int thread) {
    if constexpr (!kAligned) return rows.data;
    return rows.data + thread / kThreadsPerRow * rows.row * kSize + 16 * (thread % kThreadsPerRow);
  }
  static __forceinline__ u32 target(u32 tile, int thread) {
    return tile + Tile::offset(thread / kThreadsPerRow, 16 * (thread % kThreadsPerRow));
  }

  // `from` and `to` are the thread's own; `rows` tells strides and how much is there.
  static __forceinline__ void load(u32 to, const char* from, const GlobalRows& rows, int thread) {
    if constexpr (kAligned) {
      int last_pass = 0;
      const i64 pass_bytes = kRowsPerPass * rows.row * kSize;
      for_chunks(thread, [&](int row, int chunk, int pass, int step) {
        if (pass != last_pass) from += pass_bytes;
        last_pass = pass;
        ptx::cp_async_16(to + Tile::offset(pass * kRowsPerPass, 16 * step), from + 16 * step,
                         present(rows, row, chunk));
      });
    } else {
      // One chunk at a time: there is no hurry here, and many at once would need many registers.
      const u32 tile = to - target(0, thread);
#pragma unroll 1
      for (int idx = thread; idx < Tile::kRows * kChunks; idx += kThreads) {
        const int row = idx / kChunks, chunk = idx % kChunks;
        u32 words[4] = {0, 0, 0, 0};
#pragma unroll
        for (int element = 0; element < kChunkElements; ++element) {
          const int column = chunk * kChunkElements + element;
          if (row >= rows.num_rows || column >= rows.num_columns) continue;
          const char* at = from + (row * rows.row + column * rows.dim) * kSize;
          if constexpr (kSize == 2) {
            words[element / 2] |= u32{*reinterpret_cast<const unsigned short*>(at)}
                                  << 16 * (element % 2);
          } else {
            words[element] = *reinterpret_cast<const u32*>(at);
          }
        }
        ptx::st_shared_128(tile + Tile::offset(row, 16 * chunk),
                           make_uint4(words[0], words[1], words[2], words[3]));
      }
    }
  }
  static __forceinline__ void load(u32 tile, const GlobalRows& rows, int thread) {
    load(target(tile, thread), source(rows, thread), rows, thread);
  }

  static __forceinline__ void store(u32 from, const GlobalRows& rows, int thread) {
    for_chunks(thread, [&](int row, int chunk, int, int) {
      if (!present(rows, row, chunk)) return;
      const uint4 x = ptx::ld_shared_128(from + Tile::offset(row, 16 * chunk));
      char* to = rows.data + row * rows.row * kSize;
      if constexpr (kAligned) {
        *reinterpret_cast<uint4*>(to + chunk * 16) = x;
      } else {
        const u32 words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int idx = 0; idx < kChunkElements; ++idx) {
          const int column = chunk * kChunkElements + idx;
          if (column >= rows.num_columns) break;
          char* at = to + column * rows.dim * kSize;
          if constexpr (kSize == 2) {
            *reinterpret_cast<unsigned short*>(at) =
                static_cast<unsigned short>(words[idx / 2] >> 16 * (idx % 2));
          } else {
            *reinterpret_cast<u32*>(at) = words[idx];
          }
        }
      }
    });
  }
};

}  // namespace onefold::tile
