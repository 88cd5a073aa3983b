// Private sums of dK and dV: where those of a chunk of queries lie, how chunks are summed, and how
// a sum becomes a gradient.
//
// Invariant: chunks are added in ascending order, each only where it has keys, whoever adds them.
// Compiled once per instruction set; includes scratch.h.
#pragma once

#include "cpu/scratch.h"

namespace onefold::cpu::ONEFOLD_ISA {

// Private sums hold whole key tiles; no tile is larger than this.
inline constexpr int kMostTileKeys = 128;
template <class R>
inline std::int64_t chunk_elements_of(const Problem& p) {
  return round_up(p.longest_k, kMostTileKeys) * (padded_dim<R>(p.dim) + padded_dim<R>(p.dim_v));
}

// dk or dv of keys [begin, end) of one head from sums [key][d].
template <class R>
inline void store_key_gradient(const BackwardCall& call, const Item& item, const Rows& to,
                               const R* sums, std::int64_t dim, double factor, R* row) {
  if (!to) return;
  const Sequence& seq = call.problem->sequences[static_cast<std::size_t>(item.b)];
  for (std::int64_t key = item.row_begin; key < item.row_end; ++key) {
    const R* from = sums + key * padded_dim<R>(dim);
    scale_row(row, from, dim, factor);
    store_row(to.at(item.b, seq.k_begin + key, item.kv_head), to.dtype, to.dim, row, dim);
  }
}

// The same sum as backward_item forms of a whole head: chunk after chunk, each only where it has
// keys.
template <class R>
void reduce_chunks_of(const BackwardCall& call, const Item& keys, int worker) {
  const Problem& p = *call.problem;
  const Sequence& seq = p.sequences[static_cast<std::size_t>(keys.b)];
  Arena arena(call.scratch + static_cast<std::size_t>(worker) * call.scratch_bytes);
  const std::int64_t most = padded_dim<R>(p.dim > p.dim_v ? p.dim : p.dim_v);
  R *sum = arena.take<R>(most), *row = arena.take<R>(most);
  const R* sums = reinterpret_cast<const R*>(call.chunk_sums) +
                  (keys.b * p.heads_k + keys.kv_head) * call.num_chunks * chunk_elements_of<R>(p);
  const std::int64_t v_at = round_up(p.longest_k, kMostTileKeys) * padded_dim<R>(p.dim);
  for (std::int64_t key = keys.row_begin; key < keys.row_end; ++key) {
    for (int side = 0; side < 2; ++side) {
      const Rows& to = side == 0 ? call.t.dk : call.t.dv;
      if (!to) continue;
      const std::int64_t dim = side == 0 ? p.dim : p.dim_v, step = padded_dim<R>(dim);
      for (std::int64_t d = 0; d < dim; ++d) sum[d] = R(0);
      for (std::int64_t idx = 0; idx < call.num_chunks; ++idx) {
        const std::int64_t rows = chunk_rows(seq.used.q), i0 = idx * rows;
        const std::int64_t i1 = i0 + rows < seq.used.q ? i0 + rows : seq.used.q;
        if (i0 >= i1) break;
        const TileRange all = kv_range(p.variant, seq.used, i0, i1);
        if (key < all.begin / call.tiles.keys * call.tiles.keys || key >= all.end) continue;
        const R* from = sums + idx * chunk_elements_of<R>(p) + side * v_at + key * step;
        for (std::int64_t d = 0; d < dim; ++d) sum[d] += from[d];
      }
      scale_row(row, sum, dim, side == 0 ? p.variant.scale : 1.0);
      store_row(to.at(keys.b, seq.k_begin + key, keys.kv_head), to.dtype, to.dim, row, dim);
    }
  }
}

}  // namespace onefold::cpu::ONEFOLD_ISA
