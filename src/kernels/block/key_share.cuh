// Gradients of keys that two pairs of warps share: each pair has half of the queries of a tile, and
// each warp half of the columns of its gradient. A warp has the operands of its own queries in
// registers; those of the other pair's it takes from shared memory.
//
// Invariant: barriers 5 + pair (values) and 9 + pair (keys) tell that the operands are there. Who a
// warp is is found anew each time, because registers are scarce. Weights pass through float16.
// Includes hand_over.cuh, tile, ptx.
#pragma once

#include "kernels/backward_spec.h"
#include "kernels/block/hand_over.cuh"
#include "kernels/tile/product.cuh"
#include "kernels/tile/transposed.cuh"

namespace onefold::kernels {

template <BackwardSpec kSpec>
struct KeyShare {
  static constexpr Element kElement = kSpec.element;
  using Op = tile::Operand<kElement>;
  static constexpr int kSharing = kSpec.sharing, kWarpKeys = kSpec.warp_keys();
  static constexpr int kRowTiles = kWarpKeys / 16, kWarpQueries = kSpec.step_q / kSharing;
  static constexpr int kBlocks = kWarpQueries / 8;
  using QTile = tile::SharedTile<kSpec.tile_q, kSpec.row_bytes(), kSpec.swizzled()>;
  using DoutTile = tile::SharedTile<kSpec.tile_q, kSpec.row_bytes_v(), kSpec.swizzled()>;
  using DsTile = tile::TransposedTile<kElement, kSpec.tile_k, kSpec.tile_q>;
  using Accumulators = float[kRowTiles][kBlocks][4];
  int thread;
  u32 exchange;

  struct Who {
    int lane, pair;
    __forceinline__ int part() const { return pair % kSharing; }
    __forceinline__ int first_key() const { return pair / kSharing * kWarpKeys; }
  };
  __forceinline__ Who who() const {
    const int now = ptx::opaque(thread);
    return {now % 32, now / 32 % (kSpec.warps / 2)};
  }
  template <class Tile>
  static __forceinline__ u32 columns_at(Who me, u32 tile, int part_of_queries) {
    return tile + Op::template offset_b_trans<Tile>(me.lane) +
           Tile::offset(part_of_queries * kWarpQueries, me.part() * (Tile::kRowBytes / kSharing));
  }
  template <class Tile, class Gradient, class Of>
  static __forceinline__ void absorb_other(Gradient& gradient, u32 at, Of&& operand_of) {
#pragma unroll
    for (int step = 0; step < kWarpQueries / 16; ++step) {
      typename Op::A a[kRowTiles];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) a[m] = operand_of(m, step);
      tile::multiply_depth<Op, Tile>(gradient, a, at + Tile::offset(16 * step, 0));
    }
  }
  template <class Dv>
  __forceinline__ void absorb_values(const Accumulators& weights, u32 dout, Dv& dv) const {
    const Who me = who();
    ptx::bar_arrive(5 + me.pair, 64);
    tile::multiply_weights<Op, DoutTile>(dv, weights, columns_at<DoutTile>(me, dout, me.part()),
                                         [](int) {});
    const Who then = who();
    ptx::bar_sync(5 + (then.pair ^ 1), 64);
    const HandOver<kElement, kRowTiles, kBlocks> other{exchange, then.pair ^ 1, then.lane};
    absorb_other<DoutTile>(dv, columns_at<DoutTile>(then, dout, 1 - then.part()),
                           [&](int m, int step) { return other.operand(m, 2 * step); });
  }
  template <class Dk>
  __forceinline__ void absorb_keys(const Accumulators& ds, u32 q, u32 ds_tile, Dk& dk) const {
    const Who me = who();
    ptx::bar_arrive(9 + me.pair, 64);
    tile::multiply_weights<Op, QTile>(dk, ds, columns_at<QTile>(me, q, me.part()), [](int) {});
    const Who then = who();
    ptx::bar_sync(9 + (then.pair ^ 1), 64);
    using Rows = typename DsTile::Tile;
    const u32 at = ds_tile + Rows::offset(then.first_key() + tile::a_row(then.lane),
                                          (1 - then.part()) * kWarpQueries * Op::kBytes +
                                              tile::a_byte(then.lane));
    absorb_other<QTile>(dk, columns_at<QTile>(then, q, 1 - then.part()), [&](int m, int step) {
      return Op::load_a(at + Rows::offset(16 * m, step * Op::kDepthBytes));
    });
  }
};

}  // namespace onefold::kernels
