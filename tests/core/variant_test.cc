// Visibility, tiles, scores and dropout of variant.h against brute force.

#include "core/variant.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "tests/algebra/random.h"

namespace onefold::test {
namespace {

// The definition, without any interval.
bool sees(const Variant& v, Lengths n, i64 i, i64 j) {
  if (i < 0 || i >= n.q || j < 0 || j >= n.k) return false;
  const i64 offset = v.top_left ? j - i : j - (i + n.k - n.q);
  return v.band_begin <= offset && offset <= v.band_end;
}

std::string text(const Variant& v, Lengths n) {
  return "Sq " + std::to_string(n.q) + " Sk " + std::to_string(n.k) + " band [" +
         std::to_string(v.band_begin) + ", " + std::to_string(v.band_end) + "]" +
         (v.top_left ? " top left" : "");
}

// Calls body(variant, lengths) for all small lengths and bands: no border, borders inside, beyond
// and crossing each other, both alignments.
template <class Body>
void for_all_small_bands(i64 most_q, i64 most_k, Body&& body) {
  std::vector<i64> begins{-kUnbounded}, ends{kUnbounded};
  for (i64 border = -most_q - 2; border <= most_k + 2; ++border) {
    begins.push_back(border);
    ends.push_back(border);
  }
  for (i64 q = 1; q <= most_q; ++q) {
    for (i64 k = 0; k <= most_k; ++k) {
      for (const i64 begin : begins) {
        for (const i64 end : ends) {
          for (const bool top_left : {false, true}) {
            Variant v;
            v.band_begin = begin;
            v.band_end = end;
            v.top_left = top_left;
            body(v, Lengths{q, k});
            if (::testing::Test::HasFailure()) return;  // the first case says it all
          }
        }
      }
    }
  }
}

// What a TileRange must say of positions [0, count) of which position x is seen by some or by all
// of the other side.
template <class Some, class All>
void expect_range(const TileRange& range, i64 count, Some&& some, All&& all) {
  ASSERT_LE(0, range.begin);
  ASSERT_LE(range.begin, range.full_begin);
  ASSERT_LE(range.full_begin, range.full_end);
  ASSERT_LE(range.full_end, range.end);
  ASSERT_LE(range.end, count);
  for (i64 x = 0; x < count; ++x) {
    ASSERT_EQ(range.begin <= x && x < range.end, some(x)) << "position " << x;
    ASSERT_EQ(range.full_begin <= x && x < range.full_end, all(x)) << "full, position " << x;
  }
}

TEST(Visibility, the_band_of_a_tile_is_exactly_what_its_rows_see) {
  for_all_small_bands(4, 5, [](const Variant& v, Lengths n) {
    SCOPED_TRACE(text(v, n));
    for (i64 i0 = 0; i0 < n.q; i0 += 2) {
      for (i64 j0 = 0; j0 < n.k; j0 += 3) {
        const TileBand keys = key_band(v, n, i0, j0), queries = query_band(v, n, j0, i0);
        for (int r = 0; r < 3; ++r) {
          for (int c = 0; c < 3; ++c) {
            if (i0 + r < n.q) {
              ASSERT_EQ(keys.first + r <= c && c < keys.end + r && c < keys.limit,
                        sees(v, n, i0 + r, j0 + c));
            }
            if (j0 + r < n.k) {
              ASSERT_EQ(queries.first + r <= c && c < queries.end + r && c < queries.limit,
                        sees(v, n, i0 + c, j0 + r));
            }
          }
        }
      }
    }
  });
}

TEST(Visibility, key_interval_is_exactly_what_a_query_sees) {
  for_all_small_bands(5, 6, [](const Variant& v, Lengths n) {
    SCOPED_TRACE(text(v, n));
    for (i64 i = 0; i < n.q; ++i) {
      const KeyInterval keys = key_interval(v, n, i);
      for (i64 j = -2; j < n.k + 2; ++j) {
        ASSERT_EQ(keys.begin <= j && j < keys.end, sees(v, n, i, j)) << i << " " << j;
      }
      if (i == 0) continue;
      const KeyInterval above = key_interval(v, n, i - 1);
      ASSERT_LE(above.begin, keys.begin) << "row " << i;
      ASSERT_LE(above.end, keys.end) << "row " << i;
    }
  });
}

TEST(Visibility, kv_range_is_exactly_what_some_and_all_rows_see) {
  for_all_small_bands(5, 6, [](const Variant& v, Lengths n) {
    for (i64 i0 = 0; i0 < n.q; ++i0) {
      for (i64 i1 = i0 + 1; i1 <= n.q; ++i1) {
        SCOPED_TRACE(text(v, n) + " rows " + std::to_string(i0) + " to " + std::to_string(i1));
        const auto count = [&](i64 j) {
          i64 rows = 0;
          for (i64 i = i0; i < i1; ++i) rows += sees(v, n, i, j);
          return rows;
        };
        expect_range(
            kv_range(v, n, i0, i1), n.k, [&](i64 j) { return count(j) > 0; },
            [&](i64 j) { return count(j) == i1 - i0; });
      }
    }
  });
}

TEST(Visibility, q_range_is_exactly_who_sees_some_and_all_keys) {
  for_all_small_bands(5, 6, [](const Variant& v, Lengths n) {
    for (i64 j0 = 0; j0 < n.k; ++j0) {
      for (i64 j1 = j0 + 1; j1 <= n.k; ++j1) {
        SCOPED_TRACE(text(v, n) + " keys " + std::to_string(j0) + " to " + std::to_string(j1));
        const auto count = [&](i64 i) {
          i64 keys = 0;
          for (i64 j = j0; j < j1; ++j) keys += sees(v, n, i, j);
          return keys;
        };
        expect_range(
            q_range(v, n, j0, j1), n.q, [&](i64 i) { return count(i) > 0; },
            [&](i64 i) { return count(i) == j1 - j0; });
      }
    }
  });
}

TEST(Visibility, tile_class_tells_empty_partial_and_full_tiles_apart) {
  for_all_small_bands(4, 5, [](const Variant& v, Lengths n) {
    SCOPED_TRACE(text(v, n));
    for (i64 i0 = 0; i0 < n.q; ++i0) {
      for (i64 i1 = i0 + 1; i1 <= n.q; ++i1) {
        for (i64 j0 = 0; j0 < n.k; ++j0) {
          for (i64 j1 = j0 + 1; j1 <= n.k; ++j1) {
            i64 pairs = 0;
            for (i64 i = i0; i < i1; ++i) {
              for (i64 j = j0; j < j1; ++j) pairs += sees(v, n, i, j);
            }
            const TileClass want = pairs == 0                       ? TileClass::kEmpty
                                   : pairs == (i1 - i0) * (j1 - j0) ? TileClass::kFull
                                                                    : TileClass::kPartial;
            ASSERT_EQ(tile_class(v, n, i0, i1, j0, j1), want)
                << "rows " << i0 << " to " << i1 << ", keys " << j0 << " to " << j1;
          }
        }
      }
    }
  });
}

// The sums that lead to a border stay inside 64 bits; the undefined-behaviour sanitizer listens.
TEST(Visibility, the_longest_lengths_and_widest_windows_do_not_overflow) {
  const i64 huge = i64{1} << 57, border = kUnbounded / 4;
  for (const Lengths n : {Lengths{huge, huge}, Lengths{1, huge}, Lengths{huge, 1}}) {
    for (const bool top_left : {false, true}) {
      for (const i64 begin : {-kUnbounded, -border, i64{0}, border}) {
        for (const i64 end : {-border, i64{0}, border, kUnbounded}) {
          Variant v;
          v.band_begin = begin;
          v.band_end = end;
          v.top_left = top_left;
          SCOPED_TRACE(text(v, n));
          for (const i64 i : {i64{0}, n.q / 2, n.q - 1}) {
            const KeyInterval keys = key_interval(v, n, i);
            for (const i64 j : {i64{0}, n.k / 2, n.k - 1}) {
              ASSERT_EQ(keys.begin <= j && j < keys.end, sees(v, n, i, j)) << i << " " << j;
            }
          }
          for (const i64 j : {i64{0}, n.k / 2, n.k - 1}) {
            const TileRange rows = q_range(v, n, j, j + 1);
            for (const i64 i : {i64{0}, n.q / 2, n.q - 1}) {
              ASSERT_EQ(rows.begin <= i && i < rows.end, sees(v, n, i, j)) << i << " " << j;
            }
          }
        }
      }
    }
  }
}

// ---- scores ----

// All combinations of cap, bias and slopes.
template <class Body>
void for_all_scores(Body&& body) {
  for (int options = 0; options < 8; ++options) {
    Variant v;
    v.softcap = options & 1 ? 1.7 : 0.0;
    v.has_bias = options & 2;
    v.has_slopes = options & 4;
    SCOPED_TRACE("options " + std::to_string(options));
    body(v);
  }
}

TEST(Score, cap_comes_before_bias_and_slopes) {
  Variant v;
  v.softcap = 2.0;
  v.has_bias = v.has_slopes = true;
  const At<double> at{100.0, 0.5, 6.0};
  // The bias is far beyond the cap, so only the right order gives this.
  EXPECT_DOUBLE_EQ(score(v, 1e6, at), 2.0 + 100.0 - 3.0);
  EXPECT_DOUBLE_EQ(score(v, 1.0, at), 2.0 * std::tanh(0.5) + 100.0 - 3.0);
}

TEST(Score, what_is_switched_off_is_not_read) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_EQ(score(Variant{}, 1.25, At<double>{nan, nan, nan}), 1.25);
}

TEST(Score, the_derivative_is_that_of_finite_differences) {
  for_all_scores([](const Variant& v) {
    for_random_cases(50, [&](Random& random) {
      const At<double> at{random.normal(), random.uniform(), 5 * random.uniform()};
      const double x = 3 * random.normal(), h = 1e-5;
      const Dual<double> z = score(v, Dual<double>{x, 1.0}, at);
      EXPECT_EQ(z.value, score(v, x, at));
      const double difference = (score(v, x + h, at) - score(v, x - h, at)) / (2 * h);
      // Central differences: h^2/6 of the third derivative, at most 2 / cap^2, and the rounding of
      // values of about 10 divided by h.
      EXPECT_NEAR(z.slope, difference, h * h * 2 / 6 / (1.7 * 1.7) + 10 * 0x1p-52 / h);
      // And the chain rule: a slope that came in goes out multiplied.
      EXPECT_DOUBLE_EQ(score(v, Dual<double>{x, -2.5}, at).slope, -2.5 * z.slope);
    });
  });
}

TEST(Score, float_follows_double) {
  for_all_scores([](const Variant& v) {
    for_random_cases(50, [&](Random& random) {
      const At<float> at{static_cast<float>(random.normal()), static_cast<float>(random.uniform()),
                         5.0f};
      const At<double> exact{at.bias, at.slope, at.distance};
      const auto x = static_cast<float>(3 * random.normal());
      const double want = score(v, double{x}, exact);
      // At most five roundings of terms whose magnitudes sum to this.
      const double terms = std::fabs(double{x}) + std::fabs(exact.bias) + 5 * exact.slope;
      EXPECT_NEAR(score(v, x, at), want, 5 * 0x1p-24 * (terms + std::fabs(want)));
    });
  });
}

TEST(Score, scale_only_says_when_nothing_else_changes_a_score) {
  for_all_scores([](const Variant& v) {
    EXPECT_EQ(v.scale_only(), v.softcap == 0.0 && !v.has_bias && !v.has_slopes);
  });
  Variant masked;
  masked.has_mask = true;
  masked.dropout_p = 0.5;
  masked.band_end = 0;
  EXPECT_TRUE(masked.scale_only());
}

// ---- dropout ----

// J. K. Salmon et al., the authors' known answers for philox4x32 with 10 rounds.
TEST(Dropout, philox_gives_the_published_answers) {
  struct Known {
    u32 counter[4];
    u64 key;
    u32 word[4];
  };
  const Known kKnown[] = {
      {{0, 0, 0, 0}, 0, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
      {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
       0xffffffffffffffff,
       {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
      {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
       0x299f31d0a4093822,
       {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
  };
  for (const Known& k : kKnown) {
    const Philox got = philox(k.counter[0], k.counter[1], k.counter[2], k.counter[3], k.key);
    for (int word = 0; word < 4; ++word) EXPECT_EQ(got.word[word], k.word[word]);
  }
}

TEST(Dropout, a_weight_is_one_word_of_the_counter_of_its_position) {
  Variant v;
  v.dropout_p = 0.3;
  v.seed = 0x123456789abcdef0;
  for_random_cases(500, [&](Random& random) {
    const i64 b = random.integer(0, 70000), h = random.integer(0, 70000);
    const i64 i = random.integer(0, 1 << 20), j = random.integer(0, 1 << 20);
    const Philox words = philox(static_cast<u32>(i / 2), static_cast<u32>(j / 2),
                                static_cast<u32>(h), static_cast<u32>(b), v.seed);
    const double unit = words.word[2 * (i % 2) + j % 2] / 4294967296.0;
    if (std::fabs(unit - v.dropout_p) < 0x1p-31) return;  // floor(p * 2^32) moves the border
    EXPECT_EQ(keep(v, b, h, i, j), unit > v.dropout_p);
  });
}

TEST(Dropout, zero_keeps_everything_and_one_keeps_nothing) {
  for (int x = 0; x < 1000; ++x) {
    Variant all, none;
    none.dropout_p = 1.0;
    all.seed = none.seed = static_cast<u64>(x);
    EXPECT_TRUE(keep(all, 0, 0, x, 3 * x));
    EXPECT_FALSE(keep(none, 0, 0, x, 3 * x));
  }
  Variant none;
  none.dropout_p = 1.0;
  EXPECT_EQ(keep_threshold(none), u64{1} << 32);  // more than any word: 64 bits are needed
  EXPECT_EQ(keep_scale(none), 0.0);
  none.dropout_p = 0.75;
  EXPECT_EQ(keep_scale(none), 4.0);
  EXPECT_FALSE(Variant{}.dropout());
}

// Counts over a 256 x 256 square, and of neighbours in every direction, within 5 standard
// deviations of independent draws.
TEST(Dropout, kept_weights_have_the_statistics_of_independent_draws) {
  constexpr i64 kSide = 256;
  for (const double p : {0.01, 0.1, 0.5, 0.99}) {
    Variant v;
    v.dropout_p = p;
    v.seed = base_seed() + 17;
    SCOPED_TRACE("p " + std::to_string(p) + ", seed " + std::to_string(v.seed));
    const double q = 1 - p, n = kSide * kSide;
    double kept = 0, right = 0, down = 0, head = 0, batch = 0, other_seed = 0;
    Variant w = v;
    w.seed ^= u64{1} << 63;
    for (i64 i = 0; i < kSide; ++i) {
      for (i64 j = 0; j < kSide; ++j) {
        if (!keep(v, 1, 2, i, j)) continue;
        kept += 1;
        right += keep(v, 1, 2, i, j + 1);
        down += keep(v, 1, 2, i + 1, j);
        head += keep(v, 1, 3, i, j);
        batch += keep(v, 2, 2, i, j);
        other_seed += keep(w, 1, 2, i, j);
      }
    }
    EXPECT_NEAR(kept, n * q, 5 * std::sqrt(n * q * p));
    const double pair = q * q, deviation = 5 * std::sqrt(n * pair * (1 - pair) * 3);
    for (const double both : {right, down, head, batch, other_seed}) {
      EXPECT_NEAR(both, n * pair, deviation);
    }
  }
}

}  // namespace
}  // namespace onefold::test
