// onefold's own threads: every index once, one worker number at a time, errors to the caller, and
// nobody waits for what cannot come: nested calls, callers at once, resizing, fork.

#include "cpu/thread_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "onefold/error.h"

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
#endif

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define ONEFOLD_TEST_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define ONEFOLD_TEST_SANITIZED 1
#endif
#endif
#if defined(__SANITIZE_THREAD__)
#define ONEFOLD_TEST_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define ONEFOLD_TEST_TSAN 1
#endif
#endif

namespace onefold::test {
namespace {

// parallel_for with any callable.
template <class Body>
void run(Executor& executor, std::int64_t count, Body&& body) {
  executor.parallel_for(
      count,
      [](void* context, std::int64_t idx, int worker) {
        (*static_cast<std::remove_reference_t<Body>*>(context))(idx, worker);
      },
      &body);
}

class ThreadPool : public ::testing::Test {
 protected:
  void TearDown() override { cpu::set_pool_threads(0); }
};

std::shared_ptr<Executor> pool_of(int threads) {
  cpu::set_pool_threads(threads);
  return cpu::default_pool();
}

// Runs `count` items and checks the whole promise of Executor.
void expect_promise_kept(Executor& executor, std::int64_t count) {
  const auto size = static_cast<std::size_t>(count);
  std::vector<std::atomic<int>> times(size);
  std::vector<std::atomic<bool>> busy(static_cast<std::size_t>(executor.concurrency()));
  std::atomic<int> faults{0};
  run(executor, count, [&](std::int64_t idx, int worker) {
    if (worker < 0 || worker >= executor.concurrency() || idx < 0 || idx >= count) {
      ++faults;
      return;
    }
    if (busy[static_cast<std::size_t>(worker)].exchange(true)) ++faults;  // shared at once
    ++times[static_cast<std::size_t>(idx)];
    if (idx % 7 == 0) std::this_thread::yield();
    busy[static_cast<std::size_t>(worker)] = false;
  });
  EXPECT_EQ(faults.load(), 0) << "a worker shared, or a number out of range";
  std::int64_t done = 0;
  for (const std::atomic<int>& n : times) done += n.load() == 1;
  EXPECT_EQ(done, count) << "items done exactly once";
}

TEST_F(ThreadPool, every_item_is_done_once_and_no_two_at_once_share_a_worker) {
  for (const int threads : {1, 2, 3, 8}) {
    const auto pool = pool_of(threads);
    ASSERT_EQ(pool->concurrency(), threads);
    ASSERT_EQ(cpu::pool_threads(), threads);
    for (const std::int64_t count : {0, 1, 2, 7, 8, 9, 1000}) {
      SCOPED_TRACE(concat(threads, " threads, ", count, " items"));
      for (int again = 0; again < 20; ++again) expect_promise_kept(*pool, count);
    }
    expect_promise_kept(*pool, 100000);  // many small ones: who takes which is contended
  }
}

// A pool that only ever used the caller would pass every other test here.
TEST_F(ThreadPool, as_many_threads_work_at_once_as_were_asked_for) {
  const auto pool = pool_of(3);
  std::atomic<int> here{0};
  run(*pool, 3, [&](std::int64_t, int) {
    ++here;
    while (here.load() < 3) std::this_thread::yield();  // each item waits for the other two
  });
  EXPECT_EQ(here.load(), 3);
}

TEST_F(ThreadPool, one_thread_is_the_caller_and_takes_the_items_in_order) {
  const auto pool = pool_of(1);
  std::vector<std::int64_t> order;
  const auto caller = std::this_thread::get_id();
  run(*pool, 20, [&](std::int64_t idx, int worker) {
    EXPECT_EQ(std::this_thread::get_id(), caller);
    EXPECT_EQ(worker, 0);
    order.push_back(idx);
  });
  ASSERT_EQ(order.size(), 20u);
  for (std::size_t n = 0; n < order.size(); ++n) EXPECT_EQ(order[n], static_cast<int>(n));
}

TEST_F(ThreadPool, an_exception_reaches_the_caller_once_everybody_has_stopped) {
  for (const int threads : {1, 4}) {
    const auto pool = pool_of(threads);
    for (const std::int64_t bad : {0, 1, 57, 99}) {
      std::atomic<int> inside{0}, left{0};
      try {
        run(*pool, 100, [&](std::int64_t idx, int) {
          ++inside;
          if (idx == bad) {
            ++left;
            invalid("item ", idx, " is bad");
          }
          std::this_thread::yield();
          ++left;
        });
        FAIL() << "no exception of item " << bad;
      } catch (const Error& error) {
        EXPECT_EQ(std::string(error.what()), concat("item ", bad, " is bad"));
        EXPECT_EQ(error.kind(), ErrorKind::kInvalidArgument);
      }
      EXPECT_EQ(inside.load(), left.load()) << "somebody still works on a body that is gone";
      expect_promise_kept(*pool, 100);
    }
  }
}

TEST_F(ThreadPool, of_many_exceptions_one_is_passed_on) {
  const auto pool = pool_of(4);
  for (int again = 0; again < 50; ++again) {
    EXPECT_THROW(run(*pool, 64, [](std::int64_t, int) { throw std::runtime_error("every item"); }),
                 std::runtime_error);
  }
}

TEST_F(ThreadPool, a_call_from_inside_an_item_is_done_by_whoever_makes_it) {
  const auto pool = pool_of(3);
  std::atomic<int> inner{0}, elsewhere{0};
  run(*pool, 12, [&](std::int64_t, int) {
    const auto me = std::this_thread::get_id();
    run(*pool, 12, [&](std::int64_t, int worker) {
      ++inner;
      if (std::this_thread::get_id() != me || worker != 0) ++elsewhere;
    });
  });
  EXPECT_EQ(inner.load(), 144);
  EXPECT_EQ(elsewhere.load(), 0);
}

TEST_F(ThreadPool, several_threads_may_call_at_once) {
  const auto pool = pool_of(3);
  std::vector<std::thread> callers;
  for (int n = 0; n < 4; ++n) {
    callers.emplace_back([&pool] {
      for (int again = 0; again < 50; ++again) expect_promise_kept(*pool, 40);
    });
  }
  for (std::thread& caller : callers) caller.join();
}

// Replaced under those who use it: each call keeps the pool it started with.
TEST_F(ThreadPool, resizing_during_work_neither_waits_for_it_nor_disturbs_it) {
  pool_of(3);
  std::atomic<bool> stop{false}, started{false};
  std::vector<std::thread> callers;
  for (int n = 0; n < 2; ++n) {
    callers.emplace_back([&] {
      while (!stop.load()) {
        expect_promise_kept(*cpu::default_pool(), 30);
        started = true;
      }
    });
  }
  while (!started.load()) std::this_thread::yield();
  for (int n = 0; n < 200; ++n) {
    cpu::set_pool_threads(n % 5);
    if (n % 5 > 0) {
      EXPECT_EQ(cpu::pool_threads(), n % 5);
    }
  }
  stop = true;
  for (std::thread& caller : callers) caller.join();

  // From inside an item too.
  const auto pool = pool_of(2);
  std::atomic<int> done{0};
  run(*pool, 8, [&](std::int64_t idx, int) {
    cpu::set_pool_threads(static_cast<int>(idx % 3 + 1));
    ++done;
  });
  EXPECT_EQ(done.load(), 8);
}

TEST_F(ThreadPool, no_count_means_the_processors_this_process_may_use) {
  cpu::set_pool_threads(0);
  EXPECT_EQ(cpu::pool_threads(), cpu::available_processors());
  EXPECT_GE(cpu::available_processors(), 1);
#if defined(__linux__)
  std::thread([] {  // its affinity ends with it
    cpu_set_t all, one;
    ASSERT_EQ(sched_getaffinity(0, sizeof all, &all), 0);
    CPU_ZERO(&one);
    int first = 0;
    while (!CPU_ISSET(first, &all)) ++first;
    CPU_SET(first, &one);
    ASSERT_EQ(sched_setaffinity(0, sizeof one, &one), 0);
    EXPECT_EQ(cpu::available_processors(), 1);
  })
      .join();
#endif
}

TEST_F(ThreadPool, a_host_s_own_count_is_kept_unless_a_number_was_asked_for) {
  const int all = cpu::available_processors();
  EXPECT_EQ(cpu::pool_for_host(0)->concurrency(), all);
  EXPECT_EQ(cpu::pool_for_host(all + 5)->concurrency(), all);
  const auto one = cpu::pool_for_host(1);
  EXPECT_EQ(one->concurrency(), 1);
  expect_promise_kept(*one, 100);
  cpu::set_pool_threads(3);
  EXPECT_EQ(cpu::pool_for_host(1)->concurrency(), 3);
}

// Hosts of different counts share the pool's threads: each call sees no more than its own.
TEST_F(ThreadPool, a_share_of_a_pool_keeps_the_whole_promise) {
  const auto pool = pool_of(4);
  for (const int threads : {1, 2, 3, 4}) {
    const auto share = cpu::share_of(pool, threads);
    ASSERT_EQ(share->concurrency(), threads);
    for (int again = 0; again < 20; ++again) {
      expect_promise_kept(*share, 100);
      expect_promise_kept(*pool, 100);
    }
    std::atomic<int> here{0};
    run(*share, threads, [&](std::int64_t, int) {
      ++here;
      while (here.load() < threads) std::this_thread::yield();  // each waits for the others
    });
    EXPECT_EQ(here.load(), threads);
  }
}

TEST_F(ThreadPool, a_forked_child_has_threads_of_its_own_even_if_its_parent_was_at_work) {
#if !defined(__linux__)
  GTEST_SKIP() << "this system has no pthread_atfork";
#elif defined(ONEFOLD_TEST_TSAN)
  GTEST_SKIP() << "the thread sanitizer ends a child that starts threads";
#else
  pool_of(3);
  std::atomic<bool> stop{false}, started{false};
  std::thread busy([&] {
    const auto mine = cpu::default_pool();
    while (!stop.load()) {
      run(*mine, 6, [&](std::int64_t, int) { started = true; });
    }
  });
  while (!started.load()) std::this_thread::yield();
  for (int n = 0; n < 10; ++n) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(60);  // a child that hangs is a failure, not a wait
      const auto pool = cpu::default_pool();
      std::atomic<int> here{0};
      run(*pool, 3, [&](std::int64_t, int) {
        ++here;
        while (here.load() < 3) std::this_thread::yield();
      });
      _exit(pool->concurrency() == 3 && here.load() == 3 ? 0 : 1);
    }
    ASSERT_GT(child, 0);
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "status " << status;
    expect_promise_kept(*cpu::default_pool(), 20);
  }
  stop = true;
  busy.join();
#endif
}

// The address space, not the number of processes, is what runs out: that binds root too.
TEST_F(ThreadPool, with_fewer_threads_to_be_had_than_wanted_those_there_are_do_the_work) {
#if !defined(__linux__)
  GTEST_SKIP() << "the limit below is Linux's";
#elif defined(ONEFOLD_TEST_SANITIZED)
  GTEST_SKIP() << "a sanitizer needs address space of its own";
#else
  for (const rlim_t threads : {0, 2}) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(60);
      const auto pool = pool_of(8);
      std::ifstream statm("/proc/self/statm");
      rlim_t pages = 0;
      statm >> pages;
      const rlim_t used = pages * static_cast<rlim_t>(sysconf(_SC_PAGESIZE));
      constexpr rlim_t kStackBytes = rlim_t{64} << 20;
      rlimit space{};
      getrlimit(RLIMIT_AS, &space);
      const rlimit before = space;
      pthread_attr_t attributes;  // threads of std::thread have stacks of this size
      pthread_attr_init(&attributes);
      pthread_attr_setstacksize(&attributes, kStackBytes);
      pthread_setattr_default_np(&attributes);
      space.rlim_cur = used + threads * kStackBytes + kStackBytes / 2;
      setrlimit(RLIMIT_AS, &space);
      expect_promise_kept(*pool, 100);
      expect_promise_kept(*pool, 100);
      setrlimit(RLIMIT_AS, &before);
      std::atomic<int> here{0};
      run(*pool, 8, [&](std::int64_t, int) {  // all of them, once they can be had
        ++here;
        while (here.load() < 8) std::this_thread::yield();
      });
      _exit(HasFailure() ? 1 : 0);
    }
    ASSERT_GT(child, 0);
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "status " << status;
  }
#endif
}

TEST(Quota, is_the_least_of_all_control_groups_around_the_process) {
  const std::filesystem::path root =
      std::filesystem::path(testing::TempDir()) / concat("onefold_quota_", getpid());
  const auto write = [&](const char* path, const char* text) {
    std::filesystem::create_directories((root / path).parent_path());
    std::ofstream(root / path) << text;
  };
  const auto quota = [&](const char* memberships) {
    std::istringstream lines(memberships);
    return cpu::quota_processors(lines, root);
  };
  EXPECT_EQ(quota("0::/a/b\n"), 0);
  write("cpu.max", "max 100000\n");
  write("a/cpu.max", "250000 100000\n");
  write("a/b/cpu.max", "700000 100000\n");
  write("a/b/c/cpu.max", "max 100000\n");
  write("cpu/x/cpu.cfs_quota_us", "150000\n");
  write("cpu/x/cpu.cfs_period_us", "100000\n");
  write("cpu/cpu.cfs_quota_us", "-1\n");
  write("cpu/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(quota(""), 0);
  EXPECT_EQ(quota("0::/\n"), 0);
  EXPECT_EQ(quota("0::/a/b/c\n"), 3);  // two and a half
  EXPECT_EQ(quota("0::/b\n"), 0);
  EXPECT_EQ(quota("0::/../a\n"), 0);
  EXPECT_EQ(quota("2:cpuset:/x\n1:name=systemd:/a\n"), 0);
  EXPECT_EQ(quota("3:cpu,cpuacct:/x/y\n0::/\n"), 2);
  write("cpu.max", "100000 100000\n");
  EXPECT_EQ(quota("0::/a/b\n"), 1);
  std::filesystem::remove_all(root);
}

}  // namespace
}  // namespace onefold::test
