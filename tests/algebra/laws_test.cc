// The laws every fold keeps, and with them every backend: held against exact answers and, where the
// law is an identity, against single bits.

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "onefold/fold.h"
#include "tests/algebra/random.h"
#include "tests/algebra/subjects.h"

namespace onefold::test {
namespace {

constexpr int kCases = 200;
constexpr int kMostItems = 70;

template <class T>
auto bits(T x) {
  using Word = std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t>;
  return std::bit_cast<Word>(x);
}

template <class T>
void expect_same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t n = 0; n < a.size(); ++n) {
    EXPECT_EQ(bits(a[n]), bits(b[n])) << "number " << n << ": " << a[n] << " and " << b[n];
  }
}

template <class T>
void expect_within(const std::vector<T>& answer, const std::vector<Expected>& expected) {
  ASSERT_EQ(answer.size(), expected.size());
  for (std::size_t n = 0; n < answer.size(); ++n) {
    if (std::isinf(expected[n].value)) {
      EXPECT_EQ(answer[n], static_cast<T>(expected[n].value)) << "number " << n;
      continue;
    }
    EXPECT_LE(std::abs(static_cast<Real>(answer[n]) - expected[n].value), expected[n].bound)
        << "number " << n << ": " << answer[n] << ", exactly " << expected[n].value;
  }
}

int ceil_log2(int count) {
  return count <= 1 ? 0 : std::bit_width(static_cast<unsigned>(count - 1));
}

template <class Subject>
typename Subject::State left(const std::vector<typename Subject::Item>& items) {
  return fold_left<typename Subject::Fold>(items.data(), static_cast<long long>(items.size()));
}

template <class Subject>
typename Subject::State random_state(Random& random) {
  const int count = random.integer(0, 5);
  return left<Subject>(draw_items<Subject>(random, draw_family(random), count));
}

// Merges a random split of [begin, end): any bracketing there is.
template <class Subject>
typename Subject::State random_tree(Random& random,
                                    const std::vector<typename Subject::Item>& items, int begin,
                                    int end) {
  using Fold = typename Subject::Fold;
  if (begin == end) return Fold::identity();
  if (end - begin == 1) return Fold::lift(items[begin]);
  const int middle = random.integer(begin, end);
  if (middle == begin || middle == end) {  // an empty split
    const auto rest = random_tree<Subject>(random, items, begin, end);
    return middle == begin ? Fold::merge(Fold::identity(), rest)
                           : Fold::merge(rest, Fold::identity());
  }
  return Fold::merge(random_tree<Subject>(random, items, begin, middle),
                     random_tree<Subject>(random, items, middle, end));
}

// ---- laws of every fold ----

template <class Subject>
class FoldLaws : public ::testing::Test {};

using Subjects =
    ::testing::Types<SoftmaxSubject<float>, SoftmaxSubject<double>, AttentionSubject<float>,
                     AttentionSubject<double>, WelfordSubject<float>, WelfordSubject<double>,
                     SumSubject<float>, SumSubject<double>>;

struct SubjectNames {
  template <class Subject>
  static std::string GetName(int) {
    return std::string(Subject::name()) +
           (sizeof(typename Subject::T) == sizeof(float) ? "Float" : "Double");
  }
};
TYPED_TEST_SUITE(FoldLaws, Subjects, SubjectNames);

TYPED_TEST(FoldLaws, is_a_fold_and_a_monoid) {
  static_assert(Monoid<typename TypeParam::Fold>);
  static_assert(Fold<typename TypeParam::Fold, typename TypeParam::Item>);
  static_assert(!Fold<typename TypeParam::Fold, std::string>);
}

TYPED_TEST(FoldLaws, merge_with_identity_is_bitwise_noop) {
  using Fold = typename TypeParam::Fold;
  const auto none = Fold::identity();
  expect_same_bits(TypeParam::numbers(Fold::merge(none, none)), TypeParam::numbers(none));
  for_random_cases(kCases, [&](Random& random) {
    const auto x = random_state<TypeParam>(random);
    expect_same_bits(TypeParam::numbers(Fold::merge(x, none)), TypeParam::numbers(x));
    expect_same_bits(TypeParam::numbers(Fold::merge(none, x)), TypeParam::numbers(x));
  });
}

TYPED_TEST(FoldLaws, merge_is_bitwise_commutative) {
  using Fold = typename TypeParam::Fold;
  for_random_cases(kCases, [](Random& random) {
    const auto x = random_state<TypeParam>(random);
    const auto y = random.chance(0.1) ? x : random_state<TypeParam>(random);
    expect_same_bits(TypeParam::numbers(Fold::merge(x, y)), TypeParam::numbers(Fold::merge(y, x)));
  });
}

TYPED_TEST(FoldLaws, merge_order_changes_only_rounding) {
  using Fold = typename TypeParam::Fold;
  for_random_cases(kCases, [](Random& random) {
    const int count = random.integer(0, kMostItems);
    const auto items = draw_items<TypeParam>(random, draw_family(random), count);
    expect_within(TypeParam::answer(left<TypeParam>(items)), TypeParam::expect(items, count));
    expect_within(TypeParam::answer(fold_tree<Fold>(items.data(), count)),
                  TypeParam::expect(items, ceil_log2(count)));
    expect_within(TypeParam::answer(random_tree<TypeParam>(random, items, 0, count)),
                  TypeParam::expect(items, count));
  });
}

TYPED_TEST(FoldLaws, a_chain_of_a_thousand_merges_stays_within_its_bound) {
  for_random_cases(5, [](Random& random) {
    const auto items = draw_items<TypeParam>(random, Family::kSpread, 1000);
    expect_within(TypeParam::answer(left<TypeParam>(items)), TypeParam::expect(items, 1000));
  });
}

TYPED_TEST(FoldLaws, empties_in_any_place_change_no_bit) {
  using Fold = typename TypeParam::Fold;
  for_random_cases(kCases, [](Random& random) {
    const int count = random.integer(0, 12);
    const auto items = draw_items<TypeParam>(random, draw_family(random), count);
    auto state = Fold::identity();
    for (const auto& item : items) {
      // A part that is empty itself, on either side of what it joins.
      while (random.chance(0.4)) state = Fold::merge(state, Fold::identity());
      while (random.chance(0.2)) state = Fold::merge(Fold::identity(), state);
      state = Fold::merge(state, Fold::merge(Fold::identity(), Fold::lift(item)));
    }
    while (random.chance(0.4)) state = Fold::merge(state, Fold::identity());
    expect_same_bits(TypeParam::numbers(state), TypeParam::numbers(left<TypeParam>(items)));
  });
}

TYPED_TEST(FoldLaws, the_empty_fold_has_the_answer_of_the_identity) {
  using Fold = typename TypeParam::Fold;
  const typename TypeParam::Item* nothing = nullptr;
  const auto expected = TypeParam::answer(Fold::identity());
  expect_same_bits(TypeParam::answer(fold_left<Fold>(nothing, 0)), expected);
  expect_same_bits(TypeParam::answer(fold_tree<Fold>(nothing, 0)), expected);
  for (const auto number : expected) {
    EXPECT_TRUE(bits(number) == 0 || number == kEmpty<typename TypeParam::T>) << number;
  }
}

TYPED_TEST(FoldLaws, a_tree_of_two_is_the_merge_of_two) {
  using Fold = typename TypeParam::Fold;
  for_random_cases(kCases, [](Random& random) {
    const auto items = draw_items<TypeParam>(random, draw_family(random), 2);
    expect_same_bits(TypeParam::numbers(fold_tree<Fold>(items.data(), 2)),
                     TypeParam::numbers(Fold::merge(Fold::lift(items[0]), Fold::lift(items[1]))));
  });
}

// ---- laws of scores ----

template <class T>
class ScoreLaws : public ::testing::Test {};
using Scalars = ::testing::Types<float, double>;
struct ScalarNames {
  template <class T>
  static std::string GetName(int) {
    return sizeof(T) == sizeof(float) ? "Float" : "Double";
  }
};
TYPED_TEST_SUITE(ScoreLaws, Scalars, ScalarNames);

TYPED_TEST(ScoreLaws, masked_item_is_identity) {
  using Subject = AttentionSubject<TypeParam>;
  using Fold = typename Subject::Fold;
  for_random_cases(kCases, [](Random& random) {
    auto hidden = Subject::draw(random, Family::kAllHidden, 0);
    if (random.chance(0.5)) hidden.value[0] = std::numeric_limits<TypeParam>::quiet_NaN();
    if (random.chance(0.5)) hidden.value[1] = -std::numeric_limits<TypeParam>::infinity();
    expect_same_bits(Subject::numbers(Fold::lift(hidden)), Subject::numbers(Fold::identity()));
  });
  expect_same_bits(Subject::numbers(Fold::lift_sink(kEmpty<TypeParam>)),
                   Subject::numbers(Fold::identity()));
}

TYPED_TEST(ScoreLaws, one_key_is_its_own_answer) {
  using Subject = AttentionSubject<TypeParam>;
  for_random_cases(kCases, [](Random& random) {
    const auto key = Subject::draw(random, Family::kWide, 0);
    std::vector<TypeParam> expected = {key.score};
    expected.insert(expected.end(), key.value, key.value + Subject::kDim);
    expect_same_bits(Subject::answer(Subject::Fold::lift(key)), expected);
  });
}

TYPED_TEST(ScoreLaws, sink_equals_one_more_key_with_zero_value) {
  using Subject = AttentionSubject<TypeParam>;
  using Fold = typename Subject::Fold;
  for_random_cases(kCases, [](Random& random) {
    const Family family = draw_family(random);
    auto items = draw_items<Subject>(random, family, random.integer(0, kMostItems));
    const auto sink = static_cast<TypeParam>(draw_score(random, family, 3));
    const auto with_sink = Fold::merge(left<Subject>(items), Fold::lift_sink(sink));
    items.push_back({sink, {}});
    expect_same_bits(Subject::numbers(with_sink), Subject::numbers(left<Subject>(items)));
    expect_within(Subject::answer(with_sink),
                  Subject::expect(items, static_cast<int>(items.size())));
  });
}

TYPED_TEST(ScoreLaws, merging_wire_forms_equals_wire_of_merge) {
  using Subject = AttentionSubject<TypeParam>;
  using Fold = typename Subject::Fold;
  for_random_cases(kCases, [](Random& random) {
    const int count = random.integer(0, kMostItems);
    const auto items = draw_items<Subject>(random, draw_family(random), count);
    // Parts that travel as (lse, out), some of them empty.
    auto state = Fold::identity();
    int begin = 0, parts = 0;
    Real longest_exponent = 0;
    while (begin < count || random.chance(0.3)) {
      const int end = random.integer(begin, count);
      const std::vector<typename Subject::Item> part(items.begin() + begin, items.begin() + end);
      const auto wire = Fold::finish(left<Subject>(part));
      if (!part.empty() && wire.lse != kEmpty<TypeParam>) {
        longest_exponent = std::max<Real>(longest_exponent, std::abs(wire.lse));
      }
      state = Fold::merge(state, Fold::from_wire(wire));
      begin = end;
      ++parts;
    }
    // A part's lse and out are stored rounded: u |lse| and two units of log2 |sum| (at most 7) in
    // the exponent, one division, beside the merges inside the parts and of the parts.
    Roundings r = Roundings::of_merges(count + parts);
    r.units += static_cast<Real>(kLn2) * (longest_exponent + kLog2Units * 7);
    r.additions += 2;
    expect_within(Subject::answer(state), Subject::expect(items, r));
  });
}

TYPED_TEST(ScoreLaws, wire_form_there_and_back_changes_no_bit) {
  using Subject = AttentionSubject<TypeParam>;
  using Fold = typename Subject::Fold;
  for_random_cases(kCases, [](Random& random) {
    const auto wire = Fold::finish(random_state<Subject>(random));
    const auto again = Fold::finish(Fold::from_wire(wire));
    EXPECT_EQ(bits(again.lse), bits(wire.lse));
    for (int d = 0; d < Subject::kDim; ++d) EXPECT_EQ(bits(again.out[d]), bits(wire.out[d]));
  });
}

TYPED_TEST(ScoreLaws, softmax_is_the_attention_state_without_out) {
  using Subject = AttentionSubject<TypeParam>;
  for_random_cases(kCases, [](Random& random) {
    const auto items = draw_items<Subject>(random, draw_family(random), random.integer(0, 20));
    std::vector<TypeParam> scores;
    for (const auto& item : items) scores.push_back(item.score);
    const auto whole = left<Subject>(items).norm;
    const auto alone = left<SoftmaxSubject<TypeParam>>(scores);
    EXPECT_EQ(bits(whole.ref), bits(alone.ref));
    EXPECT_EQ(bits(whole.sum), bits(alone.sum));
  });
}

// A kernel that keeps its reference in the units of raw scores: c * ref is in base 2.
template <class T, class Gauge>
void absorb_in_own_units(AttentionState<T, AttentionSubject<T>::kDim>& state,
                         const std::vector<typename AttentionSubject<T>::Item>& tile, T c,
                         const Gauge& gauge) {
  T top = kEmpty<T>;
  for (const auto& key : tile) top = Arith<T>::max(top, key.score);
  const T keep = raise(state.norm, top, c, gauge);
  for (T& sum : state.out) sum = sum * keep;
  for (const auto& key : tile) {
    const T w = weight_from(key.score, anchor(state.norm.ref), c);
    state.norm.sum += w;
    for (int d = 0; d < AttentionSubject<T>::kDim; ++d) state.out[d] += w * key.value[d];
  }
}

TYPED_TEST(ScoreLaws, a_reference_in_other_units_stands_for_the_same_set) {
  using T = TypeParam;
  using Subject = AttentionSubject<T>;
  for_random_cases(kCases, [](Random& random) {
    const int count = random.integer(0, kMostItems), most = random.integer(1, 20);
    const T c = static_cast<T>(random.uniform(0.05, 3));
    const T lag = static_cast<T>(8 / c);
    const bool lagging = random.chance(0.5);
    const auto items = draw_items<Subject>(random, draw_family(random), count);
    AttentionState<T, Subject::kDim> state;
    int tiles = 0;
    for (int begin = 0; begin < count; ++tiles) {
      const int end = std::min(count, begin + random.integer(1, most));
      const std::vector<typename Subject::Item> tile(items.begin() + begin, items.begin() + end);
      if (lagging) {
        absorb_in_own_units(state, tile, c, LaggingBy<T>{lag});
      } else {
        absorb_in_own_units(state, tile, c, MaximumGauge{});
      }
      begin = end;
    }
    std::vector<Real> scores;
    for (const auto& item : items) scores.push_back(static_cast<Real>(item.score) * c);
    const Weighted exact(scores);
    // Differences are rounded, then scaled: twice. The lag is 8 up to its own rounding.
    const Roundings r{(tiles + 1) * (kExp2Units + 1), static_cast<Real>(count + tiles + 1),
                      lagging ? Real(8.01L) : Real(0), 2};
    state.norm.ref = state.norm.ref * c;
    std::vector<Expected> expected = {expected_lse<T>(exact, r)};
    for (int d = 0; d < Subject::kDim; ++d) {
      std::vector<Real> v;
      for (const auto& item : items) v.push_back(item.value[d]);
      expected.push_back(expected_out<T>(exact, v, r));
    }
    expect_within(Subject::answer(state), expected);
  });
}

// ---- laws of absorbing a tile, for every reference policy ----

template <class Number, class G>
struct Policy {
  using T = Number;
  using Gauge = G;
};

template <class P>
class TileLaws : public ::testing::Test {};
using Policies = ::testing::Types<Policy<float, MaximumGauge>, Policy<float, IntegerGauge>,
                                  Policy<float, LaggingGauge<8>>, Policy<float, LaggingGauge<0>>,
                                  Policy<double, MaximumGauge>, Policy<double, IntegerGauge>,
                                  Policy<double, LaggingGauge<8>>, Policy<double, LaggingGauge<0>>>;

template <class G>
inline constexpr int kLagOf = 1;  // an integer reference lies less than 1 above the maximum
template <int kLag>
inline constexpr int kLagOf<LaggingGauge<kLag>> = kLag;

struct PolicyNames {
  template <class P>
  static std::string GetName(int) {
    const std::string number = sizeof(typename P::T) == sizeof(float) ? "Float" : "Double";
    if (std::is_same_v<typename P::Gauge, MaximumGauge>) return "Maximum" + number;
    if (std::is_same_v<typename P::Gauge, IntegerGauge>) return "Integer" + number;
    return "Lagging" + std::to_string(kLagOf<typename P::Gauge>) + number;
  }
};
TYPED_TEST_SUITE(TileLaws, Policies, PolicyNames);

// What a kernel does: absorb the scores of a tile, scale what was there, add weights times values.
template <class Gauge, class T>
void absorb_tile(AttentionState<T, AttentionSubject<T>::kDim>& state,
                 const std::vector<typename AttentionSubject<T>::Item>& tile, T c) {
  std::vector<T> weights;
  for (const auto& key : tile) weights.push_back(key.score);
  const T keep =
      absorb<Gauge>(state.norm, weights.data(), static_cast<long long>(weights.size()), c);
  for (int d = 0; d < AttentionSubject<T>::kDim; ++d) {
    T sum = T(0);
    for (std::size_t j = 0; j < tile.size(); ++j) sum += weights[j] * tile[j].value[d];
    state.out[d] = state.out[d] * keep + sum;
  }
}

TYPED_TEST(TileLaws, absorb_tile_equals_merge_of_items) {
  using T = typename TypeParam::T;
  using Gauge = typename TypeParam::Gauge;
  using Subject = AttentionSubject<T>;
  for_random_cases(kCases, [](Random& random) {
    const int count = random.integer(0, kMostItems);
    const int most = random.integer(1, 20);
    const T c = random.chance(0.5) ? T(1) : static_cast<T>(random.uniform(0.01, 3));
    auto items = draw_items<Subject>(random, draw_family(random), count);
    AttentionState<T, Subject::kDim> state;
    int begin = 0, tiles = 0;
    while (begin < count || random.chance(0.2)) {
      const int end = std::min(count, begin + random.integer(0, most));
      absorb_tile<Gauge, T>(state, {items.begin() + begin, items.begin() + end}, c);
      begin = end;
      ++tiles;
    }
    for (auto& item : items) item.score = item.score * c;  // as absorb rounds it
    // Per tile: one rescale (exp2 and a product), one product per weight, the sums.
    Roundings r{(tiles + 1) * (kExp2Units + 1), static_cast<Real>(most + tiles + 1),
                static_cast<Real>(kLagOf<Gauge>)};
    expect_within(Subject::answer(state), Subject::expect(items, r));
    expect_within(Subject::answer(left<Subject>(items)), Subject::expect(items, count));
  });
}

TYPED_TEST(TileLaws, absorbing_hidden_keys_changes_no_bit) {
  using T = typename TypeParam::T;
  for_random_cases(kCases, [](Random& random) {
    auto state = random_state<SoftmaxSubject<T>>(random);
    const bool was_empty = state.ref == kEmpty<T>;
    const auto before = SoftmaxSubject<T>::numbers(state);
    std::vector<T> scores(random.integer(0, 9), kEmpty<T>);
    const T keep = absorb<typename TypeParam::Gauge>(
        state, scores.data(), static_cast<long long>(scores.size()), static_cast<T>(0.3));
    if (std::is_same_v<typename TypeParam::Gauge, MaximumGauge> || was_empty) {
      expect_same_bits(SoftmaxSubject<T>::numbers(state), before);
    }
    EXPECT_EQ(keep, was_empty ? T(0) : T(1));
    for (const T weight : scores) EXPECT_EQ(bits(weight), bits(T(0)));
  });
}

TYPED_TEST(TileLaws, every_weight_stays_below_two_to_the_lag) {
  using T = typename TypeParam::T;
  for_random_cases(kCases, [](Random& random) {
    const Family family = draw_family(random);
    Softmax<T> state;
    for (int tile = 0; tile < 5; ++tile) {
      std::vector<T> scores = draw_items<SoftmaxSubject<T>>(random, family, 6);
      absorb<typename TypeParam::Gauge>(state, scores.data(), 6, T(1));
      const int lag = std::is_same_v<typename TypeParam::Gauge, IntegerGauge>
                          ? 0
                          : kLagOf<typename TypeParam::Gauge>;
      for (const T weight : scores) EXPECT_LE(weight, math::exp2(static_cast<T>(lag)));
    }
  });
}

TYPED_TEST(TileLaws, moving_ref_by_an_integer_is_exact) {
  using T = typename TypeParam::T;
  using Gauge = typename TypeParam::Gauge;
  for_random_cases(kCases, [](Random& random) {
    const T ref = static_cast<T>(random.integer(-100000, 100000));
    const int step = random.integer(1, 60);
    const T sum = static_cast<T>(random.uniform(1, 2000));
    Softmax<T> state{ref, sum};
    const T keep = raise<Gauge>(state, ref + static_cast<T>(step));
    if (step <= kLagOf<Gauge> && state.ref == ref) {  // a lagging reference stays
      EXPECT_EQ(keep, T(1));
      EXPECT_EQ(bits(state.sum), bits(sum));
      return;
    }
    EXPECT_EQ(state.ref, ref + static_cast<T>(step));
    EXPECT_EQ(bits(keep), bits(std::ldexp(T(1), -step)));
    EXPECT_EQ(bits(std::ldexp(state.sum, step)), bits(sum));
  });
}

TYPED_TEST(TileLaws, a_lower_top_moves_nothing) {
  using T = typename TypeParam::T;
  for_random_cases(kCases, [](Random& random) {
    Softmax<T> state{static_cast<T>(random.integer(-50, 50)), static_cast<T>(1.25)};
    const Softmax<T> before = state;
    const T below = random.chance(0.2) ? kEmpty<T> : before.ref - static_cast<T>(random.uniform());
    EXPECT_EQ(raise<typename TypeParam::Gauge>(state, below), T(1));
    expect_same_bits(SoftmaxSubject<T>::numbers(state), SoftmaxSubject<T>::numbers(before));
  });
}

}  // namespace
}  // namespace onefold::test
