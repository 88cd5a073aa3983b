#include "cuda/program.h"

#include "onefold/error.h"

namespace onefold::cuda {
namespace {

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
                ", .warps = ", s.warps, ", .stages = ", s.stages,
                ", .blocks_per_sm = ", s.blocks_per_sm,
                ", .q_in_registers = ", flag(s.q_in_registers), ", .aligned = ", flag(s.aligned),
                ", .whole = ", flag(s.whole), ", .features = ", text(s.features), "}");
}

jit::Program program(const ForwardSpec& spec) {
  jit::Program made;
  made.name = "portable_forward";
  made.entry = "portable_forward";
  made.arch = spec.arch;
  made.source = source(
      "portable_forward.cuh", concat("inline constexpr ForwardSpec kSpec", text(spec), ";\n"),
      "kSpec.threads(), kSpec.blocks_per_sm", "portable_forward", "ForwardArguments",
      concat(kSharedMemory, "  PortableForward<kSpec>(arguments, memory).run();\n"));
  return made;
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
