// Every good question gets its canonical form, empty ones included.

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "core/problem.h"
#include "tests/core/problem_call.h"

namespace onefold::test {
namespace {

TEST(GoodInput, every_extent_may_be_zero) {
  for (int zero = 0; zero < 7; ++zero) {
    SCOPED_TRACE(zero);
    std::array<std::int64_t, 7> n{2, 3, 4, 4, 2, 5, 6};  // B, Sq, Sk, Hq, Hk, D, Dv
    n[static_cast<std::size_t>(zero)] = 0;
    if (n[4] == 0) n[3] = 0;
    Attention a;
    const auto empty = [](std::int64_t b, std::int64_t s, std::int64_t h, std::int64_t d) {
      Tensor t = tensor({b, s, h, d});
      if (t.elements() == 0) t.data = nullptr;
      return t;
    };
    a.q = empty(n[0], n[1], n[3], n[5]);
    a.k = empty(n[0], n[2], n[4], n[5]);
    a.v = empty(n[0], n[2], n[4], n[6]);
    const Problem p = make_problem(a);
    EXPECT_EQ(p.batch, n[0]);
    const bool nothing = (n[1] == 0 || n[3] == 0) && (n[2] == 0 || n[4] == 0);
    EXPECT_EQ(p.sequences.size(), static_cast<std::size_t>(nothing ? 0 : n[0]));
    EXPECT_TRUE(std::isfinite(p.variant.scale));
  }
}

TEST(GoodInput, a_batch_of_nothing_costs_no_memory) {
  Attention a;
  a.q = a.k = a.v = tensor({std::int64_t{1} << 50, 0, 1 << 26, 16});
  a.q.data = a.k.data = a.v.data = nullptr;
  const Problem p = make_problem(a);
  EXPECT_EQ(p.batch, std::int64_t{1} << 50);
  EXPECT_TRUE(p.sequences.empty());
}

// ---- canonical form ----

Attention square(std::int64_t queries, std::int64_t keys) {
  Attention a;
  a.q = tensor({1, queries, 1, 4});
  a.k = a.v = tensor({1, keys, 1, 4});
  return a;
}

TEST(CanonicalForm, a_border_that_hides_nothing_is_no_border) {
  struct Case {
    const char* name;
    std::int64_t queries, keys;
    Causal causal;
    std::optional<std::int64_t> left, right;
    bool banded;
  };
  const Case kCases[] = {
      {"nothing asked", 5, 7, Causal::kNone, {}, {}, false},
      {"bottom-right causal, one query", 1, 7, Causal::kBottomRight, {}, {}, false},
      {"bottom-right causal, two queries", 2, 7, Causal::kBottomRight, {}, {}, true},
      {"top-left causal, one query, one key", 1, 1, Causal::kTopLeft, {}, {}, false},
      {"top-left causal, one query", 1, 7, Causal::kTopLeft, {}, {}, true},
      {"top-left causal, the first row sees all", 5, 1, Causal::kTopLeft, {}, {}, false},
      {"left window as wide as the keys", 5, 7, Causal::kNone, 6, {}, false},
      {"left window one narrower", 5, 7, Causal::kNone, 5, {}, true},
      {"right window as wide as the queries", 5, 7, Causal::kNone, {}, 4, false},
      {"right window one narrower", 5, 7, Causal::kNone, {}, 3, true},
      {"left window counts from the aligned diagonal", 256, 64, Causal::kNone, 63, {}, false},
      {"right window counts from it too", 256, 64, Causal::kNone, {}, 255, false},
      {"windows as wide as an int64", 5, 7, Causal::kNone, kLongest, kLongest, false},
      {"no keys", 5, 0, Causal::kBottomRight, 1, 1, false},
      {"no queries", 0, 5, Causal::kBottomRight, 1, 1, false},
      {"negative right window", 5, 5, Causal::kNone, {}, -3, true},
  };
  for (const Case& c : kCases) {
    Attention a = square(c.queries, c.keys);
    a.causal = c.causal;
    a.window_left = c.left;
    a.window_right = c.right;
    EXPECT_EQ(make_problem(a).variant.banded(), c.banded) << c.name;
  }
}

// What a problem says of every pair, against the words of attention.h; 128-bit sums, so that no
// window is too wide for the test.
TEST(CanonicalForm, visibility_is_what_the_question_says) {
  const std::vector<std::optional<std::int64_t>> windows{
      std::nullopt, -7, -3, -1, 0, 1, 2, 5, 100, kLongest, kShortest, kLongest - 1, kShortest + 1};
  for (const std::int64_t queries : {1, 2, 5}) {
    for (const std::int64_t keys : {1, 3, 6}) {
      for (const Causal causal : {Causal::kNone, Causal::kBottomRight, Causal::kTopLeft}) {
        for (const auto& left : windows) {
          for (const auto& right : windows) {
            Attention a = square(queries, keys);
            a.causal = causal;
            a.window_left = left;
            a.window_right = right;
            const Problem p = make_problem(a);
            for (std::int64_t i = 0; i < queries; ++i) {
              const KeyInterval seen = key_interval(p.variant, p.sequences[0].used, i);
              for (std::int64_t j = 0; j < keys; ++j) {
                const __int128 right_of =
                    causal == Causal::kTopLeft ? j - i : j - (i + keys - queries);
                const bool want = (causal == Causal::kNone || right_of <= 0) &&
                                  (!right || right_of <= *right) &&
                                  (!left || right_of >= -static_cast<__int128>(*left));
                ASSERT_EQ(seen.begin <= j && j < seen.end, want)
                    << queries << " x " << keys << " causal " << static_cast<int>(causal)
                    << " left " << left.value_or(-999) << " right " << right.value_or(-999)
                    << " at " << i << ", " << j;
              }
            }
          }
        }
      }
    }
  }
}

TEST(CanonicalForm, packed_sequences_and_used_lengths_become_one_list) {
  Call c;
  make_packed(c);
  c.a.seqused_q = c.vector(c.used_q);
  c.a.seqused_k = c.vector(c.used_k);
  const Problem p = make_problem(c.a);
  ASSERT_EQ(p.sequences.size(), 2u);
  EXPECT_TRUE(p.packed && p.padded);
  const Sequence &first = p.sequences[0], &second = p.sequences[1];
  EXPECT_EQ(first.q_begin, 0);
  EXPECT_EQ(second.q_begin, 3);
  EXPECT_EQ(second.k_begin, 4);
  EXPECT_EQ(first.used.q, 2);
  EXPECT_EQ(first.used.k, 0);
  EXPECT_EQ(second.used.q, 4);
  EXPECT_EQ(second.used.k, 5);
  EXPECT_EQ(second.k_rows, 5);
  EXPECT_EQ(p.longest_q, 4);
  EXPECT_EQ(p.longest_k, 5);
  EXPECT_EQ(p.q.batch, 0);  // rows count from the tensor's start
}

TEST(CanonicalForm, index_lists_may_be_int32_and_strided) {
  Call c;
  make_packed(c);
  std::vector<std::int32_t> wide{0, -9, 3, -9, 7, -9};
  c.a.cu_seqlens_q = Tensor::packed(wide.data(), DType::kInt32, {3});
  c.a.cu_seqlens_q->stride[0] = 2;
  std::vector<std::int64_t> backwards{9, 4, 0};
  c.a.cu_seqlens_k = Tensor::packed(backwards.data() + 2, DType::kInt64, {3});
  c.a.cu_seqlens_k->stride[0] = -1;
  const Problem p = make_problem(c.a);
  EXPECT_EQ(p.sequences[1].q_begin, 3);
  EXPECT_EQ(p.sequences[1].k_begin, 4);
  EXPECT_FALSE(p.padded);
}

TEST(CanonicalForm, rows_beyond_the_last_offset_are_padding) {
  Call c;
  make_packed(c);
  c.offsets_k[2] = 8;
  EXPECT_TRUE(make_problem(c.a).padded);
}

TEST(CanonicalForm, maxima_are_hints_and_never_limits) {
  Call c;
  make_packed(c);
  c.a.max_seqlen_q = 1;
  c.a.max_seqlen_k = 1;
  const Problem p = make_problem(c.a);
  EXPECT_EQ(p.longest_q, 4);
  EXPECT_EQ(p.longest_k, 5);
}

TEST(CanonicalForm, bias_and_mask_broadcast_from_the_right_with_any_strides) {
  Call c;
  make_dense(c);
  c.a.bias = tensor({4, 1, 4});
  c.a.bias->stride = {-8, 77, 2};
  c.a.mask = tensor({}, DType::kBool);
  const Problem p = make_problem(c.a);
  EXPECT_EQ(p.bias.offset(1, 2, 2, 3), 2 * -8 + 3 * 2);
  EXPECT_EQ(p.mask.offset(1, 2, 2, 3), 0);
  EXPECT_TRUE(p.bias && p.mask);
}

TEST(CanonicalForm, the_default_scale_is_one_over_the_root_of_the_head_dim_of_q) {
  Call c;
  make_dense(c);
  EXPECT_DOUBLE_EQ(make_problem(c.a).variant.scale, 1 / std::sqrt(5.0));
  c.a.scale = -0.25;
  EXPECT_EQ(make_problem(c.a).variant.scale, -0.25);
}

TEST(CanonicalForm, float64_questions_take_float64_options) {
  Call c;
  make_dense(c);
  for (Tensor* t : {&c.a.q, &c.a.k, &c.a.v}) t->dtype = DType::kFloat64;
  for (const DType dtype : {DType::kFloat32, DType::kFloat64}) {
    c.a.sinks = tensor({4}, dtype);
    c.a.alibi_slopes = tensor({2, 4}, dtype);
    EXPECT_NO_THROW(make_problem(c.a)) << name(dtype);
  }
  c.a.sinks->dtype = DType::kFloat16;
  try {
    make_problem(c.a);
    ADD_FAILURE() << "accepted";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "sinks is float16: float32 is needed (or float64)");
  }
}

}  // namespace
}  // namespace onefold::test
