// Declarations of our own against cuda.h where there is one, what is said where there is no driver,
// and kernels that really run where there is a device.

#include "cuda/driver.h"

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "cuda/device.h"
#include "cuda/launch.h"
#include "tests/jit/scratch.h"

#if __has_include(<cuda.h>)
#include <cuda.h>
#endif

namespace onefold::cuda {
namespace {

using namespace onefold::test;

#if __has_include(<cuda.h>)
TEST(Driver, DeclaresWhatCudaHDeclares) {
  EXPECT_EQ(kSuccess, CUDA_SUCCESS);
  EXPECT_EQ(kImplicitCapture, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
  EXPECT_EQ(kAttributeMaxSharedOptin, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
  EXPECT_EQ(kAttributeSharedPerSm, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR);
  EXPECT_EQ(kAttributeRegistersPerSm, CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR);
  EXPECT_EQ(kAttributeThreadsPerSm, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR);
  EXPECT_EQ(kAttributeNumSms, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
  EXPECT_EQ(kAttributeClockKhz, CU_DEVICE_ATTRIBUTE_CLOCK_RATE);
  EXPECT_EQ(kAttributeL2Bytes, CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE);
  EXPECT_EQ(kAttributeMajor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
  EXPECT_EQ(kAttributeMinor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
  EXPECT_EQ(kFunctionMaxDynamicShared, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);
  EXPECT_EQ(kLaunchClusterDimension, CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION);
  EXPECT_EQ(kLaunchProgrammaticSerialization,
            CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION);
  EXPECT_EQ(kCaptureNone, CU_STREAM_CAPTURE_STATUS_NONE);
  EXPECT_EQ(kCaptureModeRelaxed, CU_STREAM_CAPTURE_MODE_RELAXED);

  using OurConfig = onefold::cuda::CUlaunchConfig;
  using OurAttribute = onefold::cuda::CUlaunchAttribute;
  using TheirConfig = ::CUlaunchConfig;
  using TheirAttribute = ::CUlaunchAttribute;
  EXPECT_EQ(sizeof(OurAttribute), sizeof(TheirAttribute));
  EXPECT_EQ(offsetof(OurAttribute, value), offsetof(TheirAttribute, value));
  EXPECT_EQ(sizeof(OurConfig), sizeof(TheirConfig));
  EXPECT_EQ(offsetof(OurConfig, block_x), offsetof(TheirConfig, blockDimX));
  EXPECT_EQ(offsetof(OurConfig, shared_bytes), offsetof(TheirConfig, sharedMemBytes));
  EXPECT_EQ(offsetof(OurConfig, stream), offsetof(TheirConfig, hStream));
  EXPECT_EQ(offsetof(OurConfig, attributes), offsetof(TheirConfig, attrs));
  EXPECT_EQ(offsetof(OurConfig, num_attributes), offsetof(TheirConfig, numAttrs));
}
#endif

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

TEST(Driver, SaysWhyItCannotBeUsedWhereItCannot) {
  std::string why_not;
  if (find_driver(&why_not) != nullptr) GTEST_SKIP() << "it can be used here";
  EXPECT_FALSE(why_not.empty());
  EXPECT_EQ(device_count(), 0);
  EXPECT_EQ(error_of([] { driver(); }), "CUDA cannot be used: " + why_not);
  EXPECT_EQ(error_of([] { device_facts(0); }), "CUDA cannot be used: " + why_not);
  EXPECT_EQ(error_of([] { allocate(16, 0, nullptr); }), "CUDA cannot be used: " + why_not);
}

// With a device, and NVRTC as in the tests of the compiler.
class Device : public CompilerTest {
 protected:
  void SetUp() override {
    std::string why_not;
    if (find_driver(&why_not) == nullptr) GTEST_SKIP() << why_not;
    CompilerTest::SetUp();
  }

  static jit::Program program(const std::string& name, const std::string& text) {
    jit::Program p;
    p.name = name;
    p.source = text;
    p.entry = "entry";
    p.arch = device_facts(0).arch;
    return p;
  }

  // Device memory, and its content once the stream is done.
  static std::vector<int> read(const void* memory, std::size_t count) {
    const DeviceGuard guard(0);
    std::vector<int> host(count);
    check(
        driver().cuMemcpyAsync(reinterpret_cast<CUdeviceptr>(host.data()),
                               reinterpret_cast<CUdeviceptr>(memory), count * sizeof(int), nullptr),
        "cuMemcpyAsync");
    check(driver().cuStreamSynchronize(nullptr), "cuStreamSynchronize");
    return host;
  }
};

constexpr char kWriteText[] = R"(
extern "C" __global__ void entry(int* out, long long n, int value) {
  const long long at = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (at < n) out[at] = value + (int)at;
})";

TEST_F(Device, TellsItsFacts) {
  const DeviceFacts& facts = device_facts(0);
  EXPECT_FALSE(facts.name.empty());
  EXPECT_GE(facts.arch, 750);
  EXPECT_GT(facts.num_sms, 0);
  EXPECT_GE(facts.shared_bytes, 48u << 10);
  EXPECT_GE(facts.shared_bytes_per_sm, facts.shared_bytes);
  EXPECT_GE(facts.registers_per_sm, 65536);
  EXPECT_GE(facts.threads_per_sm, 1024);
  EXPECT_GT(facts.clock_khz, 0);
  EXPECT_NE(error_of([] { device_facts(device_count()); }).find("device index is "),
            std::string::npos);
  EXPECT_NE(error_of([] { device_facts(-1); }).find("device index is -1"), std::string::npos);
}

TEST_F(Device, RunsAKernelWithItsArguments) {
  constexpr std::int64_t kCount = 1000;
  const auto memory = allocate(kCount * sizeof(int), 0, nullptr);
  fill(memory.get(), 0xff, kCount * sizeof(int), 0, nullptr);
  EXPECT_EQ(read(memory.get(), kCount), std::vector<int>(kCount, -1));

  const Kernel& kernel = load(program("write", kWriteText), 0, nullptr);
  launch(kernel, {.grid = {8}, .block = {128}}, nullptr, memory.get(), kCount - 1, 7);
  const std::vector<int> got = read(memory.get(), kCount);
  for (int i = 0; i < kCount - 1; ++i) ASSERT_EQ(got[i], 7 + i);
  EXPECT_EQ(got[kCount - 1], -1) << "beyond n";
}

TEST_F(Device, RunsMoreBlocksThanTwoBytesCanCount) {
  constexpr std::int64_t kCount = 70000 * 32;
  const auto memory = allocate(kCount * sizeof(int), 0, nullptr);
  const Kernel& kernel = load(program("write", kWriteText), 0, nullptr);
  launch(kernel, {.grid = {70000}, .block = {32}}, nullptr, memory.get(), kCount, 0);
  EXPECT_EQ(read(memory.get(), kCount).back(), kCount - 1);
}

TEST_F(Device, LetsAKernelUseAllOfTheSharedMemory) {
  const Kernel& kernel = load(program("shared", R"(
extern "C" __global__ void entry(int* out, int bytes) {
  extern __shared__ int s[];
  __shared__ int fixed[8];
  const int last = bytes / 4 - 1;
  s[last] = bytes;
  fixed[threadIdx.x & 7] = threadIdx.x;
  __syncthreads();
  out[threadIdx.x] = s[last] + fixed[0];
})"),
                              0, nullptr);
  EXPECT_EQ(kernel.binary->facts.static_shared_bytes, 32);
  const auto memory = allocate(sizeof(int), 0, nullptr);
  const int bytes = static_cast<int>(device_facts(0).shared_bytes) - 32;
  launch(kernel, {.block = {1}, .shared_bytes = static_cast<std::size_t>(bytes)}, nullptr,
         memory.get(), bytes);
  EXPECT_EQ(read(memory.get(), 1)[0], bytes);

  const std::string error = error_of([&] {
    launch(kernel, {.block = {1}, .shared_bytes = static_cast<std::size_t>(bytes) + 4}, nullptr,
           memory.get(), bytes);
  });
  EXPECT_NE(error.find("launch of program shared, grid 1 x 1 x 1, block 1 x 1 x 1"),
            std::string::npos)
      << error;
  EXPECT_NE(error.find("CUDA_ERROR_INVALID_VALUE"), std::string::npos) << error;
}

TEST_F(Device, LoadsAKernelOnceForAnyNumberOfThreads) {
  const jit::Program p = program("loaded-once", kWriteText);
  std::vector<const Kernel*> got(8);
  std::vector<std::thread> threads;
  for (auto& slot : got) threads.emplace_back([&] { slot = &load(p, 0, nullptr); });
  for (std::thread& thread : threads) thread.join();
  for (const Kernel* kernel : got) EXPECT_EQ(kernel, got[0]);
}

TEST_F(Device, LeavesCurrentWhatWasCurrent) {
  CUcontext before = nullptr, inside = nullptr, after = nullptr;
  std::thread([&] {
    driver().cuCtxGetCurrent(&before);
    {
      const DeviceGuard guard(0);
      const DeviceGuard again(0);
      driver().cuCtxGetCurrent(&inside);
    }
    driver().cuCtxGetCurrent(&after);
  }).join();
  EXPECT_EQ(before, nullptr) << "a new thread has no context";
  EXPECT_NE(inside, nullptr);
  EXPECT_EQ(after, before);
}

TEST_F(Device, GuardsGoFromOneDeviceToAnotherAndBack) {
  if (device_count() < 2) GTEST_SKIP() << "needs two devices";
  CUcontext first = nullptr, second = nullptr, back = nullptr;
  const DeviceGuard outer(0);
  driver().cuCtxGetCurrent(&first);
  {
    const DeviceGuard inner(1);
    driver().cuCtxGetCurrent(&second);
  }
  driver().cuCtxGetCurrent(&back);
  EXPECT_NE(first, second);
  EXPECT_EQ(first, back);
}

// A stream of its own that captures a graph until end().
class Capture {
 public:
  Capture() {
    check(function<int(CUstream*, unsigned)>("cuStreamCreate")(&stream_, 0), "cuStreamCreate");
    check(function<int(CUstream, int)>("cuStreamBeginCapture_v2")(stream_, 0), "begin of capture");
  }
  // The number of nodes that were captured, -1 when the capture was spoiled.
  int end() {
    void* graph = nullptr;
    if (function<int(CUstream, void**)>("cuStreamEndCapture")(stream_, &graph) != 0) return -1;
    std::size_t count = 0;
    function<int(void*, void**, std::size_t*)>("cuGraphGetNodes")(graph, nullptr, &count);
    function<int(void*)>("cuGraphDestroy")(graph);
    return static_cast<int>(count);
  }
  ~Capture() { function<int(CUstream)>("cuStreamDestroy_v2")(stream_); }
  CUstream stream() const { return stream_; }

 private:
  template <class Signature>
  static Signature* function(const char* name) {
    return reinterpret_cast<Signature*>(dlsym(dlopen("libcuda.so.1", RTLD_NOW), name));
  }
  CUstream stream_ = nullptr;
};

TEST_F(Device, NeitherLoadsNorAllocatesInsideACapturedGraphAndSaysSo) {
  const DeviceGuard guard(0);
  const Kernel& ready = load(program("write", kWriteText), 0, nullptr);
  const jit::Program unready = program("unready", std::string(kWriteText) + "// not ready\n");
  const auto memory = allocate(64, 0, nullptr);
  EXPECT_FALSE(capturing(0, nullptr));
  Capture capture;
  CUstream stream = capture.stream();
  EXPECT_TRUE(capturing(0, stream));
  EXPECT_EQ(&load(program("write", kWriteText), 0, stream), &ready);
  launch(ready, {.block = {16}}, stream, memory.get(), std::int64_t{16}, 1);
  fill(memory.get(), 0, 64, 0, stream);
  EXPECT_NE(error_of([&] { load(unready, 0, stream); }).find("program unready is not ready"),
            std::string::npos);
  EXPECT_NE(error_of([&] { allocate(16, 0, stream); }).find("while a CUDA graph is captured"),
            std::string::npos);
  EXPECT_FALSE(jit::in_memory(unready)) << "nor is anything compiled";
  // Another thread is free to load meanwhile, and the capture goes on.
  std::thread([&] { EXPECT_NO_THROW(load(jit::get(program("meanwhile", kWriteText)), 0)); }).join();
  launch(ready, {.block = {16}}, stream, memory.get(), std::int64_t{16}, 2);
  EXPECT_EQ(capture.end(), 3);
  EXPECT_NO_THROW(load(unready, 0, nullptr));
}

TEST_F(Device, RefusesAProgramForAnotherChipInTheDriversWords) {
  jit::Program p = program("elsewhere", kWriteText);
  p.arch = p.arch >= 1000 ? 800 : 1200;
  const std::string error = error_of([&] { load(p, 0, nullptr); });
  EXPECT_NE(error.find("cuModuleLoadData of program elsewhere"), std::string::npos) << error;
  EXPECT_NE(error.find("CUDA_ERROR_NO_BINARY_FOR_GPU"), std::string::npos) << error;
}

}  // namespace
}  // namespace onefold::cuda
