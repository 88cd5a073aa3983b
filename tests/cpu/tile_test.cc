// The pieces of tiles that move numbers: transposition, widening, sums of lanes, on the instruction
// set in use.

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "tests/cpu/isa/vectors.h"

namespace onefold::test {
namespace {

class Tile : public Vectors {
 protected:
  template <class R>
  void check_transpose();
  template <class R>
  void check_all_finite();
};

template <class R>
void Tile::check_transpose() {
  Random random(base_seed());
  const R canary = R(-1);
  for (std::int64_t rows = 0; rows <= 19; ++rows) {
    for (std::int64_t columns = 0; columns <= 19; ++columns) {
      const std::int64_t from_step = columns + random.integer(0, 3);
      const std::int64_t to_step = rows + random.integer(0, 3);
      // Up to the last element that may be read, and not one further.
      const std::int64_t reads = rows > 0 && columns > 0 ? (rows - 1) * from_step + columns : 0;
      std::unique_ptr<R[]> from(new R[static_cast<std::size_t>(reads)]);
      for (std::int64_t n = 0; n < reads; ++n) from[static_cast<std::size_t>(n)] = R(n);
      std::vector<R> to(static_cast<std::size_t>(columns * to_step) + 16, canary), want = to;
      for (std::int64_t r = 0; r < rows; ++r) {
        for (std::int64_t c = 0; c < columns; ++c) {
          want[static_cast<std::size_t>(c * to_step + r)] = R(r * from_step + c);
        }
      }
      of<R>().transpose(from.get(), from_step, rows, columns, to.data(), to_step);
      ASSERT_EQ(to, want) << rows << " rows, " << columns << " columns";
    }
  }
}
TEST_F(Tile, transposition_moves_every_element_and_touches_no_other) {
  check_transpose<float>();
  check_transpose<double>();
}

template <class R>
void Tile::check_all_finite() {
  using Limits = std::numeric_limits<R>;
  for (std::size_t count = 0; count <= 40; ++count) {
    std::unique_ptr<R[]> row(new R[count]);
    for (std::size_t n = 0; n < count; ++n) row[n] = n % 2 == 0 ? Limits::max() : Limits::lowest();
    const auto length = static_cast<std::int64_t>(count);
    EXPECT_TRUE(of<R>().all_finite(row.get(), length)) << count;
    for (std::size_t n = 0; n < count; ++n) {
      const R before = row[n];
      for (const R bad : {Limits::infinity(), -Limits::infinity(), Limits::quiet_NaN()}) {
        row[n] = bad;
        EXPECT_FALSE(of<R>().all_finite(row.get(), length))
            << bad << " at " << n << " of " << count;
      }
      row[n] = before;
    }
  }
}
TEST_F(Tile, one_number_that_is_not_finite_is_found_wherever_it_stands) {
  check_all_finite<float>();
  check_all_finite<double>();
}

// Every 16-bit float, against the definitions that simd_test holds load_row to.
TEST_F(Tile, vectors_are_widened_as_rows_are) {
  const auto width = static_cast<std::size_t>(of<float>().width);
  std::vector<std::uint16_t> from(width);
  std::vector<float> got(width), want(width);
  for (std::size_t first = 0; first < 1 << 16; first += width) {
    for (std::size_t n = 0; n < width; ++n) from[n] = static_cast<std::uint16_t>(first + n);
    for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
      of<float>().load_row(want.data(), from.data(), dtype, 1, of<float>().width);
      (dtype == DType::kFloat16 ? operations().widen_float16 : operations().widen_bfloat16)(
          from.data(), got.data());
      for (std::size_t n = 0; n < width; ++n) {
        ASSERT_TRUE(same(got[n], want[n])) << name(dtype) << " " << first + n;
      }
    }
  }
  for (const float x : odd_numbers<float>()) {
    want.assign(width, x);
    operations().widen_float(want.data(), got.data());
    for (const float lane : got) ASSERT_TRUE(same(lane, x)) << x;
  }
}

TEST_F(Tile, float16_rows_are_rounded_as_single_numbers_are) {
  for_random_cases(200, [this](Random& random) {
    std::vector<float> x(static_cast<std::size_t>(random.integer(1, 70)));
    // Subnormal to infinite.
    for (float& element : x) element = static_cast<float>(random.wide(25));
    x[0] = std::numeric_limits<float>::infinity();
    std::vector<std::uint16_t> row(x.size());
    operations().store_float16(row.data(), x.data(), static_cast<std::int64_t>(x.size()));
    for (std::size_t n = 0; n < x.size(); ++n) ASSERT_EQ(row[n], float_to_float16(x[n])) << x[n];
  });
}

// Powers of two that no rounding hides: a lane that is lost or counted twice changes the sum.
TEST_F(Tile, the_sum_of_lanes_counts_each_once) {
  std::vector<float> x(static_cast<std::size_t>(of<float>().width));
  for (std::size_t lane = 0; lane < x.size(); ++lane) {
    x[lane] = std::ldexp(1.0f, static_cast<int>(lane));
  }
  EXPECT_EQ(operations().sum_lanes(x.data()), std::ldexp(1.0f, of<float>().width) - 1);
}

TEST_F(Tile, the_largest_lane_is_found_wherever_it_is) {
  std::vector<float> x(static_cast<std::size_t>(of<float>().width));
  for (std::size_t most = 0; most < x.size(); ++most) {
    for (std::size_t lane = 0; lane < x.size(); ++lane) {
      x[lane] = lane == most ? -1.0f : -2.0f - static_cast<float>(lane);
    }
    EXPECT_EQ(operations().max_lane(x.data()), -1.0f) << most;
  }
}

TEST_F(Tile, sums_of_many_vectors_have_the_bits_of_each_ones_sum) {
  const auto width = static_cast<std::size_t>(of<float>().width);
  const auto most = static_cast<std::size_t>(operations().most_sums);
  const auto check = [&](Random& random, std::size_t count, auto sums_of) {
    std::vector<float> x(width * count), sums(count);
    for (float& element : x) element = static_cast<float>(random.wide(3));
    sums_of(x.data(), sums.data());
    for (std::size_t n = 0; n < count; ++n) {
      ASSERT_TRUE(same(sums[n], operations().sum_lanes(x.data() + n * width))) << n;
    }
  };
  for_random_cases(200, [&](Random& random) {
    check(random, 8, operations().sums_of_8);
    check(random, most, operations().sums_of_most);
  });
}

}  // namespace
}  // namespace onefold::test
