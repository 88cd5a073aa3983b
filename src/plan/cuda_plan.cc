#include "plan/cuda_plan.h"

#include <algorithm>

#include "onefold/error.h"

namespace onefold {
namespace {

using kernels::Features;
using kernels::ForwardPlan;
using kernels::ForwardSpec;

constexpr std::int64_t kMostRows = std::int64_t{1} << 31;  // kernels count rows in 32 bits
constexpr std::int64_t kMostBlocks = (std::int64_t{1} << 31) - 1;
constexpr std::size_t kReservedPerBlock = 1024;  // of shared memory, taken by the driver

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
int padded(std::int64_t dim) {
  return static_cast<int>(std::max<std::int64_t>(ceil_div(dim, 32) * 32, 32));
}

struct ForwardTiles {
  int tile_q, tile_k, warps, stages, blocks_per_sm;
  bool q_in_registers;
};
// Rows of a table: the first that fits is taken, from the fastest to the smallest.
struct Row {
  int most_dim;  // the larger of the padded head dims
  ForwardTiles tiles;
};

// 16 bit, nothing but a scale: a warp owns 32 rows, so that K and V fragments are read once for two
// products. Two blocks fit a multiprocessor with at most 255 registers a thread.
constexpr Row kPlain16[] = {
    {64, {128, 64, 4, 2, 2, false}},  {64, {128, 64, 4, 1, 2, false}},
    {128, {128, 64, 4, 2, 2, false}}, {128, {128, 64, 4, 1, 2, false}},
    {128, {128, 64, 8, 1, 1, false}}, {256, {64, 64, 4, 1, 2, false}},
    {256, {64, 64, 4, 1, 1, false}},  {256, {64, 32, 4, 1, 1, false}},
};
// 16 bit with options: 16 rows a warp leave the registers that options need.
constexpr Row kOptions16[] = {
    {64, {64, 64, 4, 2, 2, false}},
    {128, {64, 64, 4, 1, 2, false}},
    {256, {64, 32, 4, 1, 1, false}},
};
// 32 bit: three products, and operands of twice the size.
constexpr Row kAny32[] = {
    {64, {64, 64, 4, 1, 2, false}},
    {128, {64, 32, 4, 1, 2, false}},
    {256, {64, 16, 4, 1, 1, false}},
    {256, {32, 16, 2, 1, 1, false}},
};

bool fits(const ForwardSpec& spec, const CudaFacts& facts) {
  const auto block = static_cast<std::size_t>(spec.shared_bytes());
  const auto all = static_cast<std::size_t>(spec.blocks_per_sm) * (block + kReservedPerBlock);
  return block <= facts.shared_bytes && all <= facts.shared_bytes_per_sm;
}

template <std::size_t kRows>
bool choose(const Row (&table)[kRows], const CudaFacts& facts, ForwardSpec& spec) {
  for (const Row& row : table) {
    if (std::max(spec.dim, spec.dim_v) > row.most_dim) continue;
    spec.tile_q = row.tiles.tile_q;
    spec.tile_k = row.tiles.tile_k;
    spec.warps = row.tiles.warps;
    spec.stages = row.tiles.stages;
    spec.blocks_per_sm = row.tiles.blocks_per_sm;
    spec.q_in_registers = row.tiles.q_in_registers;
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
    unsupported("seqlen is ", std::max(p.rows_q, p.rows_k), " on CUDA: fewer than 2^31 rows work");
  }
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

}  // namespace

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
  spec.arch = facts.arch;
  spec.element = element_of(p.dtype);
  spec.dim = padded(p.dim);
  spec.dim_v = padded(p.dim_v);
  spec.whole = spec.dim == p.dim && spec.dim_v == p.dim_v;
  spec.aligned = is_aligned(p.q, p.dim) && is_aligned(p.k, p.dim) && is_aligned(p.v, p.dim_v) &&
                 is_aligned(t.out, p.dim_v);
  spec.features = features_of(p);
  const Features& f = spec.features;
  const bool plain = f.scale_only() && !f.mask && !f.dropout && spec.aligned;
  const bool found = spec.element == Element::kFloat32 ? choose(kAny32, facts, spec)
                     : plain                           ? choose(kPlain16, facts, spec)
                                                       : choose(kOptions16, facts, spec);
  if (!found) {
    unsupported("head_dim is ", std::max(p.dim, p.dim_v), " on a device with ", facts.shared_bytes,
                " bytes of shared memory a block: no tile fits, a smaller head_dim is needed");
  }
  plan.query_tiles =
      p.packed ? p.rows_q / spec.tile_q + p.batch + 1 : ceil_div(p.rows_q, spec.tile_q);
  plan.blocks = plan.query_tiles * p.heads_q * (p.packed ? 1 : p.batch);
  if (plan.blocks > kMostBlocks) {
    unsupported("batch * heads * seqlen needs ", plan.blocks, " blocks: fewer than 2^31 work");
  }
  // With a right border later rows see more keys: they start first, so that none of them ends last.
  plan.longest_first = p.variant.band_end < kUnbounded;
  if (p.mask) {
    const auto& extent = p.mask.extent;
    plan.mask_query_tiles = extent[2] == 1 ? 1 : ceil_div(extent[2], spec.tile_q);
    plan.mask_words = extent[3] == 1 ? 1 : ceil_div(ceil_div(extent[3], spec.tile_k), 16);
    plan.mask_blocks = extent[0] * extent[1] * plan.mask_query_tiles * plan.mask_words;
    plan.workspace_bytes = plan.mask_blocks * 4;
  }
  return plan;
}

std::string describe_reasons(const Problem& p, const ForwardPlan& plan, const CudaFacts& facts) {
  std::string text;
  const auto line = [&text](const auto&... parts) { text += concat(parts..., "\n"); };
  const ForwardSpec& spec = plan.spec;
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
    line("causal or window: key tiles outside the band are skipped, border tiles are masked");
  }
  if (p.mask) line("mask: its tiles are classified on the device first, hidden ones are skipped");
  if (p.packed || p.used_q || p.used_k) line("lengths are read on the device only");
  return text;
}

}  // namespace onefold
