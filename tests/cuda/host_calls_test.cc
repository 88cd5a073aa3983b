// What a call asks of the CUDA driver once its kernels are loaded, counted by a driver without a
// device: what the host spends there is spent in every call. Memory below is never touched.

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "onefold/attention.h"
#include "tests/jit/scratch.h"

// In libcuda.so.1, to which this program is linked.
extern "C" std::map<std::string, int>* stub_counts();

namespace onefold::cuda {
namespace {

using Counts = std::map<std::string, int>;

constexpr std::int64_t kBatch = 2, kLength = 64, kHeads = 4, kDim = 64;

void* address(int tensor) {
  return reinterpret_cast<void*>(std::uintptr_t{1} << 40 | tensor << 24);
}

Tensor on_device(int tensor, DType dtype, std::initializer_list<std::int64_t> shape) {
  Tensor t = Tensor::packed(address(tensor), dtype, shape);
  t.device = {DeviceType::kCuda, 0};
  return t;
}
Tensor rows(int tensor) {
  return on_device(tensor, DType::kBFloat16, {kBatch, kLength, kHeads, kDim});
}

class HostCalls : public test::CompilerTest {
 protected:
  Context context;
  Attention question;
  Tensor out = rows(4), lse = on_device(5, DType::kFloat32, {kBatch, kHeads, kLength});

  HostCalls() {
    context.device = {DeviceType::kCuda, 0};
    context.allocate = [](std::size_t) { return std::shared_ptr<void>(address(6), [](void*) {}); };
    question.q = rows(1);
    question.k = rows(2);
    question.v = rows(3);
    question.causal = Causal::kBottomRight;
  }

  // Of the second of two calls.
  static Counts counts_of(const std::function<void()>& call) {
    call();
    stub_counts()->clear();
    call();
    return *stub_counts();
  }
};

TEST_F(HostCalls, OfAForwardAreOneLaunchAndALookAtTheContext) {
  const Counts counts = counts_of([&] { forward(context, question, out, lse); });
  EXPECT_EQ(counts, (Counts{{"cuCtxGetCurrent", 1}, {"cuLaunchKernelEx", 1}}));
}

TEST_F(HostCalls, OfABackwardAreItsThreeLaunches) {
  Gradients gradients;
  gradients.dq = rows(7);
  gradients.dk = rows(8);
  gradients.dv = rows(9);
  const Counts counts =
      counts_of([&] { backward(context, question, out, lse, rows(10), std::nullopt, gradients); });
  EXPECT_EQ(counts, (Counts{{"cuCtxGetCurrent", 3}, {"cuLaunchKernelEx", 3}}));
}

TEST_F(HostCalls, WithAMaskAreOneLaunchMore) {
  question.mask = on_device(11, DType::kBool, {kBatch, 1, kLength, kLength});
  const Counts counts = counts_of([&] { forward(context, question, out, lse); });
  EXPECT_EQ(counts, (Counts{{"cuCtxGetCurrent", 2}, {"cuLaunchKernelEx", 2}}));
}

}  // namespace
}  // namespace onefold::cuda
