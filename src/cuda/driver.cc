#include "cuda/driver.h"

#include <dlfcn.h>

#include <type_traits>

namespace onefold::cuda {
namespace {

constexpr int kOldestVersion = 12000;

struct Found {
  Driver functions{};
  bool usable = false;
  int version = 0;
  std::string why_not;
};

// Fills the table; false and the name of the first function that the driver lacks.
bool bind(void* library, Driver& d, std::string& missing) {
  const auto one = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
    if (function == nullptr && missing.empty()) missing = name;
  };
  one(d.cuInit, "cuInit");
  one(d.cuDriverGetVersion, "cuDriverGetVersion");
  one(d.cuGetErrorName, "cuGetErrorName");
  one(d.cuGetErrorString, "cuGetErrorString");
  one(d.cuDeviceGetCount, "cuDeviceGetCount");
  one(d.cuDeviceGet, "cuDeviceGet");
  one(d.cuDeviceGetName, "cuDeviceGetName");
  one(d.cuDeviceGetAttribute, "cuDeviceGetAttribute");
  one(d.cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain");
  one(d.cuCtxGetCurrent, "cuCtxGetCurrent");
  one(d.cuCtxPushCurrent, "cuCtxPushCurrent_v2");
  one(d.cuCtxPopCurrent, "cuCtxPopCurrent_v2");
  one(d.cuModuleLoadData, "cuModuleLoadData");
  one(d.cuModuleGetFunction, "cuModuleGetFunction");
  one(d.cuFuncSetAttribute, "cuFuncSetAttribute");
  one(d.cuLaunchKernelEx, "cuLaunchKernelEx");
  one(d.cuStreamIsCapturing, "cuStreamIsCapturing");
  one(d.cuThreadExchangeStreamCaptureMode, "cuThreadExchangeStreamCaptureMode");
  one(d.cuStreamSynchronize, "cuStreamSynchronize");
  one(d.cuMemAllocAsync, "cuMemAllocAsync");
  one(d.cuMemFreeAsync, "cuMemFreeAsync");
  one(d.cuMemsetD8Async, "cuMemsetD8Async");
  one(d.cuMemcpyAsync, "cuMemcpyAsync");
  return missing.empty();
}

std::string words(const Driver& d, CUresult result) {
  const char *name = nullptr, *text = nullptr;
  d.cuGetErrorName(result, &name);
  d.cuGetErrorString(result, &text);
  return concat(name ? name : "error", " (", text ? text : concat(result), ")");
}

Found open_driver() {
  Found found;
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    found.why_not = "there is no CUDA driver (libcuda.so.1)";
    return found;
  }
  Driver& d = found.functions;
  std::string missing;
  const bool complete = bind(library, d, missing);
  if (d.cuDriverGetVersion != nullptr) d.cuDriverGetVersion(&found.version);
  if (!complete || found.version < kOldestVersion) {
    found.why_not =
        concat("the CUDA driver speaks CUDA ", found.version / 1000, ".", found.version % 1000 / 10,
               ", and 12.0 is needed", complete ? "" : " (it lacks " + missing + ")");
    return found;
  }
  int count = 0;
  CUresult result = d.cuInit(0);
  if (result == kSuccess) result = d.cuDeviceGetCount(&count);
  if (result != kSuccess) {
    found.why_not = "the CUDA driver says " + words(d, result);
  } else if (count == 0) {
    found.why_not = "the CUDA driver sees no device";
  } else {
    found.usable = true;
  }
  return found;
}

const Found& the_driver() {
  static const Found& found = *new Found(open_driver());
  return found;
}

}  // namespace

const Driver* find_driver(std::string* why_not) {
  const Found& found = the_driver();
  if (found.usable) return &found.functions;
  if (why_not != nullptr) *why_not = found.why_not;
  return nullptr;
}

const Driver& driver() {
  std::string why_not;
  const Driver* d = find_driver(&why_not);
  if (d == nullptr) throw Error(ErrorKind::kRuntime, "CUDA cannot be used: " + why_not);
  return *d;
}

int driver_version() { return the_driver().version; }

void fail(CUresult result, const std::string& what) {
  // From CUDA_ERROR_ILLEGAL_ADDRESS to CUDA_ERROR_LAUNCH_FAILED: what a running kernel ran into.
  const bool sticky = result >= 700 && result <= 719;
  throw Error(ErrorKind::kRuntime, concat(what, ": ", words(the_driver().functions, result),
                                          sticky ? "; a kernel before this call may be at fault, "
                                                   "CUDA_LAUNCH_BLOCKING=1 tells which"
                                                 : ""));
}

}  // namespace onefold::cuda
