#include "cuda/program.h"

#include "onefold/error.h"

namespace onefold::cuda {
namespace {

using kernels::BackwardSpec;
using kernels::Features;
using kernels::ForwardSpec;

const char* element_text(Element e) {
  switch (e) {
    case Element::kFloat32:
      return "Element::kFloat32";
    case Element::kFloat16:
      return "Element::kFloat16";
    case Element::kBFloat16:
      return "Element::kBFloat16";
    case Element::kFloat64:
      return "Element::kFloat64";
    case Element::kNone:
      break;
  }
  return "Element::kNone";
}

const char* flag(bool x) { return x ? "true" : "false"; }

std::string text(const Features& f) {
  return concat("{.softcap = ", flag(f.softcap), ", .slopes = ", flag(f.slopes),
                ", .bias = ", element_text(f.bias), ", .mask = ", flag(f.mask),
                ", .dropout = ", flag(f.dropout), "}");
}

// A program with one kernel: `run` is called with the parameters, in `space`.
std::string source(const char* header, const std::string& constants, const std::string& bounds,
                   const char* entry, const char* arguments, const std::string& run) {
  return concat("#include \"kernels/", header, "\"\n\nnamespace onefold::kernels {\n", constants,
                "}  // namespace onefold::kernels\n\nusing namespace onefold;\n",
                "using namespace onefold::kernels;\n\n",
                "extern \"C\" __global__ void __launch_bounds__(", bounds, ")\n", entry,
                "(const __grid_constant__ ", arguments, " arguments) {\n", run, "}\n");
}

constexpr const char* kSharedMemory =
    "  extern __shared__ __align__(128) unsigned char memory[];\n";

}  // namespace

std::string text(const ForwardSpec& s) {
  return concat("{.arch = ", s.arch, ", .element = ", element_text(s.element), ", .dim = ", s.dim,
                ", .dim_v = ", s.dim_v, ", .tile_q = ", s.tile_q, ", .tile_k = ", s.tile_k,
                ", .warps = ", s.warps, ", .sharing = ", s.sharing, ", .stages = ", s.stages,
                ", .swizzled = ", flag(s.swizzled), ", .blocks_per_sm = ", s.blocks_per_sm,
                ", .q_in_registers = ", flag(s.q_in_registers), ", .aligned = ", flag(s.aligned),
                ", .whole = ", flag(s.whole), ", .features = ", text(s.features), "}");
}

std::string text(const BackwardSpec& s) {
  return concat("{.arch = ", s.arch, ", .element = ", element_text(s.element), ", .dim = ", s.dim,
                ", .dim_v = ", s.dim_v, ", .tile_q = ", s.tile_q, ", .tile_k = ", s.tile_k,
                ", .step_q = ", s.step_q, ", .warps = ", s.warps, ", .paired = ", flag(s.paired),
                ", .sharing = ", s.sharing, ", .stages = ", s.stages,
                ", .blocks_per_sm = ", s.blocks_per_sm, ", .dq = ", flag(s.dq),
                ", .ordered = ", flag(s.ordered), ", .aligned = ", flag(s.aligned),
                ", .whole = ", flag(s.whole), ", .features = ", text(s.features), "}");
}

static std::string text(const kernels::ScoreGradientsSpec& s) {
  return concat("{.arch = ", s.arch, ", .element = ", element_text(s.element), ", .dim = ", s.dim,
                ", .dim_v = ", s.dim_v, ", .tile_q = ", s.tile_q, ", .tile_k = ", s.tile_k,
                ", .bias = ", flag(s.bias), ", .aligned = ", flag(s.aligned),
                ", .whole = ", flag(s.whole), ", .features = ", text(s.features), "}");
}
static std::string text(const kernels::MergeStatesSpec& s) {
  return concat("{.arch = ", s.arch, ", .outs = ", element_text(s.outs),
                ", .out = ", element_text(s.out), ", .lses = ", element_text(s.lses),
                ", .lse = ", element_text(s.lse), "}");
}
static std::string text(const kernels::GradientSumsSpec& s) {
  return concat("{.arch = ", s.arch, ", .element = ", element_text(s.element), "}");
}

// A kernel named after its program, made from a spec that is a constant in it.
template <class Spec>
static jit::Program specialised(const Spec& spec, const char* type, const char* name,
                                const char* header, const std::string& bounds,
                                const char* arguments, const std::string& run) {
  jit::Program made;
  made.name = name;
  made.entry = name;
  made.arch = spec.arch;
  made.source = source(header, concat("inline constexpr ", type, " kSpec", text(spec), ";\n"),
                       bounds, name, arguments, run);
  return made;
}

jit::Program program(const ForwardSpec& spec) {
  return specialised(spec, "ForwardSpec", "portable_forward", "portable_forward.cuh",
                     "kSpec.threads(), kSpec.blocks_per_sm", "ForwardArguments",
                     concat(kSharedMemory, "  PortableForward<kSpec>(arguments, memory).run();\n"));
}

jit::Program program(const BackwardSpec& spec) {
  return specialised(
      spec, "BackwardSpec", "portable_backward", "portable_backward.cuh",
      "kSpec.threads(), kSpec.blocks_per_sm", "BackwardArguments",
      concat(kSharedMemory, "  PortableBackward<kSpec>(arguments, memory).run();\n"));
}

// Rows and sums lie the same whether adding is ordered or not: one program serves both.
static BackwardSpec unordered(BackwardSpec spec) {
  spec.ordered = false;
  return spec;
}

jit::Program program(const kernels::BackwardRowsSpec& spec) {
  // With the number of blocks the compiler takes the registers that it needs: without, it spills
  // for the sake of more blocks, which only float32 with every option makes it do.
  const bool wide = spec.backward.element == Element::kFloat32;
  return specialised(unordered(spec.backward), "BackwardSpec", "backward_rows", "backward_rows.cuh",
                     wide ? "kBackwardRowsThreads, 1" : "kBackwardRowsThreads",
                     "BackwardRowsArguments",
                     "  BackwardRows<kSpec>{arguments, arguments.problem}.run();\n");
}

jit::Program program(const kernels::BackwardDqSpec& spec) {
  return specialised(unordered(spec.backward), "BackwardSpec", "backward_dq", "backward_rows.cuh",
                     "kBackwardDqThreads", "BackwardDqArguments",
                     concat(kSharedMemory, "  BackwardDq<kSpec>::run(arguments, memory);\n"));
}

jit::Program program(const kernels::ScoreGradientsSpec& spec) {
  return specialised(spec, "ScoreGradientsSpec", "score_gradients", "score_gradients.cuh",
                     "kSpec.threads(), 1", "ScoreGradientsArguments",
                     concat(kSharedMemory, "  ScoreGradients<kSpec>(arguments, memory).run();\n"));
}

jit::Program program(const kernels::GradientSumsSpec& spec) {
  return specialised(spec, "GradientSumsSpec", "gradient_sums_kernel", "score_gradients.cuh",
                     "kGradientSumsThreads", "GradientSumsArguments",
                     "  gradient_sums<kSpec>(arguments);\n");
}

jit::Program program(const kernels::HeadSumsSpec& spec) {
  jit::Program made;
  made.name = "head_sums";
  made.entry = "head_sums_kernel";
  made.arch = spec.arch;
  made.source = source("score_gradients.cuh", "", "32", "head_sums_kernel", "HeadSumsArguments",
                       "  head_sums(arguments);\n");
  return made;
}

jit::Program program(const kernels::MergeStatesSpec& spec) {
  return specialised(spec, "MergeStatesSpec", "merge_states_kernel", "merge_states.cuh",
                     "32 * kMergeStatesWarps", "MergeStatesArguments",
                     "  merge_states<kSpec>(arguments);\n");
}

jit::Program program(const kernels::MaskClassesSpec& spec) {
  jit::Program made;
  made.name = "mask_classes";
  made.entry = "mask_classes_kernel";
  made.arch = spec.arch;
  made.source = source("mask_classes.cuh", "", "kMaskClassesThreads", "mask_classes_kernel",
                       "MaskClassesArguments", "  mask_classes(arguments);\n");
  return made;
}

}  // namespace onefold::cuda
