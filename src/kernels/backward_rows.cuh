// What comes before and after portable_backward: what it knows rows by, and the rounding of dQ.
//
// One block, one tile of query rows of one head. Includes weights.cuh, tile.
#pragma once

#include "kernels/block/dq_sums.cuh"
#include "kernels/block/weights.cuh"
#include "kernels/tile/poison.cuh"

namespace onefold::kernels {

// lse and delta = dO . O - dLSE as Weights has them, and whether dP counts: in a row that sees one
// key it does not, since O is that key's V and dP - dO . O is 0, which rounding would hide. Clears
// what the tile sums up.
template <BackwardSpec kSpec>
struct BackwardRows {
  static constexpr Element kElement = kSpec.element;
  using W = Weights<kElement, kSpec.features>;
  static constexpr int kGroup = 8;  // lanes that share a row
  static constexpr int kRowsPerPass = kBackwardRowsThreads / kGroup;
  static constexpr int kPasses = kSpec.tile_q / kRowsPerPass;
  static_assert(kSpec.tile_q % kRowsPerPass == 0);
  static constexpr int kChunk = 16 / size_bytes(kElement);

  const BackwardRowsArguments& args;
  const ProblemView& p;
  QueryTile tile;
  int thread, lane_in_group;

  // The part of dO . O that this lane sums: every kGroup-th chunk of 16 bytes, wherever rows lie.
  __forceinline__ float product(int row) const {
    const auto at = [&](const RowsView& view) {
      return rows_of<kElement>(p, view, tile.at.b, tile.q_row + row, tile.at.h, 1, 1, p.dim_v);
    };
    const tile::GlobalRows out = at(args.out), dout = at(args.dout);
    float sum = 0.0f;
    if constexpr (kSpec.aligned) {
      for (int column = lane_in_group * kChunk; column < p.dim_v; column += kGroup * kChunk) {
        const uint4 x = *reinterpret_cast<const uint4*>(out.data + column * size_bytes(kElement));
        const uint4 y = *reinterpret_cast<const uint4*>(dout.data + column * size_bytes(kElement));
        const u32 xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
        for (int idx = 0; idx < 4; ++idx) {
          if constexpr (kElement == Element::kFloat32) {
            sum = ::fmaf(__uint_as_float(xs[idx]), __uint_as_float(ys[idx]), sum);
          } else {
            sum =
                ::fmaf(tile::unpack_16<kElement>(xs[idx]), tile::unpack_16<kElement>(ys[idx]), sum);
            sum = ::fmaf(tile::unpack_16<kElement>(xs[idx] >> 16),
                         tile::unpack_16<kElement>(ys[idx] >> 16), sum);
          }
        }
      }
    } else {  // the same order of additions
      for (int column = lane_in_group * kChunk; column < p.dim_v; column += kGroup * kChunk) {
        const int end = column + kChunk < p.dim_v ? column + kChunk : p.dim_v;
        for (int at = column; at < end; ++at) {
          sum = ::fmaf(tile::load_element<kElement>(out.data, at * out.dim),
                       tile::load_element<kElement>(dout.data, at * dout.dim), sum);
        }
      }
    }
    return sum;
  }
  static __forceinline__ float group_sum(float x) {
#pragma unroll
    for (int step = 1; step < kGroup; step *= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
  }

  // Whether exactly one key, and no sink, has a weight in row i. By all lanes of a warp together.
  __forceinline__ bool sees_one_key(const Scores<kSpec.features>& scores, int i, bool used) const {
    if (p.sinks.data != nullptr && p.sinks.data[tile.at.h * p.sinks.head] != kEmpty<float>) {
      return false;
    }
    const KeyInterval keys = key_interval(p.variant, tile.at.n, i);
    if constexpr (!kSpec.features.hides()) return used && keys.end - keys.begin == 1;
    const i64 end = used ? keys.end : keys.begin;
    float seen = 0.0f;
    for (i64 j = keys.begin; __any_sync(0xffffffffu, seen < 2.0f && j < end); j += kGroup) {
      const i64 mine = j + lane_in_group;
      const bool counts = mine < end && !scores.hidden(i, mine);
      seen += group_sum(counts ? 1.0f : 0.0f);
    }
    return seen == 1.0f;
  }

  __forceinline__ void run() {
    thread = static_cast<int>(threadIdx.x);
    lane_in_group = thread % kGroup;
    tile = query_tile_at(p, blockIdx.x, kSpec.tile_q);
    if (args.ticket != nullptr && blockIdx.x == 0 && thread == 0) *args.ticket = 0;
    if (!tile.present()) return;
    const i64 number = row_tile(p, tile.at.b, tile.at.h, kSpec.tile_q) + tile.row0 / kSpec.tile_q;
    float* rows = args.rows + number * kSpec.row_numbers();
    const Scores<kSpec.features> scores(p, tile.at);
    // All loads first.
    float sums[kPasses];
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int row = thread / kGroup + pass * kRowsPerPass;
      const bool counts = tile.row0 + row < tile.at.n.q && args.dout.data != nullptr;
      sums[pass] = counts ? product(row) : 0.0f;
    }
    clear(number);
    u32 flags = 0;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int row = thread / kGroup + pass * kRowsPerPass;
      const int i = tile.row0 + row;
      const bool used = i < tile.at.n.q;
      float lse = 0.0f, delta = group_sum(sums[pass]), use = 1.0f;
      const bool one_key = sees_one_key(scores, i, used) && tile::finite(delta);
      if (used) {
        const auto load = [&](const NumbersView& view) {
          const i64 batch = p.sequences.cu_q.bytes != 0 ? 0 : tile.at.b;
          return view
              .data[batch * view.batch + tile.at.h * view.head + (tile.q_row + row) * view.row];
        };
        lse = load(args.lse);
        if (one_key) {
          delta = use = 0.0f;
          flags |= kRowsOneKey;
        }
        if (args.dlse.data != nullptr) delta -= load(args.dlse);
        if (!tile::finite(lse) || !tile::finite(delta)) flags |= kRowsNotFinite;
        if (!tile::finite(delta)) delta = __int_as_float(0x7fffffff);
        // Weights of a row that sees nothing are 0.
        if (lse == kEmpty<float>) lse = -kEmpty<float>;
      }
      if (lane_in_group == 0) {
        rows[row] = W::stored_lse(lse);
        rows[kSpec.tile_q + row] = delta * W::kLeast;
        rows[2 * kSpec.tile_q + row] = use;
      }
    }
    const u32 not_finite = __syncthreads_or(flags & kRowsNotFinite) ? kRowsNotFinite : 0;
    const u32 one_key = __syncthreads_or(flags & kRowsOneKey) ? kRowsOneKey : 0;
    if (thread == 0) {
      rows[3 * kSpec.tile_q] = __uint_as_float(not_finite | one_key);
    }
  }

  __forceinline__ void clear(i64 number) const {
    if (args.turns != nullptr && thread == 0) args.turns[number] = 0;
    if constexpr (kSpec.dq) {
      float4* dq = reinterpret_cast<float4*>(args.dq + number * kSpec.dq_numbers());
#pragma unroll 4
      for (int at = thread; at < kSpec.dq_numbers() / 4; at += kBackwardRowsThreads) {
        dq[at] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      }
    }
  }
};

// The sums of dQ become rows.
template <BackwardSpec kSpec>
struct BackwardDq {
  static constexpr Element kElement = kSpec.element;
  using Tile = tile::SharedTile<kSpec.tile_q, kSpec.row_bytes()>;
  using Copy = tile::RowCopy<Tile, kElement, kBackwardDqThreads, kSpec.aligned, kSpec.whole>;
  static constexpr int kBlocksPerRow = kSpec.dq_columns() / 8;

  static __forceinline__ void run(const BackwardDqArguments& args, unsigned char* memory) {
    const ProblemView& p = args.problem;
    const QueryTile tile = query_tile_at(p, blockIdx.x, kSpec.tile_q);
    if (!tile.present()) return;
    const i64 number = row_tile(p, tile.at.b, tile.at.h, kSpec.tile_q) + tile.row0 / kSpec.tile_q;
    const float* sums = args.dq + number * kSpec.dq_numbers();
    const u32 base = ptx::shared_address(memory);
    const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
    const int used = static_cast<int>(tile.at.n.q) - tile.row0;
#pragma unroll 4
    for (int idx = thread / 32; idx < kSpec.dq_numbers() / 128; idx += kBackwardDqThreads / 32) {
      constexpr int kPerWarp = kSpec.dq_rows() / 16 * kBlocksPerRow;
      const int warp = idx / kPerWarp, m = idx % kPerWarp / kBlocksPerRow;
      const int row = warp % kSpec.warps_q() * kSpec.dq_rows() + 16 * m + lane / 4;
      const int column =
          warp / kSpec.warps_q() * kSpec.dq_columns() + 8 * (idx % kBlocksPerRow) + 2 * (lane % 4);
      float x[4];
      DqSums<kSpec>::load(sums, idx, x, lane);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const bool there = row + 8 * half < used;
        const float low = there ? x[2 * half] * args.scale : 0.0f;
        const float high = there ? x[2 * half + 1] * args.scale : 0.0f;
        const u32 to = base + Tile::offset(row + 8 * half, column * size_bytes(kElement));
        if constexpr (kElement == Element::kFloat32) {
          ptx::st_shared_64(to, __float_as_uint(low), __float_as_uint(high));
        } else {
          ptx::st_shared_32(to, tile::pack_16<kElement>(low, high));
        }
      }
    }
    __syncthreads();
    Copy::store(base,
                rows_of<kElement>(p, args.dq_rows, tile.at.b, tile.q_row, tile.at.h,
                                  tile.num_rows - tile.row0, kSpec.tile_q, p.dim),
                thread);
  }
};

}  // namespace onefold::kernels
