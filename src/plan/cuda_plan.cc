#include "plan/cuda_plan.h"

#include <algorithm>

#include "onefold/error.h"

namespace onefold {
namespace {

using kernels::BackwardPlan;
using kernels::BackwardSpec;
using kernels::Features;
using kernels::ForwardPlan;
using kernels::ForwardSpec;
using kernels::MaskTiles;
using kernels::ScoreGradientsSpec;

// Kernels count rows in 32 bits, up to the end of a tile.
constexpr std::int64_t kMostRows = (std::int64_t{1} << 31) - 1024;
constexpr std::int64_t kMostBlocks = (std::int64_t{1} << 31) - 1;
constexpr std::size_t kReservedPerBlock = 1024;  // of shared memory, taken by the driver

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
int padded(std::int64_t dim) {
  return static_cast<int>(std::max<std::int64_t>(ceil_div(dim, 32) * 32, 32));
}

struct ForwardTiles {
  int tile_q, tile_k, warps, stages, blocks_per_sm;
  bool q_in_registers;
  int sharing = 1;
  bool swizzled = false;
};
// Rows of a table: the first that fits is taken, from the fastest to the smallest.
struct Row {
  int most_dim;  // the larger of the padded head dims
  ForwardTiles tiles;
};

// 16 bit, nothing but a scale: a warp owns 32 rows, so that K and V fragments are read once for two
// products. Two blocks fit a multiprocessor with at most 255 registers a thread.
constexpr Row kPlain16[] = {
    {64, {128, 64, 4, 2, 2, true, 1, true}},  {64, {128, 64, 4, 2, 2, true}},
    {64, {128, 64, 4, 1, 2, false}},          {128, {128, 64, 4, 2, 2, false, 1, true}},
    {128, {128, 64, 4, 1, 2, false}},         {128, {128, 64, 8, 1, 1, false}},
    {256, {64, 64, 4, 1, 2, false, 2, true}}, {256, {64, 64, 4, 1, 2, false, 2}},
    {256, {64, 64, 4, 1, 2, false}},          {256, {64, 64, 4, 1, 1, false}},
    {256, {64, 32, 4, 1, 1, false}},
};
// 16 bit with options: 16 rows a warp leave the registers that options need.
constexpr Row kOptions16[] = {
    {64, {64, 64, 4, 2, 2, false}},
    {128, {64, 64, 4, 1, 2, false}},
    {256, {64, 32, 4, 1, 1, false}},
};
// With several options: half the keys.
constexpr Row kMany16[] = {
    {64, {64, 64, 4, 2, 2, false}},
    {128, {64, 32, 4, 1, 2, false}},
    {256, {64, 32, 4, 1, 1, false}},
};
// 32 bit: three products, and operands of twice the size.
constexpr Row kAny32[] = {
    {64, {64, 32, 4, 1, 2, false}},
    {128, {64, 32, 4, 1, 2, false}},
    {256, {64, 16, 4, 1, 1, false}},
    {256, {32, 16, 2, 1, 1, false}},
};

void set(ForwardSpec& spec, const ForwardTiles& tiles) {
  spec.tile_q = tiles.tile_q;
  spec.tile_k = tiles.tile_k;
  spec.warps = tiles.warps;
  spec.stages = tiles.stages;
  spec.blocks_per_sm = tiles.blocks_per_sm;
  spec.q_in_registers = tiles.q_in_registers;
  spec.sharing = tiles.sharing;
  spec.swizzled = tiles.swizzled;
}

struct BackwardTiles {
  int tile_q, tile_k, step_q, warps;
  bool paired;
  int stages, blocks_per_sm;
  int sharing = 1;
};
struct BackwardRow {
  int most_dim;
  BackwardTiles tiles;
};
constexpr BackwardRow kBackwardPlain16[] = {
    {64, {64, 128, 32, 4, false, 2, 2}}, {64, {32, 128, 32, 4, false, 2, 1}},
    {128, {64, 128, 64, 8, true, 2, 1}}, {128, {32, 128, 32, 8, true, 2, 1}},
    {128, {32, 64, 32, 4, true, 2, 1}},  {256, {64, 64, 64, 8, true, 2, 1, 2}},
    {256, {64, 64, 64, 8, true, 2, 1}},  {256, {32, 64, 32, 8, true, 2, 1}},
    {256, {32, 32, 32, 4, true, 1, 1}},
};
constexpr BackwardRow kBackwardOptions16[] = {
    {64, {32, 128, 32, 8, true, 2, 1}}, {128, {32, 128, 32, 8, true, 2, 1}},
    {128, {32, 64, 32, 4, true, 2, 1}}, {256, {32, 64, 32, 8, true, 2, 1}},
    {256, {32, 32, 32, 4, true, 1, 1}},
};
// Nothing but a scale, and rows that are copied element by element: as much work for each warp, so
// that where tensors lie changes no bit.
constexpr BackwardRow kBackwardUnaligned16[] = {
    {64, {32, 128, 32, 4, false, 2, 1}}, {128, {32, 128, 32, 8, true, 2, 1}},
    {128, {32, 64, 32, 4, true, 2, 1}},  {256, {32, 64, 32, 8, true, 2, 1}},
    {256, {32, 32, 32, 4, true, 1, 1}},
};
// With several options: 16 keys a warp.
constexpr BackwardRow kBackwardMany16[] = {
    {128, {32, 64, 32, 8, true, 2, 1}},
    {256, {32, 64, 32, 8, true, 2, 1}},
    {256, {32, 32, 32, 4, true, 1, 1}},
};
constexpr BackwardRow kBackwardAny32[] = {
    {64, {32, 64, 32, 8, true, 1, 1}},  {128, {32, 64, 32, 8, true, 1, 1}},
    {128, {16, 32, 16, 4, true, 1, 1}}, {256, {16, 64, 16, 8, true, 1, 1}},
    {256, {16, 32, 16, 4, true, 1, 1}}, {256, {16, 16, 16, 2, true, 1, 1}},
};

void set(BackwardSpec& spec, const BackwardTiles& tiles) {
  spec.tile_q = tiles.tile_q;
  spec.tile_k = tiles.tile_k;
  spec.step_q = tiles.step_q;
  spec.warps = tiles.warps;
  spec.paired = tiles.paired;
  spec.sharing = tiles.sharing;
  spec.stages = tiles.stages;
  spec.blocks_per_sm = tiles.blocks_per_sm;
}

template <class Spec>
bool fits(const Spec& spec, const CudaFacts& facts) {
  const auto block = static_cast<std::size_t>(spec.shared_bytes());
  const auto all = static_cast<std::size_t>(spec.blocks_per_sm) * (block + kReservedPerBlock);
  return block <= facts.shared_bytes && all <= facts.shared_bytes_per_sm;
}

template <class Row, std::size_t kRows, class Spec>
bool choose(const Row (&table)[kRows], const CudaFacts& facts, Spec& spec) {
  for (const Row& row : table) {
    if (std::max(spec.dim, spec.dim_v) > row.most_dim) continue;
    set(spec, row.tiles);
    if (spec.invalid() == nullptr && fits(spec, facts)) return true;
  }
  return false;
}

// Whether rows can be copied 16 bytes at a time.
bool is_aligned(const Rows& rows, std::int64_t dim) {
  if (!rows) return true;
  const std::int64_t step = 16 / size_bytes(rows.dtype);
  return rows.dim == 1 && dim % step == 0 &&
         reinterpret_cast<std::uintptr_t>(rows.data) % 16 == 0 && rows.batch % step == 0 &&
         rows.row % step == 0 && rows.head % step == 0;
}

Element element_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return Element::kFloat32;
    case DType::kFloat16:
      return Element::kFloat16;
    case DType::kBFloat16:
      return Element::kBFloat16;
    case DType::kFloat64:
      return Element::kFloat64;
    default:
      return Element::kNone;
  }
}

Features features_of(const Problem& p) {
  Features f;
  f.softcap = p.variant.softcap > 0;
  f.slopes = p.variant.has_slopes;
  if (p.bias) f.bias = element_of(p.bias.dtype);
  f.mask = bool(p.mask);
  f.dropout = p.variant.dropout();
  return f;
}

// What every spec says of the tensors.
template <class Spec>
void describe(Spec& spec, const Problem& p, const CudaFacts& facts) {
  spec.arch = facts.arch;
  spec.element = element_of(p.dtype);
  spec.dim = padded(p.dim);
  spec.dim_v = padded(p.dim_v);
  spec.whole = spec.dim == p.dim && spec.dim_v == p.dim_v;
  spec.aligned = is_aligned(p.q, p.dim) && is_aligned(p.k, p.dim) && is_aligned(p.v, p.dim_v);
  spec.features = features_of(p);
}

int num_options(const Features& f) {
  return f.softcap + f.slopes + (f.bias != Element::kNone) + f.mask + f.dropout;
}
bool has_many(const Features& f) { return num_options(f) > 2; }

// Options of which backward needs the registers of many: where a warp has 32 keys, the compiler
// spills with them.
bool is_heavy(const Features& f) {
  return has_many(f) || f.bias != Element::kNone || (f.softcap && f.mask);
}

[[noreturn]] void no_tile_fits(const Problem& p, const CudaFacts& facts) {
  unsupported("head_dim is ", std::max(p.dim, p.dim_v), " on a device with ", facts.shared_bytes,
              " bytes of shared memory a block: no tile fits, a smaller head_dim is needed");
}

void check_blocks(std::int64_t blocks) {
  if (blocks <= kMostBlocks) return;
  unsupported("batch * heads * seqlen needs ", blocks, " blocks: fewer than 2^31 work");
}

// Tiles of one head: of one sequence, or of all packed ones and the rows beyond them.
std::int64_t tiles_of(const Problem& p, std::int64_t rows, int tile) {
  return kernels::tiles_per_head(rows, tile, p.packed, p.batch);
}

// How many heads go in step (head_tile_at). With a right border alone some tiles are longer than
// others: the longest of many heads come first, so that no long one ends last. Where blocks take
// turns adding to dQ, those that run at once belong to many heads and wait less. Elsewhere head
// after head keeps in L2 what its blocks share; so do smaller groups when heads are short.
int heads_in_step(const Problem& p, const CudaFacts& facts, int blocks_per_sm, std::int64_t heads,
                  std::int64_t tiles, bool ordered) {
  const bool uneven = p.variant.band_end < kUnbounded && p.variant.band_begin == -kUnbounded;
  if (heads < 2 || tiles < 1 || !(ordered ? !p.variant.banded() : uneven)) return 1;
  constexpr int kShort = 16, kFewWaves = 2, kWaves = 8;
  const int waves = ordered || tiles <= kShort ? kFewWaves : kWaves;
  const std::int64_t blocks = std::int64_t{waves} * facts.num_sms * blocks_per_sm;
  return static_cast<int>(std::clamp<std::int64_t>(ceil_div(blocks, tiles), 1, heads));
}

MaskTiles mask_tiles(const Problem& p, int tile_q, int tile_k) {
  MaskTiles m;
  if (!p.mask) return m;
  const auto& extent = p.mask.extent;
  m.tile_q = tile_q;
  m.tile_k = tile_k;
  m.query_tiles = extent[2] == 1 ? 1 : ceil_div(extent[2], tile_q);
  m.words = extent[3] == 1 ? 1 : ceil_div(ceil_div(extent[3], tile_k), 16);
  m.blocks = extent[0] * extent[1] * m.query_tiles * m.words;
  check_blocks(m.blocks);
  return m;
}

// Workspace, piece by piece.
struct Workspace {
  std::int64_t bytes = 0;
  std::int64_t take(std::int64_t size) {
    const std::int64_t at = bytes;
    bytes += ceil_div(size, 256) * 256;
    return at;
  }
};

ScoreGradientsSpec score_gradients_spec(const Problem& p, const BackwardSpec& like, bool bias,
                                        const CudaFacts& facts) {
  ScoreGradientsSpec spec;
  describe(spec, p, facts);
  spec.aligned = like.aligned;
  spec.bias = bias;
  // Several options, and those with a bias, need the registers of half a tile.
  const bool halved = has_many(spec.features) || spec.features.bias != Element::kNone;
  const int most_keys = halved ? 32 : 64;
  for (const int tile : {64, 32, 16}) {
    spec.tile_q = tile;
    spec.tile_k = std::min(tile, most_keys);
    if (spec.invalid() == nullptr &&
        static_cast<std::size_t>(spec.shared_bytes()) <= facts.shared_bytes) {
      return spec;
    }
  }
  no_tile_fits(p, facts);
}

// Blocks that own entries of dbias. Where they are few and many positions share an entry, several
// split the sum: as many as keep the device busy, which follows from the shapes alone.
void plan_bias(const Problem& p, const Grid& dbias, const CudaFacts& facts, BackwardPlan& plan) {
  constexpr std::int64_t kBlocksWanted = 512;
  const auto& extent = dbias.extent;
  plan.bias = true;
  plan.bias_spec = score_gradients_spec(p, plan.spec, true, facts);
  const int tile_q = plan.bias_spec.tile_q, tile_k = plan.bias_spec.tile_k;
  const auto shared = [&](int axis, std::int64_t all) { return extent[axis] == 1 ? all : 1; };
  plan.bias_items =
      extent[0] * extent[1] * ceil_div(extent[2], tile_q) * ceil_div(extent[3], tile_k);
  plan.bias_entries = extent[0] * extent[1] * extent[2] * extent[3];
  const std::int64_t walked =
      shared(0, p.batch) * shared(1, p.heads_q) * shared(2, ceil_div(p.longest_q, tile_q));
  const std::int64_t wanted = ceil_div(kBlocksWanted, std::max<std::int64_t>(plan.bias_items, 1));
  plan.bias_splits =
      static_cast<int>(std::clamp<std::int64_t>(wanted, 1, std::max<std::int64_t>(walked, 1)));
  check_blocks(plan.bias_items * plan.bias_splits);
}

}  // namespace

void check_supported(const Problem& p, const CudaFacts& facts) {
  if (p.dtype == DType::kFloat64) {
    unsupported("q is float64 on CUDA: float16, bfloat16 or float32 is needed there");
  }
  if (facts.arch < 800) {
    unsupported("q is on a device of compute capability ", facts.arch / 100, ".",
                facts.arch / 10 % 10, ": 8.0 or later is needed");
  }
  if (p.dim > 256 || p.dim_v > 256) {
    unsupported("head_dim is ", std::max(p.dim, p.dim_v), " on CUDA: at most 256 works there");
  }
  if (p.rows_q >= kMostRows || p.rows_k >= kMostRows) {
    unsupported("seqlen is ", std::max(p.rows_q, p.rows_k),
                " on CUDA: fewer than 2^31 - 1024 rows work");
  }
}

CudaFacts cuda_facts_of(int arch) {
  // CUDA C++ programming guide, "Technical specifications per compute capability": KiB of shared
  // memory per multiprocessor; a block may have all but one.
  constexpr struct {
    int arch, shared_kib;
  } kKnown[] = {{800, 164},  {860, 100},  {870, 164},  {890, 100},  {900, 228},
                {1000, 228}, {1030, 228}, {1100, 228}, {1200, 100}, {1210, 100}};
  std::string known;
  for (const auto& row : kKnown) {
    const auto kib = static_cast<std::size_t>(row.shared_kib);
    if (row.arch == arch) return {arch, 0, (kib - 1) << 10, kib << 10};
    known += concat(known.empty() ? "" : ", ", row.arch / 10);
  }
  unsupported("arch is ", arch / 10, ": one of ", known, " is needed");
}

ForwardPlan plan_cuda_forward(const Problem& p, const ForwardTensors& t, const CudaFacts& facts) {
  check_supported(p, facts);
  ForwardPlan plan;
  ForwardSpec& spec = plan.spec;
  describe(spec, p, facts);
  spec.aligned = spec.aligned && is_aligned(t.out, p.dim_v);
  const bool plain = spec.features.plain() && spec.aligned;
  const bool found = spec.element == Element::kFloat32 ? choose(kAny32, facts, spec)
                     : plain                           ? choose(kPlain16, facts, spec)
                     : has_many(spec.features)         ? choose(kMany16, facts, spec)
                                                       : choose(kOptions16, facts, spec);
  if (!found) no_tile_fits(p, facts);
  plan.query_tiles = tiles_of(p, p.rows_q, spec.tile_q);
  plan.blocks = plan.query_tiles * p.heads_q * (p.packed ? 1 : p.batch);
  check_blocks(plan.blocks);
  // With a right border later rows see more keys: they start first, so that none of them ends last.
  plan.longest_first = p.variant.band_end < kUnbounded;
  plan.heads_in_step = heads_in_step(p, facts, spec.blocks_per_sm,
                                     p.heads_q * (p.packed ? 1 : p.batch), plan.query_tiles, false);
  plan.mask = mask_tiles(p, spec.tile_q, spec.tile_k);
  plan.workspace_bytes = plan.mask.blocks * 4;
  return plan;
}

BackwardPlan plan_cuda_backward(const Problem& p, const BackwardTensors& t, bool deterministic,
                                const CudaFacts& facts) {
  check_supported(p, facts);
  BackwardSpec spec;
  describe(spec, p, facts);
  spec.aligned = spec.aligned && is_aligned(t.out, p.dim_v) && is_aligned(t.dout, p.dim_v) &&
                 is_aligned(t.dq, p.dim) && is_aligned(t.dk, p.dim) && is_aligned(t.dv, p.dim_v);
  spec.dq = bool(t.dq);
  spec.ordered = deterministic && spec.dq;
  // Datacenter Blackwell: the compiler spills in the tile that is fastest on Hopper for head dims
  // up to 128, and no device of the kind has been measured.
  const int most_dim = std::max(spec.dim, spec.dim_v);
  const bool spills = spec.arch / 100 == 10 && most_dim > 64 && most_dim <= 128;
  const bool plain = spec.features.plain() && !spills;
  const bool many = most_dim <= 64 ? has_many(spec.features) : is_heavy(spec.features);
  const bool found = spec.element == Element::kFloat32 ? choose(kBackwardAny32, facts, spec)
                     : plain && spec.aligned           ? choose(kBackwardPlain16, facts, spec)
                     : plain                           ? choose(kBackwardUnaligned16, facts, spec)
                     : many                            ? choose(kBackwardMany16, facts, spec)
                                                       : choose(kBackwardOptions16, facts, spec);
  if (!found) no_tile_fits(p, facts);
  return plan_cuda_backward(p, t, spec, facts);
}

BackwardPlan plan_cuda_backward(const Problem& p, const BackwardTensors& t,
                                const BackwardSpec& chosen, const CudaFacts& facts) {
  BackwardPlan plan;
  BackwardSpec& spec = plan.spec;
  spec = chosen;
  const std::int64_t batches = p.packed ? 1 : p.batch;
  plan.query_tiles = tiles_of(p, p.rows_q, spec.tile_q);
  plan.row_tiles = plan.query_tiles * p.heads_q * batches;
  plan.key_tiles = tiles_of(p, p.rows_k, spec.tile_k);
  spec.ordered = spec.ordered && plan.row_tiles > 0;
  if (t.dq || t.dk || t.dv) {
    plan.blocks = plan.key_tiles * p.heads_k * batches;
    plan.mask = mask_tiles(p, spec.tile_q, spec.tile_k);
    plan.heads_in_step = heads_in_step(p, facts, spec.blocks_per_sm, p.heads_k * batches,
                                       plan.key_tiles, spec.ordered);
  }
  check_blocks(std::max(plan.blocks, plan.row_tiles));
  if (t.dbias) plan_bias(p, t.dbias, facts, plan);
  plan.slopes = bool(t.dslopes);
  plan.sinks = bool(t.dsinks);
  if (plan.slopes || plan.sinks) {
    plan.rows_spec = score_gradients_spec(p, spec, false, facts);
    plan.rows_query_tiles = tiles_of(p, p.rows_q, plan.rows_spec.tile_q);
    plan.rows_tiles = plan.rows_query_tiles * p.heads_q * batches;
    check_blocks(plan.rows_tiles);
  }

  Workspace workspace;
  plan.rows_at = workspace.take(plan.row_tiles * spec.row_numbers() * 4);
  plan.dq_at = workspace.take(spec.dq ? plan.row_tiles * spec.dq_numbers() * 4 : 0);
  plan.turns_at = workspace.take(spec.ordered ? plan.row_tiles * 4 : 0);
  plan.ticket_at = workspace.take(spec.ordered ? 4 : 0);
  plan.mask_at = workspace.take(plan.mask.blocks * 4);
  plan.bias_at =
      workspace.take(plan.bias_splits > 1 ? plan.bias_splits * plan.bias_entries * 4 : 0);
  plan.slopes_at = workspace.take(plan.slopes ? plan.rows_tiles * 4 : 0);
  plan.sinks_at = workspace.take(plan.sinks ? plan.rows_tiles * 4 : 0);
  plan.workspace_bytes = workspace.bytes;
  return plan;
}

kernels::MergeStatesSpec plan_cuda_merge(const Tensor& outs, const Tensor& lses, const Tensor& out,
                                         const Tensor& lse, const CudaFacts& facts) {
  return {facts.arch, element_of(outs.dtype), element_of(out.dtype), element_of(lses.dtype),
          element_of(lse.dtype)};
}

namespace {

// Reasons that forward and backward share.
template <class Spec>
std::string reasons(const Problem& p, const Spec& spec, const CudaFacts& facts) {
  std::string text;
  const auto line = [&text](const auto&... parts) { text += concat(parts..., "\n"); };
  line("backend cuda: q is on the device, compute capability ", facts.arch / 100, ".",
       facts.arch / 10 % 10, ", ", facts.num_sms, " multiprocessors");
  line("tile ", spec.tile_q, " queries x ", spec.tile_k, " keys, ", spec.warps, " warps, ",
       spec.shared_bytes(), " bytes of shared memory");
  line("portable kernel: the same text for every device with tensor cores; there is no other yet");
  if (spec.element == Element::kFloat32) {
    line("float32: every product is three of tf32 parts, to keep float32's accuracy; float16 and",
         " bfloat16 take one");
  } else if (spec.features != Features{}) {
    line("softcap, slopes, bias, mask or dropout: smaller tiles, which leave registers for them");
  }
  if (!spec.aligned) {
    line("rows of q, k, v or out are not whole multiples of 16 bytes, or their last stride is not",
         " 1: copied element by element, which is slower");
  }
  if (!spec.whole) {
    line("head_dim ", p.dim, " and ", p.dim_v, " padded to ", spec.dim, " and ", spec.dim_v,
         " inside");
  }
  if (p.variant.banded()) {
    line("causal or window: tiles outside the band are skipped, border tiles are masked");
  }
  if (p.mask) line("mask: its tiles are classified on the device first, hidden ones are skipped");
  if (p.packed || p.used_q || p.used_k) line("lengths are read on the device only");
  return text;
}

}  // namespace

std::string describe_reasons(const Problem& p, const ForwardPlan& plan, const CudaFacts& facts) {
  return reasons(p, plan.spec, facts);
}

std::string describe_reasons(const Problem& p, const BackwardPlan& plan, const CudaFacts& facts) {
  std::string text = reasons(p, plan.spec, facts);
  if (plan.spec.ordered) {
    text += "deterministic: blocks take turns in adding to dq, which costs speed\n";
  } else if (plan.spec.dq) {
    text += "dq is summed by atomic additions: its last bits vary from call to call\n";
  }
  if (plan.bias) text += "the gradient of bias comes from a pass of its own\n";
  if (plan.slopes || plan.sinks) {
    text += "the gradients of alibi_slopes and sinks come from a pass of their own\n";
  }
  return text;
}

}  // namespace onefold
