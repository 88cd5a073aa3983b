#include "cuda/attention.h"

#include <algorithm>
#include <cmath>
#include <list>
#include <mutex>

#include "cuda/program.h"
#include "kernels/mask_classes_spec.h"

namespace onefold::cuda {
namespace {

using kernels::ForwardArguments;
using kernels::ForwardPlan;
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

IndexView view(const Indices& i) { return {i.data, i.stride, i.present ? size_bytes(i.dtype) : 0}; }

// Positions at which a grid may be read: all, along broadcast axes.
void limit(Lengths& readable, const Grid& g) {
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
  // A scale so small that it vanishes in float is 0 there.
  const float scale = static_cast<float>(std::fabs(p.variant.scale));
  const float scale_log2 = static_cast<float>(std::fabs(p.variant.scale) * kLog2E);
  const bool zero = scale == 0.0f || scale_log2 == 0.0f;
  v.q_factor = zero ? 0.0f : p.variant.scale < 0 ? -1.0f : 1.0f;
  v.score_factor = zero ? 1.0f : scale;
  v.score_factor_log2 = zero ? static_cast<float>(kLog2E) : scale_log2;
  return v;
}

// Kernels by spec and device: finding one by its program costs a digest of its text.
template <class Spec>
class Kernels {
 public:
  const Kernel& of(const Spec& spec, int device, void* stream) {
    {
      const std::lock_guard lock(mutex_);
      for (const Entry& entry : entries_) {
        if (entry.device == device && entry.spec == spec) return *entry.kernel;
      }
    }
    const Kernel& kernel = load(program(spec), device, stream);
    const std::lock_guard lock(mutex_);
    entries_.push_front({spec, device, &kernel});
    return kernel;
  }

 private:
  struct Entry {
    Spec spec;
    int device;
    const Kernel* kernel;
  };
  std::mutex mutex_;
  std::list<Entry> entries_;
};

template <class Spec>
const Kernel& kernel_of(const Spec& spec, int device, void* stream) {
  static auto& kernels = *new Kernels<Spec>;
  return kernels.of(spec, device, stream);
}

kernels::MaskClassesSpec mask_classes_of(const ForwardPlan& plan) { return {plan.spec.arch}; }

// Classifies the tiles of the mask into `words`, and tells the kernels where to look.
void classify_mask(const Problem& p, const ForwardPlan& plan, ProblemView& v, void* stream,
                   u32* words) {
  const Grid& g = p.mask;
  MaskClassesArguments args;
  args.mask = view(g);
  args.heads = g.extent[1];
  args.queries = g.extent[2];
  args.keys = g.extent[3];
  args.query_tiles = plan.mask_query_tiles;
  args.words = plan.mask_words;
  args.tile_q = plan.spec.tile_q;
  args.tile_k = plan.spec.tile_k;
  args.classes = words;
  const i64 per_head = plan.mask_query_tiles * plan.mask_words;
  v.mask_classes.words = words;
  v.mask_classes.query_tile = g.extent[2] == 1 ? 0 : plan.mask_words;
  v.mask_classes.head = g.extent[1] == 1 ? 0 : per_head;
  v.mask_classes.batch = g.extent[0] == 1 ? 0 : per_head * g.extent[1];
  v.mask_classes.one_key = g.extent[3] == 1;
  if (plan.mask_blocks == 0) return;  // no keys, so no tile to look up
  const Kernel& kernel = kernel_of(mask_classes_of(plan), p.device.index, stream);
  LaunchShape shape;
  shape.grid.x = static_cast<unsigned>(plan.mask_blocks);
  shape.block.x = kernels::kMaskClassesThreads;
  launch(kernel, shape, stream, args);
}

}  // namespace

std::vector<jit::Program> programs(const Problem& p, const ForwardPlan& plan) {
  std::vector<jit::Program> all;
  if (plan.blocks == 0) return all;
  if (p.mask && plan.mask_blocks > 0) all.push_back(program(mask_classes_of(plan)));
  all.push_back(program(plan.spec));
  return all;
}

void run_forward(const Problem& p, const ForwardPlan& plan, const ForwardTensors& t, void* stream,
                 void* workspace) {
  if (plan.blocks == 0) return;
  const Kernel& kernel = kernel_of(plan.spec, p.device.index, stream);
  ForwardArguments args;
  args.problem = view(p);
  args.problem.query_tiles = static_cast<int>(plan.query_tiles);
  args.out = view(t.out);
  args.lse = view(t.lse);
  args.score_lag = kernels::kLagLog2 / args.problem.score_factor_log2;
  args.keep_scale = static_cast<float>(p.variant.dropout() ? keep_scale(p.variant) : 1.0);
  args.keep_threshold = static_cast<u32>(std::min<u64>(keep_threshold(p.variant), 0xffffffffu));
  args.longest_first = plan.longest_first;
  if (p.mask) classify_mask(p, plan, args.problem, stream, static_cast<u32*>(workspace));
  LaunchShape shape;
  shape.grid.x = static_cast<unsigned>(plan.blocks);
  shape.block.x = static_cast<unsigned>(plan.spec.threads());
  shape.shared_bytes = static_cast<std::size_t>(plan.spec.shared_bytes());
  launch(kernel, shape, stream, args);
}

}  // namespace onefold::cuda
