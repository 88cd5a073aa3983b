#include "plan/plan.h"

#include <algorithm>

#include "onefold/error.h"

namespace onefold {
namespace {

constexpr int kKeyTile = 64;
// An item reads and packs the keys once for all its tiles. 8 tiles, which fit into L2 beside the
// keys, were 1 to 8 % slower than 24 or more: packing costs more than rows parked in L3.
constexpr std::int64_t kMostTilesPerItem = 48;
constexpr std::int64_t kItemsPerThread = 4;  // so that threads end together; one thread need not
// In backward K once more and the sums of dK and dV lie beside K and V: a third of L2 together. At
// D 128 and 4096 tokens 3 % faster than half of L2 for K and V alone, at D 64 no slower.
constexpr double kForwardPartOfL2 = 1.0 / 2, kBackwardPartOfL2 = 2.0 / 15;
constexpr std::int64_t kSplitKeys = 1024;  // packs enough work into an item, splits 8k keys in 8

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// `part_of_l2`: how much of it K and V may take, packed.
Tiles choose_tiles(const Problem& p, const CpuFacts& facts, double part_of_l2) {
  Tiles t;
  const bool wide = p.dtype == DType::kFloat64;
  t.rows = wide ? facts.lanes_double : facts.lanes_float;
  // Fixed everywhere: it orders the additions. 48 and 96 or 128 keys were 1 to 3 % slower.
  t.keys = kKeyTile;
  const std::int64_t key_bytes = std::max<std::int64_t>(1, (p.dim + p.dim_v) * (wide ? 8 : 4));
  const auto room = static_cast<std::int64_t>(static_cast<double>(facts.l2_bytes) * part_of_l2);
  const std::int64_t fit = room / key_bytes / t.keys * t.keys;
  const std::int64_t needed = ceil_div(std::max<std::int64_t>(p.longest_k, 1), t.keys) * t.keys;
  t.super_keys = std::clamp<std::int64_t>(std::min(fit, needed), t.keys, 2048);
  return t;
}

// Query-key pairs of an item inside its band: the measure for "longest first".
std::int64_t cost(const Problem& p, const Item& item) {
  const Sequence& s = p.sequences[static_cast<std::size_t>(item.b)];
  const TileRange keys =
      kv_range(p.variant, s.used, item.row_begin / p.group, (item.row_end - 1) / p.group + 1);
  return item.kv_heads * (item.row_end - item.row_begin) *
         (std::min(keys.end, item.key_end) - std::max(keys.begin, item.key_begin));
}

// Few rows against many keys (decoding): stretches of kSplitKeys keys, whoever runs them. Returns
// false when the rows see no more than one stretch.
bool split_keys(const Problem& p, std::int64_t b, const CpuFacts& facts, CpuWork& w) {
  const Sequence& s = p.sequences[static_cast<std::size_t>(b)];
  const std::int64_t rows = s.used.q * p.group;
  if (rows == 0 || rows > kSplitRows) return false;
  const TileRange seen = kv_range(p.variant, s.used, 0, s.used.q);
  const std::int64_t first = seen.begin / kSplitKeys, last = ceil_div(seen.end, kSplitKeys);
  if (last - first < 2) return false;
  const std::int64_t partial =
      w.splits.empty() ? 0 : w.splits.back().first_partial + w.splits.back().count;
  for (std::int64_t h = 0; h < p.heads_k; ++h) {
    w.splits.push_back({b, h, rows, partial + h * (last - first), last - first});
  }
  // Neighbouring heads together, as far as there is work for all threads: their keys lie side by
  // side in memory.
  const std::int64_t count = last - first;
  const std::int64_t together = std::clamp<std::int64_t>(
      p.batch * count * p.heads_k / (facts.threads * kItemsPerThread), 1, p.heads_k);
  for (std::int64_t n = first; n < last; ++n) {
    for (std::int64_t h = 0; h < p.heads_k; h += together) {
      Item item{b, h, 0, rows, n * kSplitKeys, (n + 1) * kSplitKeys};
      item.partial = partial + h * count + n - first;
      item.first = n == first;
      item.kv_heads = std::min(together, p.heads_k - h);
      item.partial_step = count;
      w.items.push_back(item);
    }
  }
  w.tiles_per_item = std::max(w.tiles_per_item, ceil_div(kSplitRows, w.tiles.rows));
  return true;
}

}  // namespace

CpuWork plan_forward(const Problem& p, const CpuFacts& facts) {
  CpuWork w;
  w.tiles = choose_tiles(p, facts, kForwardPartOfL2);
  std::int64_t tiles = 0;
  for (const Sequence& s : p.sequences) {
    tiles += ceil_div(s.used.q * p.group, w.tiles.rows) * p.heads_k;
  }
  const std::int64_t parts = facts.threads > 1 ? facts.threads * kItemsPerThread : 1;
  w.tiles_per_item = std::clamp<std::int64_t>(tiles / parts, 1, kMostTilesPerItem);
  const auto num_sequences = static_cast<std::int64_t>(p.sequences.size());
  for (std::int64_t b = 0; b < num_sequences; ++b) {
    const std::int64_t rows = p.sequences[static_cast<std::size_t>(b)].used.q * p.group;
    if (rows == 0) continue;
    const char* tiled = facts.not_decoding ? facts.not_decoding(p, rows) : "";
    ++(tiled ? w.tiled : w.decoding);
    if (tiled && rows <= kSplitRows) w.not_decoding = tiled;
    if (split_keys(p, b, facts, w)) continue;
    // As many items as it takes, of the same size.
    const std::int64_t sequence_tiles = ceil_div(rows, w.tiles.rows);
    const std::int64_t count = ceil_div(sequence_tiles, w.tiles_per_item);
    const std::int64_t step = ceil_div(sequence_tiles, count) * w.tiles.rows;
    for (std::int64_t h = 0; h < p.heads_k; ++h) {
      for (std::int64_t r = 0; r < rows; r += step) {
        w.items.push_back({b, h, r, std::min(r + step, rows)});
      }
    }
  }
  if (!w.splits.empty()) {
    const Split& last = w.splits.back();
    w.partials_bytes =
        static_cast<std::size_t>(last.first_partial + last.count) * facts.partial_bytes(p);
  }
  if (facts.threads > 1 && (p.variant.banded() || p.sequences.size() > 1)) {
    std::stable_sort(w.items.begin(), w.items.end(),
                     [&p](const Item& x, const Item& y) { return cost(p, x) > cost(p, y); });
  }
  w.workers = w.items.size() > 1 ? facts.threads : 1;
  if (w.items.empty()) return w;
  w.scratch_bytes = facts.forward_scratch(p, w.tiles, w.tiles_per_item);
  w.workspace_bytes = w.scratch_bytes * static_cast<std::size_t>(w.workers) + w.partials_bytes;
  return w;
}

CpuWork plan_backward(const Problem& p, const BackwardWants& wants, const CpuFacts& facts) {
  CpuWork w;
  w.wants = wants;
  w.tiles = choose_tiles(p, facts, kBackwardPartOfL2);
  w.chunk = chunk_rows(p.longest_q);
  w.num_chunks = std::max<std::int64_t>(1, ceil_div(p.longest_q, w.chunk));
  const auto num_sequences = static_cast<std::int64_t>(p.sequences.size());
  const std::int64_t heads = num_sequences * p.heads_k;
  // Chunks keep more sums than heads do, each in memory of its own, so heads are better wherever
  // they share out evenly.
  bool even = heads % facts.threads == 0;
  for (const Sequence& s : p.sequences) even &= s.used.q == p.longest_q && s.used.k == p.longest_k;
  w.by_chunk =
      facts.threads > 1 && w.num_chunks > 1 && heads < std::int64_t{2} * facts.threads && !even;
  if (wants.main_pass()) {
    for (std::int64_t b = 0; b < num_sequences; ++b) {
      const std::int64_t rows = p.sequences[static_cast<std::size_t>(b)].used.q;
      if (rows == 0) continue;
      for (std::int64_t h = 0; h < p.heads_k; ++h) {
        if (!w.by_chunk) w.items.push_back({b, h, 0, rows * p.group});
        for (std::int64_t c = 0; w.by_chunk && c * chunk_rows(rows) < rows; ++c) {
          w.items.push_back({b, h, c, c + 1});
        }
      }
    }
  }
  const std::size_t units = static_cast<std::size_t>(heads * w.num_chunks);
  if (w.by_chunk && wants.dkv) w.chunk_sums_bytes = units * facts.chunk_bytes(p);
  if (wants.dslopes || wants.dsinks) {
    w.number_sums_bytes = 2 * units * static_cast<std::size_t>(p.group) * sizeof(double);
  }
  w.workers = facts.threads;
  w.scratch_bytes = facts.backward_scratch(p, w.tiles, wants, w.by_chunk, w.num_chunks);
  w.workspace_bytes = w.scratch_bytes * static_cast<std::size_t>(w.workers) + w.chunk_sums_bytes +
                      w.number_sums_bytes;
  return w;
}

std::string describe_kernel(const Problem& p, const CpuWork& w, const CpuFacts& facts) {
  const std::string split = w.splits.empty() ? "" : concat(", keys split every ", kSplitKeys);
  const char* inside = p.dtype == DType::kFloat64 ? ", float64 inside" : ", float32 inside";
  if (w.decoding > 0 && w.tiled == 0) {
    return concat("decoding ", facts.isa, ", ", w.tiles.keys, " keys per tile", split, inside);
  }
  return concat(w.decoding == 0 ? "tiled " : "tiled and decoding ", facts.isa, ", ", w.tiles.rows,
                " rows x ", w.tiles.keys, " keys per tile, ", w.tiles.super_keys,
                " keys packed at a time", split, inside);
}

std::string describe_reasons(const Problem& p, const CpuWork& w, const CpuFacts& facts) {
  std::string text;
  const auto line = [&text](const auto&... parts) { text += concat(parts..., "\n"); };
  line("runs on the CPU, because q is there, with ", w.workers,
       w.workers == 1 ? " thread" : " threads");
  line("with ", facts.isa, " instructions, the widest that this processor has (or what",
       " ONEFOLD_BACKEND asks for)");
  line("keys are taken ", w.tiles.keys, " at a time on every machine: the order of additions does",
       " not depend on its caches");
  if (w.tiled > 0 && w.decoding == 0 && w.not_decoding == nullptr) {
    line("the path for decoding is not taken: it serves up to ", kSplitRows,
         " rows of queries per key/value head");
  }
  if (p.variant.band_begin > p.variant.band_end) {
    line("window hides every key from every query: None, not a negative number, is unbounded");
  } else if (p.variant.banded()) {
    line("causal or window: keys that no query of a tile sees are skipped, those at the border are",
         " compared one by one");
  }
  if (!w.splits.empty()) {
    line("few queries: keys are split into stretches of ", kSplitKeys, ", merged in order");
  }
  const bool strided = p.k.dim != 1 || p.v.dim != 1;
  if (w.decoding > 0) {
    line("few queries: rows of k and v are read a vector along head_dim at a time, ",
         strided ? "from a copy of each tile: a last stride is not 1" : "in place");
  }
  if (w.not_decoding != nullptr && *w.not_decoding != 0) {
    line("few queries, yet not decoding: ", w.not_decoding);
  }
  if (p.mask) line("mask: read in place, tiles that it hides entirely are skipped");
  if (p.bias) line("bias: read in place, added to every tile");
  if (p.variant.scale_only()) {
    line("scores are only scaled, which costs nothing: q is multiplied by scale * log2(e) once");
  } else {
    line("softcap, bias or slopes change scores one by one, so scaling is a step of its own");
  }
  for (const auto& [name, rows] : {std::pair{"q", p.q}, {"k", p.k}, {"v", p.v}}) {
    if (rows.dim != 1 && (w.tiled > 0 || w.decoding == 0)) {
      line("last stride of ", name, " is ", rows.dim, ": read element by element");
    }
  }
  if (w.by_chunk) {
    line("backward over ", w.num_chunks, " chunks of up to ", w.chunk,
         " queries per head: heads alone are too few for ", facts.threads, " threads");
  }
  if (p.variant.dropout()) line("dropout: Philox4x32-10, drawn again in backward");
  line("NaN and infinity in v reach the rows that see their key, and no other");
  return text;
}

}  // namespace onefold
