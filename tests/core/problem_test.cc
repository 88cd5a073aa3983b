// Every bad question gets its one sentence, and every good one its canonical form.

#include "core/problem.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <vector>

namespace onefold::test {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinite = std::numeric_limits<double>::infinity();
constexpr std::int64_t kLongest = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t kShortest = std::numeric_limits<std::int64_t>::min();

// Memory enough for any tensor here; problems are made, never executed.
alignas(64) std::array<std::byte, 1 << 16> pool;
Tensor tensor(std::initializer_list<std::int64_t> shape, DType dtype = DType::kFloat32,
              std::size_t offset = 0) {
  return Tensor::packed(pool.data() + offset, dtype, shape);
}

// One question and everything forward and backward are handed with it, all of it valid.
struct Call {
  Attention a;
  Tensor out, lse;
  std::optional<Tensor> dout, dlse;
  Gradients g;
  std::vector<std::int64_t> offsets_q{0, 3, 7}, offsets_k{0, 4, 9}, used_q{2, 4}, used_k{0, 5};

  Tensor vector(std::vector<std::int64_t>& numbers) {
    return Tensor::packed(numbers.data(), DType::kInt64,
                          {static_cast<std::int64_t>(numbers.size())});
  }
  void run() const {
    const Problem p = make_problem(a);
    make_forward(p, a, out, lse);
    make_backward(p, a, out, lse, dout, dlse, g);
  }
};

// (2, 3, 4, 5), (2, 4, 2, 5), (2, 4, 2, 6). Every tensor has a page of its own.
void make_dense(Call& c) {
  std::size_t page = 0;
  const auto fresh = [&page](std::initializer_list<std::int64_t> shape) {
    return tensor(shape, DType::kFloat32, 4096 * page++);
  };
  c.a.q = fresh({2, 3, 4, 5});
  c.a.k = fresh({2, 4, 2, 5});
  c.a.v = fresh({2, 4, 2, 6});
  c.out = fresh({2, 3, 4, 6});
  c.lse = fresh({2, 4, 3});
  c.dout = fresh({2, 3, 4, 6});
  c.dlse = fresh({2, 4, 3});
  c.g.dq = fresh({2, 3, 4, 5});
  c.g.dk = fresh({2, 4, 2, 5});
  c.g.dv = fresh({2, 4, 2, 6});
}
// The same with sequences of 3 and 4 queries, 4 and 5 keys.
void make_packed(Call& c) {
  make_dense(c);
  const auto rows = [](Tensor& t, std::int64_t count) {
    t = Tensor::packed(t.data, t.dtype, {count, t.shape[2], t.shape[3]});
  };
  for (Tensor* t : {&c.a.q, &c.out, &*c.dout, &*c.g.dq}) rows(*t, 7);
  for (Tensor* t : {&c.a.k, &c.a.v, &*c.g.dk, &*c.g.dv}) rows(*t, 9);
  for (Tensor* t : {&c.lse, &*c.dlse}) *t = Tensor::packed(t->data, t->dtype, {4, 7});
  c.a.cu_seqlens_q = c.vector(c.offsets_q);
  c.a.cu_seqlens_k = c.vector(c.offsets_k);
}
void make_optional(Call& c) {  // each option once, outputs for all
  c.a.bias = tensor({4, 1, 4}, DType::kFloat32, 4096 * 10);
  c.a.mask = tensor({2, 1, 3, 1}, DType::kBool, 4096 * 11);
  c.a.alibi_slopes = tensor({4}, DType::kFloat32, 4096 * 12);
  c.a.sinks = tensor({4}, DType::kFloat32, 4096 * 12 + 512);
  c.g.dbias = tensor({4, 1, 4}, DType::kFloat32, 4096 * 13);
  c.g.dslopes = tensor({4}, DType::kFloat32, 4096 * 14);
  c.g.dsinks = tensor({4}, DType::kFloat32, 4096 * 14 + 512);
}

struct Bad {
  const char* name;
  std::string message;
  std::function<void(Call&)> spoil;
  ErrorKind kind = ErrorKind::kInvalidArgument;
};

void expect_refused(const std::vector<Bad>& table, const std::function<void(Call&)>& make) {
  for (const Bad& bad : table) {
    SCOPED_TRACE(bad.name);
    Call good;
    make(good);
    EXPECT_NO_THROW(good.run());
    Call c;
    make(c);
    bad.spoil(c);
    try {
      c.run();
      ADD_FAILURE() << "accepted";
    } catch (const Error& error) {
      EXPECT_EQ(std::string(error.what()), bad.message);
      EXPECT_EQ(error.kind(), bad.kind);
    }
  }
}

TEST(BadInput, shapes_and_memory_of_q_k_and_v) {
  expect_refused(
      {
          {"rank of q", "q has 3 axes, shape (3, 4, 5): 4 are needed",
           [](Call& c) {
             c.a.q = tensor({3, 4, 5});
           }},
          {"rank of k", "k has 2 axes, shape (4, 5): 4 are needed",
           [](Call& c) {
             c.a.k = tensor({4, 5});
           }},
          {"rank of v", "v has 0 axes, shape (): 4 are needed",
           [](Call& c) { c.a.v = tensor({}); }},
          {"more axes than a tensor has", "q has 9 axes, shape (2, 3, 4, 5, ...): 4 are needed",
           [](Call& c) { c.a.q.rank = 9; }},
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
          {"dense tensors", "q has 4 axes, shape (2, 3, 4, 5): 3 are needed",
           [](Call& c) {
             c.a.q = tensor({2, 3, 4, 5});
           }},
          {"offsets of two axes", "cu_seqlens_q has 2 axes, shape (1, 3): 1 are needed",
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
          {"two axes", "seqused_k has 2 axes, shape (2, 1): 1 are needed",
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
  const auto scale = [](double x) { return [x](Call& c) { c.a.scale = x; }; };
  const auto softcap = [](double x) { return [x](Call& c) { c.a.softcap = x; }; };
  const auto dropout = [](double x) { return [x](Call& c) { c.a.dropout_p = x; }; };
  expect_refused(
      {
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
           "bias has 5 axes: at most 4 broadcast to (batch, heads, queries, keys)",
           [](Call& c) { c.a.bias->rank = 5; }},
          {"null mask", "mask is a null pointer with shape (2, 1, 3, 1): it needs memory",
           [](Call& c) { c.a.mask->data = nullptr; }},
      },
      [](Call& c) {
        make_dense(c);
        make_optional(c);
      });
}

TEST(BadInput, outputs_and_cotangents) {
  expect_refused(
      {
          {"out of another dtype", "out is float16: q is float32 and both must agree",
           [](Call& c) { c.out.dtype = DType::kFloat16; }},
          {"out with q's head_dim", "out has shape (2, 3, 4, 5): (2, 3, 4, 6) is needed",
           [](Call& c) {
             c.out = tensor({2, 3, 4, 5}, DType::kFloat32, 4096 * 3);
           }},
          {"rank of out", "out has 3 axes, shape (3, 4, 6): 4 are needed",
           [](Call& c) {
             c.out = tensor({3, 4, 6});
           }},
          {"out that repeats itself",
           "out has stride 0 on axis 1: an output needs memory of its own",
           [](Call& c) { c.out.stride[1] = 0; }},
          {"lse that repeats itself",
           "lse has stride 0 on axis 2: an output needs memory of its own",
           [](Call& c) { c.lse.stride[2] = 0; }},
          {"out in q", "out shares memory with q: an output needs memory of its own",
           [](Call& c) { c.out.data = static_cast<float*>(c.a.q.data) + 100; }},
          {"lse in out", "lse shares memory with out: an output needs memory of its own",
           [](Call& c) { c.lse.data = c.out.data; }},
          {"lse of another dtype", "lse is float64: float32 is needed",
           [](Call& c) { c.lse.dtype = DType::kFloat64; }},
          {"batch of lse", "batch of lse is 1: 2 is needed, the batch of q",
           [](Call& c) {
             c.lse = tensor({1, 4, 3}, DType::kFloat32, 4096 * 4);
           }},
          {"heads of lse", "heads of lse is 3: 4 is needed, the heads of q",
           [](Call& c) {
             c.lse = tensor({2, 3, 4}, DType::kFloat32, 4096 * 4);
           }},
          {"rows of lse", "rows of lse is 4: 3 is needed, the rows of q",
           [](Call& c) {
             c.lse = tensor({2, 4, 4}, DType::kFloat32, 4096 * 4);
           }},
          {"shape of dout", "dout has shape (2, 3, 4, 5): (2, 3, 4, 6) is needed",
           [](Call& c) {
             c.dout = tensor({2, 3, 4, 5}, DType::kFloat32, 4096 * 5);
           }},
          {"dlse of another dtype", "dlse is bfloat16: float32 is needed",
           [](Call& c) { c.dlse->dtype = DType::kBFloat16; }},
          {"shape of dq", "dq has shape (2, 3, 4, 6): (2, 3, 4, 5) is needed",
           [](Call& c) {
             c.g.dq = tensor({2, 3, 4, 6}, DType::kFloat32, 4096 * 7);
           }},
          {"dtype of dk", "dk is float16: k is float32 and both must agree",
           [](Call& c) { c.g.dk->dtype = DType::kFloat16; }},
          {"dv with the heads of q", "dv has shape (2, 4, 4, 6): (2, 4, 2, 6) is needed",
           [](Call& c) {
             c.g.dv = tensor({2, 4, 4, 6}, DType::kFloat32, 4096 * 9);
           }},
          {"dq in dout", "dq shares memory with dout: an output needs memory of its own",
           [](Call& c) { c.g.dq->data = c.dout->data; }},
          {"dk in dq", "dk shares memory with dq: an output needs memory of its own",
           [](Call& c) { c.g.dk->data = c.g.dq->data; }},
          {"dv in k", "dv shares memory with k: an output needs memory of its own",
           [](Call& c) { c.g.dv->data = c.a.k.data; }},
          {"dbias without bias", "dbias was asked for without bias: there is nothing to derive by",
           [](Call& c) { c.g.dbias = tensor({4}, DType::kFloat32, 4096 * 13); }},
          {"dslopes without slopes",
           "dslopes was asked for without alibi_slopes: there is nothing to derive by",
           [](Call& c) { c.g.dslopes = tensor({4}, DType::kFloat32, 4096 * 13); }},
          {"dsinks without sinks",
           "dsinks was asked for without sinks: there is nothing to derive by",
           [](Call& c) { c.g.dsinks = tensor({4}, DType::kFloat32, 4096 * 13); }},
      },
      make_dense);
  expect_refused(
      {
          {"dbias that is expanded",
           "dbias is float32 (4, 3, 4): float32 (4, 1, 4) is needed, as bias",
           [](Call& c) {
             c.g.dbias = tensor({4, 3, 4}, DType::kFloat32, 4096 * 13);
           }},
          {"dtype of dbias", "dbias is float64 (4, 1, 4): float32 (4, 1, 4) is needed, as bias",
           [](Call& c) { c.g.dbias->dtype = DType::kFloat64; }},
          {"rank of dslopes", "dslopes has 2 axes, shape (2, 4): 1 are needed",
           [](Call& c) {
             c.g.dslopes = tensor({2, 4}, DType::kFloat32, 4096 * 14);
           }},
          {"dsinks in sinks", "dsinks shares memory with sinks: an output needs memory of its own",
           [](Call& c) { c.g.dsinks->data = c.a.sinks->data; }},
      },
      [](Call& c) {
        make_dense(c);
        make_optional(c);
      });
}

TEST(BadInput, merging) {
  struct Merge {
    Tensor outs = tensor({3, 5, 4}, DType::kFloat32, 0),
           lses = tensor({3, 5}, DType::kFloat32, 4096);
    Tensor out = tensor({5, 4}, DType::kFloat32, 8192), lse = tensor({5}, DType::kFloat32, 12288);
  };
  const auto message = [](const std::function<void(Merge&)>& spoil) {
    Merge m;
    spoil(m);
    try {
      check_merge(m.outs, m.lses, m.out, m.lse);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_EQ(message([](Merge&) {}), "");
  EXPECT_EQ(message([](Merge& m) {
              m.outs = tensor({5, 4});
            }),
            "outs has 2 axes, shape (5, 4): 3 are needed");
  EXPECT_EQ(message([](Merge& m) {
              m.lses = tensor({2, 5});
            }),
            "lses has shape (2, 5): (3, 5) is needed");
  EXPECT_EQ(message([](Merge& m) { m.lses.dtype = DType::kFloat16; }),
            "lses is float16: float32 or float64 is needed");
  EXPECT_EQ(message([](Merge& m) { m.out.dtype = DType::kBool; }),
            "out is bool: a float dtype is needed");
  EXPECT_EQ(message([](Merge& m) { m.lse.data = nullptr; }),
            "lse is a null pointer with shape (5,): it needs memory");
  EXPECT_EQ(message([](Merge& m) { m.out.data = m.outs.data; }),
            "out shares memory with outs: an output needs memory of its own");
  EXPECT_EQ(message([](Merge& m) { m.lse.stride[0] = 0; }),
            "lse has stride 0 on axis 0: an output needs memory of its own");
  EXPECT_EQ(message([](Merge& m) { m.outs.device.type = DeviceType::kCuda; }),
            "outs is on CUDA device 0: the call runs on the CPU, so move it there");
}

TEST(GoodInput, gradients_may_be_slices_of_one_buffer) {
  // dqkv of shape (2, 4, 3, 4, 5): sequences of equal length, as many key as query heads.
  Call c;
  const auto whole = [](std::size_t page) { return tensor({2, 4, 4, 5}, DType::kFloat32, page); };
  c.a.q = whole(0), c.a.k = whole(4096), c.a.v = whole(8192), c.out = whole(12288);
  c.dout = whole(16384);
  c.lse = tensor({2, 4, 4}, DType::kFloat32, 20480);
  const auto slice = [](std::size_t n) {
    Tensor t = tensor({2, 4, 4, 5}, DType::kFloat32, 24576 + n * 20 * sizeof(float));
    t.stride = {4 * 60, 60, 5, 1};
    return t;
  };
  c.g = {slice(0), slice(1), slice(2)};
  EXPECT_NO_THROW(c.run());
  // And so may the inputs with out: q, k, v and out as four slices.
  const auto quarter = [](std::size_t n) {
    Tensor t = tensor({2, 4, 4, 5}, DType::kFloat32, 32768 + n * 20 * sizeof(float));
    t.stride = {4 * 80, 80, 5, 1};
    return t;
  };
  c.a.q = quarter(0), c.a.k = quarter(1), c.a.v = quarter(2), c.out = quarter(3);
  EXPECT_NO_THROW(c.run());
  c.out.data = static_cast<float*>(c.out.data) - 1;
  EXPECT_THROW(c.run(), Error);
}

TEST(GoodInput, inputs_may_share_memory) {
  Call c;
  make_dense(c);
  c.a.k = c.a.v = tensor({2, 4, 2, 5}, DType::kFloat32, 4096);
  c.out = c.a.q, c.out.data = pool.data() + 12288;
  c.dout = c.out, c.g.dv = c.a.k, c.g.dv->data = pool.data() + 4096 * 9;
  EXPECT_NO_THROW(c.run());
}

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
