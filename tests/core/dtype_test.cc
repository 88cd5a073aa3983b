// The 16-bit floats against their definition: every value, every rounding border.

#include "core/dtype.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "tests/algebra/random.h"

namespace onefold::test {
namespace {

constexpr double kInfinite = std::numeric_limits<double>::infinity();

// A 16-bit float: sign, exponent, mantissa; and the two conversions under test.
struct Format {
  const char* name;
  int mantissa_bits;
  int bias;
  float (*to_float)(std::uint16_t);
  std::uint16_t (*from_float)(float);

  std::uint16_t infinity() const {
    return static_cast<std::uint16_t>(0x7fff >> mantissa_bits << mantissa_bits);
  }
  bool is_nan(std::uint16_t bits) const { return (bits & 0x7fff) > infinity(); }
  // The definition, in double, where every value is exact.
  double value(std::uint16_t bits) const {
    const int exponent = (bits & 0x7fff) >> mantissa_bits;
    const int mantissa = bits & ((1 << mantissa_bits) - 1);
    const double sign = bits & 0x8000 ? -1.0 : 1.0;
    if (bits == infinity() || bits == (infinity() | 0x8000)) return sign * kInfinite;
    const int hidden = exponent > 0 ? 1 << mantissa_bits : 0;
    const int power = (exponent > 0 ? exponent : 1) - bias - mantissa_bits;
    return sign * std::ldexp(hidden + mantissa, power);
  }
  // Where the next value would lie if infinity were an ordinary number.
  double next_above(std::uint16_t bits) const {
    const auto next = static_cast<std::uint16_t>(bits + 1);
    if (next != infinity()) return value(next);
    return std::ldexp(1.0, (infinity() >> mantissa_bits) - bias);
  }
};

const Format kFormats[] = {
    {"float16", 10, 15, float16_to_float, float_to_float16},
    {"bfloat16", 7, 127, bfloat16_to_float, float_to_bfloat16},
};

class Float16Bits : public ::testing::TestWithParam<Format> {};
INSTANTIATE_TEST_SUITE_P(Formats, Float16Bits, ::testing::ValuesIn(kFormats),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_P(Float16Bits, every_value_is_the_one_its_bits_define) {
  const Format f = GetParam();
  for (int bits = 0; bits < 0x10000; ++bits) {
    const auto b = static_cast<std::uint16_t>(bits);
    const float x = f.to_float(b);
    if (f.is_nan(b)) {
      ASSERT_TRUE(std::isnan(x)) << bits;
    } else {
      ASSERT_EQ(static_cast<double>(x), f.value(b)) << bits;
      ASSERT_EQ(std::signbit(x), (b & 0x8000) != 0) << bits;
    }
  }
}

TEST_P(Float16Bits, every_value_survives_the_round_trip) {
  const Format f = GetParam();
  for (int bits = 0; bits < 0x10000; ++bits) {
    const auto b = static_cast<std::uint16_t>(bits);
    const std::uint16_t back = f.from_float(f.to_float(b));
    if (f.is_nan(b)) {
      ASSERT_TRUE(f.is_nan(back)) << bits;
      ASSERT_EQ(back & 0x8000, b & 0x8000) << bits;
    } else {
      ASSERT_EQ(back, b) << bits;
    }
  }
}

// Between two neighbours: below the middle, the middle itself (to the even one) and above it. The
// middle has one bit more than the format and is exact in float.
TEST_P(Float16Bits, rounding_is_to_nearest_and_ties_go_to_even) {
  const Format f = GetParam();
  constexpr float kMost = std::numeric_limits<float>::infinity();
  for (std::uint16_t low = 0; low < f.infinity(); ++low) {
    const auto high = static_cast<std::uint16_t>(low + 1);
    const double middle = (f.value(low) + f.next_above(low)) / 2;
    if (middle > static_cast<double>(std::numeric_limits<float>::max())) continue;
    const auto x = static_cast<float>(middle);
    ASSERT_EQ(static_cast<double>(x), middle) << low;
    const std::uint16_t even = low % 2 == 0 ? low : high;
    for (const std::uint16_t sign : {0x0000, 0x8000}) {
      const float factor = sign ? -1.0f : 1.0f;
      ASSERT_EQ(f.from_float(factor * x), sign | even) << low;
      ASSERT_EQ(f.from_float(factor * std::nextafter(x, 0.0f)), sign | low) << low;
      ASSERT_EQ(f.from_float(factor * std::nextafter(x, kMost)), sign | high) << low;
    }
  }
}

TEST_P(Float16Bits, any_float_goes_to_the_nearest_value) {
  const Format f = GetParam();
  Random random(base_seed());
  for (int idx = 0; idx < 300000; ++idx) {
    const float x = std::bit_cast<float>(static_cast<std::uint32_t>(random.bits()));
    const std::uint16_t rounded = f.from_float(x);
    if (std::isnan(x)) {
      ASSERT_TRUE(f.is_nan(rounded)) << reproduce(idx);
      continue;
    }
    ASSERT_EQ((rounded & 0x8000) != 0, std::signbit(x)) << x << " " << reproduce(idx);
    const std::uint16_t magnitude = rounded & 0x7fff;
    ASSERT_LE(magnitude, f.infinity()) << x << " " << reproduce(idx);
    // Nearest: x lies between the middles on both sides of the value.
    const double a = std::fabs(static_cast<double>(x));
    if (magnitude > 0) {
      const auto below = static_cast<std::uint16_t>(magnitude - 1);
      ASSERT_GE(a, (f.value(below) + f.next_above(below)) / 2) << x << " " << reproduce(idx);
    }
    if (magnitude < f.infinity()) {
      ASSERT_LE(a, (f.value(magnitude) + f.next_above(magnitude)) / 2)
          << x << " " << reproduce(idx);
    }
  }
}

TEST_P(Float16Bits, every_nan_stays_a_nan) {
  const Format f = GetParam();
  // Payloads in the bits that are cut off, in those that stay, and both signs.
  for (const std::uint32_t bits : {0x7f800001u, 0x7f80ffffu, 0x7fffffffu, 0x7fc00000u, 0x7fbfffffu,
                                   0xff800001u, 0xffffffffu, 0xffbf8000u}) {
    const std::uint16_t nan = f.from_float(std::bit_cast<float>(bits));
    EXPECT_TRUE(f.is_nan(nan)) << std::hex << bits;
    EXPECT_EQ((nan & 0x8000) != 0, (bits & 0x80000000u) != 0) << std::hex << bits;
  }
}

TEST(DType, borders_of_float16_are_where_the_standard_puts_them) {
  EXPECT_EQ(float_to_float16(65504.0f), 0x7bff);
  EXPECT_EQ(float_to_float16(65519.996f), 0x7bff);
  EXPECT_EQ(float_to_float16(65520.0f), 0x7c00);  // half way to 65536 is infinity
  EXPECT_EQ(float_to_float16(0x1p-14f), 0x0400);
  EXPECT_EQ(float_to_float16(0x1p-24f), 0x0001);
  EXPECT_EQ(float_to_float16(0x1p-25f), 0x0000);  // half of the smallest ties to zero
  EXPECT_EQ(float_to_float16(std::nextafter(0x1p-25f, 1.0f)), 0x0001);
  EXPECT_EQ(float_to_float16(0x1p-149f), 0x0000);
}

TEST(DType, subnormal_bfloat16_keeps_its_bits) {
  EXPECT_EQ(float_to_bfloat16(0x1p-133f), 0x0001);
  EXPECT_EQ(float_to_bfloat16(0x1p-134f), 0x0000);
  EXPECT_EQ(float_to_bfloat16(std::nextafter(0x1p-134f, 1.0f)), 0x0001);
  EXPECT_EQ(float_to_bfloat16(std::numeric_limits<float>::max()), 0x7f80);
}

TEST(DType, numbers_are_loaded_and_stored_at_their_index_alone) {
  for (const DType dtype : {DType::kFloat64, DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    const auto size = static_cast<std::size_t>(size_bytes(dtype));
    std::vector<unsigned char> memory(5 * size, 0xAB);
    const std::vector<unsigned char> before = memory;
    store_number(memory.data(), dtype, 2, -1.5);
    EXPECT_EQ(load_number(memory.data(), dtype, 2), -1.5) << name(dtype);
    for (std::size_t x = 0; x < memory.size(); ++x) {
      if (x / size == 2) continue;
      EXPECT_EQ(memory[x], before[x]) << name(dtype) << " byte " << x;
    }
  }
}

TEST(DType, booleans_and_integers_are_read_exactly) {
  const std::uint8_t flags[] = {0, 1, 2, 255};
  EXPECT_EQ(load_number(flags, DType::kBool, 0), 0.0);
  for (int idx = 1; idx < 4; ++idx) EXPECT_EQ(load_number(flags, DType::kBool, idx), 1.0);
  const std::int64_t wide[] = {(std::int64_t{1} << 53) + 1,
                               std::numeric_limits<std::int64_t>::min()};
  EXPECT_EQ(load_integer(wide, DType::kInt64, 0), wide[0]);  // a double could not hold it
  EXPECT_EQ(load_integer(wide, DType::kInt64, 1), wide[1]);
  const std::int32_t narrow[] = {-7, std::numeric_limits<std::int32_t>::max()};
  EXPECT_EQ(load_integer(narrow, DType::kInt32, 0), -7);
  EXPECT_EQ(load_integer(narrow, DType::kInt32, 1), 2147483647);
}

TEST(DType, kinds_are_told_apart) {
  for (const DType dtype : {DType::kFloat64, DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    EXPECT_TRUE(is_float(dtype) && !is_index(dtype)) << name(dtype);
  }
  for (const DType dtype : {DType::kInt32, DType::kInt64}) {
    EXPECT_TRUE(is_index(dtype) && !is_float(dtype)) << name(dtype);
  }
  EXPECT_FALSE(is_float(DType::kBool) || is_index(DType::kBool));
}

}  // namespace
}  // namespace onefold::test
