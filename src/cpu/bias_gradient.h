// The gradient of a bias that broadcasts: a pass of its own, in which an item owns one tile of the
// bias's index space, walks the batches, heads, queries and keys that share it in ascending order,
// recomputes dZ and writes the sum once.
//
// Compiled once per instruction set; includes backward.h.
#pragma once

#include "cpu/backward.h"

namespace onefold::cpu::ONEFOLD_ISA {

// The tiles of dbias's index space, and where tile `item` lies.
template <class R>
struct BiasTiles {
  std::int64_t batches, heads, query_tiles, key_tiles;  // broadcast axes count 1
  bool all_queries, all_keys;                           // the axis is broadcast

  explicit BiasTiles(const BackwardCall& call) {
    const Problem& p = *call.problem;
    const Grid& g = call.t.dbias;
    batches = g.extent[0];
    heads = g.extent[1];
    all_queries = g.extent[2] == 1;
    all_keys = g.extent[3] == 1;
    query_tiles = all_queries ? 1 : (p.longest_q + kLanes<R> - 1) / kLanes<R>;
    key_tiles = all_keys ? 1 : (p.longest_k + call.tiles.keys - 1) / call.tiles.keys;
  }
  std::int64_t count() const { return batches * heads * query_tiles * key_tiles; }
};

template <class X>
struct BiasGradientItem {
  using R = SumOf<X>;
  const BackwardCall& call;
  const Problem& p;
  BackwardScratch<X>& s;
  R* sums;  // [key][lane], the tile; broadcast axes are folded modulo its size and summed at the
            // end

  // Adds dZ of one head over queries [i_begin, i_end) and keys [j_begin, j_end).
  void add_head(std::int64_t b, std::int64_t h, std::int64_t i_begin, std::int64_t i_end,
                std::int64_t j_begin, std::int64_t j_end) {
    const Sequence& seq = p.sequences[static_cast<std::size_t>(b)];
    i_end = i_end < seq.used.q ? i_end : seq.used.q;
    j_end = j_end < seq.used.k ? j_end : seq.used.k;
    BackwardItem<X> work{
        call, p, s, {b, h / p.group, h, 1}, seq, nullptr, nullptr, nullptr, nullptr, false, true};
    const QueryData<X> x = s.query_data(p, 0);
    const bool one_tile = i_end - i_begin <= kLanes<R>;
    for (std::int64_t j = j_begin; j < j_end; j += call.tiles.keys) {
      const int count = static_cast<int>(j_end - j < call.tiles.keys ? j_end - j : call.tiles.keys);
      work.pack(j, j + count);
      for (std::int64_t i = i_begin; i < i_end; i += kLanes<R>) {
        const QueryTile tile = work.tile(i, i_end);
        set_lanes(p, tile, s.lanes);
        if (!one_tile || j == j_begin) {
          work.load_queries(tile, x);
          if (work.weigh_far_rows(tile, x)) work.pack(j, j + count);
        }
        const KeyCut cut = work.attend_any(tile, j, count, 0, x);
        const int width = tile.vectors * kWidth<R>;
        for (int key = 0; key < cut.count; ++key) {
          for (int lane = 0; lane < tile.rows; ++lane) {
            sums[(cut.first + key) * kLanes<R> + lane] += s.dz[key * width + lane];
          }
        }
      }
    }
  }

  void run(const BiasTiles<R>& tiles, std::int64_t item) {
    const Grid& g = call.t.dbias;
    const int keys = call.tiles.keys;
    std::int64_t rest = item;
    const std::int64_t jt = rest % tiles.key_tiles;
    rest /= tiles.key_tiles;
    const std::int64_t it = rest % tiles.query_tiles;
    rest /= tiles.query_tiles;
    const std::int64_t bias_head = rest % tiles.heads, bias_batch = rest / tiles.heads;
    const std::int64_t i0 = it * kLanes<R>, j0 = jt * keys;
    const std::int64_t i1 = tiles.all_queries ? p.longest_q : i0 + kLanes<R>;
    const std::int64_t j1 = tiles.all_keys ? p.longest_k : j0 + keys;
    for (std::int64_t x = 0; x < std::int64_t{keys} * kLanes<R>; ++x) sums[x] = R(0);

    const bool all_batches = g.extent[0] == 1, all_heads = g.extent[1] == 1;
    const auto sequences = static_cast<std::int64_t>(p.sequences.size());
    for (std::int64_t b = all_batches ? 0 : bias_batch;
         b < (all_batches || sequences == 0 ? sequences : bias_batch + 1); ++b) {
      for (std::int64_t h = all_heads ? 0 : bias_head; h < (all_heads ? p.heads_q : bias_head + 1);
           ++h) {
        add_head(b, h, i0, i1, j0, j1);
      }
    }
    write(tiles, bias_batch, bias_head, i0, j0);
  }

  void write(const BiasTiles<R>& tiles, std::int64_t b, std::int64_t h, std::int64_t i0,
             std::int64_t j0) {
    const Grid& g = call.t.dbias;
    const int keys = call.tiles.keys;
    const int last_key = tiles.all_keys ? 1 : static_cast<int>(clamp(p.longest_k - j0, 0, keys));
    const int last_lane =
        tiles.all_queries ? 1 : static_cast<int>(clamp(p.longest_q - i0, 0, kLanes<R>));
    for (int lane = 0; lane < last_lane; ++lane) {
      for (int key = 0; key < last_key; ++key) {
        double sum = 0;
        for (int l = lane; l < (tiles.all_queries ? kLanes<R> : lane + 1); ++l) {
          for (int k = key; k < (tiles.all_keys ? keys : key + 1); ++k) {
            sum += double{sums[k * kLanes<R> + l]};
          }
        }
        s.row[key] = static_cast<R>(sum);
      }
      const std::int64_t at = g.offset(b, h, i0 + lane, j0);
      store_row(static_cast<std::byte*>(g.data) + at * size_bytes(g.dtype), g.dtype, g.stride[3],
                s.row, last_key);
    }
  }
};

template <class X>
void bias_gradient_item(const BackwardCall& call, std::int64_t item, int worker) {
  using R = SumOf<X>;
  const Problem& p = *call.problem;
  Arena arena(call.scratch + static_cast<std::size_t>(worker) * call.scratch_bytes);
  BackwardScratch<X> scratch(arena, p, call.tiles, 1, false, false, true);
  R* sums = arena.take<R>(std::int64_t{call.tiles.keys} * kLanes<R>);
  BiasGradientItem<X> work{call, p, scratch, sums};
  work.run(BiasTiles<R>(call), item);
}

}  // namespace onefold::cpu::ONEFOLD_ISA
