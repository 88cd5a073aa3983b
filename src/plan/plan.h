// plan(problem, facts) -> work: pure, deterministic, no execution, no device include.
//
// Invariant: what a plan says about order (key tiles, chunks of queries, who is added to whom)
// depends on the problem alone; threads and caches change only who does what when. Includes core.
#pragma once

#include <string>

#include "core/work.h"

namespace onefold {

CpuWork plan_forward(const Problem& problem, const CpuFacts& facts);
CpuWork plan_backward(const Problem& problem, const BackwardWants& wants, const CpuFacts& facts);

// What explain() prints: the kernel in one line, and the reasons, one a line.
std::string describe_kernel(const Problem& problem, const CpuWork& work, const CpuFacts& facts);
std::string describe_reasons(const Problem& problem, const CpuWork& work, const CpuFacts& facts);

}  // namespace onefold
