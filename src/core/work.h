// The work order of the CPU backend: what plan decides and the kernels carry out.
//
// Invariant: plain data. `CpuFacts` is what plan may know about the machine and the kernels;
// `CpuWork` is all a backend needs besides the problem. Includes problem.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/problem.h"

namespace onefold {

// A unit of work: rows [row_begin, row_end) of one (sequence, key/value head). With `group` query
// heads per key/value head, row r is query r / group of head kv_head * group + r % group. Backward
// items that are chunks name the chunk in row_begin.
struct Item {
  std::int64_t b, kv_head, row_begin, row_end;
  // Forward: the keys it attends to, and where its state goes when others hold the rest (-1: it
  // finishes the rows itself).
  std::int64_t key_begin = 0, key_end = kUnbounded;
  std::int64_t partial = -1;
  bool first = true;  // of the stretches of one split
  // A split's item covers heads [kv_head, kv_head + kv_heads); their states lie partial_step apart.
  std::int64_t kv_heads = 1, partial_step = 0;
};

// Few rows against many keys: states of fixed stretches of keys, merged in ascending order.
struct Split {
  std::int64_t b, kv_head, rows;
  std::int64_t first_partial, count;
};
inline constexpr std::int64_t kSplitRows = 16;  // at most

// Sizes that shape one call. `keys` fixes the order of additions and depends on the head dims
// alone; `super_keys` (how many packed keys stay in cache) touches no result.
struct Tiles {
  int rows = 0;                 // of one query tile: the lanes
  int keys = 0;                 // of one key tile
  std::int64_t super_keys = 0;  // packed at a time, a multiple of keys
};

// Queries per private accumulation of dK and dV of a sequence with so many: at least 512, so that
// packing K and V costs under 2 % of it, and at most eight chunks, so that the private sums never
// grow with Sq x Sk. It orders additions, so it comes from the sequence alone.
static inline std::int64_t chunk_rows(std::int64_t queries) {
  constexpr std::int64_t kLeast = 512, kMostChunks = 8, kStep = 64;
  const std::int64_t rows = (queries + kMostChunks - 1) / kMostChunks;
  return rows < kLeast ? kLeast : (rows + kStep - 1) / kStep * kStep;
}

struct BackwardWants {
  bool dq = false, dkv = false, dslopes = false, dsinks = false;
  bool dbias = false;
  bool dbias_broadcast = false;  // some axis of dbias is summed over
  bool bias_in_main_pass() const { return dbias && !dbias_broadcast; }
  bool main_pass() const { return dq || dkv || dslopes || dsinks || bias_in_main_pass(); }
};

struct CpuFacts {
  const char* isa = "";
  int threads = 1;
  std::int64_t l2_bytes = 512 * 1024;
  int lanes_float = 0, lanes_double = 0;
  // Scratch of one worker and private sums of one chunk, laid out by the kernels themselves.
  std::size_t (*forward_scratch)(const Problem&, const Tiles&,
                                 std::int64_t tiles_per_item) = nullptr;
  std::size_t (*backward_scratch)(const Problem&, const Tiles&, const BackwardWants&, bool by_chunk,
                                  std::int64_t num_chunks) = nullptr;
  std::size_t (*chunk_bytes)(const Problem&) = nullptr;
  std::size_t (*partial_bytes)(const Problem&) = nullptr;  // the state of kSplitRows rows
  // Why so many rows against one key/value head do not take the decoding path (other sums, other
  // bits); null when they do.
  const char* (*not_decoding)(const Problem&, std::int64_t rows) = nullptr;
};

struct CpuWork {
  Tiles tiles;
  std::int64_t tiles_per_item = 1;
  std::vector<Item> items;
  std::vector<Split> splits;             // forward: run after the items
  std::size_t partials_bytes = 0;        // forward: their states
  std::int64_t tiled = 0, decoding = 0;  // forward: sequences that take either path
  const char* not_decoding = nullptr;    // why the last tiled sequence of few rows does not decode
  std::size_t scratch_bytes = 0;         // per worker
  int workers = 1;

  // Backward. Items are whole heads, or chunks of queries of one when heads are few.
  BackwardWants wants;
  bool by_chunk = false;
  std::int64_t chunk = 0, num_chunks = 0;  // of the longest sequence; no other has more chunks
  std::size_t chunk_sums_bytes = 0;        // private dK and dV of every chunk
  std::size_t number_sums_bytes = 0;       // dSlopes and dSinks per chunk, both
  std::size_t workspace_bytes = 0;         // all of the above
};

}  // namespace onefold
