// Where a call runs and what it may use: the plan, executors, the workspace, threads. None of them
// changes an answer.

#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "onefold/attention.h"
#include "tests/cpp_api/numbers.h"

namespace onefold::test {
namespace {

Call some_call() {
  Call c(2, 200, 150, 4, 2, 32);
  c.a.causal = Causal::kBottomRight;
  return c;
}

// Runs everything on the calling thread, from the last index to the first, and counts.
class Counting : public Executor {
 public:
  explicit Counting(int workers = 1) : workers_(workers) {}
  int concurrency() const override { return workers_; }
  void parallel_for(std::int64_t count, Body body, void* context) override {
    counts.push_back(count);
    for (std::int64_t idx = count - 1; idx >= 0; --idx) {
      body(context, idx, static_cast<int>(idx % workers_));
    }
  }
  std::vector<std::int64_t> counts;

 private:
  int workers_;
};

// ---- executors ----

TEST(ContextOfACall, a_program_s_own_executor_does_all_the_work) {
  Call own = some_call(), others = some_call();
  own.run();
  for (const int workers : {1, 3}) {
    Counting executor(workers);
    Context context;
    context.executor = &executor;
    forward(context, others.a, others.out, others.lse);
    ASSERT_FALSE(executor.counts.empty());
    EXPECT_EQ(executor.counts[0], plan(context, others.a, Direction::kForward).work_items);
    executor.counts.clear();
    backward(context, others.a, others.out, others.lse, others.dout, others.dlse,
             others.gradients());
    ASSERT_FALSE(executor.counts.empty());
    EXPECT_EQ(executor.counts[0], plan(context, others.a, Direction::kBackward).work_items);
    expect_same_bits(others, own);
  }
}

// A host's threads: started for each job, as many as it likes, none of them onefold's.
class Lending : public Executor {
 public:
  explicit Lending(int workers) : workers_(workers) {}
  int concurrency() const override { return workers_; }
  void parallel_for(std::int64_t count, Body body, void* context) override {
    std::atomic<std::int64_t> next{0};
    std::vector<std::thread> threads;
    for (int worker = 0; worker < workers_; ++worker) {
      threads.emplace_back([&, worker] {
        for (std::int64_t idx = next++; idx < count; idx = next++) {
          body(context, idx, worker);
          ++done;
          std::this_thread::yield();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  std::atomic<std::int64_t> done{0};

 private:
  int workers_;
};

TEST(ContextOfACall, a_host_may_lend_its_threads) {
  Call own = some_call(), lent = some_call(), decode(1, 1, 5000, 8, 2, 32),
       lent_decode(1, 1, 5000, 8, 2, 32);
  own.run();
  forward({}, decode.a, decode.out, decode.lse);
  for (const int workers : {2, 5}) {
    Lending executor(workers);
    Context context;
    context.executor = &executor;
    lent.run(context);
    expect_same_bits(lent, own);
    forward(context, lent_decode.a, lent_decode.out, lent_decode.lse);
    expect_same_bits(lent_decode.out, decode.out);
    const std::int64_t planned = plan(context, lent.a, Direction::kForward).work_items +
                                 plan(context, lent.a, Direction::kBackward).work_items +
                                 plan(context, lent_decode.a, Direction::kForward).work_items;
    EXPECT_GE(executor.done.load(), planned);  // and the merging of what was split
  }
}

TEST(ContextOfACall, an_executor_without_workers_is_refused) {
  Counting executor(0);
  Context context;
  context.executor = &executor;
  Call c = some_call();
  try {
    forward(context, c.a, c.out, c.lse);
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kInvalidArgument);
    EXPECT_NE(std::string(error.what()).find("Context::executor has concurrency 0"),
              std::string::npos)
        << error.what();
  }
}

// The inner call must not take the workspace of the outer one, where states of stretches of keys
// wait to be merged.
TEST(ContextOfACall, an_item_may_make_a_call_of_its_own) {
  struct Nested : Counting {
    Call inner{1, 2, 4000, 4, 2, 32};
    void parallel_for(std::int64_t count, Body body, void* context) override {
      for (std::int64_t idx = 0; idx < count; ++idx) {
        body(context, idx, 0);
        forward({}, inner.a, inner.out, inner.lse);
      }
    }
  };
  Call own(1, 2, 4000, 4, 2, 32), nested(1, 2, 4000, 4, 2, 32);
  nested.q.wave(7), own.q.wave(7);  // another question than the inner one
  forward({}, own.a, own.out, own.lse);
  Nested executor;
  Context context;
  context.executor = &executor;
  ASSERT_GT(plan(context, nested.a, Direction::kForward).work_items, 2) << "nothing to merge";
  forward(context, nested.a, nested.out, nested.lse);
  expect_same_bits(nested.out, own.out);
  expect_same_bits(nested.lse, own.lse);
}

TEST(ContextOfACall, several_threads_may_call_at_once) {
  Call own = some_call();
  own.run();
  std::vector<std::thread> threads;
  for (int n = 0; n < 4; ++n) {
    threads.emplace_back([&own] {
      for (int again = 0; again < 3; ++again) {
        Call c = some_call();
        c.run();
        expect_same_bits(c, own);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// ---- the workspace ----

// Hands out what was asked for and not a byte more, full of NaN, and keeps count.
struct Ledger {
  std::vector<std::size_t> asked;
  int alive = 0;

  Context context() {
    Context c;
    c.allocate = [this](std::size_t bytes) {
      void* p = nullptr;
      if (posix_memalign(&p, 64, bytes) != 0) throw std::bad_alloc();
      std::memset(p, 0xFF, bytes);
      asked.push_back(bytes);
      ++alive;
      return std::shared_ptr<void>(p, [this](void* memory) {
        --alive;
        std::free(memory);
      });
    };
    return c;
  }
};

TEST(ContextOfACall, the_workspace_is_asked_for_once_is_what_the_plan_said_and_is_returned) {
  Call own = some_call(), c = some_call();
  own.run();
  Ledger ledger;
  Context context = ledger.context();
  for (const int workers : {1, 2, 5}) {
    Counting executor(workers);
    context.executor = &executor;
    ledger.asked.clear();
    c.run(context);
    const std::vector<std::size_t> planned = {
        plan(context, c.a, Direction::kForward).workspace_bytes,
        plan(context, c.a, Direction::kBackward).workspace_bytes};
    EXPECT_EQ(ledger.asked, planned) << workers << " workers";
    EXPECT_GT(planned[0], 0u);
    EXPECT_EQ(ledger.alive, 0);
    expect_same_bits(c, own);
  }
}

TEST(ContextOfACall, an_allocator_that_gives_nothing_or_askew_memory_is_named) {
  Call c = some_call();
  alignas(64) static std::byte memory[64];
  Context context;
  const auto message = [&] {
    try {
      forward(context, c.a, c.out, c.lse);
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kInvalidArgument);
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  context.allocate = [](std::size_t) { return std::shared_ptr<void>(); };
  EXPECT_NE(message().find("Context::allocate gave nothing"), std::string::npos) << message();
  context.allocate = [](std::size_t) { return std::shared_ptr<void>(memory + 1, [](void*) {}); };
  EXPECT_NE(message().find("not 64-byte aligned"), std::string::npos) << message();
}

// Memory may grow with the lengths, and never with their product.
TEST(ContextOfACall, the_workspace_does_not_grow_with_queries_times_keys) {
  Counting executor(1);
  Context context;
  context.executor = &executor;
  const auto bytes = [&](std::int64_t length, Direction direction) {
    Call c(1, 1, 1, 1, 1, 16);
    for (Tensor* t : {&c.a.q, &c.a.k, &c.a.v}) t->shape[1] = length;  // planned, never run
    return plan(context, c.a, direction).workspace_bytes;
  };
  for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
    EXPECT_LE(bytes(1 << 17, direction), 8 * bytes(1 << 14, direction));
  }
}

// ---- the plan ----

TEST(ContextOfACall, a_plan_names_its_choices_and_is_the_same_twice) {
  const Call c = some_call();
  for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
    const Plan one = plan({}, c.a, direction), two = plan({}, c.a, direction);
    EXPECT_EQ(one.backend, "cpu");
    EXPECT_FALSE(one.kernel.empty());
    EXPECT_EQ(one.kernel.find('\n'), std::string::npos);
    EXPECT_FALSE(one.why.empty());
    EXPECT_EQ(one.kernel, two.kernel);
    EXPECT_EQ(one.why, two.why);
    EXPECT_EQ(one.work_items, two.work_items);
    EXPECT_EQ(one.workspace_bytes, two.workspace_bytes);
  }
}

TEST(ContextOfACall, a_plan_of_nothing_has_no_work) {
  const Call c(0, 3, 4, 2, 1, 8);
  EXPECT_EQ(plan({}, c.a, Direction::kForward).work_items, 0);
  EXPECT_EQ(plan({}, c.a, Direction::kBackward).work_items, 0);
}

// ---- threads ----

TEST(ContextOfACall, the_number_of_threads_is_kept_and_changes_no_bit) {
  Call own = some_call();
  set_num_threads(1);
  own.run();
  for (const int threads : {2, 3, 7}) {
    set_num_threads(threads);
    EXPECT_EQ(num_threads(), threads);
    Call c = some_call();
    c.run();
    expect_same_bits(c, own);
  }
  set_num_threads(0);
  EXPECT_GE(num_threads(), 1);
  EXPECT_LE(num_threads(), static_cast<int>(std::thread::hardware_concurrency()));
  for (const int bad : {-1, 1 << 20}) {
    try {
      set_num_threads(bad);
      ADD_FAILURE() << bad << " accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kInvalidArgument);
      EXPECT_EQ(std::string(error.what()).find(concat("count is ", bad)), 0u);
    }
  }
}

TEST(ContextOfACall, info_says_what_runs_here) {
  set_num_threads(3);
  const std::string text = info();
  EXPECT_NE(text.find("onefold "), std::string::npos) << text;
  EXPECT_NE(text.find("3 threads"), std::string::npos) << text;
  EXPECT_NE(text.find("instruction set "), std::string::npos) << text;
  set_num_threads(0);
}

}  // namespace
}  // namespace onefold::test
