// onefold's own threads: an Executor over std::thread with one atomic counter as its queue.
//
// Invariant: parallel_for returns when every index is done; the caller works too. Indices are taken
// in ascending order, so the longest item should come first. Threads are started on first use, spin
// for a short while after a call and then sleep. A call from inside a worker, or while another
// thread is using the pool, runs on the calling thread. Includes the public headers.
#pragma once

#include <filesystem>
#include <istream>
#include <memory>

#include "onefold/attention.h"

namespace onefold::cpu {

// Processors this process may use: its affinity mask, capped by the quotas of its control groups.
int available_processors();

// The least quota of the control groups that /proc/self/cgroup names and of those around them, in
// whole processors; 0 for none.
int quota_processors(std::istream& memberships, const std::filesystem::path& mounted);

// The pool that serves calls without an executor of their own. A call holds on to the one it
// started with: set_pool_threads replaces the pool and never resizes it.
std::shared_ptr<Executor> default_pool();

// What a host with `count` threads of its own lends a call: the default pool, or that many of its
// threads, the caller included. A number given to set_pool_threads says more; 0 says nothing.
std::shared_ptr<Executor> pool_for_host(int count);

// The first `count` threads of a pool of this file, of which there are at least as many.
std::shared_ptr<Executor> share_of(const std::shared_ptr<Executor>& pool, int count);

// Threads of the default pool, the caller included; 0 means available_processors().
void set_pool_threads(int count);
int pool_threads();

}  // namespace onefold::cpu
