// What a plan knows of devices that are not here.

#include <gtest/gtest.h>

#include <string>

#include "onefold/attention.h"
#include "plan/cuda_plan.h"

namespace onefold {
namespace {

TEST(CudaFacts, a_block_may_have_all_shared_memory_but_a_kibibyte) {
  for (const int arch : {800, 860, 890, 900, 1000, 1200}) {
    const CudaFacts facts = cuda_facts_of(arch);
    EXPECT_EQ(facts.arch, arch);
    EXPECT_EQ(facts.shared_bytes + 1024, facts.shared_bytes_per_sm);
  }
  EXPECT_EQ(cuda_facts_of(900).shared_bytes, 227u * 1024);
}

TEST(CudaFacts, an_unknown_architecture_is_refused_with_those_that_are_known) {
  try {
    cuda_facts_of(910);
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUnsupported);
    EXPECT_EQ(std::string(error.what()).substr(0, 34), "arch is 91: one of 80, 86, 87, 89,");
  }
}

TEST(WarmUp, the_cpu_has_nothing_to_make_ready) {
  float x[8] = {};
  const Tensor t = Tensor::packed(x, DType::kFloat32, {1, 2, 1, 4});
  const Attention question{.q = t, .k = t, .v = t};
  EXPECT_TRUE(warm_up({}, question).empty());
  Gradients wanted;
  wanted.dq = t;
  EXPECT_TRUE(warm_up({}, question, wanted).empty());
}

}  // namespace
}  // namespace onefold
