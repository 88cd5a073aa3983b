#include "cuda/device.h"

#include <memory>
#include <mutex>

namespace onefold::cuda {
namespace {

struct State {
  std::once_flag facts_once, context_once;
  DeviceFacts facts;
  CUcontext context = nullptr;
};

CUdevice handle_of(int device) {
  CUdevice handle = 0;
  check(driver().cuDeviceGet(&handle, device), "cuDeviceGet");
  return handle;
}

State& state_of(int device) {
  static const int count = device_count();
  static const auto& states = *new std::unique_ptr<State[]>(new State[count > 0 ? count : 1]);
  driver();  // says why, where there is none
  if (device < 0 || device >= count) {
    throw Error(ErrorKind::kInvalidArgument,
                concat("device index is ", device, ": this process sees ", count,
                       count == 1 ? " CUDA device" : " CUDA devices"));
  }
  return states[device];
}

CUcontext primary_context(int device) {
  State& state = state_of(device);
  std::call_once(state.context_once, [&] {
    check(driver().cuDevicePrimaryCtxRetain(&state.context, handle_of(device)),
          "cuDevicePrimaryCtxRetain");
  });
  return state.context;
}

DeviceFacts ask(int device) {
  const Driver& d = driver();
  const CUdevice handle = handle_of(device);
  const auto attribute = [&](int which) {
    int value = 0;
    check(d.cuDeviceGetAttribute(&value, which, handle), "cuDeviceGetAttribute");
    return value;
  };
  char name[256] = "";
  check(d.cuDeviceGetName(name, sizeof name - 1, handle), "cuDeviceGetName");
  DeviceFacts facts;
  facts.name = name;
  facts.arch = attribute(kAttributeMajor) * 100 + attribute(kAttributeMinor) * 10;
  facts.num_sms = attribute(kAttributeNumSms);
  facts.shared_bytes = static_cast<std::size_t>(attribute(kAttributeMaxSharedOptin));
  facts.shared_bytes_per_sm = static_cast<std::size_t>(attribute(kAttributeSharedPerSm));
  facts.registers_per_sm = attribute(kAttributeRegistersPerSm);
  facts.threads_per_sm = attribute(kAttributeThreadsPerSm);
  facts.l2_bytes = static_cast<std::size_t>(attribute(kAttributeL2Bytes));
  facts.clock_khz = attribute(kAttributeClockKhz);
  return facts;
}

}  // namespace

int device_count() {
  const Driver* d = find_driver();
  int count = 0;
  if (d != nullptr) check(d->cuDeviceGetCount(&count), "cuDeviceGetCount");
  return count;
}

const DeviceFacts& device_facts(int device) {
  State& state = state_of(device);
  std::call_once(state.facts_once, [&] { state.facts = ask(device); });
  return state.facts;
}

DeviceGuard::DeviceGuard(int device) {
  const CUcontext wanted = primary_context(device);
  CUcontext current = nullptr;
  check(driver().cuCtxGetCurrent(&current), "cuCtxGetCurrent");
  if (current == wanted) return;
  check(driver().cuCtxPushCurrent(wanted), "cuCtxPushCurrent");
  pushed_ = true;
}

DeviceGuard::~DeviceGuard() {
  CUcontext ignored = nullptr;
  if (pushed_) driver().cuCtxPopCurrent(&ignored);
}

}  // namespace onefold::cuda
