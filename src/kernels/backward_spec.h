// The spec of the portable backward kernels and their parameters.
//
// Three kernels share a spec, because they share a layout: backward_rows prepares what a row is
// known by (RowNumbers) and clears the sums of dQ, portable_backward does the work, backward_dq
// rounds the sums of dQ. score_gradients is for bias, slopes and sinks. Host and device compile it;
// includes mask_classes_spec.h and tile/shared_tile.h.
#pragma once

#include "kernels/mask_classes_spec.h"
#include "kernels/tile/shared_tile.h"

namespace onefold::kernels {

// Weights are kept times two to this, so that float16 holds the small ones.
constexpr int weight_log2(Element e) { return e == Element::kFloat32 ? 0 : 14; }

// What a tile of rows is known by: lse, delta and use of dP (0 or 1) of each, and flags.
constexpr int backward_row_numbers(int tile_q) { return 3 * tile_q + 4; }

struct BackwardSpec {
  int arch = 800;
  Element element = Element::kBFloat16;  // of q, k, v, out and their gradients
  int dim = 128, dim_v = 128;            // padded to whole products
  int tile_q = 64, tile_k = 128;
  int step_q = 64;  // queries of a tile that are worked on at a time
  int warps = 8;
  // A warp owns keys. Paired: one warp computes P and dV, another dP, dS and dK of the same keys,
  // so that each has the registers for one gradient only.
  bool paired = true;
  // Pairs that share keys: each has a part of the queries of a tile, and of the columns of dK, dV.
  int sharing = 1;
  int stages = 2;         // of Q and dO: with 2 the next ones are copied during a whole tile
  int blocks_per_sm = 1;  // registers are allotted for this many
  bool dq = true;         // dQ is wanted
  bool ordered = false;   // blocks take turns in adding to dQ, which makes its bits repeatable
  bool aligned = true;    // rows go by 16-byte copies
  bool whole = true;      // the head dims are the padded ones
  Features features;

  constexpr bool operator==(const BackwardSpec&) const = default;
  constexpr int threads() const { return 32 * warps; }
  // Whether registers are left for what makes it faster: with options, or turns and wide heads,
  // the compiler would spill.
  constexpr bool roomy() const {
    return features.plain() && !(ordered && (dim > 128 || dim_v > 128));
  }
  // Threads that copy Q and dO: of paired warps, those of the values, which have less to do.
  constexpr bool values_copy() const {
    return paired && stages == 2 && aligned && element != Element::kFloat32 && roomy();
  }
  constexpr int copying_threads() const { return values_copy() ? threads() / 2 : threads(); }
  constexpr int row_bytes() const { return dim * size_bytes(element); }
  constexpr int row_bytes_v() const { return dim_v * size_bytes(element); }
  constexpr int key_warps() const { return (paired ? warps / 2 : warps) / sharing; }
  constexpr int warp_keys() const { return tile_k / key_warps(); }

  // How warps share dQ: by rows and by columns, as many warps as can have whole blocks, and if it
  // makes no difference 32 rows each.
  constexpr int warps_q() const {
    const int wide = tile_q % 32 == 0 ? columns_of(tile_q / 32) * (tile_q / 32) : 0;
    const int narrow = columns_of(tile_q / 16) * (tile_q / 16);
    return wide > 0 && wide >= narrow ? tile_q / 32 : tile_q / 16;
  }
  constexpr int warps_d() const { return columns_of(warps_q()); }
  constexpr int columns_of(int along_q) const {
    int along_d = along_q > 0 ? warps / along_q : 0;
    while (along_d > 0 && dim % (along_d * 16) != 0) --along_d;
    return along_d;
  }
  constexpr int dq_rows() const { return tile_q / warps_q(); }
  constexpr int dq_columns() const { return dim / warps_d(); }

  // Tiles of q, k, v and dO: where registers suffice for the addresses (elsewhere, and for 10.0,
  // the compiler would spill 8 to 32 bytes).
  constexpr bool swizzled() const { return sharing == 2 && arch / 100 != 10; }

  constexpr int row_numbers() const { return backward_row_numbers(tile_q); }
  // Floats of dQ that a tile of rows sums up.
  constexpr int dq_numbers() const { return tile_q * dim; }

  constexpr int stage_bytes() const {
    const int bytes = tile::shared_tile_bytes(tile_q, row_bytes(), swizzled()) +
                      tile::shared_tile_bytes(tile_q, row_bytes_v(), swizzled()) +
                      4 * row_numbers();
    return swizzled() ? tile::whole_lines(bytes) : bytes;
  }
  constexpr int ds_bytes() const {
    return element == Element::kFloat32 ? tile::shared_tile_bytes(tile_q, 4 * tile_k)
                                        : tile::shared_tile_bytes(tile_k, 2 * tile_q);
  }
  constexpr int exchange_bytes() const {
    return paired ? tile_q * tile_k * size_bytes(element) : 16;
  }
  constexpr int shared_bytes() const {
    const int bytes = tile::shared_tile_bytes(tile_k, row_bytes(), swizzled()) +
                      tile::shared_tile_bytes(tile_k, row_bytes_v(), swizzled()) +
                      stages * (stage_bytes() + ds_bytes()) + exchange_bytes() + 4 * tile_k + 80;
    return swizzled() ? tile::whole_lines(bytes) : bytes;
  }

  constexpr const char* invalid() const {
    if (element == Element::kNone || element == Element::kFloat64) {
      return "float16, bfloat16 or float32 is needed";
    }
    if (dim % 32 != 0 || dim_v % 32 != 0 || dim < 32 || dim_v < 32 || dim > 256 || dim_v > 256) {
      return "padded head dims are multiples of 32 up to 256";
    }
    if (warps < 1 || warps > 16 || (paired && warps % 2 != 0)) return "1 to 16 warps, or pairs";
    if (key_warps() < 1 || tile_k % (16 * key_warps()) != 0) {
      return "each warp owns whole blocks of 16 keys";
    }
    if (tile_q % 16 != 0 || tile_q % step_q != 0 || step_q % 16 != 0) {
      return "tiles have whole steps of whole blocks of 16 queries";
    }
    if (paired && step_q != tile_q) return "paired warps work on whole tiles";
    if (sharing < 1 || sharing > 2) return "1 or 2 pairs share keys";
    if (sharing == 2 && (!paired || warps != 8 || tile_q % 32 != 0 ||
                         element == Element::kFloat32 || features.softcap || features.dropout)) {
      return "8 paired warps share keys, in 16 bits, without softcap and dropout";
    }
    // Halves of a row are whole lines.
    if (sharing == 2 && ordered) return "turns need registers that pairs that share keys lack";
    if (sharing == 2 && (dim != 256 || dim_v != 256)) return "pairs share keys of head dim 256";
    if (warps_d() == 0) return "the warps cannot share dQ";
    if (stages < 1 || stages > 2) return "1 or 2 stages";
    if (shared_bytes() > 227 * 1024) return "the tiles exceed the shared memory of any device";
    return nullptr;
  }
};

// The same spec names three programs.
inline constexpr int kBackwardRowsThreads = 128;
inline constexpr int kBackwardDqThreads = 128;
struct BackwardRowsSpec {
  BackwardSpec backward;
  constexpr bool operator==(const BackwardRowsSpec&) const = default;
  constexpr int threads() const { return kBackwardRowsThreads; }
  constexpr int shared_bytes() const { return 0; }
};
struct BackwardDqSpec {
  BackwardSpec backward;
  constexpr bool operator==(const BackwardDqSpec&) const = default;
  constexpr int threads() const { return kBackwardDqThreads; }
  constexpr int shared_bytes() const {
    return tile::shared_tile_bytes(backward.tile_q, backward.row_bytes());
  }
};

// Flags of a tile of rows.
inline constexpr u32 kRowsNotFinite = 1;  // lse or delta of some row
inline constexpr u32 kRowsOneKey = 2;     // some row sees one key only

// Tiles of rows are numbered through, head by head: see row_tile() in sequence.h.
struct BackwardRowsArguments {
  ProblemView problem;
  RowsView out, dout;     // dout's data may be null: zeros
  NumbersView lse, dlse;  // dlse's may, too
  float* rows = nullptr;  // row_numbers() a tile
  float* dq = nullptr;    // dq_numbers() a tile, cleared
  u32* turns = nullptr;   // one a tile, cleared; null when adding is not ordered
  u32* ticket = nullptr;  // cleared
};

struct BackwardArguments {
  ProblemView problem;
  RowsView dout, dk, dv;  // the last two may have null data: not wanted
  const float* rows = nullptr;
  float* dq = nullptr;
  u32* turns = nullptr;   // how many blocks have added to a tile of dQ
  u32* ticket = nullptr;  // blocks in the order in which they began
  int heads_in_step = 1;  // see head_tile_at
  int key_tiles = 0;      // per key head: of one sequence, or of all packed ones together
  float scale = 1;        // of the scores, without scale_power
  float keep_scale = 1;
  u32 keep_threshold = 0;
};

struct BackwardDqArguments {
  ProblemView problem;
  RowsView dq_rows;
  const float* dq = nullptr;
  float scale = 1;
};

// ---- gradients of what is added to scores ----

// One block sums dZ over the positions that share an entry of dbias, tile by tile; or, for slopes
// and sinks, over the keys of one tile of rows.
struct ScoreGradientsSpec {
  int arch = 800;
  Element element = Element::kBFloat16;
  int dim = 128, dim_v = 128;
  int tile_q = 64, tile_k = 64;  // a warp owns 16 rows
  bool bias = false;             // of a bias; else of slopes and sinks
  bool aligned = true;
  bool whole = true;
  Features features;

  constexpr bool operator==(const ScoreGradientsSpec&) const = default;
  constexpr int warps() const { return tile_q / 16; }
  constexpr int threads() const { return 32 * warps(); }
  constexpr int row_bytes() const { return dim * size_bytes(element); }
  constexpr int row_bytes_v() const { return dim_v * size_bytes(element); }
  constexpr int shared_bytes() const {
    return (tile_q + tile_k) * (row_bytes() + row_bytes_v() + 2 * tile::kRowPadding) +
           4 * warps() * tile_k;
  }
  constexpr const char* invalid() const {
    if (tile_q % 16 != 0 || tile_k % 16 != 0 || tile_q < 16 || tile_q > 256) {
      return "tiles have 16 to 256 rows and a multiple of 16 keys";
    }
    if (shared_bytes() > 227 * 1024) return "the tiles exceed the shared memory of any device";
    return nullptr;
  }
};

struct ScoreGradientsArguments {
  ProblemView problem;
  RowsView dout;
  NumbersView dlse;
  const float* rows = nullptr;  // of the backward kernels
  int rows_tile = 64;           // and their tile
  int rows_tiles = 0;           // per head
  float keep_scale = 1;
  u32 keep_threshold = 0;

  // Of a bias: extents of its gradient, 1 along broadcast axes, and where it goes. With several
  // splits each sums a part of what shares an entry, into `partial`, dense and one after the other.
  GridView dbias;
  i64 extent[4] = {1, 1, 1, 1};
  i64 longest_q = 0, longest_k = 0;
  bool broadcast[4] = {false, false, false, false};
  int splits = 1;
  float* partial = nullptr;

  // Of slopes and sinks: one number per tile of rows; null: not wanted.
  float* slopes = nullptr;
  float* sinks = nullptr;
};

// Sums partial gradients in the order of their index, into strided entries.
inline constexpr int kGradientSumsThreads = 128;
struct GradientSumsSpec {
  int arch = 800;
  Element element = Element::kFloat32;  // of the result
  constexpr bool operator==(const GradientSumsSpec&) const = default;
  constexpr int threads() const { return kGradientSumsThreads; }
  constexpr int shared_bytes() const { return 0; }
};
struct GradientSumsArguments {
  // Entries are (b, h, i, j) of extent; entry e of part n is from[n * entries + e].
  const float* from = nullptr;
  i64 parts = 1;
  GridView to;
  i64 extent[4] = {1, 1, 1, 1};
};

// Sums what tiles of rows have left, per head or per (sequence, head).
struct HeadSumsSpec {
  int arch = 800;
  constexpr bool operator==(const HeadSumsSpec&) const = default;
  constexpr int threads() const { return 32; }
  constexpr int shared_bytes() const { return 0; }
};
struct HeadSumsArguments {
  ProblemView problem;
  const float* from = nullptr;
  int tile_q = 64;
  bool per_sequence = false;
  NumbersView to;
};

// ---- plan ----

struct BackwardPlan {
  BackwardSpec spec;
  i64 row_tiles = 0;    // of all query heads together
  i64 query_tiles = 0;  // per query head: of one sequence, or of all packed ones together
  int heads_in_step = 1;
  i64 key_tiles = 0;  // per key head
  i64 blocks = 0;     // of portable_backward; 0: no gradient of q, k, v is wanted
  MaskTiles mask;

  bool bias = false;  // the gradient of a bias is wanted
  ScoreGradientsSpec bias_spec;
  i64 bias_items = 0, bias_entries = 0;
  int bias_splits = 1;
  bool slopes = false, sinks = false;
  ScoreGradientsSpec rows_spec;
  i64 rows_tiles = 0;        // of rows_spec, of all query heads together
  i64 rows_query_tiles = 0;  // per query head

  // Where in the workspace, in bytes.
  i64 rows_at = 0, dq_at = 0, turns_at = 0, ticket_at = 0, mask_at = 0, bias_at = 0, slopes_at = 0,
      sinks_at = 0;
  i64 workspace_bytes = 0;
};

}  // namespace onefold::kernels
