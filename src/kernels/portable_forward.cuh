// Forward on tensor cores that every GPU since Ampere has: one block, the rows of one query tile of
// one head, against its keys from the first to the last.
//
//   one stage                                two stages
//     copy Q, K                                copy Q, K, V
//     for each key tile                        for each key tile
//       K is here; copy V                        K, V are here; copy the next K, V
//       S = Q K^T, variant, hide                 S = Q K^T, variant, hide
//       V is here; copy the next K               raise references; O = O keep + P V
//       raise references; O = O keep + P V
//     divide, store out and lse
//
// "Is here" is cp.async.wait_group by every thread and then the block's barrier, which also tells
// that the tile before is free. A warp owns 16 or 32 whole rows, so softmax needs no other warp,
// and P goes from accumulators to operands in registers; or two warps own 32 rows together, each
// half the keys and half the columns (block/row_share.cuh). References are raised only when they
// must be (by 2^8), so O is rarely rescaled.
//
// A value that is not finite at a key that only some rows see would reach all rows through 0 * NaN.
// The loop does not look for it; if some row ends up not finite although its weights are, the block
// runs again, carefully: such values are taken out of the tiles, and in the end the rows that see
// them get them. Rows that are still not finite have a sum of values beyond float32, and perhaps a
// mean inside it: they run once more against references that are higher by kHeadroomLog2, which
// make all weights smaller. Sequences have fewer than 2^31 rows; only addresses are 64-bit.
#pragma once

#include "kernels/block/row_share.cuh"
#include "kernels/block/scores.cuh"
#include "kernels/block/worker.cuh"
#include "kernels/forward_spec.h"
#include "kernels/tile/poison.cuh"
#include "kernels/tile/product.cuh"
#include "kernels/tile/reduce.cuh"

namespace onefold::kernels {

template <ForwardSpec kSpec>
struct PortableForward : Worker {
  // ---- facts ----
  static_assert(kSpec.invalid() == nullptr);
  static constexpr Element kElement = kSpec.element;
  static constexpr Features kFeatures = kSpec.features;
  using Op = tile::Operand<kElement>;
  static constexpr int kThreads = kSpec.threads();
  // Rows, keys of a tile and columns of O that a warp works on, and rows that it stores.
  static constexpr int kSharing = kSpec.sharing;
  static constexpr int kWarpRows = kSpec.pair_rows(), kRowTiles = kWarpRows / 16;
  static constexpr int kWarpKeys = kSpec.tile_k / kSharing, kBlocks = kWarpKeys / 8;
  static constexpr int kOutBlocks = kSpec.dim_v / 8 / kSharing;
  static constexpr int kStoredRows = kWarpRows / kSharing;
  static constexpr int kQSteps = kSpec.q_in_registers ? kSpec.dim / Op::kDepth : 1;
  // Float32 with many columns, and float16 on 10.x: what depends on the thread is found anew where
  // it is used, because kept through the loop it would cost registers that there are not.
  static constexpr bool kScarce =
      (kElement == Element::kFloat32 && kSpec.dim_v > 128) ||
      (kElement == Element::kFloat16 && kSpec.dim_v == 128 && kSpec.arch / 100 == 10);
  // Q in registers: K is asked for before Q is waited for. Elsewhere that costs registers.
  static constexpr bool kEarlyK = kSpec.q_in_registers;
  static constexpr float kExactLog2 = 4096.0f;  // beyond, c * s - c * ref is not exact enough
  static constexpr float kLargest = 3.402823466e38f;
  // Sums of 2^31 values with weights below 2^8 stay in range. Those of float16 always do; wide
  // heads with options have no registers for it.
  static constexpr bool kMayOverflow =
      kElement != Element::kFloat16 && (kSpec.dim_v <= 128 || kFeatures.plain());
  static constexpr int kHeadroomLog2 = 40;
  static constexpr float kHeadroom = static_cast<float>(i64{1} << kHeadroomLog2);

  // ---- storage ----
  using QTile = tile::SharedTile<kSpec.tile_q, kSpec.row_bytes(), kSpec.swizzled>;
  using KTile = tile::SharedTile<kSpec.tile_k, kSpec.row_bytes(), kSpec.swizzled>;
  using VTile = tile::SharedTile<kSpec.tile_k, kSpec.row_bytes_v(), kSpec.swizzled>;
  using OutTile = tile::SharedTile<kSpec.tile_q, kSpec.row_bytes_v()>;
  using WarpOutTile = tile::SharedTile<kStoredRows, kSpec.row_bytes_v()>;
  using Share = RowShare<kSpec>;
  struct Tiles {
    QTile q;
    KTile k[kSpec.stages];
    VTile v[kSpec.stages];
  };
  // What the loop rarely needs, read when needed: registers are for products.
  struct Facts {
    QueryTile tile;            // what this block owns
    int num_q, num_k;          // used lengths
    int tile_begin, tile_end;  // key tiles that some row sees
    int full_begin, full_end;  // key tiles that every row sees
    int hides;                 // some of these keys are hidden from some row
    int careful;               // what this pass does that the first one does not
    const u32* classes;        // of the mask, for these rows
  };
  struct Shared : RowExchange<kSpec> {
    union {
      Tiles tiles;
      OutTile out;
    };
    alignas(16) Facts facts;
    u32 headroom[kThreads];  // the rows of a thread that have it, a bit each
  };
  static_assert(sizeof(Shared) == kSpec.shared_bytes());

  using QCopy = tile::RowCopy<QTile, kElement, kThreads, kSpec.aligned, kSpec.whole>;
  using KCopy = tile::RowCopy<KTile, kElement, kThreads, kSpec.aligned, kSpec.whole>;
  using VCopy = tile::RowCopy<VTile, kElement, kThreads, kSpec.aligned, kSpec.whole>;
  using OutCopy = tile::RowCopy<WarpOutTile, kElement, 32, kSpec.aligned, kSpec.whole>;
  using Positions = TilePositions<false, kRowTiles, kBlocks>;

  const ForwardArguments& args;
  const ProblemView& p;
  Shared& shared;
  HeadAt at;
  int row0;          // first row of the tile, local
  int num_rows;      // of the sequence, used or not
  i64 q_row, k_row;  // where the tile and the sequence's keys begin in the tensors

  __forceinline__ PortableForward(const ForwardArguments& arguments, unsigned char* memory)
      : args(arguments), p(arguments.problem), shared(*reinterpret_cast<Shared*>(memory)) {}

  __forceinline__ int fact(int Facts::*which) const {
    return static_cast<int>(ptx::ld_shared_32(ptx::shared_address(&(shared.facts.*which))));
  }
  __forceinline__ int first_row() const {
    return static_cast<int>(ptx::ld_shared_32(ptx::shared_address(&shared.facts.tile.row0)));
  }
  __forceinline__ Lengths lengths() const { return {fact(&Facts::num_q), fact(&Facts::num_k)}; }
  __forceinline__ bool packed() const { return p.sequences.cu_q.bytes != 0; }

  // Which tile of which head this block owns. False when it has no rows.
  __forceinline__ bool locate() {
    const QueryTile tile =
        query_tile_at(p, ptx::block_idx(), kSpec.tile_q, args.heads_in_step, args.longest_first);
    take(tile);
    return tile.present();
  }
  // The same once more, after a loop through which it is not kept.
  __forceinline__ void recall() {
    // Here the compiler would spill (10.x; 8.0 in float16 with all options).
    if constexpr ((kSpec.arch / 100 == 10 && !kScarce) ||
                  (kElement == Element::kFloat16 && kSpec.dim_v > 128 && !kFeatures.plain())) {
      locate();
    } else {
      take(shared.facts.tile);
    }
  }
  __forceinline__ void take(const QueryTile& tile) {
    at = tile.at;
    row0 = tile.row0;
    num_rows = tile.num_rows;
    q_row = tile.q_row;
    k_row = tile.k_row;
  }

  __forceinline__ tile::GlobalRows rows_at(const RowsView& view, i64 row, int head, int count,
                                           int most, int num_columns) const {
    return rows_of<kElement>(p, view, at.b, row, head, count, most, num_columns);
  }

  // Rows that warps share belong to a group of them. Which of the group a warp is, is found anew
  // each time: where rows are shared, registers are scarce.
  __forceinline__ int first_of_warp() const { return warp / kSharing * kWarpRows; }
  __forceinline__ int part() const {
    return kSharing > 1 ? ptx::opaque(thread) / 32 % kSharing : 0;
  }
  __forceinline__ Share share() const {
    const int now = ptx::opaque(thread);
    return {shared, now / 32, now % 32};
  }

  // ---- copies ----
  __forceinline__ void copy_q() {
    QCopy::load(ptx::shared_address(&shared.tiles.q),
                rows_at(p.q, q_row, at.h, at.n.q - row0, kSpec.tile_q, p.dim), thread);
  }
  __forceinline__ int thread_now() const {
    return kScarce ? ptx::opaque(static_cast<int>(threadIdx.x)) : thread;
  }
  const char *k_from, *v_from;  // where this thread reads in key tile 0
  u32 k_to, v_to;               // where it writes in stage 0
  __forceinline__ void find_key_rows() {
    k_from = KCopy::source(rows_at(p.k, k_row, at.kv_head, 0, 0, 0), thread);
    v_from = VCopy::source(rows_at(p.v, k_row, at.kv_head, 0, 0, 0), thread);
    k_to = KCopy::target(ptx::shared_address(&shared.tiles.k), thread);
    v_to = VCopy::target(ptx::shared_address(&shared.tiles.v), thread);
  }
  __forceinline__ void copy_k(int tile, int stage) const {
    const int j0 = tile * kSpec.tile_k;
    u32 to = k_to;
    if constexpr (kScarce) {
      to = KCopy::target(ptx::shared_address(&shared.tiles.k), thread_now());
    }
    KCopy::load(to + stage * KTile::kBytes, k_from + j0 * p.k.row * size_bytes(kElement),
                {nullptr, p.k.row, p.k.dim, fact(&Facts::num_k) - j0, p.dim}, thread_now());
  }
  __forceinline__ void copy_v(int tile, int stage) const {
    const int j0 = tile * kSpec.tile_k;
    u32 to = v_to;
    if constexpr (kScarce) {
      to = VCopy::target(ptx::shared_address(&shared.tiles.v), thread_now());
    }
    VCopy::load(to + stage * VTile::kBytes, v_from + j0 * p.v.row * size_bytes(kElement),
                {nullptr, p.v.row, p.v.dim, fact(&Facts::num_k) - j0, p.dim_v}, thread_now());
  }

  // A negative scale turns q around, scale 0 makes it 0 (and keeps its NaN).
  __forceinline__ float q_factor() const { return p.scale_sign * p.scale_power; }
  __forceinline__ void factor_q() {
    multiply_tile<QTile, kElement, kThreads>(ptx::shared_address(&shared.tiles.q), thread,
                                             q_factor());
  }

  // ---- which key tiles ----
  __forceinline__ void find_keys() {
    constexpr i64 kTile = kSpec.tile_k;
    const int row_end = row0 + kSpec.tile_q < at.n.q ? row0 + kSpec.tile_q : at.n.q;
    TileRange range{0, 0, 0, 0};
    if (row0 < row_end) range = kv_range(p.variant, at.n, row0, row_end);
    Facts f;
    f.tile = {at, row0, num_rows, q_row, k_row};
    f.classes = p.mask_classes.row(at.b, at.h, row0 / kSpec.tile_q);
    f.tile_begin = static_cast<int>(range.begin / kTile);
    f.tile_end =
        range.end > range.begin ? static_cast<int>((range.end + kTile - 1) / kTile) : f.tile_begin;
    f.num_q = static_cast<int>(at.n.q);
    f.num_k = static_cast<int>(at.n.k);
    f.full_begin = static_cast<int>((range.full_begin + kTile - 1) / kTile);
    f.full_end = static_cast<int>(range.full_end / kTile);
    // A tile brings all of its keys, also those that a border hides from every row; beyond the last
    // key of the sequence there are zeros.
    const i64 last = f.tile_end * kTile < f.num_k ? f.tile_end * kTile : f.num_k;
    f.careful = 0;
    f.hides = range.full_begin > f.tile_begin * kTile || range.full_end < last;
    if (thread == 0) shared.facts = f;
    __syncthreads();
  }
  __forceinline__ u32 class_of(int tile) const {
    return p.mask_classes.at(shared.facts.classes, tile);
  }
  // The first tile from `tile` on that is not all hidden.
  __forceinline__ int next_tile(int tile) const {
    if constexpr (kFeatures.mask) {
      while (tile < fact(&Facts::tile_end) && class_of(tile) == 0) ++tile;
    }
    return tile;
  }

  // ---- registers ----
  float out[kRowTiles][kOutBlocks][4];
  Softmax<Mufu> state[kRowTiles][2];  // sum: of this thread's columns; ref: in units of the scores
  typename Op::A q[kRowTiles][kQSteps];
  u32 q_at;  // where this lane reads q

  __forceinline__ void load_q() {
    if constexpr (kSpec.q_in_registers) {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int step = 0; step < kQSteps; ++step) {
          q[m][step] = Op::load_a(QTile::move(q_at, 16 * m, step * Op::kDepthBytes));
        }
      }
    }
  }

  // ---- one key tile ----
  __forceinline__ void score(float (&s)[kRowTiles][kBlocks][4], const Scores<kFeatures>& scores,
                             int tile, int stage) {
    tile::clear(s);
    const u32 k_at = tile::b_address<KTile>(ptx::shared_address(&shared.tiles.k[stage])) +
                     KTile::offset(part() * kWarpKeys, 0);
    if constexpr (kSpec.q_in_registers) {
      tile::multiply_rows<Op, KTile>(s, q, k_at);
    } else {
      u32 at_q = q_at;
      if constexpr (kScarce) {
        at_q = tile::a_address<QTile>(ptx::shared_address(&shared.tiles.q),
                                      thread_now() / 32 * kWarpRows);
      }
      tile::multiply_rows<Op, QTile, KTile>(s, at_q, k_at);
    }
    const Positions positions{first_row() + first_of_warp(),
                              i64{tile} * kSpec.tile_k + part() * kWarpKeys, lengths()};
    if constexpr (Scores<kFeatures>::kNatural) {
      positions.for_each(p.readable, [&](int m, int n, int idx, i64 i, i64 j, float distance) {
        float& x = s[m][n][idx];
        const At<Mufu> position = scores.load(i, j, distance);
        x = onefold::score(scores.modifier, Mufu{x * p.score_factor}, position).x;
        if (scores.hides(position)) x = kEmpty<float>;
      });
    }
    if constexpr (kFeatures.mask) {
      if (class_of(tile) != 2) {
        positions.for_each(p.readable, [&](int m, int n, int idx, i64 i, i64 j, float) {
          if (scores.masked(i, j)) s[m][n][idx] = kEmpty<float>;
        });
      }
    }
    if (tile < fact(&Facts::full_begin) || tile >= fact(&Facts::full_end)) {
      positions.for_each_visible(p.variant, [&](int m, int n, int idx, bool visible) {
        s[m][n][idx] = visible ? s[m][n][idx] : kEmpty<float>;
      });
    }
  }

  static __forceinline__ bool is_extreme(float log2) { return ::fabsf(log2) > kExactLog2; }

  __forceinline__ LaggingBy<Mufu> gauge() const {
    return {{Scores<kFeatures>::kNatural ? kLagLog2 * static_cast<float>(kLn2) : args.score_lag}};
  }
  // The largest of this thread's scores in each row. True when one lies so far above the reference
  // of its row that it must be raised: threads that share a row need not tell each other what they
  // have before one of them says so.
  __forceinline__ bool find_tops(const float (&s)[kRowTiles][kBlocks][4],
                                 float (&top)[kRowTiles][2]) const {
    const float lag = gauge().lag.x;
    bool raises = false;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float most = ::fmaxf(s[m][0][2 * half], s[m][0][2 * half + 1]);
#pragma unroll
        for (int n = 1; n < kBlocks; ++n) {
          most = ::fmaxf(most, ::fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
        }
        top[m][half] = most;
        raises |= state[m][half].ref.x + lag < most;
      }
    }
    return raises;
  }
  // Brings references and O to these scores, for all rows or none of those who ask each other.
  __forceinline__ void raise_to(float (&top)[kRowTiles][2], Mufu factor) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) top[m][half] = tile::quad_max(top[m][half]);
    }
    if constexpr (kSharing > 1) {
      share().reduce(top, [](float a, float b) { return ::fmaxf(a, b); });
    }
    float keep[kRowTiles][2];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        keep[m][half] = raise(state[m][half], Mufu{top[m][half]}, factor, gauge()).x;
      }
    }
    for_each(out, [&](float& x, int m, int half) { x *= keep[m][half]; });
  }
  __forceinline__ void find_against(float (&s)[kRowTiles][kBlocks][4], Mufu factor,
                                    Mufu (&against)[kRowTiles][2]) const {
    bool extreme = gives_headroom();
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        against[m][half] = anchor(state[m][half].ref) * factor;
        extreme |= is_extreme(against[m][half].x);
      }
    }
    if (__any_sync(tile::kAllLanes, extreme)) take_references(s, against);
  }
  // Where the products of scores and of references with the factor would not be exact enough,
  // references are taken off the scores. Row by row: what one row holds changes no bit of another.
  __forceinline__ void take_references(float (&s)[kRowTiles][kBlocks][4],
                                       Mufu (&against)[kRowTiles][2]) const {
    for_each(s, [&](float& x, int m, int half) {
      if (is_extreme(against[m][half].x)) x -= anchor(state[m][half].ref).x;
    });
    for (int m = 0; m < kRowTiles; ++m) {
      for (int half = 0; half < 2; ++half) {
        if (is_extreme(against[m][half].x)) against[m][half] = {0.0f};
        if (has_headroom(2 * m + half)) against[m][half].x += kHeadroomLog2;
      }
    }
  }
  // body(number, row tile, upper or lower row)
  template <int kColumns, class Body>
  static __forceinline__ void for_each(float (&x)[kRowTiles][kColumns][4], Body&& body) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
#pragma unroll
        for (int idx = 0; idx < 4; ++idx) body(x[m][n][idx], m, idx / 2);
      }
    }
  }

  // Scores become weights, the sums and O absorb them. The exponentials of a few keys are taken
  // just before their product, so that they overlap with the product of the keys before.
  __forceinline__ void absorb(float (&s)[kRowTiles][kBlocks][4], float (&top)[kRowTiles][2],
                              bool raises, int tile, int stage, float to_base_2) {
    const Mufu factor{to_base_2};
    Mufu against[kRowTiles][2];
    if (raises) raise_to(top, factor);
    find_against(s, factor, against);  // a weight is 2^(x * factor - against), by weight_from
    const auto to_weights = [&](int n) {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int idx = 0; idx < 4; ++idx) {
          float& x = s[m][n][idx];
          x = weight_from(Mufu{x} * factor, against[m][idx / 2]).x;
          state[m][idx / 2].sum.x += x;
        }
      }
    };
    if constexpr (kFeatures.dropout) {
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) to_weights(n);
      drop(s, tile);
    }
    const u32 v_at = tile::b_trans_address<Op, VTile>(ptx::shared_address(&shared.tiles.v[stage])) +
                     part() * (kSpec.row_bytes_v() / kSharing);
    if constexpr (kSharing > 1) {
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) to_weights(n);
      share().template absorb<VTile>(out, s, v_at);
      return;
    }
    tile::multiply_weights<Op, VTile>(out, s, v_at, [&](int n) {
      if constexpr (!kFeatures.dropout) to_weights(n);
    });
  }

  // Only kept weights meet V.
  __forceinline__ void drop(float (&s)[kRowTiles][kBlocks][4], int tile) {
    const Positions positions{first_row() + first_of_warp(), i64{tile} * kSpec.tile_k, lengths()};
    for_each_kept(positions, at, seed, args.keep_threshold, [&](int m, int n, int idx, bool kept) {
      if (!kept) s[m][n][idx] = 0.0f;
    });
  }
  u64 seed;

  // ---- careful passes ----
  // Bits of Facts::careful: what is not finite is taken out of V, and some rows have headroom.
  static constexpr int kTakesPoison = 1, kGivesHeadroom = 2;

  __forceinline__ bool gives_headroom() const {
    return kMayOverflow && (fact(&Facts::careful) & kGivesHeadroom) != 0;
  }
  // Rows are numbered as this thread has them: 2 m + half.
  __forceinline__ bool has_headroom(int row) const {
    return gives_headroom() && (shared.headroom[thread] >> row & 1u) != 0;
  }
  __forceinline__ bool hides() const { return kFeatures.hides() || fact(&Facts::hides) != 0; }
  __forceinline__ void take_poison(int stage) {
    tile::take_poison<VTile, kElement, kThreads>(ptx::shared_address(&shared.tiles.v[stage]),
                                                 thread, [](int) {});
    __syncthreads();
  }

  // Whether some row is not finite (or in numbers above 2^60, which cost as much to tell from that)
  // although its weights are, and another pass, which is then set up, may change it.
  __forceinline__ bool must_run_again() {
    if (!kMayOverflow && !hides()) return false;
    u32 rows = 0;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float products = 0.0f;
#pragma unroll
        for (int n = 0; n < kOutBlocks; ++n) {
          products = ::fmaf(out[m][n][2 * half], out[m][n][2 * half + 1], products);
        }
        if (!tile::finite(products) && tile::finite(state[m][half].sum.x)) {
          rows |= 1u << (2 * m + half);
        }
      }
    }
    const int careful = fact(&Facts::careful);
    if (!__syncthreads_or(rows != 0)) return false;
    const int next = careful == 0 && hides() ? kTakesPoison : careful | kGivesHeadroom;
    if (thread == 0) shared.facts.careful = next;
    if (next & kGivesHeadroom) {
      rows |= __shfl_xor_sync(tile::kAllLanes, rows, 1);
      rows |= __shfl_xor_sync(tile::kAllLanes, rows, 2);
      if constexpr (kSharing > 1) rows = share().of_both(rows);
      shared.headroom[thread] = rows;
    }
    __syncthreads();
    return true;
  }

  // ---- loop ----
  __forceinline__ void attend(const Scores<kFeatures>& scores) {
    tile::clear(out);
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) state[m][0] = state[m][1] = Softmax<Mufu>{};
    const float to_base_2 = Scores<kFeatures>::to_base_2(p);
    int tile = next_tile(fact(&Facts::tile_begin)), stage = 0;
    if (tile < fact(&Facts::tile_end)) {
      copy_k(tile, 0);
      if constexpr (kSpec.stages == 2) copy_v(tile, 0);
    }
    ptx::cp_async_commit();
    // Q was asked for before K: the first copies of K are under way meanwhile.
    if (kEarlyK && fact(&Facts::careful) == 0) {
      ptx::cp_async_wait<1>();
      __syncthreads();
      if (q_factor() != 1.0f) {
        factor_q();
        __syncthreads();
      }
      load_q();
    }
#pragma unroll 1
    while (tile < fact(&Facts::tile_end)) {
      const int next = next_tile(tile + 1);
      ptx::cp_async_wait<0>();
      __syncthreads();
      if constexpr (kSpec.stages == 2) {
        if (next < fact(&Facts::tile_end)) {
          copy_k(next, stage ^ 1);
          copy_v(next, stage ^ 1);
        }
      } else {
        copy_v(tile, 0);
      }
      ptx::cp_async_commit();
      float s[kRowTiles][kBlocks][4];
      score(s, scores, tile, stage);
      float top[kRowTiles][2];
      bool raises = false;
      if constexpr (kSpec.stages == 1) {
        // Where warps share rows, the barrier tells them whether one must raise a reference.
        if constexpr (kSharing > 1) raises = find_tops(s, top);
        ptx::cp_async_wait<0>();
        if constexpr (kSharing > 1) {
          raises = __syncthreads_or(raises);
        } else {
          __syncthreads();
        }
        if (next < fact(&Facts::tile_end)) copy_k(next, 0);
        ptx::cp_async_commit();
      }
      if ((fact(&Facts::careful) & kTakesPoison) != 0) take_poison(stage);
      if constexpr (kSharing == 1) raises = __any_sync(tile::kAllLanes, find_tops(s, top));
      absorb(s, top, raises, tile, stage, to_base_2);
      tile = next;
      if constexpr (kSpec.stages == 2) stage ^= 1;
    }
    ptx::cp_async_wait<0>();
    __syncthreads();
    finish_sums();
  }

  // ---- finish ----
  // Sums of rows, with what the other warp has of them.
  __forceinline__ void finish_sums() {
    float sum[kRowTiles][2];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        sum[m][half] = tile::quad_sum(state[m][half].sum.x);
      }
    }
    if constexpr (kSharing > 1) share().reduce(sum, [](float a, float b) { return a + b; });
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        state[m][half].sum.x = sum[m][half];
      }
    }
  }
  // Each of the lanes that share rows finishes one of them, and tells the others by what to
  // multiply it: what is done once a block should be little code, since all of it must be fetched.
  __forceinline__ void finish() {
    constexpr int kQuadRows = 2 * kRowTiles;
    static_assert(kQuadRows <= 4);
    const float to_base_2 = Scores<kFeatures>::to_base_2(p);
    const int mine = lane % kQuadRows;
    Softmax<Mufu> own = state[0][0];
#pragma unroll
    for (int idx = 1; idx < kQuadRows; ++idx) {
      if (mine == idx) own = state[idx / 2][idx % 2];
    }
    const int row = row0 + first_of_warp() + 8 * mine + lane / 4;
    const bool used = row < at.n.q;
    const float ref = own.ref.x;
    const float headroom = has_headroom(mine) ? kHeadroom : 1.0f;
    Softmax<Mufu> total{{ref * to_base_2}, {own.sum.x * headroom}};
    // A bias may be so small that it is minus infinity in base 2: the row is not empty for that.
    const bool below = ref > kEmpty<float> && total.ref.x == kEmpty<float>;
    if (below) total.ref.x = -kLargest;
    float factor = args.keep_scale * headroom;
    float natural = lse(total).x * static_cast<float>(kLn2);
    if (is_extreme(total.ref.x)) {
      const float log2_sum = lse(Softmax<Mufu>{{0.0f}, total.sum}).x;
      const float unit = Scores<kFeatures>::kNatural ? 1.0f : p.score_factor;
      natural = ref * unit + log2_sum * static_cast<float>(kLn2);
    }
    const float sink = p.sinks.data != nullptr ? p.sinks.data[at.h * p.sinks.head] : kEmpty<float>;
    if (sink != kEmpty<float>) {
      // An attention sink is one more key with value zero.
      const Mufu in_base_2{sink * static_cast<float>(kLog2E)};
      const Softmax<Mufu> with = merge(total, SoftmaxFold<Mufu>::lift(in_base_2));
      factor *= weight(total.ref, with.ref).x;
      total = with;
      natural = lse(total).x * static_cast<float>(kLn2);
    }
    const bool empty = !used || total.sum.x == 0.0f;
    factor = empty ? 0.0f : factor * ptx::rcp_approx(total.sum.x);
    const bool tells = lane % 4 < kQuadRows && part() == 0 && row < num_rows;
    if (args.lse.data != nullptr && tells) {
      const i64 b = packed() ? 0 : at.b;
      args.lse
          .data[b * args.lse.batch + at.h * args.lse.head + (q_row + row - row0) * args.lse.row] =
          empty ? kEmpty<float> : natural;
    }
    const u32 zeros = __ballot_sync(tile::kAllLanes, empty || args.keep_scale == 0.0f);
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int of = lane / 4 * 4 + 2 * m + half;
        const float by = __shfl_sync(tile::kAllLanes, factor, of);
        const bool zero = (zeros >> of & 1u) != 0;
#pragma unroll
        for (int n = 0; n < kOutBlocks; ++n) {
          for (int odd = 0; odd < 2; ++odd) {
            float& x = out[m][n][2 * half + odd];
            x = zero ? 0.0f : x * by;
          }
        }
      }
    }
    stage_out();
  }

  // Out leaves through shared memory, each warp its own rows, so that whole rows go in 16-byte
  // pieces.
  __forceinline__ u32 warp_out() const {
    return ptx::shared_address(&shared.out) + OutTile::offset(warp * kStoredRows, 0);
  }
  __forceinline__ void stage_out() {
    const u32 to = ptx::shared_address(&shared.out) +
                   OutTile::offset(first_of_warp(), part() * (kSpec.row_bytes_v() / kSharing));
    stage_rows<OutTile, kElement>(to, lane, out, [](float number) { return number; });
    if constexpr (kSharing > 1) share().meet();
  }

  // Values that are not finite, for the rows that see them. What a weight multiplies them by is
  // positive and does not count. A lane owns words of a row.
  __forceinline__ void spread_poison(const Scores<kFeatures>& scores) {
    const i64 last = i64{fact(&Facts::tile_end)} * kSpec.tile_k;
    const int end = static_cast<int>(last < at.n.k ? last : at.n.k);
#pragma unroll 1
    for (int key = fact(&Facts::tile_begin) * kSpec.tile_k; key < end; ++key) {
      const tile::GlobalRows v = rows_at(p.v, k_row + key, at.kv_head, 1, 1, p.dim_v);
      tile::for_poison<kElement>(v.data, v.dim, p.dim_v, [&](int word, float low, float high) {
        const u32 where = warp_out() + 4 * word;
#pragma unroll 1
        for (int row = 0; row < kStoredRows; ++row) {
          const int i = row0 + warp * kStoredRows + row;
          const KeyInterval keys = key_interval(p.variant, at.n, i);
          if (i >= at.n.q || key < keys.begin || key >= keys.end) continue;
          if (kFeatures.hides() && scores.hidden(i, key)) continue;
          const u32 x = ptx::ld_shared_32(where + OutTile::offset(row, 0));
          ptx::st_shared_32(where + OutTile::offset(row, 0),
                            tile::add_poison<kElement>(x, low, high));
        }
      });
    }
    __syncwarp();
  }

  __forceinline__ void store_out() const {
    const int first = row0 + warp * kStoredRows;
    if (first >= num_rows) return;
    OutCopy::store(
        warp_out(),
        rows_at(args.out, q_row + warp * kStoredRows, at.h, num_rows - first, kStoredRows, p.dim_v),
        lane);
  }

  // Where this block works is read anew for each act: what is kept from one act to the next costs
  // registers that the loop in between needs.
  __forceinline__ void run() {
    if (!locate()) return;
    if constexpr (kFeatures.dropout) seed = p.seed != nullptr ? *p.seed : p.variant.seed;
    q_at = tile::a_address<QTile>(ptx::shared_address(&shared.tiles.q), first_of_warp());
    copy_q();
    if (kEarlyK || q_factor() != 1.0f) ptx::cp_async_commit();
    find_keys();
    if (!kEarlyK && q_factor() != 1.0f) {
      ptx::cp_async_wait<0>();
      __syncthreads();
      factor_q();
      __syncthreads();
    }
#pragma unroll 1
    while (true) {
      find_key_rows();
      attend(Scores<kFeatures>(p, at));
      recall();
      constexpr int kLastPass = kMayOverflow ? kGivesHeadroom : kTakesPoison;
      if (fact(&Facts::careful) >= kLastPass || !must_run_again()) break;
    }
    finish();
    if ((fact(&Facts::careful) & kTakesPoison) != 0 && args.keep_scale != 0.0f) {
      spread_poison(Scores<kFeatures>(p, at));
    }
    store_out();
  }
};

}  // namespace onefold::kernels
