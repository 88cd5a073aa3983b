#include "cpu/thread_pool.h"

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

namespace onefold::cpu {
namespace {

// Waking a thread takes 30 to 90 us in a virtual machine, so whoever waits looks on for a while: a
// worker for the next call, the caller for the helpers that are still at work.
constexpr auto kSpinBetweenCalls = std::chrono::microseconds(100);
constexpr auto kSpinInCall = std::chrono::milliseconds(1);

template <class Condition>
void spin(std::chrono::nanoseconds longest, Condition&& met) {
  const auto until = std::chrono::steady_clock::now() + longest;
  while (!met() && std::chrono::steady_clock::now() < until) {
  }
}

// The quota that one control group sets itself, in processors, or infinity.
double own_quota(const std::filesystem::path& group) {
  std::ifstream v2(group / "cpu.max");
  std::string quota;
  double period = 0;
  if (v2 >> quota >> period && quota != "max" && period > 0) {
    return std::atof(quota.c_str()) / period;
  }
  std::ifstream v1_quota(group / "cpu.cfs_quota_us");
  std::ifstream v1_period(group / "cpu.cfs_period_us");
  double microseconds = 0;
  if (v1_quota >> microseconds && v1_period >> period && microseconds > 0 && period > 0) {
    return microseconds / period;
  }
  return std::numeric_limits<double>::infinity();
}

// One call of parallel_for, shared by the threads that help with it.
struct Job {
  std::int64_t count = 0;
  int num_workers = 0;  // those with a smaller number may help
  Executor::Body body = nullptr;
  void* context = nullptr;
  std::atomic<std::int64_t> next{0};
  std::atomic<int> helpers{0};  // threads inside work()
  std::mutex error_mutex;
  std::exception_ptr error;

  void work(int worker) {
    for (std::int64_t idx = next.fetch_add(1); idx < count; idx = next.fetch_add(1)) {
      try {
        body(context, idx, worker);
      } catch (...) {
        const std::lock_guard<std::mutex> lock(error_mutex);
        if (!error) error = std::current_exception();
        next = count;
      }
    }
  }
};

class ThreadPool final : public Executor {
 public:
  explicit ThreadPool(int threads) : threads_(threads) {}
  ~ThreadPool() override { stop(); }

  int concurrency() const override { return threads_; }

  void parallel_for(std::int64_t count, Body body, void* context) override {
    run(count, body, context, threads_);
  }

  // By the first so many workers.
  void run(std::int64_t count, Body body, void* context, int num_workers) {
    // One call owns the workers at a time; whoever finds them taken works alone, which is also
    // what a nested call does.
    std::unique_lock<std::mutex> owner(owner_, std::try_to_lock);
    if (num_workers <= 1 || count <= 1 || !owner.owns_lock()) {
      for (std::int64_t idx = 0; idx < count; ++idx) body(context, idx, 0);
      return;
    }
    start(num_workers);
    Job job;
    job.count = count;
    job.num_workers = num_workers;
    job.body = body;
    job.context = context;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      job_ = &job;
      generation_.fetch_add(1);
    }
    wake_.notify_all();
    job.work(0);
    {
      // No helper may enter any more; wait for those inside.
      const std::lock_guard<std::mutex> lock(mutex_);
      job_ = nullptr;
    }
    const auto all_left = [&job] { return job.helpers.load() == 0; };
    spin(kSpinInCall, all_left);
    if (!all_left()) {
      std::unique_lock<std::mutex> lock(mutex_);
      done_.wait(lock, all_left);
    }
    if (job.error) std::rethrow_exception(job.error);
  }

 private:
  // The workers that are still missing. Where the system has no more threads to give, those that
  // are there do the work, and the next call asks again.
  void start(int num_workers) {
    for (int worker = 1 + static_cast<int>(workers_.size()); worker < num_workers; ++worker) {
      try {
        workers_.emplace_back([this, worker] { serve(worker); });
      } catch (const std::system_error&) {
        return;
      }
    }
  }

  void stop() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
      generation_.fetch_add(1);
    }
    wake_.notify_all();
    for (std::thread& thread : workers_) thread.join();
  }

  void serve(int worker) {
    std::uint64_t seen = 0;
    while (true) {
      spin(kSpinBetweenCalls, [&] { return generation_.load() != seen; });
      Job* job = nullptr;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return generation_.load() != seen; });
        seen = generation_.load();
        if (stopping_) return;
        job = job_;
        if (job == nullptr || worker >= job->num_workers) continue;
        job->helpers.fetch_add(1);
      }
      job->work(worker);
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        job->helpers.fetch_sub(1);
      }
      done_.notify_all();
    }
  }

  const int threads_;
  std::vector<std::thread> workers_;
  std::mutex owner_, mutex_;
  std::condition_variable wake_, done_;
  std::atomic<std::uint64_t> generation_{0};
  Job* job_ = nullptr;
  bool stopping_ = false;
};

// Some threads of a pool, for one call.
class Share final : public Executor {
 public:
  Share(std::shared_ptr<ThreadPool> pool, int threads)
      : pool_(std::move(pool)), threads_(threads) {}
  int concurrency() const override { return threads_; }
  void parallel_for(std::int64_t count, Body body, void* context) override {
    pool_->run(count, body, context, threads_);
  }

 private:
  const std::shared_ptr<ThreadPool> pool_;
  const int threads_;
};

// The pool in use. Replaced, never resized, so that a running call keeps the one it started with.
struct Current {
  std::mutex mutex;
  int wanted = 0;
  std::shared_ptr<ThreadPool> pool;
};

Current*& current_slot() {
  // Never destroyed: a detached thread or an atexit handler may still attend.
  static Current* slot = new Current;
  return slot;
}

// Threads do not survive fork; the child starts with a pool of its own and forgets the parent's.
void forget_in_child() {
#if defined(__linux__)
  static const int registered = pthread_atfork(nullptr, nullptr, [] {
    const int wanted = current_slot()->wanted;
    current_slot() = new Current;
    current_slot()->wanted = wanted;
  });
  (void)registered;
#endif
}

struct Chosen {
  std::shared_ptr<ThreadPool> pool;
  bool by_number;  // its size was asked for
};

Chosen current_pool() {
  forget_in_child();
  Current& current = *current_slot();
  const std::lock_guard<std::mutex> lock(current.mutex);
  if (!current.pool) {
    const int threads = current.wanted > 0 ? current.wanted : available_processors();
    current.pool = std::make_shared<ThreadPool>(threads);
  }
  return {current.pool, current.wanted > 0};
}

}  // namespace

int quota_processors(std::istream& memberships, const std::filesystem::path& mounted) {
  double quota = std::min(own_quota(mounted), own_quota(mounted / "cpu"));
  for (std::string line; std::getline(memberships, line);) {
    // hierarchy:controllers:path, where version 2 has no controllers
    const std::size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = concat(",", line.substr(first + 1, second - first - 1), ",");
    const bool v2 = controllers == ",,";
    if (!v2 && controllers.find(",cpu,") == std::string::npos) continue;
    // A path above the mounted part begins with "..": only what is mounted can be read.
    std::filesystem::path group = v2 ? mounted : mounted / "cpu";
    for (const auto& part : std::filesystem::path(line.substr(second + 1)).relative_path()) {
      if (part == "..") break;
      group /= part;
      quota = std::min(quota, own_quota(group));
    }
  }
  return std::isfinite(quota) ? static_cast<int>(std::ceil(quota)) : 0;
}

int available_processors() {
  int count = static_cast<int>(std::thread::hardware_concurrency());
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) count = CPU_COUNT(&set);
#endif
  std::ifstream memberships("/proc/self/cgroup");
  const int quota = quota_processors(memberships, "/sys/fs/cgroup");
  if (quota > 0) count = std::min(count, quota);
  return std::max(count, 1);
}

std::shared_ptr<Executor> default_pool() { return current_pool().pool; }

std::shared_ptr<Executor> pool_for_host(int count) {
  const Chosen chosen = current_pool();
  if (chosen.by_number || count <= 0 || count >= chosen.pool->concurrency()) return chosen.pool;
  return share_of(chosen.pool, count);
}

std::shared_ptr<Executor> share_of(const std::shared_ptr<Executor>& pool, int count) {
  return std::make_shared<Share>(std::static_pointer_cast<ThreadPool>(pool), count);
}

void set_pool_threads(int count) {
  Current& current = *current_slot();
  std::shared_ptr<ThreadPool> old;  // joined outside the lock
  const std::lock_guard<std::mutex> lock(current.mutex);
  current.wanted = count;
  old.swap(current.pool);
}

int pool_threads() { return current_pool().pool->concurrency(); }

}  // namespace onefold::cpu
