#include "cuda/attention.h"

#include "cuda/view.h"

namespace onefold::cuda {

using kernels::BackwardArguments;
using kernels::BackwardDqArguments;
using kernels::BackwardPlan;
using kernels::BackwardRowsArguments;
using kernels::BackwardSpec;
using kernels::ForwardArguments;
using kernels::ForwardPlan;
using kernels::GradientSumsArguments;
using kernels::HeadSumsArguments;
using kernels::ProblemView;
using kernels::ScoreGradientsArguments;

void run_forward(const Problem& p, const ForwardPlan& plan, const ForwardTensors& t,
                 const Launches& to, void* workspace) {
  if (plan.blocks == 0) return;
  ForwardArguments args;
  args.problem = view(p);
  args.problem.query_tiles = static_cast<int>(plan.query_tiles);
  args.out = view(t.out);
  args.lse = view(t.lse);
  args.score_lag = kernels::kLagLog2 / args.problem.score_factor_log2;
  args.keep_scale = keep_scale_of(p);
  args.keep_threshold = keep_threshold_of(p);
  args.heads_in_step = plan.heads_in_step;
  args.longest_first = plan.longest_first;
  classify_mask(p, plan.mask, plan.spec.arch, args.problem, to, static_cast<u32*>(workspace));
  run(plan.spec, p.device, plan.blocks, to, args);
}

namespace {

// One backward call: its launches, in order.
struct Backward {
  const Problem& p;
  const BackwardPlan& plan;
  const BackwardTensors& t;
  const Launches& to;
  std::byte* workspace;
  ProblemView problem = view(p);

  template <class T>
  T* at(i64 offset) const {
    return reinterpret_cast<T*>(workspace + offset);
  }
  // Without the power of two, which is in the keys.
  float scale() const { return static_cast<float>(p.variant.scale / problem.scale_power); }

  void prepare_rows() {
    const BackwardSpec& spec = plan.spec;
    BackwardRowsArguments args;
    args.problem = problem;
    args.out = view(t.out);
    args.dout = view(t.dout);
    args.lse = view(t.lse);
    args.dlse = view(t.dlse);
    args.rows = at<float>(plan.rows_at);
    args.dq = at<float>(plan.dq_at);
    args.turns = spec.ordered ? at<u32>(plan.turns_at) : nullptr;
    args.ticket = spec.ordered ? at<u32>(plan.ticket_at) : nullptr;
    run(kernels::BackwardRowsSpec{spec}, p.device, plan.row_tiles, to, args);
  }

  void run_main() {
    const BackwardSpec& spec = plan.spec;
    BackwardArguments args;
    args.problem = problem;
    args.dout = view(t.dout);
    args.dk = view(t.dk);
    args.dv = view(t.dv);
    args.rows = at<float>(plan.rows_at);
    args.dq = at<float>(plan.dq_at);
    args.turns = at<u32>(plan.turns_at);
    args.ticket = at<u32>(plan.ticket_at);
    args.heads_in_step = plan.heads_in_step;
    args.key_tiles = static_cast<int>(plan.key_tiles);
    args.scale = scale();
    args.keep_scale = keep_scale_of(p);
    args.keep_threshold = keep_threshold_of(p);
    run(spec, p.device, plan.blocks, to, args);
  }

  void finish_dq() {
    BackwardDqArguments args;
    args.problem = problem;
    args.dq_rows = view(t.dq);
    args.dq = at<float>(plan.dq_at);
    args.scale = scale();
    run(kernels::BackwardDqSpec{plan.spec}, p.device, plan.row_tiles, to, args);
  }

  ScoreGradientsArguments score_gradients() const {
    ScoreGradientsArguments args;
    args.problem = problem;
    args.dout = view(t.dout);
    args.dlse = view(t.dlse);
    args.rows = at<float>(plan.rows_at);
    args.rows_tile = plan.spec.tile_q;
    args.rows_tiles = static_cast<int>(plan.query_tiles);
    args.keep_scale = keep_scale_of(p);
    args.keep_threshold = keep_threshold_of(p);
    args.longest_q = p.longest_q;
    args.longest_k = p.longest_k;
    return args;
  }

  void run_bias() {
    ScoreGradientsArguments args = score_gradients();
    args.dbias = view(t.dbias);
    for (int axis = 0; axis < 4; ++axis) {
      args.extent[axis] = t.dbias.extent[axis];
      args.broadcast[axis] = args.extent[axis] == 1;
    }
    args.splits = plan.bias_splits;
    args.partial = at<float>(plan.bias_at);
    const kernels::ScoreGradientsSpec& spec = plan.bias_spec;
    run(spec, p.device, plan.bias_items * plan.bias_splits, to, args);
    if (plan.bias_splits == 1) return;
    GradientSumsArguments sums;
    sums.from = args.partial;
    sums.parts = plan.bias_splits;
    sums.to = args.dbias;
    for (int axis = 0; axis < 4; ++axis) sums.extent[axis] = args.extent[axis];
    const kernels::GradientSumsSpec of_sums{spec.arch, spec.features.bias};
    run(of_sums, p.device, (plan.bias_entries + of_sums.threads() - 1) / of_sums.threads(), to,
        sums);
  }

  void run_slopes_and_sinks() {
    ScoreGradientsArguments args = score_gradients();
    args.problem.query_tiles = static_cast<int>(plan.rows_query_tiles);
    if (plan.slopes) args.slopes = at<float>(plan.slopes_at);
    if (plan.sinks) args.sinks = at<float>(plan.sinks_at);
    const kernels::ScoreGradientsSpec& spec = plan.rows_spec;
    run(spec, p.device, plan.rows_tiles, to, args);
    const auto sum = [&](const float* from, const Numbers& gradient) {
      HeadSumsArguments sums;
      sums.problem = args.problem;
      sums.from = from;
      sums.tile_q = spec.tile_q;
      sums.per_sequence = gradient.per_sequence;
      sums.to = view(gradient);
      run(kernels::HeadSumsSpec{spec.arch}, p.device, p.heads_q * (sums.per_sequence ? p.batch : 1),
          to, sums);
    };
    if (plan.slopes) sum(args.slopes, t.dslopes);
    if (plan.sinks) sum(args.sinks, t.dsinks);
  }
};

}  // namespace

void run_backward(const Problem& p, const BackwardPlan& plan, const BackwardTensors& t,
                  const Launches& to, void* workspace) {
  Backward call{p, plan, t, to, static_cast<std::byte*>(workspace)};
  call.problem.query_tiles = static_cast<int>(plan.query_tiles);
  call.prepare_rows();
  if (plan.blocks > 0) {
    classify_mask(p, plan.mask, plan.spec.arch, call.problem, to, call.at<u32>(plan.mask_at));
    call.run_main();
  }
  if (plan.spec.dq) call.finish_dq();
  if (plan.bias) call.run_bias();
  if (plan.slopes || plan.sinks) call.run_slopes_and_sinks();
}

void merge_states(const Tensor& outs, const Tensor& lses, const Tensor& out, const Tensor& lse,
                  const kernels::MergeStatesSpec& spec, void* stream) {
  kernels::MergeStatesArguments args;
  args.outs = outs.data;
  args.lses = lses.data;
  args.out = out.data;
  args.lse = lse.data;
  for (int axis = 0; axis < 3; ++axis) args.outs_stride[axis] = outs.stride[axis];
  for (int axis = 0; axis < 2; ++axis) args.lses_stride[axis] = lses.stride[axis];
  for (int axis = 0; axis < 2; ++axis) args.out_stride[axis] = out.stride[axis];
  args.lse_stride = lse.stride[0];
  args.parts = outs.shape[0];
  args.rows = outs.shape[1];
  args.dim = outs.shape[2];
  constexpr int kWarps = kernels::kMergeStatesWarps;
  run(spec, outs.device, (args.rows + kWarps - 1) / kWarps, Launches(stream), args);
}

}  // namespace onefold::cuda
