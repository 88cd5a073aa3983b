// Plans for CUDA devices, made without one: what they must cover, what must fit, how they may grow.

#include "plan/cuda_plan.h"

#include <gtest/gtest.h>

#include <set>
#include <string>
#include <utility>

#include "onefold/error.h"
#include "tests/plan/cuda_question.h"

namespace onefold::test {
namespace {

TEST(CudaPlan, every_head_dim_and_format_has_tiles_that_fit_every_device) {
  for (const CudaKind& kind : kCudaKinds) {
    for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
      for (const unsigned options : {0u, unsigned{kAllOptions}}) {
        for (std::int64_t dim = 1; dim <= 256; dim += dim < 8 ? 1 : 8) {
          for (const std::int64_t dim_v : {dim, std::int64_t{1}, std::int64_t{256}}) {
            SCOPED_TRACE(concat(kind.name, " ", name(dtype), " ", dim, " ", dim_v, " ", options));
            CudaQuestion ask;
            ask.dtype = dtype;
            ask.dim = dim;
            ask.dim_v = dim_v;
            ask.options = options;
            const Problem p = ask.problem();
            const kernels::ForwardPlan f = plan_cuda_forward(p, ask.forward(p), kind.facts);
            const kernels::BackwardPlan b =
                plan_cuda_backward(p, ask.backward(p), true, kind.facts);
            ASSERT_EQ(f.spec.invalid(), nullptr);
            ASSERT_EQ(b.spec.invalid(), nullptr);
            ASSERT_LE(std::size_t(f.spec.shared_bytes()), kind.facts.shared_bytes);
            ASSERT_LE(std::size_t(b.spec.shared_bytes()), kind.facts.shared_bytes);
            ASSERT_LE(std::size_t(b.spec.blocks_per_sm) * (b.spec.shared_bytes() + 1024),
                      kind.facts.shared_bytes_per_sm);
            ASSERT_GE(b.spec.dim, dim);
            ASSERT_GE(b.spec.dim_v, dim_v);
            if (options == 0) continue;
            ASSERT_EQ(b.bias_spec.invalid(), nullptr);
            ASSERT_LE(std::size_t(b.bias_spec.shared_bytes()), kind.facts.shared_bytes);
            ASSERT_LE(std::size_t(b.rows_spec.shared_bytes()), kind.facts.shared_bytes);
          }
        }
      }
    }
  }
}

std::string refusal_of(const CudaQuestion& ask) {
  const Problem p = ask.problem();
  try {
    plan_cuda_forward(p, ask.forward(p), kCudaKinds[3].facts);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUnsupported);
    return error.what();
  }
  return "";
}

// Kernels add a tile to a row in 32 bits, and a launch has at most 2^31 - 1 blocks.
TEST(CudaPlan, what_32_bits_do_not_count_is_refused) {
  CudaQuestion ask;
  ask.batch = ask.heads = ask.kv_heads = 1;
  ask.sk = 2'147'482'623;
  EXPECT_EQ(refusal_of(ask), "");
  ask.sk += 1;
  EXPECT_EQ(refusal_of(ask), "seqlen is 2147482624 on CUDA: fewer than 2^31 - 1024 rows work");
  ask.sk = 1;
  ask.sq = ask.dim = ask.dim_v = 1;
  ask.batch = 1 << 29;
  ask.heads = ask.kv_heads = 5;
  EXPECT_EQ(refusal_of(ask).substr(0, 53), "batch * heads * seqlen needs 2684354560 blocks: fewer");
}

// 132 multiprocessors; tiles of 128 queries forward and of 128 keys backward.
TEST(CudaPlan, heads_go_in_step_where_tiles_differ_or_blocks_take_turns) {
  const auto in_step = [](std::int64_t seqlen, bool causal, int window_left, bool ordered) {
    CudaQuestion ask;
    ask.batch = 64;
    ask.heads = ask.kv_heads = 16;
    ask.sq = ask.sk = seqlen;
    Attention a = ask.attention();
    if (!causal) a.causal = Causal::kNone;
    if (window_left >= 0) a.window_left = window_left;
    const Problem p = make_problem(a, {DeviceType::kCuda, 0});
    const CudaFacts& facts = kCudaKinds[3].facts;
    const auto forward = plan_cuda_forward(p, ask.forward(p), facts);
    const auto backward = plan_cuda_backward(p, ask.backward(p), ordered, facts);
    EXPECT_EQ(forward.spec.tile_q, 128);
    EXPECT_EQ(backward.spec.tile_k, 128);
    return std::pair{forward.heads_in_step, backward.heads_in_step};
  };
  EXPECT_EQ(in_step(512, true, -1, false), (std::pair{132, 132}));  // two waves of 264 blocks
  EXPECT_EQ(in_step(4096, true, -1, false), (std::pair{66, 66}));   // eight
  EXPECT_EQ(in_step(4096, false, -1, false), (std::pair{1, 1}));
  EXPECT_EQ(in_step(4096, true, 100, false), (std::pair{1, 1}));
  EXPECT_EQ(in_step(4096, true, 5000, false), (std::pair{66, 66}));  // hides nothing
  EXPECT_EQ(in_step(4096, false, -1, true), (std::pair{1, 17}));     // two
  EXPECT_EQ(in_step(4096, true, -1, true), (std::pair{66, 1}));
  EXPECT_EQ(in_step(100, true, -1, false).first, 528);
}

TEST(CudaPlan, backward_covers_all_rows_and_keys) {
  for (const auto& [sq, sk] : {std::pair{1, 1}, {63, 65}, {128, 128}, {1000, 3}, {0, 7}, {7, 0}}) {
    CudaQuestion ask;
    ask.sq = sq;
    ask.sk = sk;
    const Problem p = ask.problem();
    const auto plan = plan_cuda_backward(p, ask.backward(p), false, kCudaKinds[3].facts);
    EXPECT_EQ(plan.query_tiles, (sq + plan.spec.tile_q - 1) / plan.spec.tile_q);
    EXPECT_EQ(plan.key_tiles, (sk + plan.spec.tile_k - 1) / plan.spec.tile_k);
    EXPECT_EQ(plan.row_tiles, plan.query_tiles * ask.heads * ask.batch);
    EXPECT_EQ(plan.blocks, plan.key_tiles * ask.kv_heads * ask.batch);
  }
}

// The warps that share dQ of a tile own each of its numbers once.
TEST(CudaPlan, every_number_of_dq_has_one_owner) {
  for (const CudaKind& kind : kCudaKinds) {
    for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
      for (std::int64_t dim = 32; dim <= 256; dim += 32) {
        CudaQuestion ask;
        ask.dtype = dtype;
        ask.dim = ask.dim_v = dim;
        const Problem p = ask.problem();
        const auto s = plan_cuda_backward(p, ask.backward(p), false, kind.facts).spec;
        SCOPED_TRACE(concat(kind.name, " ", name(dtype), " ", dim));
        ASSERT_LE(s.warps_q() * s.warps_d(), s.warps);
        ASSERT_EQ(s.warps_q() * s.dq_rows(), s.tile_q);
        ASSERT_EQ(s.warps_d() * s.dq_columns(), s.dim);
        ASSERT_EQ(s.dq_rows() % 16, 0);
        ASSERT_EQ(s.dq_columns() % 16, 0);
        EXPECT_GE(2 * s.warps_q() * s.warps_d(), s.warps) << "most warps are idle";
      }
    }
  }
}

TEST(CudaPlan, the_workspace_of_backward_grows_with_the_queries_alone) {
  std::int64_t before = 0;
  for (std::int64_t n = 1 << 10; n <= 1 << 18; n *= 2) {
    CudaQuestion ask;
    ask.batch = 1;
    ask.sq = ask.sk = n;
    const Problem p = ask.problem();
    const auto plan = plan_cuda_backward(p, ask.backward(p), true, kCudaKinds[3].facts);
    const std::int64_t dq_bytes = n * ask.heads * ask.dim * 4;
    EXPECT_GE(plan.workspace_bytes, dq_bytes);
    EXPECT_LE(plan.workspace_bytes, dq_bytes + n * ask.heads * 16 + 4096);
    if (before > 0) {
      EXPECT_LE(plan.workspace_bytes, 2 * before);
    }
    before = plan.workspace_bytes;
  }
}

TEST(CudaPlan, a_bias_that_many_positions_share_is_summed_by_many_blocks) {
  const auto plan_with = [](std::initializer_list<std::int64_t> shape, std::int64_t n) {
    CudaQuestion ask;
    ask.sq = ask.sk = n;
    Attention a = ask.attention();
    a.bias = cuda_tensor(20, DType::kFloat32, shape);
    const Problem p = make_problem(a, {DeviceType::kCuda, 0});
    BackwardTensors t = ask.backward(ask.problem());
    t.dbias = p.bias;
    t.dbias.data = reinterpret_cast<void*>(std::uintptr_t{77} << 40);
    return plan_cuda_backward(p, t, false, kCudaKinds[3].facts);
  };
  const auto one = plan_with({1}, 4096), full = plan_with({2, 4, 512, 512}, 512);
  EXPECT_EQ(one.bias_entries, 1);
  EXPECT_GE(one.bias_items * one.bias_splits, 264);
  EXPECT_EQ(full.bias_splits, 1);
  EXPECT_EQ(full.bias_entries, 2 * 4 * 512 * 512);
  EXPECT_GE(full.bias_items, 2 * 4 * 8 * 8);
}

TEST(CudaPlan, turns_are_taken_only_where_bits_must_repeat) {
  CudaQuestion ask;
  const Problem p = ask.problem();
  BackwardTensors t = ask.backward(p);
  EXPECT_FALSE(plan_cuda_backward(p, t, false, kCudaKinds[3].facts).spec.ordered);
  EXPECT_TRUE(plan_cuda_backward(p, t, true, kCudaKinds[3].facts).spec.ordered);
  t.dq = {};
  const auto without = plan_cuda_backward(p, t, true, kCudaKinds[3].facts);
  EXPECT_FALSE(without.spec.ordered);
  EXPECT_FALSE(without.spec.dq);
  EXPECT_LT(without.workspace_bytes,
            plan_cuda_backward(p, ask.backward(p), true, kCudaKinds[3].facts).workspace_bytes);
}

TEST(CudaPlan, without_gradients_of_q_k_and_v_the_main_kernel_does_not_run) {
  CudaQuestion ask;
  ask.options = kAllOptions;
  const Problem p = ask.problem();
  BackwardTensors t = ask.backward(p);
  t.dq = t.dk = t.dv = {};
  const auto plan = plan_cuda_backward(p, t, false, kCudaKinds[3].facts);
  EXPECT_EQ(plan.blocks, 0);
  EXPECT_EQ(plan.mask.blocks, 0);
  EXPECT_TRUE(plan.bias && plan.slopes && plan.sinks);
}

TEST(CudaPlan, what_no_kernel_does_is_said_in_one_sentence) {
  CudaQuestion ask;
  const auto complaint = [&](const CudaFacts& facts) -> std::string {
    try {
      const Problem p = ask.problem();
      plan_cuda_backward(p, ask.backward(p), false, facts);
    } catch (const Error& e) {
      return e.what();
    }
    return "";
  };
  EXPECT_EQ(complaint(kCudaKinds[0].facts), "");
  EXPECT_NE(complaint({750, 40, 64 * 1024, 64 * 1024}).find("capability 7.5"), std::string::npos);
  ask.dim = 257;
  EXPECT_NE(complaint(kCudaKinds[0].facts).find("head_dim is 257"), std::string::npos);
}

TEST(CudaPlan, reasons_of_backward_name_what_makes_it_slow) {
  CudaQuestion ask;
  ask.options = kAllOptions;
  const Problem p = ask.problem();
  const auto reasons = [&](bool deterministic) {
    const CudaFacts& facts = kCudaKinds[3].facts;
    return describe_reasons(p, plan_cuda_backward(p, ask.backward(p), deterministic, facts), facts);
  };
  for (const char* part : {"causal or window", "mask:", "gradient of bias", "alibi_slopes"}) {
    EXPECT_NE(reasons(false).find(part), std::string::npos) << part;
  }
  EXPECT_NE(reasons(false).find("atomic"), std::string::npos);
  EXPECT_NE(reasons(true).find("deterministic"), std::string::npos);
}

}  // namespace
}  // namespace onefold::test
