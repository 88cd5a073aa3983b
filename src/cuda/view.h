// Problems as kernels see them, and kernels by spec: what forward and backward share.
//
// Invariant: nothing here reads a tensor. Includes core, the specs, launch.h and program.h.
#pragma once

#include <list>
#include <mutex>

#include "core/problem.h"
#include "cuda/attention.h"
#include "cuda/launch.h"
#include "cuda/program.h"
#include "kernels/mask_classes_spec.h"

namespace onefold::cuda {

kernels::RowsView view(const Rows& rows);
kernels::GridView view(const Grid& grid);
kernels::NumbersView view(const Numbers& numbers);
kernels::ProblemView view(const Problem& problem);

// The power of two that ProblemView::scale_power is for a scale.
double scale_power(double scale);

// Factor of kept weights, and what a word must reach to keep its weight.
float keep_scale_of(const Problem& problem);
u32 keep_threshold_of(const Problem& problem);

// Classifies the tiles of the mask into `words`, and tells the kernels where to look.
void classify_mask(const Problem& problem, const kernels::MaskTiles& tiles, int arch,
                   kernels::ProblemView& view, const Launches& to, u32* words);

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

// One launch of the kernel of `spec`, or its program.
template <class Spec, class Arguments>
void run(const Spec& spec, const Device& device, std::int64_t blocks, const Launches& to,
         const Arguments& arguments) {
  if (blocks == 0) return;
  if (to.programs != nullptr) {
    to.programs->push_back(program(spec));
    return;
  }
  LaunchShape shape;
  shape.grid.x = static_cast<unsigned>(blocks);
  shape.block.x = static_cast<unsigned>(spec.threads());
  shape.shared_bytes = static_cast<std::size_t>(spec.shared_bytes());
  launch(kernel_of(spec, device.index, to.stream), shape, to.stream, arguments);
}

}  // namespace onefold::cuda
