// Kernels on a device: loaded once, launched on the caller's stream.
//
// Invariant: nothing here synchronises, and inside a captured graph nothing is compiled, loaded or
// allocated: that is a clear error. A stream is the caller's handle (null: the default stream) and
// belongs to the device named with it. Includes jit.h, device.h and the standard library.
#pragma once

#include <array>
#include <cstddef>
#include <memory>

#include "cuda/device.h"
#include "jit/jit.h"

namespace onefold::cuda {

struct Kernel {
  CUfunction function = nullptr;
  const jit::Binary* binary = nullptr;
  int device = 0;
};

// The kernel ready on the device, allowed to use all of its shared memory. Compiled and loaded on
// the first call for (program, device) and remembered; while `stream` is capturing a graph, one
// that is not ready is an error that says so.
const Kernel& load(const jit::Program& program, int device, void* stream);

// The same for a binary at hand.
const Kernel& load(const jit::Binary& binary, int device);

struct Extent {
  unsigned x = 1, y = 1, z = 1;
};

struct LaunchShape {
  Extent grid{};  // x up to 2^31 - 1, y and z up to 65535: use x
  Extent block{};
  std::size_t shared_bytes = 0;  // dynamic
  Extent cluster{};
  bool overlap_previous = false;  // may start before its predecessor ends; it waits by itself
};

// `arguments` points to one pointer per kernel parameter.
void launch_raw(const Kernel& kernel, const LaunchShape& shape, void* stream, void** arguments);

// Arguments must have exactly the types of the kernel's parameters. Their values are copied before
// this returns.
template <class... Arguments>
void launch(const Kernel& kernel, const LaunchShape& shape, void* stream,
            const Arguments&... arguments) {
  std::array<void*, sizeof...(Arguments) + 1> pointers{
      const_cast<void*>(static_cast<const void*>(&arguments))..., nullptr};
  launch_raw(kernel, shape, stream, pointers.data());
}

bool capturing(int device, void* stream);

// Sets bytes, in the stream's order.
void fill(void* data, unsigned char value, std::size_t bytes, int device, void* stream);

// Stream-ordered memory for callers that bring no allocator: 256-byte aligned; freed, in the
// stream's order, with the last copy of the pointer. An error while capturing.
std::shared_ptr<void> allocate(std::size_t bytes, int device, void* stream);

}  // namespace onefold::cuda
