// The vector operations of src/cpu/isa/simd.h on the instruction set in use: functions within
// computed bounds, everything else bit for bit.

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "tests/cpu/isa/vectors.h"

namespace onefold::test {
namespace {

class Simd : public Vectors {
 protected:
  template <class R>
  void check_exp2(double truncation);
  template <class R>
  void check_pairs();
  template <class R>
  void check_single();
  template <class R>
  void check_fma();
};

// ---- functions ----

// What rounding alone does to Horner's scheme for 2^f, relative to 2^f, to first order: u for each
// operation's result, and for each coefficient, taken along.
template <class R>
double exp2_rounding(double f, bool fused) {
  constexpr int kDegree = sizeof(R) == 4 ? 5 : 13;
  const double u = std::numeric_limits<R>::epsilon() / 2, ln2 = std::log(2.0);
  double coefficient = 1;
  std::vector<double> c = {1};
  for (int k = 1; k <= kDegree; ++k) c.push_back(coefficient *= ln2 / k);
  double p = c[kDegree], error = u * p;
  for (int k = kDegree - 1; k >= 0; --k) {
    const double product = p * f;
    error = error * std::abs(f) + (fused ? 0 : u * std::abs(product)) + (k > 0 ? u * c[k] : 0);
    p = product + c[k];
    error += u * std::abs(p);
  }
  return error / std::exp2(f);
}

template <class R>
void Simd::check_exp2(double truncation) {
  const int low = std::numeric_limits<R>::min_exponent - 1;
  const int high = std::numeric_limits<R>::max_exponent - 1;
  Random random(base_seed());
  std::vector<R> x;
  for (int n = 0; n < 400000; ++n) x.push_back(static_cast<R>(random.uniform(low, high)));
  for (int n = 0; n < 100000; ++n) x.push_back(static_cast<R>(random.uniform(-2, 2)));
  for (int n = 0; n < 1000; ++n) x.push_back(static_cast<R>(random.wide(30) * 1e-30));
  for (int n = low; n <= high; ++n) {  // where the nearest integer changes
    for (const R border : {R(n), R(n) + R(0.5)}) {
      for (const R y : {std::nextafter(border, R(-1e4)), border, std::nextafter(border, R(1e4))}) {
        if (y >= low && y <= high) x.push_back(y);
      }
    }
  }
  const std::vector<R> y = mapped(of<R>().width, x, of<R>().exp2);
  double worst = 0;
  for (std::size_t n = 0; n < x.size(); ++n) {
    const auto exact = std::exp2(static_cast<long double>(x[n]));
    const auto error = static_cast<double>(std::abs(y[n] / exact - 1));
    const double f = static_cast<double>(x[n]) - std::nearbyint(static_cast<double>(x[n]));
    const double bound = truncation + exp2_rounding<R>(f, fused());
    ASSERT_LE(error, bound) << "2^" << x[n] << " is " << y[n];
    worst = std::max(worst, error / bound);
    if (x[n] == std::nearbyint(x[n])) {
      ASSERT_EQ(y[n], static_cast<R>(exact)) << "2^" << x[n];
    }
  }
  EXPECT_GT(worst, 0.3) << "the bound says little";

  const R inf = std::numeric_limits<R>::infinity(), least = std::numeric_limits<R>::min();
  const std::vector<R> flushed = {std::nextafter(R(low), -inf), R(low) - R(0.5), R(2 * low), -inf,
                                  std::numeric_limits<R>::lowest()};
  for (const R z : mapped(of<R>().width, flushed, of<R>().exp2)) EXPECT_TRUE(same(z, R(0))) << z;
  const std::vector<R> others = {R(low), R(0), -R(0), std::numeric_limits<R>::denorm_min(),
                                 std::numeric_limits<R>::quiet_NaN()};
  const std::vector<R> of_others = mapped(of<R>().width, others, of<R>().exp2);
  EXPECT_EQ(of_others[0], least);
  for (int n = 1; n < 4; ++n) EXPECT_EQ(of_others[static_cast<std::size_t>(n)], R(1));
  EXPECT_TRUE(std::isnan(of_others[4]));
}

// The truncations are those that simd.h states of its two polynomials.
TEST_F(Simd, exp2_of_float_is_within_its_bound_and_exact_at_integers) { check_exp2<float>(1.1e-7); }
TEST_F(Simd, exp2_of_double_is_within_its_bound_and_exact_at_integers) {
  check_exp2<double>(1e-17);
}

TEST_F(Simd, tanh_of_float_is_within_two_units_in_the_last_place) {
  Random random(base_seed());
  std::vector<float> x = odd_numbers<float>();
  for (int n = 0; n < 300000; ++n) x.push_back(static_cast<float>(random.uniform(-10, 10)));
  for (int n = 0; n < 100000; ++n) x.push_back(static_cast<float>(random.wide(38)));
  for (const float near : {0.625f, 10.0f, 15.0f}) {  // where formulas change
    for (int n = -20; n <= 20; ++n) {
      x.push_back(std::bit_cast<float>(std::bit_cast<std::int32_t>(near) + n));
    }
  }
  const std::vector<float> y = mapped(of<float>().width, x, of<float>().tanh);
  for (std::size_t n = 0; n < x.size(); ++n) {
    const double exact = std::tanh(static_cast<double>(x[n]));
    if (std::isnan(exact)) {
      ASSERT_TRUE(std::isnan(y[n])) << x[n];
      continue;
    }
    int exponent = 0;  // exact = m * 2^exponent, m in [1/2, 1): a unit is 2^(exponent - 24)
    std::frexp(exact, &exponent);
    const double unit = std::ldexp(1.0, std::max(exponent - 24, -149));
    ASSERT_LE(std::abs(y[n] - exact), 2 * unit) << "tanh(" << x[n] << ") is " << y[n];
    ASSERT_TRUE(x[n] == 0 || std::signbit(y[n]) == std::signbit(x[n])) << x[n];
    ASSERT_LE(std::abs(y[n]), 1.0f) << x[n];
  }
}

TEST_F(Simd, tanh_of_double_is_that_of_the_mathematical_library) {
  Random random(base_seed());
  std::vector<double> x = odd_numbers<double>();
  for (int n = 0; n < 1000; ++n) x.push_back(random.wide(3));
  const std::vector<double> y = mapped(of<double>().width, x, of<double>().tanh);
  for (std::size_t n = 0; n < x.size(); ++n) ASSERT_TRUE(same(y[n], std::tanh(x[n]))) << x[n];
}

// ---- what is exact ----

template <class R>
void Simd::check_single() {
  Random random(base_seed());
  std::vector<R> x = odd_numbers<R>();
  for (int n = 0; n < 10000; ++n) x.push_back(static_cast<R>(random.wide(20)));
  for (int n = 0; n < 1000; ++n) x.push_back(static_cast<R>(random.integer(-4000, 4000)) / 2);
  const std::vector<R> up = mapped(of<R>().width, x, of<R>().ceil);
  const std::vector<R> magnitude = mapped(of<R>().width, x, of<R>().abs);
  for (std::size_t n = 0; n < x.size(); ++n) {
    ASSERT_TRUE(same(up[n], std::ceil(x[n]))) << "ceil of " << x[n] << " is " << up[n];
    ASSERT_TRUE(magnitude[n] == std::abs(x[n]) || std::isnan(x[n])) << x[n];
    ASSERT_EQ(std::isnan(magnitude[n]), std::isnan(x[n]));
    std::vector<R> lanes(static_cast<std::size_t>(of<R>().width));
    of<R>().splat(x[n], lanes.data());
    for (const R lane : lanes) ASSERT_TRUE(same(lane, x[n])) << "splat of " << x[n];
  }
}
TEST_F(Simd, ceil_abs_and_splat_are_exact) {
  check_single<float>();
  check_single<double>();
}

template <class R>
void Simd::check_pairs() {
  const std::vector<R> odd = odd_numbers<R>();
  std::vector<R> a, b;
  for (const R x : odd) {
    for (const R y : odd) a.push_back(x), b.push_back(y);
  }
  const auto width = static_cast<std::size_t>(of<R>().width);
  a.resize(a.size() / width * width + width, R(1));
  b.resize(a.size(), R(2));
  const auto check = [&](const char* name, auto operation, auto&& want) {
    std::vector<R> got(a.size());
    for (std::size_t n = 0; n < a.size(); n += width) operation(&a[n], &b[n], &got[n]);
    for (std::size_t n = 0; n < a.size(); ++n) {
      ASSERT_TRUE(same(got[n], want(a[n], b[n])))
          << name << "(" << a[n] << ", " << b[n] << ") is " << got[n];
    }
  };
  check("max", of<R>().max, [](R x, R y) { return x > y ? x : y; });
  check("min", of<R>().min, [](R x, R y) { return x < y ? x : y; });
  check("select_less", of<R>().select_less, [](R x, R y) { return x < y ? x : y; });
  check("select_equal", of<R>().select_equal, [](R x, R y) { return x == y ? x : R(0); });
}
// Of NaN: one on the right is the result of max and min, one on the left is not.
TEST_F(Simd, max_min_and_selections_treat_zeros_infinities_and_nan_as_their_formulas_say) {
  check_pairs<float>();
  check_pairs<double>();
}

template <class R>
void Simd::check_fma() {
  Random random(base_seed());
  const auto width = static_cast<std::size_t>(of<R>().width);
  std::vector<R> a(width), b(width), c(width), got(width);
  bool rounding_shows = false;
  for (int round = 0; round < 2000; ++round) {
    for (std::size_t lane = 0; lane < width; ++lane) {
      a[lane] = static_cast<R>(random.normal());
      b[lane] = static_cast<R>(random.normal());
      c[lane] = -a[lane] * b[lane] * static_cast<R>(random.chance(0.5) ? 1 : random.normal());
    }
    of<R>().fma(a.data(), b.data(), c.data(), got.data());
    for (std::size_t lane = 0; lane < width; ++lane) {
      const R once = std::fma(a[lane], b[lane], c[lane]), product = a[lane] * b[lane];
      const R twice = product + c[lane];
      rounding_shows |= once != twice;
      ASSERT_EQ(got[lane], fused() ? once : twice);
    }
  }
  EXPECT_TRUE(rounding_shows);
}
TEST_F(Simd, fma_rounds_once_where_the_set_has_it_and_twice_elsewhere) {
  check_fma<float>();
  check_fma<double>();
}

// ---- rows ----

// A 16-bit float of so many exponent bits, from its definition.
double decoded(std::uint16_t bits, int exponent_bits) {
  const int mantissa_bits = 15 - exponent_bits, bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = (bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  double x = 0;
  if (exponent == (1 << exponent_bits) - 1) {
    x = mantissa == 0 ? std::numeric_limits<double>::infinity()
                      : std::numeric_limits<double>::quiet_NaN();
  } else if (exponent == 0) {
    x = std::ldexp(mantissa, 1 - bias - mantissa_bits);
  } else {
    x = std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
  }
  return (bits & 0x8000) != 0 ? -x : x;
}
struct Half {
  DType dtype;
  int exponent_bits;
};
constexpr Half kHalves[] = {{DType::kFloat16, 5}, {DType::kBFloat16, 8}};

std::vector<std::uint16_t> all_halves() {
  std::vector<std::uint16_t> all(1 << 16);
  for (std::size_t n = 0; n < all.size(); ++n) all[n] = static_cast<std::uint16_t>(n);
  return all;
}

TEST_F(Simd, every_16_bit_float_is_widened_exactly) {
  const std::vector<std::uint16_t> all = all_halves();
  const auto count = static_cast<std::int64_t>(all.size());
  std::vector<float> as_float(all.size());
  std::vector<double> as_double(all.size());
  for (const Half& half : kHalves) {
    of<float>().load_row(as_float.data(), all.data(), half.dtype, 1, count);
    of<double>().load_row(as_double.data(), all.data(), half.dtype, 1, count);
    for (std::size_t n = 0; n < all.size(); ++n) {
      const double exact = decoded(all[n], half.exponent_bits);
      ASSERT_TRUE(same<double>(as_float[n], exact)) << name(half.dtype) << " " << n;
      ASSERT_TRUE(same(as_double[n], exact)) << name(half.dtype) << " " << n;
    }
  }
}

// Every border of rounding: the middle of two neighbours, and the floats beside it. The middle of
// the largest number and the power of two above it is where infinity begins.
TEST_F(Simd, numbers_are_narrowed_to_the_nearest_16_bit_float_and_ties_to_the_even_one) {
  for (const Half& half : kHalves) {
    const std::uint16_t infinity =
        static_cast<std::uint16_t>(((1 << half.exponent_bits) - 1) << (15 - half.exponent_bits));
    const int bias = (1 << (half.exponent_bits - 1)) - 1;
    std::vector<float> x;
    std::vector<std::uint16_t> want;
    for (std::uint16_t below = 0; below < infinity; ++below) {
      const auto above = static_cast<std::uint16_t>(below + 1);
      const double low = decoded(below, half.exponent_bits);
      const double high =
          above == infinity ? std::ldexp(1.0, bias + 1) : decoded(above, half.exponent_bits);
      const auto middle = static_cast<float>((low + high) / 2);  // 8 or 12 bits at most: exact
      const float inf = std::numeric_limits<float>::infinity();
      for (const float sign : {1.0f, -1.0f}) {
        const auto minus = static_cast<std::uint16_t>(sign < 0 ? 0x8000 : 0);
        const auto put = [&](float number, std::uint16_t bits) {
          x.push_back(sign * number);
          want.push_back(bits | minus);
        };
        put(static_cast<float>(low), below);
        put(std::nextafter(middle, 0.0f), below);
        put(middle, below % 2 == 0 ? below : above);
        put(std::nextafter(middle, inf), above);
      }
    }
    for (const float far : {3.4028234663852886e38f, std::numeric_limits<float>::infinity()}) {
      x.push_back(far), want.push_back(infinity);
      x.push_back(-far), want.push_back(infinity | 0x8000);
    }
    const std::vector<double> wide(x.begin(), x.end());
    std::vector<std::uint16_t> got(x.size()), got_wide(x.size());
    const auto count = static_cast<std::int64_t>(x.size());
    of<float>().store_row(got.data(), half.dtype, 1, x.data(), count);
    of<double>().store_row(got_wide.data(), half.dtype, 1, wide.data(), count);
    for (std::size_t n = 0; n < x.size(); ++n) {
      ASSERT_EQ(got[n], want[n]) << x[n] << " as " << name(half.dtype);
      ASSERT_EQ(got_wide[n], want[n]) << x[n] << " as " << name(half.dtype);
    }
    const float nan[] = {std::numeric_limits<float>::quiet_NaN(),
                         -std::numeric_limits<float>::quiet_NaN(),
                         std::bit_cast<float>(0x7f800001u)};
    std::uint16_t stored[3] = {};
    of<float>().store_row(stored, half.dtype, 1, nan, 3);
    for (const std::uint16_t bits : stored) {
      EXPECT_TRUE(std::isnan(decoded(bits, half.exponent_bits))) << name(half.dtype);
    }
  }
}

// Of every length around the vectors', in every stride: exactly `count` elements are read, in
// memory that ends there, and exactly as many written.
TEST_F(Simd, rows_of_any_length_and_stride_are_loaded_and_stored_and_nothing_beside_them) {
  Random random(base_seed());
  const auto check = [&]<class R>(R, DType dtype, std::int64_t count, Layout layout) {
    Array source(dtype, {count}, layout, random);
    source.fill([&] { return random.integer(-100, 100) * 0.25; });
    const R canary = R(12345);
    std::vector<R> row(static_cast<std::size_t>(count) + 16, canary);
    of<R>().load_row(row.data(), source.tensor().data, dtype, source.tensor().stride[0], count);
    Array target(dtype, {count}, layout == Layout::kRead ? Layout::kWrite : layout, random);
    of<R>().store_row(target.tensor().data, dtype, target.tensor().stride[0], row.data(), count);
    for (std::int64_t n = 0; n < count; ++n) {
      ASSERT_EQ(row[static_cast<std::size_t>(n)], static_cast<R>(source.get(n))) << name(dtype);
      ASSERT_EQ(target.get(n), source.get(n)) << name(dtype);
    }
    for (auto n = static_cast<std::size_t>(count); n < row.size(); ++n) ASSERT_EQ(row[n], canary);
    ASSERT_TRUE(target.surroundings_untouched());
  };
  for (std::int64_t count = 0; count <= 67; ++count) {
    for (const DType dtype :
         {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64}) {
      for (const Layout layout : {Layout::kPacked, Layout::kRead, Layout::kRead}) {
        SCOPED_TRACE(concat(count, " elements"));
        check(float{}, dtype, count, layout);
        check(double{}, dtype, count, layout);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_F(Simd, a_finite_double_stays_finite_as_float) {
  const double inf = std::numeric_limits<double>::infinity();
  const float most = std::numeric_limits<float>::max();
  const std::vector<double> x = {1e300, -1e300, 3.5e38, -3.5e38, inf, -inf, std::nan(""), 0.1};
  const std::vector<float> want = {most,       -most,       most,          -most,
                                   float(inf), -float(inf), std::nanf(""), 0.1f};
  std::vector<float> got(x.size());
  of<float>().load_row(got.data(), x.data(), DType::kFloat64, 1, 8);
  std::vector<double> kept(x.size());
  of<double>().load_row(kept.data(), x.data(), DType::kFloat64, 1, 8);
  for (std::size_t n = 0; n < x.size(); ++n) {
    EXPECT_TRUE(same(got[n], want[n])) << x[n];
    EXPECT_TRUE(same(kept[n], x[n])) << x[n];
  }
}

// ---- bfloat16 in pairs ----

std::int32_t pair(float low, float high) {
  return static_cast<std::int32_t>(std::uint32_t{float_to_bfloat16(high)} << 16 |
                                   float_to_bfloat16(low));
}

TEST_F(Simd, a_product_of_pairs_adds_both_products_to_a_float) {
  const int width = of<float>().width;
  Random random(base_seed());
  for (int round = 0; round < 10000; ++round) {
    std::vector<std::int32_t> a, b;
    std::vector<float> c, got(static_cast<std::size_t>(width));
    std::vector<double> want, size;
    for (int lane = 0; lane < width; ++lane) {
      float x[4];
      for (float& one : x) one = bfloat16_to_float(float_to_bfloat16(float(random.uniform(-2, 2))));
      c.push_back(static_cast<float>(random.uniform(-4, 4)));
      a.push_back(pair(x[0], x[1]));
      b.push_back(pair(x[2], x[3]));
      const double low = double{x[0]} * x[2], high = double{x[1]} * x[3];
      want.push_back(c.back() + low + high);
      size.push_back(std::abs(double{c.back()}) + std::abs(low) + std::abs(high));
    }
    operations().multiply_pairs(a.data(), b.data(), c.data(), got.data());
    for (std::size_t lane = 0; lane < want.size(); ++lane) {
      // Two additions, and on the baseline two products.
      ASSERT_LE(std::abs(got[lane] - want[lane]), 4 * 0x1p-24 * size[lane]) << "lane " << lane;
    }
  }
}

TEST_F(Simd, rows_become_pairs_of_neighbours_or_of_each_other_rounded_to_nearest_even) {
  Random random(base_seed());
  for (std::int64_t count = 1; count < 100; ++count) {
    SCOPED_TRACE(concat(count, " elements"));
    const auto size = static_cast<std::size_t>(count);
    std::vector<float> x, y;
    for (std::size_t d = 0; d < size; ++d) {
      x.push_back(static_cast<float>(random.uniform(-2, 2)));
      y.push_back(static_cast<float>(random.uniform(-2, 2)));
    }
    x[0] = 1.00390625f;  // a tie
    constexpr std::int32_t kUntouched = 0x12345678;
    std::vector<std::int32_t> along((size + 1) / 2 + 1, kUntouched), across(size + 1, kUntouched);
    operations().narrow_row(x.data(), count, along.data());
    operations().interleave_rows(x.data(), y.data(), count, across.data());
    for (std::size_t d = 0; d < size; ++d) {
      EXPECT_EQ(across[d], pair(x[d], y[d])) << d;
    }
    for (std::size_t d = 0; d < size; d += 2) {
      EXPECT_EQ(along[d / 2], pair(x[d], d + 1 < size ? x[d + 1] : 0.0f)) << d;
    }
    EXPECT_EQ(along.back(), kUntouched);
    EXPECT_EQ(across.back(), kUntouched);
  }
}

TEST_F(Simd, what_is_interleaved_can_be_put_in_order) {
  const auto width = static_cast<std::size_t>(of<float>().width);
  std::vector<std::int32_t> first, second;
  for (std::size_t n = 0; n < width; ++n) {
    first.push_back(pair(float(2 * n), float(2 * n + 1)));
    second.push_back(pair(-1, -2));
  }
  std::vector<float> lows(2 * width);
  operations().interleave(first.data(), second.data(), lows.data());
  for (std::size_t n = 0; n < 2 * width; ++n) EXPECT_EQ(lows[n], float(n));
}

}  // namespace
}  // namespace onefold::test
