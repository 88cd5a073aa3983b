// The fold at the edge of its numbers: enormous scores, NaN and infinities, zeros with a sign, and
// vectors in place of scalars.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "onefold/fold.h"
#include "tests/algebra/random.h"
#include "tests/algebra/subjects.h"

namespace onefold::test {

// Four rows at once: what a SIMD backend instantiates the algebra with.
template <class T>
struct Lanes {
  static constexpr int kCount = 4;
  T v[kCount];
  template <class Op>
  static Lanes each(Op op) {
    Lanes out;
    for (int n = 0; n < kCount; ++n) out.v[n] = op(n);
    return out;
  }
  friend Lanes operator+(const Lanes& a, const Lanes& b) {
    return each([&](int n) { return a.v[n] + b.v[n]; });
  }
  friend Lanes operator-(const Lanes& a, const Lanes& b) {
    return each([&](int n) { return a.v[n] - b.v[n]; });
  }
  friend Lanes operator*(const Lanes& a, const Lanes& b) {
    return each([&](int n) { return a.v[n] * b.v[n]; });
  }
  friend Lanes operator/(const Lanes& a, const Lanes& b) {
    return each([&](int n) { return a.v[n] / b.v[n]; });
  }
};

}  // namespace onefold::test

namespace onefold {

template <class T>
struct Arith<test::Lanes<T>> {
  using V = test::Lanes<T>;
  using One = Arith<T>;
  using Mask = test::Lanes<bool>;
  using Scalar = T;
  static V splat(T x) {
    return V::each([&](int) { return x; });
  }
  static V exp2(V x) {
    return V::each([&](int n) { return One::exp2(x.v[n]); });
  }
  static V log2(V x) {
    return V::each([&](int n) { return One::log2(x.v[n]); });
  }
  static V ceil(V x) {
    return V::each([&](int n) { return One::ceil(x.v[n]); });
  }
  static V fma(V a, V b, V c) {
    return V::each([&](int n) { return One::fma(a.v[n], b.v[n], c.v[n]); });
  }
  static V max(V a, V b) {
    return V::each([&](int n) { return One::max(a.v[n], b.v[n]); });
  }
  static Mask less(V a, V b) {
    return Mask::each([&](int n) { return One::less(a.v[n], b.v[n]); });
  }
  static Mask equal(V a, V b) {
    return Mask::each([&](int n) { return One::equal(a.v[n], b.v[n]); });
  }
  static V select(Mask mask, V yes, V no) {
    return V::each([&](int n) { return mask.v[n] ? yes.v[n] : no.v[n]; });
  }
};

namespace test {
namespace {

constexpr int kDim = 2;

template <class T>
using Key = ScoredValue<T, kDim>;
template <class T>
using State = AttentionState<T, kDim>;

// The same keys along every way there is to fold them: from the left, as a tree, absorbed in tiles
// under three policies, and as two halves that met on the wire.
template <class Gauge, class T>
State<T> absorb_in_tiles(const std::vector<Key<T>>& keys, std::size_t tile) {
  State<T> state;
  for (std::size_t begin = 0; begin < keys.size(); begin += tile) {
    const std::size_t end = std::min(keys.size(), begin + tile);
    std::vector<T> weights;
    for (std::size_t j = begin; j < end; ++j) weights.push_back(keys[j].score);
    const T keep =
        absorb<Gauge>(state.norm, weights.data(), static_cast<long long>(weights.size()), T(1));
    for (int d = 0; d < kDim; ++d) {
      T sum = T(0);
      for (std::size_t j = begin; j < end; ++j) sum += weights[j - begin] * keys[j].value[d];
      state.out[d] = state.out[d] * keep + sum;
    }
  }
  return state;
}

template <class T>
struct Way {
  std::string name;
  Wire<T, kDim> wire;
};

template <class T>
std::vector<Way<T>> every_way(const std::vector<Key<T>>& keys) {
  using F = AttentionFold<T, kDim>;
  const auto count = static_cast<long long>(keys.size());
  const auto wire_of = [](const Key<T>* begin, long long n) {
    return F::from_wire(F::finish(fold_left<F>(begin, n)));
  };
  // Partial results of absorbed halves, which may hold a NaN beside an empty reference.
  const std::vector<Key<T>> first(keys.begin(), keys.begin() + count / 2);
  const std::vector<Key<T>> second(keys.begin() + count / 2, keys.end());
  const auto halves = [&](auto a, auto b) { return F::finish(F::merge(a, b)); };
  return {
      {"from the left", F::finish(fold_left<F>(keys.data(), count))},
      {"as a tree", F::finish(fold_tree<F>(keys.data(), count))},
      {"maximum, tiles of 3", F::finish(absorb_in_tiles<MaximumGauge>(keys, 3))},
      {"integer, tiles of 4", F::finish(absorb_in_tiles<IntegerGauge>(keys, 4))},
      {"lagging, tiles of 2", F::finish(absorb_in_tiles<LaggingGauge<8>>(keys, 2))},
      {"one tile", F::finish(absorb_in_tiles<MaximumGauge>(keys, keys.size() + 1))},
      {"two halves on the wire", halves(wire_of(keys.data(), count / 2),
                                        wire_of(keys.data() + count / 2, count - count / 2))},
      {"two absorbed halves",
       halves(absorb_in_tiles<IntegerGauge>(first, 2), absorb_in_tiles<IntegerGauge>(second, 2))},
      {"two absorbed halves, swapped",
       halves(absorb_in_tiles<MaximumGauge>(second, 3), absorb_in_tiles<MaximumGauge>(first, 3))},
  };
}

template <class T>
class Ranges : public ::testing::Test {};
using Scalars = ::testing::Types<float, double>;
struct ScalarNames {
  template <class T>
  static std::string GetName(int) {
    return sizeof(T) == sizeof(float) ? "Float" : "Double";
  }
};
TYPED_TEST_SUITE(Ranges, Scalars, ScalarNames);

template <class T>
std::vector<T> extreme_magnitudes() {
  return {T(1e5), T(1e10), T(1e30), std::numeric_limits<T>::max() / 4,
          std::numeric_limits<T>::max()};
}

TYPED_TEST(Ranges, enormous_scores_give_the_value_of_the_largest) {
  using T = TypeParam;
  for (const T size : extreme_magnitudes<T>()) {
    for (int winner = 0; winner < 7; ++winner) {
      for (const T sign : {T(1), T(-1)}) {
        std::vector<Key<T>> keys;
        for (int j = 0; j < 7; ++j) {
          const T among =
              sign > 0 ? size * T(j % 3 - 1) / 2 : -size * (j % 2 == 0 ? T(1) : T(0.75));
          const T score = j == winner ? (sign > 0 ? size : -size / 2) : among;
          keys.push_back({score, {T(j) + T(0.5), -T(j)}});
        }
        for (const Way<T>& way : every_way(keys)) {
          SCOPED_TRACE(way.name);
          EXPECT_EQ(way.wire.lse, keys[winner].score);
          EXPECT_EQ(way.wire.out[0], T(winner) + T(0.5));
          EXPECT_EQ(way.wire.out[1], -T(winner));
        }
      }
    }
  }
}

TYPED_TEST(Ranges, enormous_ties_share) {
  using T = TypeParam;
  for (const T size : extreme_magnitudes<T>()) {
    for (const T top : {size, -size / 2}) {
      const std::vector<Key<T>> keys = {{top, {3, -1}},  {-size, {9, 9}}, {top, {5, 1}},
                                        {-size, {9, 9}}, {top, {4, 0}},   {top, {8, 8}}};
      for (const Way<T>& way : every_way(keys)) {
        SCOPED_TRACE(way.name);
        EXPECT_EQ(way.wire.lse, top + T(2));
        EXPECT_EQ(way.wire.out[0], T(5));
        EXPECT_EQ(way.wire.out[1], T(2));
      }
    }
  }
}

TYPED_TEST(Ranges, a_score_without_a_weight_reaches_the_answer_wherever_it_stands) {
  using T = TypeParam;
  constexpr int kKeys = 8;
  const T nan = std::numeric_limits<T>::quiet_NaN();
  const T infinity = std::numeric_limits<T>::infinity();
  for (const T bad : {nan, infinity}) {
    for (int place = 0; place < kKeys; ++place) {
      // Beside ordinary keys, beside hidden ones, and alone.
      for (const T other : {T(1.5), kEmpty<T>}) {
        std::vector<Key<T>> keys(kKeys, {other, {1, 2}});
        keys[place].score = bad;
        for (const Way<T>& way : every_way(keys)) {
          SCOPED_TRACE(way.name + ", place " + std::to_string(place));
          EXPECT_TRUE(std::isnan(way.wire.lse)) << way.wire.lse;
          EXPECT_TRUE(std::isnan(way.wire.out[0])) << way.wire.out[0];
          EXPECT_TRUE(std::isnan(way.wire.out[1])) << way.wire.out[1];
        }
      }
    }
  }
}

TYPED_TEST(Ranges, a_value_that_is_no_number_reaches_its_own_component_only) {
  using T = TypeParam;
  constexpr int kKeys = 6;
  for (int place = 0; place < kKeys; ++place) {
    std::vector<Key<T>> keys;
    for (int j = 0; j < kKeys; ++j) keys.push_back({T(j % 3), {1, 2}});
    keys[place].value[0] = std::numeric_limits<T>::quiet_NaN();
    for (const Way<T>& way : every_way(keys)) {
      SCOPED_TRACE(way.name);
      EXPECT_FALSE(std::isnan(way.wire.lse));
      EXPECT_TRUE(std::isnan(way.wire.out[0]));
      EXPECT_NEAR(way.wire.out[1], T(2), 64 * std::numeric_limits<T>::epsilon());
    }
  }
}

TYPED_TEST(Ranges, hidden_keys_alone_are_the_empty_set) {
  using T = TypeParam;
  for (int count = 0; count < 9; ++count) {
    for (const Way<T>& way : every_way(std::vector<Key<T>>(count, {kEmpty<T>, {1, 2}}))) {
      SCOPED_TRACE(way.name);
      EXPECT_EQ(way.wire.lse, kEmpty<T>);
      EXPECT_EQ(way.wire.out[0], T(0));
      EXPECT_EQ(way.wire.out[1], T(0));
    }
  }
}

TYPED_TEST(Ranges, the_smallest_finite_score_is_an_ordinary_one) {
  using T = TypeParam;
  const T lowest = std::numeric_limits<T>::lowest();
  for (const Way<T>& way : every_way(std::vector<Key<T>>(4, {lowest, {1, 2}}))) {
    SCOPED_TRACE(way.name);
    EXPECT_EQ(way.wire.lse, lowest);  // log2(4) is far below one unit of it
    EXPECT_EQ(way.wire.out[0], T(1));
    EXPECT_EQ(way.wire.out[1], T(2));
  }
}

TYPED_TEST(Ranges, wires_of_very_different_size_merge_to_the_larger_in_both_orders) {
  using T = TypeParam;
  using F = AttentionFold<T, kDim>;
  const auto low = F::from_wire({T(-100), {0, 0}});
  const auto high = F::from_wire({T(20000), {1, 1}});
  for (const auto& wire : {F::finish(F::merge(low, high)), F::finish(F::merge(high, low))}) {
    EXPECT_EQ(wire.lse, T(20000));
    EXPECT_EQ(wire.out[0], T(1));
  }
}

TYPED_TEST(Ranges, an_empty_wire_hides_whatever_it_carries) {
  using T = TypeParam;
  using F = AttentionFold<T, kDim>;
  const T nan = std::numeric_limits<T>::quiet_NaN();
  const auto poisoned = F::from_wire({kEmpty<T>, {nan, std::numeric_limits<T>::infinity()}});
  const auto one = F::from_wire({T(2), {T(-0.0), 7}});
  for (const auto& wire :
       {F::finish(F::merge(poisoned, one)), F::finish(F::merge(one, poisoned))}) {
    EXPECT_EQ(wire.lse, T(2));
    EXPECT_TRUE(wire.out[0] == T(0) && std::signbit(wire.out[0]));  // not one bit of it
    EXPECT_EQ(wire.out[1], T(7));
  }
}

TYPED_TEST(Ranges, minus_zero_survives_where_nothing_was_added) {
  using T = TypeParam;
  using F = AttentionFold<T, kDim>;
  const Key<T> key{T(-0.0), {T(-0.0), T(0)}};
  const auto wire = F::finish(F::merge(F::identity(), F::merge(F::lift(key), F::identity())));
  EXPECT_TRUE(std::signbit(wire.out[0]));
  EXPECT_FALSE(std::signbit(wire.out[1]));
  EXPECT_EQ(wire.lse, T(0));
  EXPECT_TRUE(std::signbit(Sum<T>::merge(Sum<T>::identity(), T(-0.0))));
  EXPECT_FALSE(std::signbit(Sum<T>::finish(Sum<T>::identity())));
  EXPECT_FALSE(std::signbit(Arith<T>::abs(T(-0.0))));
}

TYPED_TEST(Ranges, anchor_reads_only_the_empty_reference_as_zero) {
  using T = TypeParam;
  EXPECT_EQ(anchor(kEmpty<T>), T(0));
  EXPECT_EQ(anchor(std::numeric_limits<T>::lowest()), std::numeric_limits<T>::lowest());
  EXPECT_TRUE(std::isnan(anchor(std::numeric_limits<T>::quiet_NaN())));
  EXPECT_EQ(weight(kEmpty<T>, kEmpty<T>), T(0));
  EXPECT_EQ(weight(T(3), T(3)), T(1));
  EXPECT_EQ(weight(T(1), T(4)), T(0.125));
  const Weights<T> both_empty = weigh(kEmpty<T>, kEmpty<T>);  // payloads are scaled by these
  EXPECT_EQ(both_empty.a, T(0));
  EXPECT_EQ(both_empty.b, T(0));
}

TYPED_TEST(Ranges, moments_of_nothing_of_one_and_of_equals_are_exact) {
  using T = TypeParam;
  using F = WelfordFold<T>;
  EXPECT_EQ(F::finish(F::identity()), T(0));
  EXPECT_EQ(F::finish(F::lift(T(1e15))), T(0));
  const std::vector<T> equal(100, T(1e15));
  const auto state = fold_left<F>(equal.data(), 100);
  EXPECT_EQ(state.count, T(100));
  EXPECT_EQ(state.mean, T(1e15));
  EXPECT_EQ(F::finish(state), T(0));
}

TYPED_TEST(Ranges, nan_and_infinity_reach_the_moments_and_the_sum_from_any_place) {
  using T = TypeParam;
  for (const T bad : {std::numeric_limits<T>::quiet_NaN(), std::numeric_limits<T>::infinity()}) {
    for (int place = 0; place < 5; ++place) {
      std::vector<T> items(5, T(1));
      items[place] = bad;
      const auto moments = fold_left<WelfordFold<T>>(items.data(), 5);
      EXPECT_FALSE(std::isfinite(moments.mean));
      EXPECT_FALSE(std::isfinite(WelfordFold<T>::finish(moments)));
      EXPECT_FALSE(std::isfinite(fold_tree<Sum<T>>(items.data(), 5)));
      EXPECT_FALSE(
          std::isfinite(WelfordFold<T>::finish(fold_tree<WelfordFold<T>>(items.data(), 5))));
    }
  }
}

TYPED_TEST(Ranges, every_lane_of_a_vector_has_the_bits_of_the_scalar_fold) {
  using T = TypeParam;
  using V = Lanes<T>;
  for_random_cases(100, [](Random& random) {
    const int count = random.integer(0, 20);
    std::vector<Key<T>> rows[V::kCount];
    std::vector<Key<V>> together(count);
    for (int n = 0; n < V::kCount; ++n) {
      const Family family = draw_family(random);
      for (int j = 0; j < count; ++j) {
        Key<T> key{static_cast<T>(draw_score(random, family, j)), {}};
        for (T& v : key.value) v = static_cast<T>(draw_value(random));
        rows[n].push_back(key);
        together[j].score.v[n] = key.score;
        for (int d = 0; d < kDim; ++d) together[j].value[d].v[n] = key.value[d];
      }
    }
    using FV = AttentionFold<V, kDim>;
    using F = AttentionFold<T, kDim>;
    auto absorbed = Softmax<V>{};
    std::vector<V> scores;
    for (const auto& key : together) scores.push_back(key.score);
    absorb<IntegerGauge>(absorbed, scores.data(), count, Arith<V>::splat(T(1)));
    const auto wire = FV::finish(fold_left<FV>(together.data(), count));
    for (int n = 0; n < V::kCount; ++n) {
      const auto expected = F::finish(fold_left<F>(rows[n].data(), count));
      EXPECT_EQ(std::memcmp(&wire.lse.v[n], &expected.lse, sizeof(T)), 0);
      for (int d = 0; d < kDim; ++d) {
        EXPECT_EQ(std::memcmp(&wire.out[d].v[n], &expected.out[d], sizeof(T)), 0);
      }
      auto alone = Softmax<T>{};
      std::vector<T> own;
      for (const auto& key : rows[n]) own.push_back(key.score);
      absorb<IntegerGauge>(alone, own.data(), count, T(1));
      EXPECT_EQ(std::memcmp(&absorbed.ref.v[n], &alone.ref, sizeof(T)), 0);
      EXPECT_EQ(std::memcmp(&absorbed.sum.v[n], &alone.sum, sizeof(T)), 0);
    }
  });
}

}  // namespace
}  // namespace test
}  // namespace onefold
