// Every bad question gets its one sentence.

#include "core/problem.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "tests/core/problem_call.h"

namespace onefold::test {
namespace {

TEST(BadInput, shapes_and_memory_of_q_k_and_v) {
  expect_refused(
      {
          {"rank of q",
           "q has 3 axes, shape (3, 4, 5): 4 are needed, or cu_seqlens_q and cu_seqlens_k for "
           "packed "
           "sequences",
           [](Call& c) {
             c.a.q = tensor({3, 4, 5});
           }},
          {"rank of k", "k has 2 axes, shape (4, 5): 4 are needed",
           [](Call& c) {
             c.a.k = tensor({4, 5});
           }},
          {"rank of v", "v has 0 axes, shape (): 4 are needed",
           [](Call& c) { c.a.v = tensor({}); }},
          {"negative extent", "q has shape (2, -1, 4, 5): extents must be >= 0",
           [](Call& c) { c.a.q.shape[1] = -1; }},
          {"null pointer", "k is a null pointer with shape (2, 4, 2, 5): it needs memory",
           [](Call& c) { c.a.k.data = nullptr; }},
          {"another device", "v is on CUDA device 0: the call runs on the CPU, so move it there",
           [](Call& c) { c.a.v.device.type = DeviceType::kCuda; }},
          {"rows of v", "seqlen of v is 5: 4 is needed, the rows of k",
           [](Call& c) {
             c.a.v = tensor({2, 5, 2, 6});
           }},
          {"heads of v", "heads of v is 4: 2 is needed, the heads of k",
           [](Call& c) {
             c.a.v = tensor({2, 4, 4, 6});
           }},
          {"head_dim of k", "head_dim of k is 6: 5 is needed, the head_dim of q",
           [](Call& c) {
             c.a.k = tensor({2, 4, 2, 6});
           }},
          {"batch of k", "batch of k is 1: 2 is needed, the batch of q",
           [](Call& c) {
             c.a.k = tensor({1, 4, 2, 5});
           }},
          {"batch of v", "batch of v is 3: 2 is needed, the batch of q",
           [](Call& c) {
             c.a.v = tensor({3, 4, 2, 6});
           }},
          {"head ratio", "q has 4 heads and k has 3: the heads of k must divide those of q",
           [](Call& c) {
             c.a.k = tensor({2, 4, 3, 5});
             c.a.v = tensor({2, 4, 3, 6});
           }},
          {"fewer query heads", "q has 4 heads and k has 8: the heads of k must divide those of q",
           [](Call& c) {
             c.a.k = tensor({2, 4, 8, 5});
             c.a.v = tensor({2, 4, 8, 6});
           }},
          {"no key heads", "q has 4 heads and k has 0: the heads of k must divide those of q",
           [](Call& c) {
             c.a.k = tensor({2, 4, 0, 5});
             c.a.v = tensor({2, 4, 0, 6});
           }},
          {"head_dim beyond everything", "head_dim is 1048577: at most 1048576 works",
           [](Call& c) {
             c.a.q = tensor({0, 3, 4, 1048577});
             c.a.k = tensor({0, 4, 2, 1048577});
             c.a.v = tensor({0, 4, 2, 6});
           },
           ErrorKind::kUnsupported},
      },
      make_dense);
}

TEST(BadInput, dtypes_of_q_k_and_v) {
  for (const DType dtype : {DType::kBool, DType::kInt32, DType::kInt64}) {
    expect_refused(
        {{"q", concat("q is ", name(dtype), ": float32, bfloat16, float16 or float64 is needed"),
          [dtype](Call& c) { c.a.q.dtype = dtype; }}},
        make_dense);
  }
  expect_refused({{"k", "k is float16: q is float32 and all three must agree",
                   [](Call& c) { c.a.k.dtype = DType::kFloat16; }},
                  {"v", "v is float64: q is float32 and all three must agree",
                   [](Call& c) { c.a.v.dtype = DType::kFloat64; }},
                  {"q", "k is float32: q is bfloat16 and all three must agree",
                   [](Call& c) { c.a.q.dtype = DType::kBFloat16; }}},
                 make_dense);
}

TEST(BadInput, packed_sequences) {
  expect_refused(
      {
          {"one list missing",
           "cu_seqlens_k is missing: packed sequences need cu_seqlens_q and cu_seqlens_k",
           [](Call& c) { c.a.cu_seqlens_k.reset(); }},
          {"the other missing",
           "cu_seqlens_q is missing: packed sequences need cu_seqlens_q and cu_seqlens_k",
           [](Call& c) { c.a.cu_seqlens_q.reset(); }},
          {"dense tensors",
           "q has 4 axes, shape (2, 3, 4, 5): 3 are needed, (tokens, heads, head_dim), for "
           "cu_seqlens_q was given: flatten batch and seqlen, or leave cu_seqlens_q and "
           "cu_seqlens_k away",
           [](Call& c) {
             c.a.q = tensor({2, 3, 4, 5});
           }},
          {"offsets of two axes", "cu_seqlens_q has 2 axes, shape (1, 3): 1 is needed",
           [](Call& c) {
             c.a.cu_seqlens_q = Tensor::packed(c.offsets_q.data(), DType::kInt64, {1, 3});
           }},
          {"no offsets", "cu_seqlens_q is empty: number of sequences + 1 offsets are needed",
           [](Call& c) { c.a.cu_seqlens_q->shape[0] = 0; }},
          {"float offsets", "cu_seqlens_k is float32: int32 or int64 is needed",
           [](Call& c) { c.a.cu_seqlens_k->dtype = DType::kFloat32; }},
          {"different numbers of sequences",
           "length of cu_seqlens_k is 2: 3 is needed, from the number of sequences",
           [](Call& c) { c.a.cu_seqlens_k->shape[0] = 2; }},
          {"first offset", "cu_seqlens_q starts with 1: 0 is needed",
           [](Call& c) { c.offsets_q[0] = 1; }},
          {"offsets that fall", "cu_seqlens_k[2] is 3 after 4: offsets must not decrease",
           [](Call& c) { c.offsets_k[2] = 3; }},
          {"offsets beyond the rows", "cu_seqlens_q ends with 8: q has 7 rows, so at most that",
           [](Call& c) { c.offsets_q[2] = 8; }},
          {"bias without maxima",
           "bias with packed sequences needs max_seqlen_q and max_seqlen_k: they give its shape",
           [](Call& c) {
             c.a.bias = tensor({4, 5});
             c.a.max_seqlen_q = 4;
           }},
          {"mask without maxima",
           "mask with packed sequences needs max_seqlen_q and max_seqlen_k: they give its shape",
           [](Call& c) {
             c.a.mask = tensor({4, 5}, DType::kBool);
           }},
          {"maxima below the longest",
           "max_seqlen_k is 4: the longest sequence has 5 rows, and bias must cover it",
           [](Call& c) {
             c.a.bias = tensor({4, 5});
             c.a.max_seqlen_q = 4;
             c.a.max_seqlen_k = 4;
           }},
          {"bias of another extent",
           "bias has shape (4, 6): it must broadcast to (2, 4, 4, 5) = (batch, heads, queries, "
           "keys)",
           [](Call& c) {
             c.a.bias = tensor({4, 6});
             c.a.max_seqlen_q = 4;
             c.a.max_seqlen_k = 5;
           }},
          {"lse of a dense shape", "lse has 3 axes, shape (1, 4, 7): 2 are needed",
           [](Call& c) {
             c.lse = tensor({1, 4, 7});
           }},
      },
      make_packed);
  expect_refused({{"maxima of dense tensors",
                   "max_seqlen_q was given without cu_seqlens_q and cu_seqlens_k: it belongs to "
                   "packed sequences",
                   [](Call& c) { c.a.max_seqlen_q = 3; }}},
                 make_dense);
}

TEST(BadInput, used_lengths) {
  const auto with_used = [](Call& c) {
    make_dense(c);
    c.used_k = {0, 4};
    c.used_q = {2, 3};
    c.a.seqused_q = c.vector(c.used_q);
    c.a.seqused_k = c.vector(c.used_k);
  };
  expect_refused(
      {
          {"float lengths", "seqused_q is float64: int32 or int64 is needed",
           [](Call& c) { c.a.seqused_q->dtype = DType::kFloat64; }},
          {"too few", "length of seqused_k is 1: 2 is needed, from the number of sequences",
           [](Call& c) { c.a.seqused_k->shape[0] = 1; }},
          {"two axes", "seqused_k has 2 axes, shape (2, 1): 1 is needed",
           [](Call& c) {
             c.a.seqused_k = Tensor::packed(c.used_k.data(), DType::kInt64, {2, 1});
           }},
          {"negative", "seqused_q[1] is -1: sequence 1 has 3 rows",
           [](Call& c) { c.used_q[1] = -1; }},
          {"longer than the tensor", "seqused_k[0] is 5: sequence 0 has 4 rows",
           [](Call& c) { c.used_k[0] = 5; }},
      },
      with_used);
  expect_refused({{"longer than its own sequence", "seqused_k[0] is 5: sequence 0 has 4 rows",
                   [](Call& c) {
                     c.used_k = {5, 5};
                     c.a.seqused_k = c.vector(c.used_k);
                   }}},
                 make_packed);
}

TEST(BadInput, numbers) {
  const auto causal = [](int x) { return [x](Call& c) { c.a.causal = static_cast<Causal>(x); }; };
  const auto scale = [](double x) { return [x](Call& c) { c.a.scale = x; }; };
  const auto softcap = [](double x) { return [x](Call& c) { c.a.softcap = x; }; };
  const auto dropout = [](double x) { return [x](Call& c) { c.a.dropout_p = x; }; };
  expect_refused(
      {
          {"causal beyond its names", "causal is 3: a value of onefold::Causal is needed",
           causal(3)},
          {"causal far beyond", "causal is 255: a value of onefold::Causal is needed", causal(255)},
          {"scale NaN", "scale is nan: a finite number is needed", scale(kNaN)},
          {"scale infinite", "scale is -inf: a finite number is needed", scale(-kInfinite)},
          {"scale beyond float32",
           "scale is 1e+39: scores are float32 inside, so a number between -2.35866e+38 and "
           "2.35866e+38 is needed",
           scale(1e39)},
          {"softcap negative", "softcap is -1: a finite number >= 0 is needed, 0 for none",
           softcap(-1)},
          {"softcap NaN", "softcap is nan: a finite number >= 0 is needed, 0 for none",
           softcap(kNaN)},
          {"softcap infinite", "softcap is inf: a finite number >= 0 is needed, 0 for none",
           softcap(kInfinite)},
          {"softcap without a reciprocal",
           "softcap is 1e-40: its reciprocal has to be finite, so at least 2.93874e-39 is needed, "
           "0 "
           "for none",
           softcap(1e-40)},
          {"dropout negative", "dropout_p is -0.1: a probability from 0 to 1 is needed",
           dropout(-0.1)},
          {"dropout above 1", "dropout_p is 1.5: a probability from 0 to 1 is needed",
           dropout(1.5)},
          {"dropout NaN", "dropout_p is nan: a probability from 0 to 1 is needed", dropout(kNaN)},
      },
      make_dense);
}

TEST(BadInput, tensors_of_options) {
  expect_refused(
      {
          {"slopes of three axes",
           "alibi_slopes has shape (1, 2, 4): (4,) or (2, 4) is needed, one number per query head",
           [](Call& c) {
             c.a.alibi_slopes = tensor({1, 2, 4});
           }},
          {"slopes per key head", "heads of alibi_slopes is 2: 4 is needed, the heads of q",
           [](Call& c) { c.a.alibi_slopes = tensor({2}); }},
          {"slopes of another batch", "batch of alibi_slopes is 3: 2 is needed, the batch of q",
           [](Call& c) {
             c.a.alibi_slopes = tensor({3, 4});
           }},
          {"slopes in half", "alibi_slopes is float16: float32 is needed",
           [](Call& c) { c.a.alibi_slopes->dtype = DType::kFloat16; }},
          {"slopes wider than q", "alibi_slopes is float64: float32 is needed",
           [](Call& c) { c.a.alibi_slopes->dtype = DType::kFloat64; }},
          {"sinks per batch", "sinks has shape (2, 4): (4,) is needed, one number per query head",
           [](Call& c) {
             c.a.sinks = tensor({2, 4});
           }},
          {"sinks of integers", "sinks is int32: float32 is needed",
           [](Call& c) { c.a.sinks->dtype = DType::kInt32; }},
          {"boolean bias", "bias is bool: a float dtype is needed (mask takes booleans)",
           [](Call& c) { c.a.bias->dtype = DType::kBool; }},
          {"additive mask", "mask is float32: bool is needed (bias takes additive numbers)",
           [](Call& c) { c.a.mask->dtype = DType::kFloat32; }},
          {"bias that does not broadcast",
           "bias has shape (2, 1, 4): it must broadcast to (2, 4, 3, 4) = (batch, heads, queries, "
           "keys)",
           [](Call& c) {
             c.a.bias = tensor({2, 1, 4});
           }},
          {"empty mask",
           "mask has shape (2, 0, 3, 1): it must broadcast to (2, 4, 3, 4) = (batch, heads, "
           "queries, keys)",
           [](Call& c) {
             c.a.mask = tensor({2, 0, 3, 1}, DType::kBool);
           }},
          {"bias of five axes",
           "bias has 5 axes, shape (4, 1, 4, 0, ...): from 0 to 4 are possible",
           [](Call& c) { c.a.bias->rank = 5; }},
          {"null mask", "mask is a null pointer with shape (2, 1, 3, 1): it needs memory",
           [](Call& c) { c.a.mask->data = nullptr; }},
      },
      [](Call& c) {
        make_dense(c);
        make_optional(c);
      });
}

TEST(BadInput, more_than_anyone_could_wait_for_is_refused) {
  constexpr std::int64_t kMany = std::int64_t{1} << 25;
  const auto repeat = [](Tensor& t, int axis, std::int64_t extent) {
    t.shape[axis] = extent;
    t.stride[axis] = 0;
  };
  expect_refused(
      {{"elements of k", "k has shape (2, 33554432, 2, 5242880): at most 2^48 elements work",
        [&](Call& c) {
          repeat(c.a.k, 1, kMany);
          repeat(c.a.k, 3, 5242880);
        },
        ErrorKind::kUnsupported},
       {"rows without elements",
        "q has shape (2, 1125899906842624, 4, 0): at most 2^48 elements work",
        [&](Call& c) {
          repeat(c.a.q, 1, kMany << 25);
          repeat(c.a.q, 3, 0);
        },
        ErrorKind::kUnsupported}},
      make_dense);
  expect_refused({{"heads of all sequences",
                   "q has 140737488355328 heads in a batch of 4: at most 2^48 in the whole batch "
                   "work",
                   [&](Call& c) {
                     c.offsets_q = c.offsets_k = {0, 0, 0, 1, 1};
                     c.a.cu_seqlens_q = c.vector(c.offsets_q);
                     c.a.cu_seqlens_k = c.vector(c.offsets_k);
                     repeat(c.a.q, 0, 1), repeat(c.a.q, 1, kMany << 22), repeat(c.a.q, 2, 1);
                     for (Tensor* t : {&c.a.k, &c.a.v}) repeat(*t, 0, 1), repeat(*t, 2, 1);
                   },
                   ErrorKind::kUnsupported}},
                 make_packed);
}

TEST(BadInput, a_batch_beyond_32_bits_is_refused) {
  Attention a;
  a.q = tensor({std::int64_t{1} << 40, 0, 1, 4});
  a.k = a.v = tensor({std::int64_t{1} << 40, 1, 1, 4});
  try {
    make_problem(a);
    ADD_FAILURE() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(std::string(error.what()), "batch is 1099511627776: at most 2147483647 works");
    EXPECT_EQ(error.kind(), ErrorKind::kUnsupported);
  }
}

}  // namespace
}  // namespace onefold::test
