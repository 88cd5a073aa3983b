// Gradients of what is added to scores: of a bias, by a block that owns a tile of its entries and
// walks, in ascending order, the batches, heads, queries and keys that share them; of slopes and
// sinks, by a block that owns a tile of rows and walks their keys.
//
// A warp owns 16 rows. P and dP are computed anew, so that nothing is added by two blocks and every
// sum has one order. Includes weights.cuh, tile.
#pragma once

#include "kernels/block/weights.cuh"
#include "kernels/block/worker.cuh"
#include "kernels/tile/product.cuh"
#include "kernels/tile/reduce.cuh"

namespace onefold::kernels {

template <ScoreGradientsSpec kSpec>
struct ScoreGradients : Worker {
  // ---- facts ----
  static_assert(kSpec.invalid() == nullptr);
  static constexpr Element kElement = kSpec.element;
  static constexpr Features kFeatures = kSpec.features;
  using Op = tile::Operand<kElement>;
  using W = Weights<kElement, kFeatures>;
  static constexpr int kThreads = kSpec.threads();
  static constexpr int kTileQ = kSpec.tile_q, kTileK = kSpec.tile_k, kBlocks = kTileK / 8;

  // ---- storage ----
  using QTile = tile::SharedTile<kTileQ, kSpec.row_bytes()>;
  using DoutTile = tile::SharedTile<kTileQ, kSpec.row_bytes_v()>;
  using KTile = tile::SharedTile<kTileK, kSpec.row_bytes()>;
  using VTile = tile::SharedTile<kTileK, kSpec.row_bytes_v()>;
  struct Shared {
    QTile q;
    DoutTile dout;
    KTile k;
    VTile v;
    float sums[kSpec.warps()][kTileK];
  };
  static_assert(sizeof(Shared) == kSpec.shared_bytes());
  template <class Tile>
  using Copy = tile::RowCopy<Tile, kElement, kThreads, kSpec.aligned, kSpec.whole>;
  using Positions = TilePositions<false, 1, kBlocks>;
  using Accumulators = float[1][kBlocks][4];

  const ScoreGradientsArguments& args;
  const ProblemView& p;
  Shared& shared;
  HeadAt at;
  i64 q_begin, k_begin;
  u64 seed;

  __forceinline__ ScoreGradients(const ScoreGradientsArguments& arguments, unsigned char* memory)
      : args(arguments), p(arguments.problem), shared(*reinterpret_cast<Shared*>(memory)) {}

  __forceinline__ void enter(i64 b, int h) {
    const Sequence seq = sequence_at(p.sequences, b);
    at = {b, h, h / p.group, {seq.used.q, seq.used.k}};
    q_begin = seq.q_begin;
    k_begin = seq.k_begin;
  }

  // ---- rows ----
  struct Row {
    float lse, delta, use;
  };
  Row rows[2];  // of this lane

  __forceinline__ int row_of(int half) const { return warp * 16 + 8 * half + lane / 4; }
  __forceinline__ Row load_row(i64 i) const {
    if (i >= at.n.q) return {0.0f, 0.0f, 1.0f};
    ProblemView prepared = p;
    prepared.query_tiles = args.rows_tiles;
    const i64 number = row_tile(prepared, at.b, at.h, args.rows_tile) + i / args.rows_tile;
    const float* from = args.rows + number * backward_row_numbers(args.rows_tile);
    const int row = static_cast<int>(i % args.rows_tile);
    return {from[row], from[args.rows_tile + row], from[2 * args.rows_tile + row]};
  }

  // Q and dO of the rows from i0 on.
  __forceinline__ void copy_rows(i64 i0) {
    const int count = static_cast<int>(at.n.q - i0 < kTileQ ? at.n.q - i0 : kTileQ);
    Copy<QTile>::load(ptx::shared_address(&shared.q),
                      rows_of<kElement>(p, p.q, at.b, q_begin + i0, at.h, count, kTileQ, p.dim),
                      thread);
    Copy<DoutTile>::load(ptx::shared_address(&shared.dout),
                         rows_of<kElement>(p, args.dout, at.b, q_begin + i0, at.h,
                                           args.dout.data == nullptr ? 0 : count, kTileQ, p.dim_v),
                         thread);
    for (int half = 0; half < 2; ++half) rows[half] = load_row(i0 + row_of(half));
  }

  // ---- one tile: dZ ----
  // Without dO nothing depends on V: zeros stand for it.
  __forceinline__ void differentiate(Accumulators& dz, i64 i0, i64 j0) {
    __syncthreads();  // the tile before has been used
    const int count = static_cast<int>(at.n.k - j0 < kTileK ? at.n.k - j0 : kTileK);
    Copy<KTile>::load(
        ptx::shared_address(&shared.k),
        rows_of<kElement>(p, p.k, at.b, k_begin + j0, at.kv_head, count, kTileK, p.dim), thread);
    Copy<VTile>::load(ptx::shared_address(&shared.v),
                      rows_of<kElement>(p, p.v, at.b, k_begin + j0, at.kv_head,
                                        args.dout.data == nullptr ? 0 : count, kTileK, p.dim_v),
                      thread);
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    __syncthreads();
    if (p.scale_power != 1.0f) {
      multiply_tile<KTile, kElement, kThreads>(ptx::shared_address(&shared.k), thread,
                                               p.scale_power);
      __syncthreads();
    }
    Accumulators weights;
    tile::clear(weights);
    tile::clear(dz);
    tile::multiply_rows<Op, QTile, KTile>(
        weights, tile::a_address<QTile>(ptx::shared_address(&shared.q), warp * 16),
        tile::b_address<KTile>(ptx::shared_address(&shared.k)));
    tile::multiply_rows<Op, DoutTile, VTile>(
        dz, tile::a_address<DoutTile>(ptx::shared_address(&shared.dout), warp * 16),
        tile::b_address<VTile>(ptx::shared_address(&shared.v)));
    const Positions positions{i0 + warp * 16, j0, at.n};
    const Scores<kFeatures> scores(p, at);
    const float factor = W::factor(p);
    positions.for_each(p.readable, [&](int, int block, int idx, i64 i, i64 j, float distance) {
      float& x = weights[0][block][idx];
      float slope;
      if constexpr (W::kNatural) {
        x = W::of_score(scores, scores.load(i, j, distance), x, factor, rows[idx / 2].lse, slope);
      } else {
        x = W::of_product(x, factor, rows[idx / 2].lse);
      }
      if constexpr (kFeatures.mask) {
        if (scores.masked(i, j)) x = 0.0f;
      }
    });
    positions.for_each_visible(p.variant, [&](int, int block, int idx, bool visible) {
      if (!visible) weights[0][block][idx] = 0.0f;
    });
    if constexpr (kFeatures.dropout) {
      for_each_kept(positions, at, seed, args.keep_threshold,
                    [&](int, int block, int idx, bool kept) {
                      if (!kept) weights[0][block][idx] = -weights[0][block][idx];
                    });
    }
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int idx = 0; idx < 4; ++idx) {
        const Row& row = rows[idx / 2];
        float& x = dz[0][block][idx];
        if (row.use == 0.0f) x = 0.0f;
        x = W::template gradient<true>(weights[0][block][idx], x, row.delta, args.keep_scale);
        if (i0 + row_of(idx / 2) >= at.n.q) x = 0.0f;
      }
    }
  }
  // The keys, in tiles, that rows from i0 on see.
  __forceinline__ TileRange keys_of(i64 i0) const {
    const i64 i1 = i0 + kTileQ < at.n.q ? i0 + kTileQ : at.n.q;
    if (i0 >= i1) return {0, 0, 0, 0};
    return kv_range(p.variant, at.n, i0, i1);
  }

  // ---- slopes and sinks ----
  __forceinline__ void sum_rows() {
    const QueryTile tile = query_tile_at(p, blockIdx.x, kTileQ);
    float slope_sum = 0.0f, sink_sum = 0.0f;
    if (tile.present() && tile.row0 < tile.at.n.q) {
      enter(tile.at.b, tile.at.h);
      copy_rows(tile.row0);
      float z[2] = {0.0f, 0.0f};
      const TileRange keys = keys_of(tile.row0);
#pragma unroll 1
      for (i64 j0 = keys.begin / kTileK * kTileK; j0 < keys.end; j0 += kTileK) {
        Accumulators dz;
        differentiate(dz, tile.row0, j0);
        const Positions positions{tile.row0 + warp * 16, j0, at.n};
        positions.for_each(p.readable, [&](int, int block, int idx, i64, i64, float distance) {
          const float x = dz[0][block][idx];
          z[idx / 2] += x;
          if constexpr (kFeatures.slopes) slope_sum = ::fmaf(-x, distance, slope_sum);
        });
      }
      for (int half = 0; half < 2; ++half) {
        const float row_sum = tile::quad_sum(z[half]);
        const i64 i = tile.row0 + row_of(half);
        if (args.sinks != nullptr && lane % 4 == 0 && i < at.n.q) {
          sink_sum += of_sink(rows[half], row_sum, i);
        }
      }
    }
    add_up(slope_sum, args.slopes);
    __syncthreads();
    add_up(sink_sum, args.sinks);
  }
  // dSink of a row is -P delta with P the weight of the sink. A delta from a stored out is off by
  // its rounding; the row says by how much, since its dZ, the sink's included, add up to dLSE.
  __forceinline__ float of_sink(const Row& row, float row_sum, i64 i) const {
    const float sink = p.sinks.data[at.h * p.sinks.head];
    if (sink == kEmpty<float> || row.lse == -kEmpty<float>) return 0.0f;  // there is no sink
    const float share = W::of_sink(sink, row.lse);
    const float delta = row.delta * W::kMost;
    float dlse = 0.0f;
    if (args.dlse.data != nullptr) {
      const i64 batch = p.sequences.cu_q.bytes != 0 ? 0 : at.b;
      dlse = args.dlse.data[batch * args.dlse.batch + at.h * args.dlse.head +
                            (q_begin + i) * args.dlse.row];
    }
    const float excess = row_sum - share * delta - dlse;
    return -share * (delta + excess);
  }
  // The sum over the block, in a fixed order.
  __forceinline__ void add_up(float x, float* to) {
    if (to == nullptr) return;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) x += __shfl_xor_sync(tile::kAllLanes, x, step);
    if (lane == 0) shared.sums[warp][0] = x;
    __syncthreads();
    if (thread != 0) return;
    float sum = 0.0f;
    for (int w = 0; w < kSpec.warps(); ++w) sum += shared.sums[w][0];
    to[blockIdx.x] = sum;
  }

  // ---- bias ----
  __forceinline__ void sum_bias() {
    const auto tiles = [&](int axis, i64 tile) {
      return args.broadcast[axis] ? 1 : (args.extent[axis] + tile - 1) / tile;
    };
    const i64 query_tiles = tiles(2, kTileQ), key_tiles = tiles(3, kTileK);
    i64 rest = blockIdx.x;
    const int split = static_cast<int>(rest % args.splits);
    rest /= args.splits;
    const i64 key_tile = rest % key_tiles;
    rest /= key_tiles;
    const i64 query_tile = rest % query_tiles;
    rest /= query_tiles;
    const i64 head = rest % args.extent[1], batch = rest / args.extent[1];

    // What shares the entries, numbered through: batches, heads, query tiles.
    const i64 batches = args.broadcast[0] ? p.sequences.batch : 1;
    const i64 heads = args.broadcast[1] ? p.heads_q : 1;
    const i64 all_tiles = (args.longest_q + kTileQ - 1) / kTileQ;
    const i64 walked_tiles = args.broadcast[2] ? all_tiles : 1;
    const i64 all = batches * heads * walked_tiles;
    const i64 first = all * split / args.splits, end = all * (split + 1) / args.splits;

    Accumulators sum;
    tile::clear(sum);
#pragma unroll 1
    for (i64 idx = first; idx < end; ++idx) {
      const i64 it = args.broadcast[2] ? idx % walked_tiles : query_tile;
      const i64 bh = idx / walked_tiles;
      enter(args.broadcast[0] ? bh / heads : batch,
            static_cast<int>(args.broadcast[1] ? bh % heads : head));
      const i64 i0 = it * kTileQ;
      TileRange keys = keys_of(i0);
      if (keys.begin >= keys.end) continue;
      i64 j0 = keys.begin / kTileK * kTileK, j1 = keys.end;
      if (!args.broadcast[3]) {
        const i64 mine = key_tile * kTileK;
        if (mine < j0 || mine >= j1) continue;
        j0 = mine;
        j1 = mine + 1;
      }
      __syncthreads();  // the rows before have been used
      copy_rows(i0);
#pragma unroll 1
      for (; j0 < j1; j0 += kTileK) {
        Accumulators dz;
        differentiate(dz, i0, j0);
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
          for (int number = 0; number < 4; ++number) {
            sum[0][block][number] += dz[0][block][number];
          }
        }
      }
    }
    fold(sum);
    write(sum, batch, head, query_tile * kTileQ, key_tile * kTileK, split);
  }
  // Sums over the rows or the columns of the tile where they share an entry: row 0 or column 0 of
  // the tile then has it.
  __forceinline__ void fold(Accumulators& sum) {
    if (args.broadcast[3]) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float x = 0.0f;
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
          x += sum[0][block][2 * half] + sum[0][block][2 * half + 1];
        }
        sum[0][0][2 * half] = tile::quad_sum(x);
      }
    }
    if (!args.broadcast[2]) return;
    __syncthreads();
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        float x = sum[0][block][odd] + sum[0][block][2 + odd];
#pragma unroll
        for (int step = 4; step < 32; step *= 2) x += __shfl_xor_sync(tile::kAllLanes, x, step);
        if (lane < 4) shared.sums[warp][8 * block + 2 * lane + odd] = x;
      }
    }
    __syncthreads();
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        float x = 0.0f;
        for (int w = 0; w < kSpec.warps(); ++w)
          x += shared.sums[w][8 * block + 2 * (lane % 4) + odd];
        sum[0][block][odd] = x;
      }
    }
  }
  __forceinline__ void write(const Accumulators& sum, i64 b, i64 h, i64 i0, i64 j0,
                             int split) const {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int idx = 0; idx < 4; ++idx) {
        const i64 i = i0 + row_of(idx / 2), j = j0 + 8 * block + 2 * (lane % 4) + idx % 2;
        if (i >= args.extent[2] || j >= args.extent[3]) continue;
        const float x = sum[0][block][idx];
        if (args.splits > 1) {
          const i64 entry = ((b * args.extent[1] + h) * args.extent[2] + i) * args.extent[3] + j;
          const i64 entries = args.extent[0] * args.extent[1] * args.extent[2] * args.extent[3];
          args.partial[split * entries + entry] = x;
        } else {
          tile::store_element<kFeatures.bias>(args.dbias.data,
                                              b * args.dbias.batch + h * args.dbias.head +
                                                  i * args.dbias.query + j * args.dbias.key,
                                              x);
        }
      }
    }
  }

  __forceinline__ void run() {
    if constexpr (kFeatures.dropout) seed = p.seed != nullptr ? *p.seed : p.variant.seed;
    if constexpr (kSpec.bias) {
      sum_bias();
    } else {
      sum_rows();
    }
  }
};

// One thread, one entry.
template <GradientSumsSpec kSpec>
__forceinline__ void gradient_sums(const GradientSumsArguments& args) {
  const i64 entries = args.extent[0] * args.extent[1] * args.extent[2] * args.extent[3];
  const i64 entry = i64{blockIdx.x} * kGradientSumsThreads + threadIdx.x;
  if (entry >= entries) return;
  float sum = 0.0f;
  for (i64 part = 0; part < args.parts; ++part) sum += args.from[part * entries + entry];
  i64 rest = entry;
  const i64 j = rest % args.extent[3];
  rest /= args.extent[3];
  const i64 i = rest % args.extent[2];
  rest /= args.extent[2];
  const i64 h = rest % args.extent[1], b = rest / args.extent[1];
  tile::store_element<kSpec.element>(
      args.to.data, b * args.to.batch + h * args.to.head + i * args.to.query + j * args.to.key,
      sum);
}

// One warp, one entry: head x, sequence y.
__forceinline__ void head_sums(const HeadSumsArguments& args) {
  const ProblemView& p = args.problem;
  const int h = static_cast<int>(blockIdx.x % p.heads_q), lane = static_cast<int>(threadIdx.x);
  const i64 only = blockIdx.x / p.heads_q;
  const i64 begin = args.per_sequence ? only : 0;
  const i64 end = args.per_sequence ? only + 1 : p.sequences.batch;
  float sum = 0.0f;
  for (i64 b = begin; b < end; ++b) {
    const Sequence seq = sequence_at(p.sequences, b);
    const float* from = args.from + row_tile(p, b, h, args.tile_q);
    const i64 tiles = (seq.used.q + args.tile_q - 1) / args.tile_q;
    for (i64 tile = lane; tile < tiles; tile += 32) sum += from[tile];
  }
#pragma unroll
  for (int step = 1; step < 32; step *= 2) sum += __shfl_xor_sync(tile::kAllLanes, sum, step);
  if (lane == 0) args.to.data[begin * args.to.batch + h * args.to.head] = sum;
}

}  // namespace onefold::kernels
