// Devices: their facts, their primary contexts, and which one is current.
//
// Invariant: work happens in a device's primary context, the one that PyTorch and the CUDA runtime
// use; it is retained once and never released, and a DeviceGuard leaves current what was current.
// Includes driver.h and the standard library.
#pragma once

#include <cstddef>
#include <string>

#include "cuda/driver.h"

namespace onefold::cuda {

struct DeviceFacts {
  std::string name;  // "NVIDIA H200"
  int arch = 0;      // 900: as jit::Program::arch
  int num_sms = 0;
  std::size_t shared_bytes = 0;  // that one block may have
  std::size_t shared_bytes_per_sm = 0;
  int registers_per_sm = 0;
  int threads_per_sm = 0;
  std::size_t l2_bytes = 0;
  int clock_khz = 0;  // peak
};

// 0 without a driver or a device.
int device_count();

// Asked of the driver once per device. Throws Error for a device that does not exist.
const DeviceFacts& device_facts(int device);

// Makes the device's primary context current, and what was current before current again.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  bool pushed_ = false;
};

}  // namespace onefold::cuda
