#include "cuda/view.h"

#include <algorithm>
#include <cmath>

namespace onefold::cuda {

using kernels::GridView;
using kernels::IndexView;
using kernels::MaskClassesArguments;
using kernels::NumbersView;
using kernels::ProblemView;
using kernels::RowsView;

RowsView view(const Rows& r) { return {r.data, r.batch, r.row, r.head, r.dim}; }

GridView view(const Grid& g) {
  return {g.data, g.stride[0], g.stride[1], g.stride[2], g.stride[3]};
}

NumbersView view(const Numbers& n) {
  return {n.present ? static_cast<float*>(n.data) : nullptr, n.batch, n.head, n.row};
}

static IndexView view(const Indices& i) {
  return {i.data, i.stride, i.present ? size_bytes(i.dtype) : 0};
}

// Positions at which a grid may be read: all, along broadcast axes.
static void limit(Lengths& readable, const Grid& g) {
  if (!g) return;
  if (g.stride[2] != 0) readable.q = std::min<std::int64_t>(readable.q, g.extent[2]);
  if (g.stride[3] != 0) readable.k = std::min<std::int64_t>(readable.k, g.extent[3]);
}

ProblemView view(const Problem& p) {
  ProblemView v;
  v.q = view(p.q);
  v.k = view(p.k);
  v.v = view(p.v);
  v.bias = view(p.bias);
  v.mask = view(p.mask);
  limit(v.readable, p.bias);
  limit(v.readable, p.mask);
  v.slopes = view(p.slopes);
  v.sinks = view(p.sinks);
  v.sequences = {view(p.cu_q), view(p.cu_k), view(p.used_q), view(p.used_k),
                 p.batch,      p.rows_q,     p.rows_k};
  v.heads_q = static_cast<int>(p.heads_q);
  v.heads_k = static_cast<int>(p.heads_k);
  v.group = static_cast<int>(p.group);
  v.dim = static_cast<int>(p.dim);
  v.dim_v = static_cast<int>(p.dim_v);
  v.variant = p.variant;
  v.seed = reinterpret_cast<const u64*>(p.device_seed);
  v.scale_power = static_cast<float>(scale_power(p.variant.scale));
  const double rest = std::fabs(p.variant.scale) / v.scale_power;
  // What is too small all the same is 0 there.
  const bool zero = rest < 0x1p-120;
  v.scale_sign = zero ? 0.0f : p.variant.scale < 0 ? -1.0f : 1.0f;
  v.score_factor = static_cast<float>(zero ? 1.0 : rest);
  v.score_factor_log2 = static_cast<float>(zero ? kLog2E : rest * kLog2E);
  return v;
}

double scale_power(double scale) {
  if (scale == 0) return 1;
  constexpr int kLeast = -100, kLeastPower = -126;
  const int exponent = std::ilogb(scale);
  if (exponent >= kLeast) return 1;
  // Half of it: then neither the numbers that are multiplied leave float32, nor their products.
  return std::ldexp(1.0, std::max(std::min(exponent / 2, exponent - kLeast), kLeastPower));
}

float keep_scale_of(const Problem& p) {
  return static_cast<float>(p.variant.dropout() ? keep_scale(p.variant) : 1.0);
}
u32 keep_threshold_of(const Problem& p) {
  return static_cast<u32>(std::min<u64>(keep_threshold(p.variant), 0xffffffffu));
}

void classify_mask(const Problem& p, const kernels::MaskTiles& tiles, int arch, ProblemView& v,
                   const Launches& to, u32* words) {
  if (!p.mask) return;
  const Grid& g = p.mask;
  MaskClassesArguments args;
  args.mask = view(g);
  args.heads = g.extent[1];
  args.queries = g.extent[2];
  args.keys = g.extent[3];
  args.query_tiles = tiles.query_tiles;
  args.words = tiles.words;
  args.tile_q = tiles.tile_q;
  args.tile_k = tiles.tile_k;
  args.classes = words;
  const i64 per_head = tiles.query_tiles * tiles.words;
  v.mask_classes.words = words;
  v.mask_classes.query_tile = g.extent[2] == 1 ? 0 : tiles.words;
  v.mask_classes.head = g.extent[1] == 1 ? 0 : per_head;
  v.mask_classes.batch = g.extent[0] == 1 ? 0 : per_head * g.extent[1];
  v.mask_classes.last_query = static_cast<int>(tiles.query_tiles) - 1;
  v.mask_classes.last_key = static_cast<int>((g.extent[3] - 1) / tiles.tile_k);
  // Without keys there are no blocks, and no tile to look up.
  run(kernels::MaskClassesSpec{arch}, p.device, tiles.blocks, to, args);
}

}  // namespace onefold::cuda
