// Who may share memory with whom, against sets of bytes.

#include "core/overlap.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "tests/algebra/random.h"

namespace onefold::test {
namespace {

// A view over nothing: only its addresses count.
Tensor view(std::intptr_t offset, std::vector<std::int64_t> shape, std::vector<std::int64_t> stride,
            DType dtype = DType::kFloat32) {
  Tensor t;
  t.data = reinterpret_cast<void*>(std::intptr_t{1} << 40 | offset * size_bytes(dtype));
  t.dtype = dtype;
  t.rank = static_cast<int>(shape.size());
  for (int axis = 0; axis < t.rank; ++axis) {
    t.shape[axis] = shape[static_cast<std::size_t>(axis)];
    t.stride[axis] = stride[static_cast<std::size_t>(axis)];
  }
  return t;
}

std::set<std::intptr_t> bytes_of(const Tensor& t) {
  std::set<std::intptr_t> bytes;
  for (std::int64_t idx = 0; idx < t.elements(); ++idx) {
    std::int64_t rest = idx, at = 0;
    for (int axis = t.rank - 1; axis >= 0; --axis) {
      at += rest % t.shape[axis] * t.stride[axis];
      rest /= t.shape[axis];
    }
    const auto first = reinterpret_cast<std::intptr_t>(t.data) + at * size_bytes(t.dtype);
    for (int x = 0; x < size_bytes(t.dtype); ++x) bytes.insert(first + x);
  }
  return bytes;
}

bool really_overlap(const Tensor& x, const Tensor& y) {
  const std::set<std::intptr_t> a = bytes_of(x), b = bytes_of(y);
  for (const std::intptr_t byte : a) {
    if (b.contains(byte)) return true;
  }
  return false;
}

TEST(Overlap, tensors_that_share_a_byte_are_never_called_apart) {
  int shared = 0, told_apart_inside = 0;
  for_random_cases(20000, [&](Random& random) {
    const auto draw = [&] {
      const DType dtypes[] = {DType::kFloat32, DType::kFloat16, DType::kFloat64};
      std::vector<std::int64_t> shape, stride;
      const int rank = random.integer(1, 4);
      for (int axis = 0; axis < rank; ++axis) {
        shape.push_back(random.integer(random.chance(0.05) ? 0 : 1, 3));
        stride.push_back(random.integer(-4, 12) * (random.chance(0.3) ? 6 : 1));
      }
      return view(random.integer(0, 30), shape, stride, dtypes[random.integer(0, 2)]);
    };
    const Tensor x = draw(), y = draw();
    const bool really = really_overlap(x, y);
    shared += really;
    if (really) {
      ASSERT_TRUE(may_overlap(x, y));
      ASSERT_TRUE(may_overlap(y, x));
    } else if (!may_overlap(x, y)) {
      ++told_apart_inside;
    }
  });
  EXPECT_GT(shared, 2000);  // the draw is not vacuous
  EXPECT_GT(told_apart_inside, 2000);
}

// qkv in one buffer, in the orders that projections leave it.
TEST(Overlap, the_slices_of_one_packed_projection_are_apart) {
  constexpr std::int64_t kB = 2, kS = 5, kH = 3, kD = 4;
  struct Order {
    const char* name;
    std::vector<std::int64_t> stride;  // of (B, S, H, D)
    std::int64_t slice;                // from q to k to v
  };
  const Order kOrders[] = {
      {"(B, S, 3, H, D)", {kS * 3 * kH * kD, 3 * kH * kD, kD, 1}, kH * kD},
      {"(B, S, H, 3, D)", {kS * 3 * kH * kD, 3 * kH * kD, 3 * kD, 1}, kD},
      {"(B, S, H, D, 3)", {kS * 3 * kH * kD, 3 * kH * kD, 3 * kD, 3}, 1},
      {"(B, H, S, 3, D)", {kH * kS * 3 * kD, 3 * kD, kS * 3 * kD, 1}, kD},
      {"(3, B, S, H, D)", {kS * kH * kD, kH * kD, kD, 1}, kB * kS * kH * kD},
      {"(S, B, 3, H, D)", {3 * kH * kD, kB * 3 * kH * kD, kD, 1}, kH * kD},
  };
  for (const Order& order : kOrders) {
    SCOPED_TRACE(order.name);
    const auto slice = [&](std::int64_t n) {
      return view(n * order.slice, {kB, kS, kH, kD}, order.stride);
    };
    ASSERT_FALSE(really_overlap(slice(0), slice(1)));
    for (int one = 0; one < 3; ++one) {
      for (int other = 0; other < 3; ++other) {
        EXPECT_EQ(may_overlap(slice(one), slice(other)), one == other) << one << " " << other;
      }
    }
    // One element further, and the slices meet.
    Tensor moved = slice(1);
    moved.data = static_cast<float*>(moved.data) + 1;
    EXPECT_TRUE(may_overlap(moved, slice(2)));
  }
}

TEST(Overlap, grouped_heads_of_one_buffer_are_apart) {
  // (B, S, Hq + 2 Hk, D): q is wider than k and v.
  const Tensor q = view(0, {2, 5, 6, 4}, {5 * 40, 40, 4, 1});
  const Tensor k = view(24, {2, 5, 2, 4}, {5 * 40, 40, 4, 1});
  const Tensor v = view(32, {2, 5, 2, 4}, {5 * 40, 40, 4, 1});
  EXPECT_FALSE(may_overlap(q, k) || may_overlap(q, v) || may_overlap(k, v));
}

TEST(Overlap, tensors_without_elements_share_nothing) {
  const Tensor x = view(0, {2, 0, 4}, {4, 4, 1}), y = view(0, {2, 3, 4}, {12, 4, 1});
  EXPECT_FALSE(may_overlap(x, y));
  EXPECT_FALSE(may_overlap(y, x));
}

TEST(Overlap, a_footprint_names_both_sides) {
  Footprint memory;
  const Tensor q = view(0, {4, 4}, {4, 1}), out = view(8, {4, 4}, {4, 1});
  const Tensor apart = view(100, {4, 4}, {4, 1}), broadcast = view(200, {4, 4}, {0, 1});
  memory.reads("q", q);
  memory.writes("apart", apart);
  const auto message = [&](const char* name, const Tensor& t) {
    try {
      memory.writes(name, t);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_EQ(message("out", out), "out shares memory with q: an output needs memory of its own");
  // What was written before counts too.
  EXPECT_EQ(message("dk", apart), "dk shares memory with apart: an output needs memory of its own");
  EXPECT_EQ(message("dv", broadcast),
            "dv has stride 0 on axis 0: an output needs memory of its own");
  EXPECT_EQ(
      message("dv", view(200, {2, 3, 4}, {12, 1, 1})),
      "dv has stride 1 on axis 2 and may reach elements twice: an output needs memory of its own");
  EXPECT_EQ(message("dv", view(200, {2, 3, 4}, {3, -1, 6})), "");
}

TEST(Overlap, an_output_without_elements_may_have_any_strides) {
  Footprint memory;
  memory.writes("dk", view(0, {3, 0, 2}, {0, 2, 0}));
}

}  // namespace
}  // namespace onefold::test
