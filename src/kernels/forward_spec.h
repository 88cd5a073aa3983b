// The spec of the portable forward kernel and its parameters.
//
// Invariant: everything known at compile time is in ForwardSpec, and its text is the program. Host
// and device compile it; includes mask_classes_spec.h and tile/shared_tile.h.
#pragma once

#include "kernels/mask_classes_spec.h"
#include "kernels/tile/shared_tile.h"

namespace onefold::kernels {

struct ForwardSpec {
  int arch = 800;
  Element element = Element::kBFloat16;  // of q, k, v and out
  int dim = 128, dim_v = 128;            // padded to whole products
  int tile_q = 128, tile_k = 64;
  int warps = 4;  // each owns tile_q / warps rows
  // 1: K and V take turns, each copied while the other is used. 2: the next K and V are copied
  // during a whole tile.
  int stages = 1;
  int blocks_per_sm = 1;        // registers are allotted for this many
  bool q_in_registers = false;  // the fragments of q stay in registers
  bool aligned = true;          // rows go by 16-byte copies
  bool whole = true;            // the head dims are the padded ones
  Features features;

  constexpr bool operator==(const ForwardSpec&) const = default;
  constexpr int threads() const { return 32 * warps; }
  constexpr int row_bytes() const { return dim * size_bytes(element); }
  constexpr int row_bytes_v() const { return dim_v * size_bytes(element); }
  constexpr int shared_bytes() const {
    const int q = tile::shared_tile_bytes(tile_q, row_bytes());
    const int k = tile::shared_tile_bytes(tile_k, row_bytes());
    const int v = tile::shared_tile_bytes(tile_k, row_bytes_v());
    const int out = tile::shared_tile_bytes(tile_q, row_bytes_v());
    const int all = q + stages * (k + v);
    return (all > out ? all : out) + 96;
  }

  constexpr const char* invalid() const {
    if (element == Element::kNone || element == Element::kFloat64) {
      return "float16, bfloat16 or float32 is needed";
    }
    if (dim % 32 != 0 || dim_v % 32 != 0 || dim < 32 || dim_v < 32 || dim > 256 || dim_v > 256) {
      return "padded head dims are multiples of 32 up to 256";
    }
    if (warps < 1 || warps > 16 || tile_q % (16 * warps) != 0) {
      return "each warp owns whole blocks of 16 rows";
    }
    if (tile_k % 16 != 0 || tile_k < 16 || tile_k > 128) {
      return "tiles have 16 to 128 keys, a multiple of 16";
    }
    if (stages < 1 || stages > 2) return "1 or 2 stages";
    if (shared_bytes() > 227 * 1024) return "the tiles exceed the shared memory of any device";
    return nullptr;
  }
};

// References lag behind the maximum by at most this, in base 2: weights stay below 2^8.
inline constexpr float kLagLog2 = 8.0f;

struct ForwardArguments {
  ProblemView problem;
  RowsView out;
  NumbersView lse;      // data may be null
  float score_lag = 0;  // kLagLog2 in units of q.k
  float keep_scale = 1;
  u32 keep_threshold = 0;
  bool longest_first = false;  // tiles in descending order
};

// What a plan says of a call.
struct ForwardPlan {
  ForwardSpec spec;
  i64 query_tiles = 0;  // per head: of one sequence, or of all packed ones together
  i64 blocks = 0;
  bool longest_first = false;
  MaskTiles mask;  // classes of them (MaskClassesView) in the workspace
  i64 workspace_bytes = 0;
};

}  // namespace onefold::kernels
