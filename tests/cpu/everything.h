// Everything that can be asked of one question, and comparing two answers bit by bit.
//
// Includes backend.h, question.h and the public headers.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "tests/cpu/backend.h"
#include "tests/cpu/question.h"

namespace onefold::test {

// ---- tensors ----

inline std::vector<std::byte> bits_of(const Tensor& t) {
  const auto size = static_cast<std::size_t>(size_bytes(t.dtype));
  std::vector<std::byte> bits(static_cast<std::size_t>(t.elements()) * size);
  for (std::int64_t n = 0; n < t.elements(); ++n) {
    std::int64_t rest = n, at = 0;
    for (int axis = t.rank - 1; axis >= 0; --axis) {
      at += rest % t.shape[axis] * t.stride[axis];
      rest /= t.shape[axis];
    }
    std::memcpy(bits.data() + static_cast<std::size_t>(n) * size,
                static_cast<const std::byte*>(t.data) + at * static_cast<std::int64_t>(size), size);
  }
  return bits;
}

inline void expect_same_bits(const std::string& name, const Tensor& x, const Tensor& y) {
  const std::vector<std::byte> a = bits_of(x), b = bits_of(y);
  ASSERT_EQ(a.size(), b.size()) << name;
  std::size_t different = 0, first = a.size();
  for (std::size_t at = 0; at < a.size(); ++at) {
    different += a[at] != b[at];
    if (a[at] != b[at] && first == a.size()) first = at;
  }
  EXPECT_EQ(different, 0u) << name << ": bytes that differ, from element "
                           << first / static_cast<std::size_t>(size_bytes(x.dtype)) << " on";
}

inline Tensor slice(Tensor t, int axis, std::int64_t begin, std::int64_t end) {
  t.data = static_cast<std::byte*>(t.data) + begin * t.stride[axis] * size_bytes(t.dtype);
  t.shape[axis] = end - begin;
  return t;
}
// The slice of an axis counted from the right, of a tensor that may lack it or be broadcast.
inline Tensor slice_from_right(const Tensor& t, int axis, std::int64_t begin, std::int64_t end) {
  return axis > t.rank || t.shape[t.rank - axis] == 1 ? t : slice(t, t.rank - axis, begin, end);
}
inline Shape shape_of(const Tensor& t) { return Shape(t.shape.begin(), t.shape.begin() + t.rank); }

inline Array copy_of(const Tensor& t, DType dtype, Layout layout, Random& random) {
  Array copy(dtype, shape_of(t), layout, random);
  copy.each([&](std::int64_t n, std::int64_t) {
    std::int64_t rest = n, at = 0;
    for (int axis = t.rank - 1; axis >= 0; --axis) {
      at += rest % t.shape[axis] * t.stride[axis];
      rest /= t.shape[axis];
    }
    copy.set(n, load_number(t.data, t.dtype, at));
  });
  return copy;
}

// ---- answers ----

struct Cotangents {
  Tensor dout, dlse;
};

struct Everything {
  Array out, lse;
  std::optional<Array> dq, dk, dv, dbias, dslopes, dsinks;
};

// All that can be asked of a question, packed.
inline Everything everything(const Context& context, const Attention& a, const Cotangents& c) {
  Random unused(0);
  const auto like = [&](const Tensor& t) {
    return Array(t.dtype, shape_of(t), Layout::kPacked, unused);
  };
  const auto tensor = [](const std::optional<Array>& array) {
    return array ? std::optional<Tensor>(array->tensor()) : std::nullopt;
  };
  Everything e{like(c.dout), like(c.dlse), like(a.q), like(a.k), like(a.v), {}, {}, {}};
  if (a.bias) e.dbias = like(*a.bias);
  if (a.alibi_slopes) e.dslopes = like(*a.alibi_slopes);
  if (a.sinks) e.dsinks = like(*a.sinks);
  forward(context, a, e.out.tensor(), e.lse.tensor());
  backward(context, a, e.out.tensor(), e.lse.tensor(), c.dout, c.dlse,
           {tensor(e.dq), tensor(e.dk), tensor(e.dv), tensor(e.dbias), tensor(e.dslopes),
            tensor(e.dsinks)});
  return e;
}

inline void expect_same(const Everything& x, const Everything& y) {
  expect_same_bits("out", x.out.tensor(), y.out.tensor());
  expect_same_bits("lse", x.lse.tensor(), y.lse.tensor());
  expect_same_bits("dq", x.dq->tensor(), y.dq->tensor());
  expect_same_bits("dk", x.dk->tensor(), y.dk->tensor());
  expect_same_bits("dv", x.dv->tensor(), y.dv->tensor());
  const auto both = [](const char* name, const auto& a, const auto& b) {
    if (a && b) expect_same_bits(name, a->tensor(), b->tensor());
  };
  both("dbias", x.dbias, y.dbias);
  both("dslopes", x.dslopes, y.dslopes);
  both("dsinks", x.dsinks, y.dsinks);
}
inline void expect_same_forward(const Everything& x, const Everything& y) {
  expect_same_bits("out", x.out.tensor(), y.out.tensor());
  expect_same_bits("lse", x.lse.tensor(), y.lse.tensor());
}

// ---- questions ----

inline Question dense(Random& random, std::int64_t batch, std::int64_t most = 200) {
  Question x;
  x.dtype = draw_float(random);
  x.batch = batch;
  x.kv_heads = random.integer(1, 2);
  x.heads = x.kv_heads * random.integer(1, 3);
  x.dim = random.chance(0.5) ? 16 * random.integer(1, 4) : random.integer(1, 70);
  x.dim_v = random.chance(0.5) ? x.dim : random.integer(1, 70);
  x.q_extent =
      random.chance(0.3) ? random.integer(1, 8) : random.integer(1, static_cast<int>(most));
  x.k_extent = random.integer(1, static_cast<int>(most));
  x.q_lengths.assign(static_cast<std::size_t>(batch), x.q_extent);
  x.k_lengths.assign(static_cast<std::size_t>(batch), x.k_extent);
  x.q_used = x.q_lengths;
  x.k_used = x.k_lengths;
  x.read = Layout::kPacked;
  draw_inputs(x, random);
  x.a.q = x.q.tensor(), x.a.k = x.k.tensor(), x.a.v = x.v.tensor();
  draw_cotangents(x, random);
  return x;
}
inline Question dense_with_options(Random& random, std::int64_t batch) {
  Question x = dense(random, batch);
  draw_score_options(x, random);
  draw_visibility(x, random);
  x.text = describe(x);
  return x;
}
inline Cotangents cotangents(const Question& x) { return {x.dout.tensor(), x.dlse.tensor()}; }

}  // namespace onefold::test
