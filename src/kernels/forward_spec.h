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
  int warps = 4;    // each owns tile_q / warps rows
  int sharing = 1;  // 2: a pair of warps owns the rows of both, see block/row_share.cuh
  // 1: K and V take turns, each copied while the other is used. 2: the next K and V are copied
  // during a whole tile.
  int stages = 1;
  bool swizzled = false;        // tiles of q, k and v, for which rows have to be whole lines
  int blocks_per_sm = 1;        // registers are allotted for this many
  bool q_in_registers = false;  // the fragments of q stay in registers
  bool aligned = true;          // rows go by 16-byte copies
  bool whole = true;            // the head dims are the padded ones
  Features features;

  constexpr bool operator==(const ForwardSpec&) const = default;
  constexpr int threads() const { return 32 * warps; }
  constexpr int row_bytes() const { return dim * size_bytes(element); }
  constexpr int row_bytes_v() const { return dim_v * size_bytes(element); }
  // A warp's part of the columns of v has to be whole lines, too. For 10.0 the compiler would spill
  // 8 bytes at head dims above 64.
  constexpr bool can_be_swizzled() const {
    return !(arch / 100 == 10 && dim_v > 64) && element != Element::kFloat32 &&
           row_bytes() % tile::kLine == 0 && row_bytes_v() % (tile::kLine * sharing) == 0;
  }
  // Of weights that warps hand to each other, and of numbers of their rows.
  constexpr int exchange_bytes() const {
    if (sharing == 1) return 0;
    return tile_q * tile_k * size_bytes(element) + 4 * warps * pair_rows();
  }
  constexpr int pair_rows() const { return tile_q / warps * sharing; }
  constexpr int shared_bytes() const {
    const int q = tile::shared_tile_bytes(tile_q, row_bytes(), swizzled);
    const int k = tile::shared_tile_bytes(tile_k, row_bytes(), swizzled);
    const int v = tile::shared_tile_bytes(tile_k, row_bytes_v(), swizzled);
    const int out = tile::shared_tile_bytes(tile_q, row_bytes_v());
    const int all = q + stages * (k + v);
    const int bytes = (all > out ? all : out) + exchange_bytes() + 96 + 4 * threads();
    return swizzled ? tile::whole_lines(bytes) : bytes;
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
    if (sharing != 1 && (sharing != 2 || warps % 2 != 0 || warps > 8 || tile_k % 32 != 0 ||
                         stages != 1 || element == Element::kFloat32 || !features.plain())) {
      return "two warps share rows of 16-bit numbers, in one stage, where nothing but a scale is";
    }
    if (tile_k % 16 != 0 || tile_k < 16 || tile_k > 128) {
      return "tiles have 16 to 128 keys, a multiple of 16";
    }
    if (swizzled && !can_be_swizzled()) return "16-bit rows that are whole lines are swizzled";
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
  int heads_in_step = 1;       // see head_tile_at
  bool longest_first = false;  // tiles in descending order
};

// What a plan says of a call.
struct ForwardPlan {
  ForwardSpec spec;
  i64 query_tiles = 0;  // per head: of one sequence, or of all packed ones together
  i64 blocks = 0;
  int heads_in_step = 1;
  bool longest_first = false;
  MaskTiles mask;  // classes of them (MaskClassesView) in the workspace
  i64 workspace_bytes = 0;
};

}  // namespace onefold::kernels
