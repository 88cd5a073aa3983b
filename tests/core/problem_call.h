// A valid question with everything forward and backward are handed, and tables of what spoils it.
//
// Invariant: nothing here is executed: tensors share one pool of memory, a page each. Includes
// core/problem.h and GoogleTest.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/problem.h"

namespace onefold::test {

inline constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
inline constexpr double kInfinite = std::numeric_limits<double>::infinity();
inline constexpr std::int64_t kLongest = std::numeric_limits<std::int64_t>::max();
inline constexpr std::int64_t kShortest = std::numeric_limits<std::int64_t>::min();

// Memory enough for any tensor here; problems are made, never executed.
alignas(64) inline std::array<std::byte, 1 << 17> pool;
// Kept out of line: inlined, g++ 12 warns of an overflow that is not there.
[[gnu::noinline]] inline Tensor tensor(std::initializer_list<std::int64_t> shape,
                                       DType dtype = DType::kFloat32, std::size_t offset = 0) {
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
inline void make_dense(Call& c) {
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
inline void make_packed(Call& c) {
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
inline void make_optional(Call& c) {  // each option once, outputs for all
  c.a.bias = tensor({4, 1, 4}, DType::kFloat32, 4096 * 10);
  c.a.mask = tensor({2, 1, 3, 1}, DType::kBool, 4096 * 11);
  c.a.alibi_slopes = tensor({4}, DType::kFloat32, 4096 * 12);
  c.a.sinks = tensor({4}, DType::kFloat32, 4096 * 12 + 512);
  c.g.dbias = tensor({4, 1, 4}, DType::kFloat32, 4096 * 13);
  c.g.dslopes = tensor({4}, DType::kFloat32, 4096 * 14);
  c.g.dsinks = tensor({4}, DType::kFloat32, 4096 * 14 + 512);
}

// All that a call may have: dense, or packed with used lengths too.
inline void make_everything(Call& c, bool packed) {
  packed ? make_packed(c) : make_dense(c);
  make_optional(c);
  c.a.seed_tensor = tensor({1}, DType::kInt64);
  c.used_k = {0, 4};
  c.used_q = {2, 3};
  c.a.seqused_q = c.vector(c.used_q);
  c.a.seqused_k = c.vector(c.used_k);
  if (packed) {
    c.a.max_seqlen_q = 4;
    c.a.max_seqlen_k = 5;
    c.a.bias = tensor({4, 1, 5}, DType::kFloat32, 4096 * 10);
    c.a.mask = tensor({2, 1, 4, 1}, DType::kBool, 4096 * 11);
    c.g.dbias = tensor({4, 1, 5}, DType::kFloat32, 4096 * 13);
  }
  std::size_t page = 16;  // index lists have pages too
  for (std::optional<Tensor>* t :
       {&c.a.seed_tensor, &c.a.seqused_q, &c.a.seqused_k, &c.a.cu_seqlens_q, &c.a.cu_seqlens_k}) {
    if (!*t) continue;
    std::byte* const to = pool.data() + 4096 * page++;
    std::memcpy(to, (*t)->data, static_cast<std::size_t>((*t)->elements()) * sizeof(std::int64_t));
    (*t)->data = to;
  }
}

// All of them by name: inputs in the order of the question, what backward is given, outputs.
using Named = std::pair<std::string, Tensor*>;
inline std::vector<Named> tensors_of(Call& c) {
  std::vector<Named> all = {{"q", &c.a.q},         {"k", &c.a.k},        {"v", &c.a.v},
                            {"out", &c.out},       {"lse", &c.lse},      {"dout", &*c.dout},
                            {"dlse", &*c.dlse},    {"dq", &*c.g.dq},     {"dk", &*c.g.dk},
                            {"dv", &*c.g.dv},      {"bias", &*c.a.bias}, {"mask", &*c.a.mask},
                            {"sinks", &*c.a.sinks}};
  all.insert(all.end(), {{"alibi_slopes", &*c.a.alibi_slopes},
                         {"seed", &*c.a.seed_tensor},
                         {"seqused_q", &*c.a.seqused_q},
                         {"seqused_k", &*c.a.seqused_k},
                         {"dbias", &*c.g.dbias},
                         {"dslopes", &*c.g.dslopes},
                         {"dsinks", &*c.g.dsinks}});
  if (c.a.cu_seqlens_q) all.emplace_back("cu_seqlens_q", &*c.a.cu_seqlens_q);
  if (c.a.cu_seqlens_k) all.emplace_back("cu_seqlens_k", &*c.a.cu_seqlens_k);
  return all;
}

struct Bad {
  const char* name;
  std::string message;
  std::function<void(Call&)> spoil;
  ErrorKind kind = ErrorKind::kInvalidArgument;
};

inline void expect_refused(const std::vector<Bad>& table, const std::function<void(Call&)>& make) {
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

}  // namespace onefold::test
