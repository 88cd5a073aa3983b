// A libcuda.so.1 without a device behind it, for host_calls_test: it says yes to everything, does
// nothing, and counts what it was asked.
//
// Invariant: it has every function that src/cuda/driver.cc looks up. Includes what declares their
// types and the standard library.

#include "cuda/driver.h"

#include <cstdio>
#include <map>
#include <string>

namespace {

using namespace onefold::cuda;

std::map<std::string, int>& counts() {
  static auto& all = *new std::map<std::string, int>;
  return all;
}

int count(const char* name) {
  ++counts()[name];
  return kSuccess;
}

char something;  // that handles point to
template <class Handle>
Handle handle() {
  return reinterpret_cast<Handle>(&something);
}

int attribute(int which) {
  switch (which) {
    case kAttributeMajor:
      return 9;
    case kAttributeMaxSharedOptin:
      return 227 << 10;
    case kAttributeSharedPerSm:
      return 228 << 10;
    case kAttributeNumSms:
      return 132;
    default:
      return 0;
  }
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

std::map<std::string, int>* stub_counts() { return &counts(); }

CUresult cuInit(unsigned) { return count("cuInit"); }
CUresult cuDriverGetVersion(int* version) {
  *version = 13000;
  return count("cuDriverGetVersion");
}
CUresult cuGetErrorName(int, const char** text) {
  *text = "STUB";
  return count("cuGetErrorName");
}
CUresult cuGetErrorString(int, const char** text) {
  *text = "of a stub";
  return count("cuGetErrorString");
}
CUresult cuDeviceGetCount(int* devices) {
  *devices = 1;
  return count("cuDeviceGetCount");
}
CUresult cuDeviceGet(CUdevice* device, int) {
  *device = 0;
  return count("cuDeviceGet");
}
CUresult cuDeviceGetName(char* name, int length, CUdevice) {
  std::snprintf(name, static_cast<std::size_t>(length), "stub");
  return count("cuDeviceGetName");
}
CUresult cuDeviceGetAttribute(int* value, int which, CUdevice) {
  *value = attribute(which);
  return count("cuDeviceGetAttribute");
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) {
  *context = handle<CUcontext>();
  return count("cuDevicePrimaryCtxRetain");
}
CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = handle<CUcontext>();
  return count("cuCtxGetCurrent");
}
CUresult cuCtxPushCurrent_v2(CUcontext) { return count("cuCtxPushCurrent_v2"); }
CUresult cuCtxPopCurrent_v2(CUcontext*) { return count("cuCtxPopCurrent_v2"); }
CUresult cuModuleLoadData(CUmodule* module, const void*) {
  *module = handle<CUmodule>();
  return count("cuModuleLoadData");
}
CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char*) {
  *function = handle<CUfunction>();
  return count("cuModuleGetFunction");
}
CUresult cuFuncSetAttribute(CUfunction, int, int) { return count("cuFuncSetAttribute"); }
CUresult cuLaunchKernelEx(const CUlaunchConfig*, CUfunction, void**, void**) {
  return count("cuLaunchKernelEx");
}
CUresult cuStreamIsCapturing(CUstream, int* status) {
  *status = kCaptureNone;
  return count("cuStreamIsCapturing");
}
CUresult cuThreadExchangeStreamCaptureMode(int*) {
  return count("cuThreadExchangeStreamCaptureMode");
}
CUresult cuStreamSynchronize(CUstream) { return count("cuStreamSynchronize"); }
CUresult cuMemAllocAsync(CUdeviceptr*, std::size_t, CUstream) { return count("cuMemAllocAsync"); }
CUresult cuMemFreeAsync(CUdeviceptr, CUstream) { return count("cuMemFreeAsync"); }
CUresult cuMemsetD8Async(CUdeviceptr, unsigned char, std::size_t, CUstream) {
  return count("cuMemsetD8Async");
}
CUresult cuMemcpyAsync(CUdeviceptr, CUdeviceptr, std::size_t, CUstream) {
  return count("cuMemcpyAsync");
}

}  // extern "C"
#pragma GCC visibility pop
