// The CUDA driver, opened at run time: libcuda.so.1 with own declarations of what is used of it.
//
// Invariant: nothing links to CUDA, and a machine without a driver loads this library all the same.
// Names and numbers below are those of cuda.h (checked by tests/cuda where that header is found).
// Includes error.h and the standard library.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "onefold/error.h"

namespace onefold::cuda {

using CUresult = int;
using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUcontext = struct CUctx_st*;
using CUmodule = struct CUmod_st*;
using CUfunction = struct CUfunc_st*;
using CUstream = struct CUstream_st*;

struct CUlaunchAttribute {
  int id;
  char pad[4];
  union Value {
    char bytes[64];
    struct {
      unsigned x, y, z;
    } cluster;
    int flag;
  } value;
};

struct CUlaunchConfig {
  unsigned grid_x, grid_y, grid_z;
  unsigned block_x, block_y, block_z;
  unsigned shared_bytes;
  CUstream stream;
  CUlaunchAttribute* attributes;
  unsigned num_attributes;
};

// Numbers of cuda.h.
inline constexpr CUresult kSuccess = 0;
inline constexpr CUresult kImplicitCapture = 906;    // CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
inline constexpr int kAttributeMaxSharedOptin = 97;  // CU_DEVICE_ATTRIBUTE_...
inline constexpr int kAttributeSharedPerSm = 81;
inline constexpr int kAttributeRegistersPerSm = 82;
inline constexpr int kAttributeThreadsPerSm = 39;
inline constexpr int kAttributeNumSms = 16;
inline constexpr int kAttributeClockKhz = 13;
inline constexpr int kAttributeL2Bytes = 38;
inline constexpr int kAttributeMajor = 75;
inline constexpr int kAttributeMinor = 76;
inline constexpr int kFunctionMaxDynamicShared = 8;  // CU_FUNC_ATTRIBUTE_...
inline constexpr int kLaunchClusterDimension = 4;    // CU_LAUNCH_ATTRIBUTE_...
inline constexpr int kLaunchProgrammaticSerialization = 6;
inline constexpr int kCaptureNone = 0;         // CU_STREAM_CAPTURE_STATUS_NONE
inline constexpr int kCaptureModeRelaxed = 2;  // CU_STREAM_CAPTURE_MODE_RELAXED

// The functions, by their names in cuda.h.
struct Driver {
  CUresult (*cuInit)(unsigned flags);
  CUresult (*cuDriverGetVersion)(int* version);
  CUresult (*cuGetErrorName)(CUresult, const char** text);
  CUresult (*cuGetErrorString)(CUresult, const char** text);
  CUresult (*cuDeviceGetCount)(int* count);
  CUresult (*cuDeviceGet)(CUdevice*, int ordinal);
  CUresult (*cuDeviceGetName)(char* name, int length, CUdevice);
  CUresult (*cuDeviceGetAttribute)(int* value, int attribute, CUdevice);
  CUresult (*cuDevicePrimaryCtxRetain)(CUcontext*, CUdevice);
  CUresult (*cuCtxGetCurrent)(CUcontext*);
  CUresult (*cuCtxPushCurrent)(CUcontext);
  CUresult (*cuCtxPopCurrent)(CUcontext*);
  CUresult (*cuModuleLoadData)(CUmodule*, const void* image);
  CUresult (*cuModuleGetFunction)(CUfunction*, CUmodule, const char* name);
  CUresult (*cuFuncSetAttribute)(CUfunction, int attribute, int value);
  CUresult (*cuLaunchKernelEx)(const CUlaunchConfig*, CUfunction, void** arguments, void** extra);
  CUresult (*cuStreamIsCapturing)(CUstream, int* status);
  CUresult (*cuThreadExchangeStreamCaptureMode)(int* mode);
  CUresult (*cuStreamSynchronize)(CUstream);
  CUresult (*cuMemAllocAsync)(CUdeviceptr*, std::size_t bytes, CUstream);
  CUresult (*cuMemFreeAsync)(CUdeviceptr, CUstream);
  CUresult (*cuMemsetD8Async)(CUdeviceptr, unsigned char value, std::size_t bytes, CUstream);
  CUresult (*cuMemcpyAsync)(CUdeviceptr to, CUdeviceptr from, std::size_t bytes, CUstream);
};

// The driver with at least one device, or nullptr; `why_not` then says what is missing.
const Driver* find_driver(std::string* why_not = nullptr);

// The same, or Error(kRuntime).
const Driver& driver();

// The CUDA version that the driver speaks, 13000 for 13.0; 0 without a driver.
int driver_version();

// Throws Error(kRuntime) with the driver's own words unless `result` is success; `what` says what
// was tried.
[[noreturn]] void fail(CUresult result, const std::string& what);
inline void check(CUresult result, const char* what) {
  if (result != kSuccess) fail(result, what);
}

}  // namespace onefold::cuda
