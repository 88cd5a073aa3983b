// The cases whose instructions count.cmake has valgrind count: `cases NAME` runs one on the calling
// thread. Only what happens inside counted_call is counted.

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <optional>
#include <vector>

#include "onefold/attention.h"

namespace {

using onefold::Attention;
using onefold::DType;
using onefold::Tensor;

// All items on the calling thread.
class Here : public onefold::Executor {
 public:
  int concurrency() const override { return 1; }
  void parallel_for(std::int64_t count, Body body, void* context) override {
    for (std::int64_t idx = 0; idx < count; ++idx) body(context, idx, 0);
  }
};

struct Case {
  const char* name;
  bool backward;
  DType dtype;
  onefold::Causal causal;
  std::int64_t queries, keys, heads, heads_k, head_dim;
};

// Small, for a multiply-add takes valgrind half a microsecond, yet of several tiles each way.
constexpr Case kCases[] = {
    {"forward", false, DType::kFloat32, onefold::Causal::kNone, 200, 200, 2, 2, 128},
    {"causal_forward", false, DType::kFloat32, onefold::Causal::kBottomRight, 300, 300, 4, 2, 64},
    {"bfloat16_forward", false, DType::kBFloat16, onefold::Causal::kNone, 200, 200, 2, 2, 64},
    {"backward", true, DType::kFloat32, onefold::Causal::kNone, 150, 200, 2, 2, 64},
    {"causal_backward", true, DType::kBFloat16, onefold::Causal::kBottomRight, 150, 150, 2, 1, 128},
    {"one_position", false, DType::kFloat32, onefold::Causal::kBottomRight, 1, 1, 8, 8, 64},
    {"decode", false, DType::kFloat32, onefold::Causal::kNone, 1, 2100, 8, 2, 128},
    {"bfloat16_decode", false, DType::kBFloat16, onefold::Causal::kNone, 1, 2100, 8, 2, 128},
};

// A tensor with memory of its own, filled with numbers of size one.
class Numbers {
 public:
  Numbers(DType dtype, std::initializer_list<std::int64_t> shape) {
    tensor_ = Tensor::packed(nullptr, dtype, shape);
    const auto count = static_cast<std::size_t>(tensor_.elements());
    const auto size = static_cast<std::size_t>(onefold::size_bytes(dtype));
    memory_.resize(count * size);
    tensor_.data = memory_.data();
    std::uint32_t state = 1;
    for (std::size_t n = 0; n < count; ++n) {
      state = state * 1664525u + 1013904223u;
      const float number = static_cast<float>(state >> 8) * 0x1p-23f - 1.0f;
      char bytes[sizeof number];
      std::memcpy(bytes, &number, sizeof number);
      // The upper half of a float is a bfloat16.
      std::memcpy(memory_.data() + n * size, bytes + sizeof number - size, size);
    }
  }
  const Tensor& tensor() const { return tensor_; }

 private:
  std::vector<char> memory_;
  Tensor tensor_;
};

// What is counted, by this name. The empty statement keeps the call from becoming a jump.
extern "C" [[gnu::noinline]] void counted_call(const std::function<void()>& call) {
  call();
  asm volatile("");
}

void run(const Case& c) {
  const auto rows = [&c](std::int64_t length, std::int64_t heads) {
    return Numbers(c.dtype, {1, length, heads, c.head_dim});
  };
  const Numbers q = rows(c.queries, c.heads), k = rows(c.keys, c.heads_k),
                v = rows(c.keys, c.heads_k), out = rows(c.queries, c.heads),
                dq = rows(c.queries, c.heads), dk = rows(c.keys, c.heads_k),
                dv = rows(c.keys, c.heads_k), dout = rows(c.queries, c.heads);
  const Numbers lse(DType::kFloat32, {1, c.heads, c.queries});
  Attention attention;
  attention.q = q.tensor();
  attention.k = k.tensor();
  attention.v = v.tensor();
  attention.causal = c.causal;
  Here executor;
  onefold::Context context;
  context.executor = &executor;
  onefold::plan(context, attention, onefold::Direction::kForward);  // asks about the processor
  if (!c.backward) {
    counted_call([&] { onefold::forward(context, attention, out.tensor(), lse.tensor()); });
    return;
  }
  onefold::Gradients gradients;
  gradients.dq = dq.tensor();
  gradients.dk = dk.tensor();
  gradients.dv = dv.tensor();
  counted_call([&] {  // an out and lse of no forward take as many instructions
    onefold::backward(context, attention, out.tensor(), lse.tensor(), dout.tensor(), std::nullopt,
                      gradients);
  });
}

}  // namespace

int main(int argc, char** argv) {
  for (const Case& c : kCases) {
    if (argc == 1) std::printf("%s\n", c.name);
    if (argc != 2 || std::strcmp(argv[1], c.name) != 0) continue;
    run(c);
    std::printf("%s", onefold::info().c_str());
    return 0;
  }
  return argc == 1 ? 0 : 2;
}
