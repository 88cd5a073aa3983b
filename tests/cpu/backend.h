// Runs a question through the public calls under hostile conditions: outputs and workspace full of
// NaN, strides of any kind, items in random order on random workers.
//
// Includes question.h and the public headers.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "cpu/cpu.h"
#include "onefold/attention.h"
#include "tests/cpu/question.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define ONEFOLD_TEST_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define ONEFOLD_TEST_SANITIZED 1
#endif
#endif

namespace onefold::test {

// Random cases a test may afford: fewer where everything is many times slower.
constexpr int affordable(int cases) {
#if defined(ONEFOLD_TEST_SANITIZED)
  return cases / 10 + 1;
#else
  return cases;
#endif
}

// A test of one instruction set, ONEFOLD_BACKEND's, is skipped where the processor lacks it.
class Backend : public ::testing::Test {
 protected:
  void SetUp() override {
    try {
      cpu::facts(1);
    } catch (const Error& error) {
      GTEST_SKIP() << error.what();
    }
  }
};

// Runs every index once, in random order, each on a random worker; sometimes on several threads.
class HostileExecutor final : public Executor {
 public:
  HostileExecutor(int workers, std::uint64_t seed) : workers_(workers), random_(seed) {}
  int concurrency() const override { return workers_; }
  void parallel_for(std::int64_t count, Body body, void* context) override {
    std::vector<std::int64_t> order(static_cast<std::size_t>(count));
    std::iota(order.begin(), order.end(), 0);
    for (std::size_t x = order.size(); x > 1; --x) {
      std::swap(order[x - 1], order[random_.bits() % x]);
    }
    if (random_.chance(0.5)) {
      for (const std::int64_t idx : order) body(context, idx, random_.integer(0, workers_ - 1));
      return;
    }
    std::vector<std::thread> threads;
    for (int worker = 0; worker < workers_; ++worker) {
      threads.emplace_back([&, worker] {
        for (std::size_t x = static_cast<std::size_t>(worker); x < order.size();
             x += static_cast<std::size_t>(workers_)) {
          body(context, order[x], worker);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

 private:
  int workers_;
  Random random_;
};

// A workspace full of NaN that ends where it was said to end: what lies behind it is looked at.
inline std::shared_ptr<void> poisoned(std::size_t bytes) {
  constexpr std::size_t kBehind = std::size_t{1} << 16;
  void* p = nullptr;
  if (posix_memalign(&p, 64, bytes + kBehind) != 0) throw std::bad_alloc();
  std::memset(p, 0xFF, bytes + kBehind);
  return {p, [bytes](void* memory) {
            const auto* end = static_cast<const unsigned char*>(memory) + bytes;
            EXPECT_TRUE(std::all_of(end, end + kBehind, [](unsigned char x) { return x == 0xFF; }))
                << "written behind a workspace of " << bytes << " bytes";
            std::free(memory);
          }};
}

// A context for one call, with an executor of its own or onefold's.
struct HostileContext {
  Context context;
  std::optional<HostileExecutor> executor;

  explicit HostileContext(Random& random) {
    context.allocate = poisoned;
    if (random.chance(0.5)) {
      executor.emplace(random.integer(1, 7), random.bits());
      context.executor = &*executor;
    } else {
      set_num_threads(random.integer(1, 3));
    }
  }
};

struct Answer {
  Array out, lse;
};
inline Answer run_forward(const Context& context, const Question& x, Random& random) {
  Answer answer{Array(x.dtype, x.out_shape(), x.write, random),
                Array(lse_dtype(x.dtype), x.lse_shape(), x.write, random)};
  forward(context, x.a, answer.out.tensor(), answer.lse.tensor());
  return answer;
}

// Which gradients are asked for, and whether cotangents are there.
struct Wanted {
  bool dq = true, dk = true, dv = true, dbias = true, dslopes = true, dsinks = true;
  bool dout = true, dlse = true;
};
inline Wanted draw_wanted(Random& random) {
  Wanted w;
  if (random.chance(0.6)) return w;
  for (bool* one : {&w.dq, &w.dk, &w.dv, &w.dbias, &w.dslopes, &w.dsinks}) {
    *one = random.chance(0.6);
  }
  w.dout = random.chance(0.8);
  w.dlse = !w.dout || random.chance(0.6);
  return w;
}

struct Derived {
  std::optional<Array> dq, dk, dv, dbias, dslopes, dsinks;
};
inline Derived run_backward(const Context& context, const Question& x, const Answer& answer,
                            const Wanted& wanted, Random& random) {
  Derived d;
  Gradients g;
  const auto like = [&](bool want, const std::optional<Tensor>& of, std::optional<Array>& array,
                        std::optional<Tensor>& tensor) {
    if (!want || !of) return;
    array.emplace(of->dtype, Shape(of->shape.begin(), of->shape.begin() + of->rank), x.write,
                  random);
    tensor = array->tensor();
  };
  like(wanted.dq, x.a.q, d.dq, g.dq);
  like(wanted.dk, x.a.k, d.dk, g.dk);
  like(wanted.dv, x.a.v, d.dv, g.dv);
  like(wanted.dbias, x.a.bias, d.dbias, g.dbias);
  like(wanted.dslopes, x.a.alibi_slopes, d.dslopes, g.dslopes);
  like(wanted.dsinks, x.a.sinks, d.dsinks, g.dsinks);
  std::optional<Tensor> dout, dlse;
  if (wanted.dout) dout = x.dout.tensor();
  if (wanted.dlse) dlse = x.dlse.tensor();
  backward(context, x.a, answer.out.tensor(), answer.lse.tensor(), dout, dlse, g);
  return d;
}

}  // namespace onefold::test
