#include "cuda/launch.h"

#include <mutex>
#include <string>
#include <unordered_map>

namespace onefold::cuda {
namespace {

std::mutex kernels_mutex;

// By device and digest, and what is loaded already by device and identity. Modules stay until the
// process ends.
std::unordered_map<std::string, std::shared_ptr<const Kernel>>& kernels() {
  static auto& table = *new std::unordered_map<std::string, std::shared_ptr<const Kernel>>;
  return table;
}

std::string kernel_id(int device, const std::string& of) {
  return std::to_string(device) + "/" + of;
}

const Kernel* find(const std::string& id) {
  const std::lock_guard lock(kernels_mutex);
  const auto at = kernels().find(id);
  return at == kernels().end() ? nullptr : at->second.get();
}

CUstream handle_of(void* stream) { return static_cast<CUstream>(stream); }

// Lets this thread load modules while another one captures a graph: that is none of its business.
class RelaxedCapture {
 public:
  RelaxedCapture() { driver().cuThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { driver().cuThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  int mode_ = kCaptureModeRelaxed;
};

CUfunction load_function(const jit::Binary& binary, int device) {
  const Driver& d = driver();
  const DeviceGuard guard(device);
  const RelaxedCapture relaxed;
  const std::string where = concat(" of program ", binary.name, " (", binary.target, ") on device ",
                                   device, ", ", device_facts(device).name);
  CUmodule module = nullptr;
  CUfunction function = nullptr;
  CUresult result = d.cuModuleLoadData(&module, binary.cubin.data());
  if (result != kSuccess) fail(result, "cuModuleLoadData" + where);
  result = d.cuModuleGetFunction(&function, module, binary.entry.c_str());
  if (result != kSuccess) fail(result, "cuModuleGetFunction " + binary.entry + where);
  const auto left = static_cast<int>(device_facts(device).shared_bytes) -
                    static_cast<int>(binary.facts.static_shared_bytes);
  result = d.cuFuncSetAttribute(function, kFunctionMaxDynamicShared, left);
  if (result != kSuccess) fail(result, "cuFuncSetAttribute" + where);
  return function;
}

}  // namespace

const Kernel& load(const jit::Binary& binary, int device) {
  const std::string id = kernel_id(device, binary.digest);
  if (const Kernel* kernel = find(id)) return *kernel;
  // Two threads may load the same module; the second copy is dropped from sight and harmless.
  auto kernel = std::make_shared<Kernel>(Kernel{load_function(binary, device), &binary, device});
  const std::lock_guard lock(kernels_mutex);
  return *kernels().try_emplace(id, std::move(kernel)).first->second;
}

const Kernel& load(const jit::Program& program, int device, void* stream) {
  const std::string id = kernel_id(device, jit::identity(program));
  if (const Kernel* kernel = find(id)) return *kernel;
  if (capturing(device, stream)) {
    throw Error(ErrorKind::kRuntime,
                concat("program ", program.name, " is not ready on device ", device,
                       " while a CUDA graph is captured, and nothing is compiled or loaded "
                       "inside: warm up before the capture (onefold::warm_up, in Python "
                       "onefold.warmup), or make the same call once"));
  }
  const jit::Binary& binary = jit::get(program);
  load(binary, device);
  const std::lock_guard lock(kernels_mutex);
  return *(kernels()[id] = kernels().at(kernel_id(device, binary.digest)));
}

void launch_raw(const Kernel& kernel, const LaunchShape& shape, void* stream, void** arguments) {
  std::array<CUlaunchAttribute, 2> attributes{};
  unsigned num_attributes = 0;
  if (shape.cluster.x * shape.cluster.y * shape.cluster.z > 1) {
    CUlaunchAttribute& attribute = attributes[num_attributes++];
    attribute.id = kLaunchClusterDimension;
    attribute.value.cluster = {shape.cluster.x, shape.cluster.y, shape.cluster.z};
  }
  if (shape.overlap_previous) {
    CUlaunchAttribute& attribute = attributes[num_attributes++];
    attribute.id = kLaunchProgrammaticSerialization;
    attribute.value.flag = 1;
  }
  const CUlaunchConfig config{shape.grid.x,
                              shape.grid.y,
                              shape.grid.z,
                              shape.block.x,
                              shape.block.y,
                              shape.block.z,
                              static_cast<unsigned>(shape.shared_bytes),
                              handle_of(stream),
                              attributes.data(),
                              num_attributes};
  const DeviceGuard guard(kernel.device);
  const CUresult result = driver().cuLaunchKernelEx(&config, kernel.function, arguments, nullptr);
  if (result == kSuccess) return;
  fail(result, concat("launch of program ", kernel.binary->name, ", grid ", shape.grid.x, " x ",
                      shape.grid.y, " x ", shape.grid.z, ", block ", shape.block.x, " x ",
                      shape.block.y, " x ", shape.block.z, ", ", shape.shared_bytes,
                      " bytes of shared memory, on device ", kernel.device));
}

bool capturing(int device, void* stream) {
  const DeviceGuard guard(device);
  int status = kCaptureNone;
  const CUresult result = driver().cuStreamIsCapturing(handle_of(stream), &status);
  // The legacy default stream may not even be asked while another stream captures.
  if (result == kImplicitCapture) return true;
  check(result, "cuStreamIsCapturing");
  return status != kCaptureNone;
}

void fill(void* data, unsigned char value, std::size_t bytes, int device, void* stream) {
  if (bytes == 0) return;
  const DeviceGuard guard(device);
  const auto at = reinterpret_cast<CUdeviceptr>(data);
  check(driver().cuMemsetD8Async(at, value, bytes, handle_of(stream)), "cuMemsetD8Async");
}

std::shared_ptr<void> allocate(std::size_t bytes, int device, void* stream) {
  if (bytes == 0) return nullptr;
  if (capturing(device, stream)) {
    throw Error(ErrorKind::kRuntime,
                concat("a workspace of ", bytes,
                       " bytes is needed while a CUDA graph is captured: "
                       "bring Context::allocate, nothing is allocated inside"));
  }
  const DeviceGuard guard(device);
  CUdeviceptr memory = 0;
  const CUresult result = driver().cuMemAllocAsync(&memory, bytes, handle_of(stream));
  if (result != kSuccess) fail(result, concat("cuMemAllocAsync of ", bytes, " bytes"));
  return {reinterpret_cast<void*>(memory), [device, stream](void* data) {
            const DeviceGuard there(device);
            driver().cuMemFreeAsync(reinterpret_cast<CUdeviceptr>(data), handle_of(stream));
          }};
}

}  // namespace onefold::cuda
