// Backward on tensor cores that every GPU since Ampere has: one block, one tile of keys of one
// key/value head, against the query tiles of all heads of its group that see some of it.
//
//   copy K; then V, the first Q, dO, while K is looked through
//   for each query tile                       (two stages; with one, Q and dO are copied first)
//     Q, dO are here; copy the next Q, dO
//     dQ of the tile before += dS K           added to global memory in fp32
//     S^T = K Q^T, P^T = 2^(S - lse)          a warp owns 16 or 32 whole keys
//     dP^T = V dO^T, dS^T = P (dP - delta)    dS goes to shared memory, for dQ
//     dV += P^T dO, dK += dS^T Q              from accumulators to operands in registers
//   dQ of the last tile; scale, store dK and dV
//
// "Are here" is cp.async.wait_group by every thread and then the block's barrier, the only one of
// an iteration: it also tells that dS of the tile before is complete. Paired warps share their
// keys: the first computes P and dV and hands P over in shared memory (barrier 1 + pair), the
// second computes dP, dS and dK. Two such pairs may share keys (block/key_share.cuh).
//
// What is not finite must reach only what sees it. A row whose lse or delta is not finite is
// flagged: where a tile hides something, Q and dO are then cleared of such numbers, so that they do
// not meet weights of zero, and dO's are given back to dV at the end. A key that is not finite is
// cleared, too, and its scores are NaN. When adding to dQ is ordered, blocks draw their tile from a
// ticket, last tiles first: whoever waits, waits for blocks that have begun, and where there is a
// right border for none where it begins.
#pragma once

#include "kernels/block/dq_sums.cuh"
#include "kernels/block/hand_over.cuh"
#include "kernels/block/key_share.cuh"
#include "kernels/block/weights.cuh"
#include "kernels/block/worker.cuh"
#include "kernels/tile/poison.cuh"
#include "kernels/tile/transposed.cuh"

namespace onefold::kernels {

template <BackwardSpec kSpec>
struct PortableBackward : Worker {
  // ---- facts ----
  static_assert(kSpec.invalid() == nullptr);
  static constexpr Element kElement = kSpec.element;
  static constexpr Features kFeatures = kSpec.features;
  using Op = tile::Operand<kElement>;
  static constexpr int kThreads = kSpec.threads();
  static constexpr int kTileQ = kSpec.tile_q, kTileK = kSpec.tile_k;
  static constexpr int kWarpKeys = kSpec.warp_keys();
  static constexpr int kRowTiles = kWarpKeys / 16;
  static constexpr int kSharing = kSpec.sharing;
  static constexpr int kStoreKeys = kWarpKeys / kSharing;  // that a warp stores
  static constexpr int kWarpQueries = kSpec.step_q / kSharing;
  static constexpr int kBlocks = kWarpQueries / 8;
  static constexpr int kSteps = kTileQ / kSpec.step_q;
  using W = Weights<kElement, kFeatures>;
  using Sums = DqSums<kSpec>;

  // ---- storage ----
  using QTile = tile::SharedTile<kTileQ, kSpec.row_bytes(), kSpec.swizzled()>;
  using DoutTile = tile::SharedTile<kTileQ, kSpec.row_bytes_v(), kSpec.swizzled()>;
  using KTile = tile::SharedTile<kTileK, kSpec.row_bytes(), kSpec.swizzled()>;
  using VTile = tile::SharedTile<kTileK, kSpec.row_bytes_v(), kSpec.swizzled()>;
  using DsTile = tile::TransposedTile<kElement, kTileK, kTileQ>;
  struct Stage {
    QTile q;
    DoutTile dout;
    float rows[kSpec.row_numbers()];
  };
  // Where this block works. Kept in shared memory and read when needed: registers are for products.
  struct Facts {
    int b, kv_head;
    int num_q, num_k;  // used lengths
    int key_tile;      // the tile, and its first key, local
    int j0;
    int num_rows;              // of the sequence's keys, used or not
    int q_row, k_row;          // where the sequence and the tile begin in the tensors
    int first_rows;            // number of the first tile of rows of the group's first head
    int tile_begin, tile_end;  // query tiles that see some key
    int full_begin, full_end;  // rows that see every key of the tile
    int hides;                 // some row does not see some key, in some tile
    int key_poison;            // some key is not finite
    int added;                 // number of the tile of rows whose turn is to be passed, or -1
    int unused[3];
  };
  struct Shared {
    KTile k;
    VTile v;
    Stage stage[kSpec.stages];
    DsTile ds[kSpec.stages];
    unsigned char exchange[kSpec.exchange_bytes()];
    u32 poison[kTileK];  // whether a key is not finite
    Facts facts;
  };
  static_assert(sizeof(Shared) == kSpec.shared_bytes());

  template <class Tile, int kBy = kThreads>
  using Copy = tile::RowCopy<Tile, kElement, kBy, kSpec.aligned, kSpec.whole>;
  using Positions = TilePositions<true, kRowTiles, kBlocks>;
  using Accumulators = float[kRowTiles][kBlocks][4];

  const BackwardArguments& args;
  const ProblemView& p;
  Shared& shared;
  u64 seed;

  __forceinline__ PortableBackward(const BackwardArguments& arguments, unsigned char* memory)
      : args(arguments), p(arguments.problem), shared(*reinterpret_cast<Shared*>(memory)) {}

  // ---- where ----
  __forceinline__ int fact(int Facts::*which) const {
    return static_cast<int>(ptx::ld_shared_32(ptx::shared_address(&(shared.facts.*which))));
  }
  // Which tile of keys this block owns. False when it has no rows.
  __forceinline__ bool locate() {
    u32 item = ptx::block_idx();
    if constexpr (kSpec.ordered) item = draw(args.ticket, shared.poison[0]);
    const u32 num_tiles = static_cast<u32>(args.key_tiles);
    const u32 num_heads = static_cast<u32>(p.heads_k);
    const HeadTile of =
        head_tile_at(item, num_tiles, heads_of(p.sequences.cu_k, p.sequences.batch, p.heads_k),
                     static_cast<u32>(args.heads_in_step));
    TileAt where{of.head / num_heads, of.tile};
    if constexpr (kSpec.ordered) where.tile = num_tiles - 1 - where.tile;
    if (p.sequences.cu_k.bytes != 0) {
      where =
          packed_tile(p.sequences.cu_k, p.sequences.batch, p.sequences.rows_k, kTileK, where.tile);
    }
    const Sequence seq = sequence_at(p.sequences, where.b);
    Facts f;
    f.b = static_cast<int>(where.b);
    f.kv_head = static_cast<int>(of.head % num_heads);
    f.num_q = static_cast<int>(seq.used.q);
    f.num_k = static_cast<int>(seq.used.k);
    f.key_tile = static_cast<int>(where.tile);
    f.j0 = f.key_tile * kTileK;
    f.num_rows = static_cast<int>(seq.k_rows);
    f.q_row = static_cast<int>(seq.q_begin);
    f.k_row = static_cast<int>(seq.k_begin) + f.j0;
    f.first_rows = static_cast<int>(row_tile(p, f.b, i64{f.kv_head} * p.group, kTileQ));
    find_rows(f);
    f.key_poison = 0;
    f.added = -1;
    if (thread == 0) shared.facts = f;
    __syncthreads();
    return f.j0 >= 0 && f.j0 < f.num_rows;
  }
  __forceinline__ Lengths lengths() const { return {fact(&Facts::num_q), fact(&Facts::num_k)}; }
  __forceinline__ HeadAt head_at(int head) const {
    return {fact(&Facts::b), fact(&Facts::kv_head) * p.group + head, fact(&Facts::kv_head),
            lengths()};
  }

  // ---- which query tiles ----
  __forceinline__ void find_rows(Facts& f) const {
    TileRange range{0, 0, 0, 0};
    const int j1 = f.j0 + kTileK < f.num_k ? f.j0 + kTileK : f.num_k;
    if (f.j0 < j1) range = q_range(p.variant, {f.num_q, f.num_k}, f.j0, j1);
    f.tile_begin = static_cast<int>(range.begin / kTileQ);
    f.tile_end = range.end > range.begin ? static_cast<int>((range.end + kTileQ - 1) / kTileQ)
                                         : f.tile_begin;
    // Keys beyond the last one are hidden like those beyond the border.
    const bool ragged = f.j0 + kTileK > f.num_k;
    f.full_begin = static_cast<int>(ragged ? range.end : range.full_begin);
    f.full_end = static_cast<int>(ragged ? range.end : range.full_end);
    f.hides = kFeatures.hides() || p.variant.banded() || (ragged && f.num_k < f.num_rows);
  }

  // A query tile of a head of the group.
  struct Step {
    int head, tile;
  };
  __forceinline__ u32 class_of(Step step) const {
    const u32* row = p.mask_classes.row(fact(&Facts::b), head_at(step.head).h, step.tile);
    return p.mask_classes.at(row, fact(&Facts::key_tile));
  }
  __forceinline__ bool present(Step step) const { return step.head < p.group; }
  // The step itself, or the first after it that has something to do. Turns must not be skipped.
  __forceinline__ Step settle(Step step) const {
    const int begin = fact(&Facts::tile_begin), end = fact(&Facts::tile_end);
    if (begin >= end) return {p.group, 0};
    while (true) {
      if (step.tile >= end) step = {step.head + 1, begin};
      if (!present(step)) return step;
      if (!kFeatures.mask || kSpec.ordered || class_of(step) != 0) return step;
      ++step.tile;
    }
  }
  __forceinline__ i64 rows_number(Step step) const {
    return fact(&Facts::first_rows) + step.head * p.query_tiles + step.tile;
  }

  // ---- copies ----
  __forceinline__ void copy_keys() {
    const int count = fact(&Facts::num_k) - fact(&Facts::j0);
    Copy<KTile>::load(ptx::shared_address(&shared.k),
                      rows_of<kElement>(p, p.k, fact(&Facts::b), fact(&Facts::k_row),
                                        fact(&Facts::kv_head), count, kTileK, p.dim),
                      thread);
  }
  // Without dO nothing depends on V: zeros stand for it, so that what it holds meets no zero of dO.
  __forceinline__ void copy_values() {
    const int count = fact(&Facts::num_k) - fact(&Facts::j0);
    Copy<VTile>::load(
        ptx::shared_address(&shared.v),
        rows_of<kElement>(p, p.v, fact(&Facts::b), fact(&Facts::k_row), fact(&Facts::kv_head),
                          args.dout.data == nullptr ? 0 : count, kTileK, p.dim_v),
        thread);
  }
  template <int kBy = kThreads>
  __forceinline__ void copy_rows(Step step, int stage) {
    const int i0 = step.tile * kTileQ, head = fact(&Facts::kv_head) * p.group + step.head;
    const int count = fact(&Facts::num_q) - i0;
    Stage& to = shared.stage[stage];
    Copy<QTile, kBy>::load(ptx::shared_address(&to.q),
                           rows_of<kElement>(p, p.q, fact(&Facts::b), fact(&Facts::q_row) + i0,
                                             head, count, kTileQ, p.dim),
                           thread);
    Copy<DoutTile, kBy>::load(
        ptx::shared_address(&to.dout),
        rows_of<kElement>(p, args.dout, fact(&Facts::b), fact(&Facts::q_row) + i0, head,
                          args.dout.data == nullptr ? 0 : count, kTileQ, p.dim_v),
        thread);
    const float* from = args.rows + rows_number(step) * kSpec.row_numbers();
    for (int chunk = thread; chunk < kSpec.row_numbers() / 4; chunk += kBy) {
      ptx::cp_async_16(ptx::shared_address(to.rows) + 16 * chunk, from + 4 * chunk, true);
    }
  }

  // The block's barrier, for places that the two warps of a pair have each for themselves: it is
  // named, so that tools know that they are one.
  __forceinline__ void meet() const { ptx::bar_sync(0, kThreads); }

  // Takes what is not finite out of K, and remembers which keys those were.
  __forceinline__ void find_poison() {
    if (!fact(&Facts::hides)) return;
    if constexpr (kSpec.roomy()) {  // a quick look
      const u32 keys = ptx::shared_address(&shared.k);
      if (!__syncthreads_or(tile::has_poison<KTile, kElement, kThreads>(keys, thread))) return;
    }
    for (int key = thread; key < kTileK; key += kThreads) shared.poison[key] = 0;
    __syncthreads();
    bool found = false;
    tile::take_poison<KTile, kElement, kThreads>(ptx::shared_address(&shared.k), thread,
                                                 [&](int key) {
                                                   shared.poison[key] = 1;
                                                   found = true;
                                                 });
    found = __syncthreads_or(found);
    if (thread == 0) shared.facts.key_poison = found;
    __syncthreads();
  }
  bool rows_poison = false;  // some were taken out of Q and dO
  // lse or delta of such a row is NaN, so that it makes no other difference.
  __forceinline__ void take_rows_poison(int stage) {
    Stage& of = shared.stage[stage];
    tile::take_poison<QTile, kElement, kThreads>(ptx::shared_address(&of.q), thread, [](int) {});
    tile::take_poison<DoutTile, kElement, kThreads>(ptx::shared_address(&of.dout), thread,
                                                    [](int) {});
    meet();
  }

  // ---- one query tile ----
  __forceinline__ KeyShare<kSpec> key_share() const {
    return {thread, ptx::shared_address(shared.exchange)};
  }
  int pair;  // which keys of the tile this warp owns, or pairs that share them own
  __forceinline__ int first_key() const { return pair / kSharing * kWarpKeys; }
  __forceinline__ int part() const { return pair % kSharing; }
  __forceinline__ int first_stored() const { return first_key() + part() * kStoreKeys; }
  u32 k_at, v_at;  // where this lane reads them

  // lse, delta or the use of dP of the two queries that a lane has in a block of columns.
  __forceinline__ float2 row_numbers(int which, int stage, int column) const {
    return ptx::ld_shared_f32x2(ptx::shared_address(shared.stage[stage].rows) +
                                4 * (which * kTileQ + column + 2 * (lane % 4)));
  }
  template <class Body>
  static __forceinline__ void for_each(Accumulators& x, Body&& body) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int idx = 0; idx < 4; ++idx) body(x[m][block][idx], m, block, idx);
      }
    }
  }

  // Products become weights, 0 where hidden. slope: of the cap.
  __forceinline__ void weigh(Accumulators& s, Accumulators& slope, Step step, int stage, int column,
                             bool border) {
    const Positions positions{fact(&Facts::j0) + first_key(), i64{step.tile} * kTileQ + column,
                              lengths()};
    const HeadAt at = head_at(step.head);
    const Scores<kFeatures> scores(p, at);
    if (fact(&Facts::key_poison)) {
      for_each(s, [&](float& x, int m, int, int idx) {
        const int key = first_key() + 16 * m + 8 * (idx / 2) + lane / 4;
        if (shared.poison[key] != 0) x = __int_as_float(0x7fffffff);
      });
    }
    const float factor = W::factor(p);
    if constexpr (W::kNatural) {
      positions.for_each(p.readable, [&](int m, int block, int idx, i64 i, i64 j, float distance) {
        const float2 lse = row_numbers(0, stage, column + 8 * block);
        float& x = s[m][block][idx];
        float of_cap;
        x = W::of_score(scores, scores.load(i, j, distance), x, factor, idx % 2 ? lse.y : lse.x,
                        of_cap);
        if constexpr (kFeatures.softcap) slope[m][block][idx] = of_cap;
      });
    } else {
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        const float2 lse = row_numbers(0, stage, column + 8 * block);
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
          for (int idx = 0; idx < 4; ++idx) {
            float& x = s[m][block][idx];
            x = W::of_product(x, factor, idx % 2 ? lse.y : lse.x);
          }
        }
      }
    }
    if constexpr (kFeatures.mask) {
      if (class_of(step) != 2) {
        positions.for_each(p.readable, [&](int m, int block, int idx, i64 i, i64 j, float) {
          if (scores.masked(i, j)) s[m][block][idx] = 0.0f;
        });
      }
    }
    if (border) {
      positions.for_each_visible(p.variant, [&](int m, int block, int idx, bool visible) {
        s[m][block][idx] = visible ? s[m][block][idx] : 0.0f;
      });
    }
    if constexpr (kFeatures.dropout) {
      // Dropped weights are negative from here on.
      for_each_kept(positions, at, seed, args.keep_threshold,
                    [&](int m, int block, int idx, bool kept) {
                      if (!kept) s[m][block][idx] = -s[m][block][idx];
                    });
    }
    if constexpr (kFeatures.softcap) {
      for_each(slope, [&](float& x, int m, int block, int idx) {
        const float weight = s[m][block][idx];
        x = weight == 0.0f ? 0.0f : x * weight;  // the slope at a hidden key may be anything
      });
    }
  }

  __forceinline__ HandOver<kElement, kRowTiles, kBlocks> exchange() const {
    return {ptx::shared_address(shared.exchange), pair, lane};
  }

  // One block of dP becomes dS.
  template <bool kSelect>
  __forceinline__ void differentiate(float (&dp)[4], const float (&weights)[4],
                                     float2 delta) const {
#pragma unroll
    for (int idx = 0; idx < 4; ++idx) {
      dp[idx] = W::template gradient<kSelect>(weights[idx], dp[idx], idx % 2 ? delta.y : delta.x,
                                              args.keep_scale);
    }
  }
  // kPaired: the weights come from the other warp; else they are `own`.
  template <bool kSelect, bool kPaired>
  __forceinline__ void differentiate_all(Accumulators& dp, const Accumulators& own, int stage,
                                         int column) const {
    if constexpr (kPaired) {
      exchange().for_each([&](int m, int block, const float(&weights)[4]) {
        const float2 delta = row_numbers(1, stage, column + 8 * block);
        differentiate<kSelect>(dp[m][block], weights, delta);
      });
    } else {
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        const float2 delta = row_numbers(1, stage, column + 8 * block);
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          differentiate<kSelect>(dp[m][block], own[m][block], delta);
        }
      }
    }
  }
  // kValues: this warp computes P and dV; kKeys: dP, dS and dK.
  template <bool kValues, bool kKeys, class Dv, class Dk>
  __forceinline__ void attend(Step step, int stage, Dv& dv, Dk& dk) {
    const Stage& at = shared.stage[stage];
    const u32 flags = ptx::ld_shared_32(ptx::shared_address(at.rows) + 4 * 3 * kTileQ);
    const int i0 = step.tile * kTileQ;
    const bool border = i0 < fact(&Facts::full_begin) || i0 + kTileQ > fact(&Facts::full_end);
    const bool select = border || kFeatures.hides();
    const u32 q_base = ptx::shared_address(&at.q), dout_base = ptx::shared_address(&at.dout);
    if ((flags & kRowsNotFinite) != 0 && fact(&Facts::hides) && select) {
      rows_poison = true;
      take_rows_poison(stage);
    }
#pragma unroll 1
    for (int sub = 0; sub < kSteps; ++sub) {
      const int column = sub * kSpec.step_q + part() * kWarpQueries;
      const u32 q_at = q_base + QTile::offset(column, 0);
      const u32 dout_at = dout_base + DoutTile::offset(column, 0);
      Accumulators s, dp;
      Accumulators slope;  // times the weight, when there is a cap
      if constexpr (kValues) {
        tile::clear(s);
        tile::multiply_rows<Op, KTile, QTile>(s, k_at, tile::b_address<QTile>(q_at));
        weigh(s, slope, step, stage, column, border);
        if constexpr (!kKeys) exchange().give(kFeatures.softcap ? slope : s);
      }
      if constexpr (kKeys) {
        tile::clear(dp);
        tile::multiply_rows<Op, VTile, DoutTile>(dp, v_at, tile::b_address<DoutTile>(dout_at));
        if (flags & kRowsOneKey) {
          for_each(dp, [&](float& x, int, int block, int idx) {
            const float2 use = row_numbers(2, stage, column + 8 * block);
            if ((idx % 2 ? use.y : use.x) == 0.0f) x = 0.0f;
          });
        }
        if constexpr (!kValues) exchange().wait();
        if (select) {
          differentiate_all<true, !kValues>(dp, kFeatures.softcap ? slope : s, stage, column);
        } else {
          differentiate_all<false, !kValues>(dp, kFeatures.softcap ? slope : s, stage, column);
        }
        if constexpr (kSpec.dq || kSharing == 2) {
          tile::store_transposed<DsTile>(ptx::shared_address(&shared.ds[stage]), dp, first_key(),
                                         column);
        }
      }
      if constexpr (kSharing == 2) {
        if constexpr (kValues) key_share().absorb_values(s, dout_base, dv);
        if constexpr (kKeys) {
          key_share().absorb_keys(dp, q_base, ptx::shared_address(&shared.ds[stage]), dk);
        }
        return;
      }
      if constexpr (kValues) {
        tile::multiply_weights<Op, DoutTile>(dv, s, tile::b_trans_address<Op, DoutTile>(dout_at),
                                             [&](int block) {
                                               if constexpr (kFeatures.dropout) {
#pragma unroll
                                                 for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
                                                   for (int idx = 0; idx < 4; ++idx) {
                                                     if (s[m][block][idx] < 0.0f)
                                                       s[m][block][idx] = 0.0f;
                                                   }
                                                 }
                                               }
                                             });
      }
      if constexpr (kKeys) {
        tile::multiply_weights<Op, QTile>(dk, dp, tile::b_trans_address<Op, QTile>(q_at),
                                          [](int) {});
      }
    }
  }

  // ---- dQ ----
  // Adds dS K of a tile to its sums.
  __forceinline__ void add_dq(Step step, int stage) {
    if (kSpec.dq && warp < Sums::kWarps) {
      typename Sums::Accumulators dq;
      tile::clear(dq);
      const int along_q = warp % kSpec.warps_q(), along_d = warp / kSpec.warps_q();
      tile::multiply_transposed<DsTile, KTile, kTileK>(
          dq, DsTile::address(ptx::shared_address(&shared.ds[stage]), along_q * kSpec.dq_rows()),
          KTile::move(tile::b_trans_address<Op, KTile>(ptx::shared_address(&shared.k)), 0,
                      along_d * kSpec.dq_columns() * Op::kBytes));
      const i64 number = rows_number(step);
      if constexpr (kSpec.ordered) await_turn(step, args.turns + number);
      Sums::add(args.dq + number * kSpec.dq_numbers() + warp * Sums::kWarpNumbers, dq, lane);
      if constexpr (kSpec.ordered) {
        __threadfence();
        if (thread == 0) shared.facts.added = static_cast<int>(number);
      }
    }
  }
  // Key tiles add in the order of their tickets: this one after those before it that see some of
  // the rows.
  __forceinline__ void await_turn(Step step, const u32* turn) const {
    const int num_q = fact(&Facts::num_q);
    const int i0 = step.tile * kTileQ, i1 = i0 + kTileQ < num_q ? i0 + kTileQ : num_q;
    Sums::await_turn(
        turn, turns_before(p.variant, lengths(), i0, i1, fact(&Facts::key_tile), kTileK), lane);
  }
  // After a barrier behind the adding.
  __forceinline__ void pass_turn() const {
    if (kSpec.ordered && kSpec.dq && thread == 0) {
      const int added = fact(&Facts::added);
      if (added >= 0) ptx::red_release_add(args.turns + added, 1u);
    }
  }

  // ---- loop ----
  template <bool kValues, bool kKeys, class Dv, class Dk>
  __forceinline__ void loop(Dv& dv, Dk& dk) {
    Step step = settle({0, fact(&Facts::tile_begin)});
    if (!present(step)) return;
    Step last{-1, 0};
    int stage = 0;
#pragma unroll 1
    while (present(step)) {
      const Step next = settle({step.head, step.tile + 1});
      ptx::cp_async_wait<0>();
      meet();
      if constexpr (kSpec.stages == 2 && (kValues || !kSpec.values_copy())) {
        if (present(next)) copy_rows<kSpec.copying_threads()>(next, stage ^ 1);
      }
      if (kSpec.stages == 1 && last.head >= 0) copy_rows(step, 0);
      ptx::cp_async_commit();
      pass_turn();
      if (last.head >= 0) add_dq(last, kSpec.stages == 2 ? stage ^ 1 : 0);
      if constexpr (kSpec.stages == 1) {
        ptx::cp_async_wait<0>();
        meet();
      }
      attend<kValues, kKeys>(step, stage, dv, dk);
      last = step;
      step = next;
      if constexpr (kSpec.stages == 2) stage ^= 1;
    }
    meet();
    pass_turn();
    add_dq(last, kSpec.stages == 2 ? stage ^ 1 : 0);
    meet();
    pass_turn();
  }

  // ---- finish ----
  // Gradients of a warp's keys leave through the tile of the keys themselves.
  template <class Tile, class Gradient>
  __forceinline__ u32 stage_gradient(u32 tile, const Gradient& x, float factor,
                                     float power = 1.0f) const {
    const u32 base = tile + Tile::offset(first_key(), part() * (Tile::kRowBytes / kSharing));
    stage_rows<Tile, kElement>(base, lane, x,
                               [=](float number) { return number * power * factor; });
    if constexpr (kSharing == 2) ptx::bar_sync((warp < kSpec.warps / 2 ? 5 : 9) + pair / 2, 64);
    return tile + Tile::offset(first_stored(), 0);
  }
  template <class Tile>
  __forceinline__ void store_gradient(u32 from, const RowsView& view, int num_columns) const {
    using WarpTile = tile::SharedTile<kStoreKeys, Tile::kRowBytes, kSpec.swizzled()>;
    const int first = first_stored();
    if (view.data == nullptr || fact(&Facts::j0) + first >= fact(&Facts::num_rows)) return;
    tile::RowCopy<WarpTile, kElement, 32, kSpec.aligned, kSpec.whole>::store(
        from,
        rows_of<kElement>(p, view, fact(&Facts::b), fact(&Facts::k_row) + first,
                          fact(&Facts::kv_head), fact(&Facts::num_rows) - fact(&Facts::j0) - first,
                          kStoreKeys, num_columns),
        lane);
  }

  // dO's numbers that are not finite, for the keys of this warp that their rows see. What a weight
  // multiplies them by is positive and does not count.
  __forceinline__ void spread_poison(u32 base) const {
    if (!rows_poison || args.dout.data == nullptr) return;
    const i64 last = i64{fact(&Facts::tile_end)} * kTileQ;
    const int end = static_cast<int>(last < fact(&Facts::num_q) ? last : fact(&Facts::num_q));
#pragma unroll 1
    for (int head = 0; head < p.group; ++head) {
      const Scores<kFeatures> scores(p, head_at(head));
#pragma unroll 1
      for (int i = fact(&Facts::tile_begin) * kTileQ; i < end; ++i) {
        const float* rows =
            args.rows + rows_number({head, i / kTileQ}) * kSpec.row_numbers() + kTileQ;
        if (tile::finite(rows[i % kTileQ])) continue;
        const tile::GlobalRows dout = rows_of<kElement>(
            p, args.dout, fact(&Facts::b), fact(&Facts::q_row) + i, scores.at.h, 1, 1, p.dim_v);
        const KeyInterval keys = key_interval(p.variant, lengths(), i);
        tile::for_poison<kElement>(
            dout.data, dout.dim, p.dim_v, [&](int word, float low, float high) {
#pragma unroll 1
              for (int row = 0; row < kStoreKeys; ++row) {
                const i64 key = fact(&Facts::j0) + first_stored() + row;
                if (key < keys.begin || key >= keys.end) continue;
                if (kFeatures.hides() && scores.hidden(i, key)) continue;
                const u32 where = base + VTile::offset(row, 4 * word);
                ptx::st_shared_32(where,
                                  tile::add_poison<kElement>(ptx::ld_shared_32(where), low, high));
              }
            });
      }
    }
    __syncwarp();
  }

  template <bool kValues, bool kKeys>
  __forceinline__ void work() {
    float dv[kValues ? kRowTiles : 1][kValues ? kSpec.dim_v / 8 / kSharing : 1][4];
    float dk[kKeys ? kRowTiles : 1][kKeys ? kSpec.dim / 8 / kSharing : 1][4];
    tile::clear(dv);
    tile::clear(dk);
    loop<kValues, kKeys>(dv, dk);
    if constexpr (kValues) {
      if (args.dout.data == nullptr) tile::clear(dv);  // whatever the weights are
      const u32 staged =
          stage_gradient<VTile>(ptx::shared_address(&shared.v), dv, args.keep_scale * W::kLeast);
      spread_poison(staged);
      store_gradient<VTile>(staged, args.dv, p.dim_v);
    }
    if constexpr (kKeys) {
      const u32 staged =
          stage_gradient<KTile>(ptx::shared_address(&shared.k), dk, args.scale, p.scale_power);
      store_gradient<KTile>(staged, args.dk, p.dim);
    }
  }

  __forceinline__ void run() {
    if (!locate()) return;
    if constexpr (kFeatures.dropout) seed = p.seed != nullptr ? *p.seed : p.variant.seed;
    const Step first = settle({0, fact(&Facts::tile_begin)});
    if (present(first)) {
      copy_keys();
      ptx::cp_async_commit();
      copy_values();
      copy_rows(first, 0);
      ptx::cp_async_commit();
      ptx::cp_async_wait<1>();  // K is here, the rest on its way until the loop waits
      __syncthreads();
      if (p.scale_power != 1.0f) {
        multiply_tile<KTile, kElement, kThreads>(ptx::shared_address(&shared.k), thread,
                                                 p.scale_power);
        __syncthreads();
      }
      find_poison();
    }
    pair = kSpec.paired ? warp % (kSpec.warps / 2) : warp;
    k_at = tile::a_address<KTile>(ptx::shared_address(&shared.k), first_key());
    v_at = tile::a_address<VTile>(ptx::shared_address(&shared.v), first_key());
    if constexpr (!kSpec.paired) {
      work<true, true>();
    } else if (warp < kSpec.warps / 2) {
      work<true, false>();
    } else {
      work<false, true>();
    }
  }
};

}  // namespace onefold::kernels
