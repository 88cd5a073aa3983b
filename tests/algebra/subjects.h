// The folds under test: how to draw items for each, what the exact answer is, and how far from it
// rounding may lead.
//
// Invariant: exact answers come from long double and from no code of the algebra; bounds are
// computed from the items and the height of the merge tree. Includes the algebra and random.h.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "onefold/fold.h"
#include "tests/algebra/random.h"

namespace onefold::test {

using Real = long double;

// An exact value and the largest error that rounding explains.
struct Expected {
  Real value, bound;
};

template <class T>
inline constexpr Real kUnit = std::numeric_limits<T>::epsilon() / 2;
// exp2 and log2 are within one unit in the last place, which is two unit roundoffs.
inline constexpr Real kExp2Units = 2, kLog2Units = 2;
// Bounds are first order; every relative error in them is below one percent.
inline constexpr Real kSecondOrder = 1.01L;

enum class Family {
  kNormal,
  kSpread,  // deviation 8
  kHighOffset,
  kLowOffset,
  kEqual,
  kOneHot,
  kRising,
  kFalling,
  kSomeHidden,
  kAllHidden,
  kWide,  // magnitudes from 1e-30 to 1e30
  kCount
};

inline double draw_score(Random& random, Family family, int idx) {
  switch (family) {
    case Family::kSpread:
      return 8 * random.normal();
    case Family::kHighOffset:
      return 1000 + random.normal();
    case Family::kLowOffset:
      return -1000 + random.normal();
    case Family::kEqual:
      return 0.7;
    case Family::kOneHot:
      return random.chance(0.05) ? 30 : 0;
    case Family::kRising:
      return 0.9 * idx;
    case Family::kFalling:
      return -0.9 * idx;
    case Family::kSomeHidden:
      return random.chance(0.4) ? kEmpty<double> : random.normal();
    case Family::kAllHidden:
      return kEmpty<double>;
    case Family::kWide:
      return random.wide(30);
    default:
      return random.normal();
  }
}

inline Family draw_family(Random& random) {
  return static_cast<Family>(random.integer(0, static_cast<int>(Family::kCount) - 1));
}

inline double draw_value(Random& random) {
  if (random.chance(0.1)) return random.chance(0.5) ? 0.0 : -0.0;
  return random.chance(0.1) ? 1e4 * random.normal() : random.normal();
}

// Exact weights of a set of base-2 scores.
struct Weighted {
  Real top = -std::numeric_limits<Real>::infinity(), sum = 0;
  std::vector<Real> p, tau;  // normalised weights; distance below the top

  explicit Weighted(const std::vector<Real>& scores) : p(scores.size()), tau(scores.size()) {
    for (const Real s : scores) top = std::max(top, s);
    if (std::isinf(top)) return;
    for (std::size_t j = 0; j < scores.size(); ++j) {
      tau[j] = std::isinf(scores[j]) ? 0 : top - scores[j];
      p[j] = std::isinf(scores[j]) ? 0 : std::exp2(-tau[j]);
      sum += p[j];
    }
    for (Real& weight : p) weight /= sum;
  }
  bool empty() const { return sum == 0; }
  Real lse() const { return top + std::log2(sum); }
};

// How the weights of a computation err: `units` unit roundoffs each from exp2 and multiplications,
// `additions` roundings of a running sum, exponents as long as tau + 2 * lag, rounded that often.
struct Roundings {
  Real units, additions, lag = 0, of_exponent = 1;
  // A tree of merges in which no item passes more than `height` of them.
  static Roundings of_merges(int height) {
    return {height * kExp2Units, static_cast<Real>(height)};
  }
};

template <class T>
Expected expected_lse(const Weighted& exact, const Roundings& r) {
  if (exact.empty()) return {exact.top, 0};
  Real relative = r.additions * kUnit<T>;
  for (std::size_t j = 0; j < exact.p.size(); ++j) {
    const Real exponent = exact.tau[j] + 2 * r.lag;
    relative +=
        exact.p[j] * (r.units + static_cast<Real>(kLn2) * r.of_exponent * exponent) * kUnit<T>;
    relative += (r.units + 1) * std::numeric_limits<T>::denorm_min();
  }
  const Real log_sum = std::abs(std::log2(exact.sum)) + r.lag + 1;
  const Real bound = static_cast<Real>(kLog2E) * relative +
                     kUnit<T> * (kLog2Units * log_sum + r.of_exponent * std::abs(exact.lse()));
  return {exact.lse(), kSecondOrder * bound};
}

// One component of the output, whose values are `v`.
template <class T>
Expected expected_out(const Weighted& exact, const std::vector<Real>& v, const Roundings& r) {
  if (exact.empty()) return {0, 0};
  Real out = 0, magnitude = 0, bound = 0;
  for (std::size_t j = 0; j < v.size(); ++j) out += exact.p[j] * v[j];
  for (std::size_t j = 0; j < v.size(); ++j) {
    const Real exponent = exact.tau[j] + 2 * r.lag;
    magnitude += exact.p[j] * std::abs(v[j]);
    bound += exact.p[j] * std::abs(v[j] - out) *
             (r.units + static_cast<Real>(kLn2) * r.of_exponent * exponent) * kUnit<T>;
    bound +=
        (r.units + 1) * (std::abs(v[j]) + std::abs(out)) * std::numeric_limits<T>::denorm_min();
  }
  bound += kUnit<T> * (r.additions * (magnitude + std::abs(out)) + std::abs(out));
  return {out, kSecondOrder * bound + std::numeric_limits<T>::denorm_min()};
}

// ---- subjects: Fold, Item, draw, numbers (of a state, for bits), answer, expect ----

// A reference of minus zero is the reference zero: no answer depends on its sign.
template <class T>
T reference_of(const Softmax<T>& s) {
  return s.ref + T(0);
}

template <class Number>
struct SoftmaxSubject {
  using T = Number;
  using Fold = SoftmaxFold<T>;
  using Item = T;
  using State = typename Fold::State;
  static const char* name() { return "Softmax"; }

  static Item draw(Random& random, Family family, int idx) {
    return static_cast<T>(draw_score(random, family, idx));
  }
  static std::vector<T> numbers(const State& s) { return {reference_of(s), s.sum}; }
  static std::vector<T> answer(const State& s) { return {Fold::finish(s)}; }
  static std::vector<Expected> expect(const std::vector<Item>& items, int height) {
    const Weighted exact(std::vector<Real>(items.begin(), items.end()));
    return {expected_lse<T>(exact, Roundings::of_merges(height))};
  }
};

template <class Number>
struct AttentionSubject {
  static constexpr int kDim = 3;
  using T = Number;
  using Fold = AttentionFold<T, kDim>;
  using Item = ScoredValue<T, kDim>;
  using State = typename Fold::State;
  static const char* name() { return "Attention"; }

  static Item draw(Random& random, Family family, int idx) {
    Item item{static_cast<T>(draw_score(random, family, idx)), {}};
    for (T& v : item.value) v = static_cast<T>(draw_value(random));
    return item;
  }
  static std::vector<T> numbers(const State& s) {
    std::vector<T> all = {reference_of(s.norm), s.norm.sum};
    all.insert(all.end(), s.out, s.out + kDim);
    return all;
  }
  static std::vector<T> answer(const State& s) {
    const Wire<T, kDim> wire = Fold::finish(s);
    std::vector<T> all = {wire.lse};
    all.insert(all.end(), wire.out, wire.out + kDim);
    return all;
  }
  static std::vector<Expected> expect(const std::vector<Item>& items, const Roundings& r) {
    std::vector<Real> scores;
    for (const Item& item : items) scores.push_back(item.score);
    const Weighted exact(scores);
    std::vector<Expected> all = {expected_lse<T>(exact, r)};
    for (int d = 0; d < kDim; ++d) {
      std::vector<Real> v;
      for (const Item& item : items) v.push_back(item.value[d]);
      all.push_back(expected_out<T>(exact, v, r));
    }
    return all;
  }
  static std::vector<Expected> expect(const std::vector<Item>& items, int height) {
    return expect(items, Roundings::of_merges(height));
  }
};

template <class Number>
struct WelfordSubject {
  using T = Number;
  using Fold = WelfordFold<T>;
  using Item = T;
  using State = typename Fold::State;
  static const char* name() { return "Welford"; }

  static Item draw(Random& random, Family family, int idx) {
    // Squares must stay finite in float: no magnitudes beyond 1e12, nothing hidden.
    if (family == Family::kWide) return static_cast<T>(random.wide(12));
    if (family == Family::kSomeHidden || family == Family::kAllHidden) family = Family::kNormal;
    return static_cast<T>(draw_score(random, family, idx));
  }
  static std::vector<T> numbers(const State& s) { return {s.count, s.mean, s.m2}; }
  static std::vector<T> answer(const State& s) { return {s.count, s.mean, Fold::finish(s)}; }

  // A merge moves the mean to a convex combination and adds at most 5 roundings of numbers below
  // the largest item, so after `height` of them the mean is off by e = 5 height u max|x|. In m2 the
  // difference of two means then errs by 2e, and sum (n1 n2 / n) 2 |delta| 2e is at most
  // 4e sqrt(M2 n height) by Cauchy and Schwarz, as n1 n2 / n adds up to at most n height.
  static std::vector<Expected> expect(const std::vector<Item>& items, int height) {
    const Real count = static_cast<Real>(items.size());
    if (items.empty()) return {{0, 0}, {0, 0}, {0, 0}};
    Real mean = 0, m2 = 0, largest = 0;
    for (const Item x : items) mean += x / count;
    for (const Item x : items) {
      m2 += (x - mean) * (x - mean);
      largest = std::max<Real>(largest, std::abs(x));
    }
    const Real mean_error = 5 * height * kUnit<T> * largest;
    const Real m2_error = 8 * height * kUnit<T> * m2 +
                          4 * mean_error * std::sqrt(m2 * count * height) +
                          4 * mean_error * mean_error * count * height;
    const Real tiny = height * std::numeric_limits<T>::min();
    return {{count, 0},
            {mean, kSecondOrder * mean_error + tiny},
            {m2 / count, kSecondOrder * (m2_error + kUnit<T> * m2) / count + tiny}};
  }
};

template <class Number>
struct SumSubject {
  using T = Number;
  using Fold = Sum<T>;
  using Item = T;
  using State = T;
  static const char* name() { return "Sum"; }

  static Item draw(Random& random, Family family, int) {
    return static_cast<T>(family == Family::kWide ? random.wide(30) : draw_value(random));
  }
  static std::vector<T> numbers(const State& s) { return {s}; }
  static std::vector<T> answer(const State& s) { return {Fold::finish(s)}; }
  static std::vector<Expected> expect(const std::vector<Item>& items, int height) {
    Real sum = 0, magnitude = 0;
    for (const Item x : items) {
      sum += x;
      magnitude += std::abs(x);
    }
    return {{sum, kSecondOrder * height * kUnit<T> * magnitude}};
  }
};

template <class Subject>
std::vector<typename Subject::Item> draw_items(Random& random, Family family, int count) {
  std::vector<typename Subject::Item> items;
  for (int idx = 0; idx < count; ++idx) items.push_back(Subject::draw(random, family, idx));
  return items;
}

}  // namespace onefold::test
