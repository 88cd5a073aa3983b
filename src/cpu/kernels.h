// What one instruction set offers the CPU backend, as plain functions and data.
//
// Invariant: this is the only border between code compiled for one instruction set and the rest, so
// that choosing a set at run time is choosing one `Kernels`. Includes core only.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/work.h"

namespace onefold::cpu {

struct ForwardCall {
  const Problem* problem;
  Tiles tiles;
  Rows out;
  Numbers lse;
  const Item* items;
  const Split* splits;
  std::byte* partials;
  std::byte* scratch;  // per worker
  std::size_t scratch_bytes;
};

struct BackwardCall {
  const Problem* problem;
  Tiles tiles;
  BackwardTensors t;
  const Item* items;
  std::byte* scratch;  // per worker
  std::size_t scratch_bytes;
  BackwardWants wants;
  bool by_chunk;            // an item is one chunk; else a head, its chunks summed on the spot
  std::int64_t num_chunks;  // of the longest sequence
  std::byte* chunk_sums;    // by_chunk: private dK and dV of every (b, kv_head, chunk)
  // dSlopes and dSinks of item (b, kv_head, chunk): group numbers each, in double.
  double *slope_sums, *sink_sums;
};

struct Kernels {
  int lanes_float, lanes_double;
  // Laid out by the kernels, asked by plan; see CpuFacts.
  std::size_t (*forward_scratch)(const Problem&, const Tiles&, std::int64_t tiles_per_item);
  std::size_t (*backward_scratch)(const Problem&, const Tiles&, const BackwardWants&, bool by_chunk,
                                  std::int64_t num_chunks);
  std::size_t (*chunk_bytes)(const Problem&);
  std::size_t (*partial_bytes)(const Problem&);
  const char* (*not_decoding)(const Problem&, std::int64_t rows);

  void (*forward)(const ForwardCall&, std::int64_t item, int worker);
  void (*merge_split)(const ForwardCall&, std::int64_t split, int worker);
  void (*backward)(const BackwardCall&, std::int64_t item, int worker);
  // Sums the chunks of keys [row_begin, row_end) of one head into dk and dv.
  void (*reduce_chunks)(const BackwardCall&, const Item& keys, int worker);
  // dbias with broadcast axes: one tile of the bias's own index space, of bias_items of them.
  std::int64_t (*bias_items)(const BackwardCall&);
  void (*bias_gradient)(const BackwardCall&, std::int64_t item, int worker);
  // Multiply-adds of one core, for benchmarks: returns the floating-point operations done.
  double (*fma_probe)(std::int64_t rounds);
  // Reads memory as fast as loads go, for benchmarks: returns the bytes read, up to the last few.
  std::int64_t (*read_probe)(const void* data, std::int64_t bytes);
};

// Null when this build does not have the set. Whether the processor has it is asked before, by
// code that needs nothing (cpu.cc).
const Kernels* avx512_bf16_kernels();  // bfloat16 only
const Kernels* avx512_kernels();
const Kernels* avx2_kernels();
const Kernels* baseline_kernels();

}  // namespace onefold::cpu
