// From products to weights: the score stage that forward and backward share.
//
// Scores of a tile lie as [key][lane]. Invariant: the same question gives the same scores, bit for
// bit, in both directions. Compiled once per instruction set; includes tile.h.
#pragma once

#include <cmath>
#include <limits>

#include "cpu/tile.h"

namespace onefold::cpu::ONEFOLD_ISA {

// A natural score in base 2. A finite one stays finite: next to the ends of the range, where the
// product would overflow, it saturates, and rows that live there are done again in double.
template <class R>
inline Vec<R> to_base_2(Vec<R> z) {
  constexpr R kMost = sizeof(R) == 4 ? R(3.4028234663852886e38) : R(1.7976931348623157e308);
  const Vec<R> most = splat<R>(kMost);
  const Vec<R> x = z * splat<R>(R(kLog2E));
  const Vec<R> low = ((z >= -most) & (x < -most)) ? -most : x;
  return ((z <= most) & (low > most)) ? most : low;
}

// The same of one number, for scores of type R.
template <class R>
inline double to_base_2(double natural) {
  constexpr double kMost = std::numeric_limits<R>::max();
  const double x = natural * kLog2E;
  if (!std::isfinite(natural)) return x;
  return x > kMost ? kMost : x < -kMost ? -kMost : x;
}

// An attention sink is one more key with value zero: the state of a row before its keys.
template <class R>
inline Softmax<R> sink_state(const Problem& p, std::int64_t b, std::int64_t h) {
  const R sink = p.sinks ? static_cast<R>(to_base_2<R>(p.sinks.load(b, h))) : kEmpty<R>;
  if (sink == kEmpty<R>) return {};
  return {std::ceil(sink), weight(sink, std::ceil(sink))};
}

// scale * q.k as a natural score of the variant. A slope never hides a key, not even one that is
// too far away for R, nor a NaN: the second argument's wins. What was minus infinity stays it.
template <class R>
inline Vec<R> natural_score(const Variant& variant, Vec<R> x, const At<Vec<R>>& at) {
  const Vec<R> z = score(variant, x, at);
  if (!variant.has_slopes) return z;
  return x == splat<R>(kEmpty<R>) ? z : max(splat<R>(std::numeric_limits<R>::lowest()), z);
}

// What products are scaled by to become base-2 scores, natural ones where the variant needs those.
// Numbers are scaled before they are multiplied; pairs by a power of two, which is exact, and the
// scores by what remains.
template <class X>
struct ScoreFactor {
  double of_queries;
  SumOf<X> of_scores;
};
template <class X>
inline ScoreFactor<X> score_factor(const Problem& p) {
  const double factor = p.variant.scale * (p.variant.scale_only() ? kLog2E : 1.0);
  if (kTerms<X> == 1 || factor == 0) return {factor, 1};
  constexpr int kMost = 100;  // so that queries keep clear of the ends of the range
  const int power = std::ilogb(factor), exponent = power < -kMost  ? -kMost
                                                   : power > kMost ? kMost
                                                                   : power;
  return {std::ldexp(1.0, exponent), static_cast<SumOf<X>>(std::ldexp(factor, -exponent))};
}

// Turns scale * q.k into scores of the variant, in base 2 unless kUnits says natural, and hides
// what is hidden. `addend` is null when there is nothing to add; top becomes the largest of each
// lane.
enum class Units { kBase2, kNatural };
template <class R, int N, Units kUnits = Units::kBase2>
inline void modify_scores(const Problem& p, const LaneFacts<R>& lanes, R* scores, const R* addend,
                          const Reach<N>& reach, bool border, std::int64_t key_begin,
                          Vec<R> (&top)[N]) {
  constexpr int kRow = N * kWidth<R>;
  const bool natural = !p.variant.scale_only();
  for (int n = 0; n < N; ++n) {
    const IntVec<R> first = load(lanes.first_key + n * kWidth<R>);
    const IntVec<R> last = load(lanes.last_key + n * kWidth<R>);
    At<Vec<R>> at{};
    if (p.variant.has_slopes) at.slope = load(lanes.slope + n * kWidth<R>);
    top[n] = splat<R>(kEmpty<R>);
    for (int key = 0; key < reach.keys[n]; ++key) {
      const int where = key * kRow + n * kWidth<R>;
      Vec<R> x = load(scores + where);
      if (addend) at.bias = load(addend + where);
      if (natural) {
        if (p.variant.has_slopes) {
          at.distance = VectorArith<R>::abs(load(lanes.position + n * kWidth<R>) -
                                            splat<R>(static_cast<R>(key_begin + key)));
        }
        x = natural_score<R>(p.variant, x, at);
        if (kUnits == Units::kBase2) x = to_base_2<R>(x);
      }
      if (addend) x = at.bias == splat<R>(kEmpty<R>) ? splat<R>(kEmpty<R>) : x;
      if (border) {
        const IntVec<R> j = splat<Int<R>>(key);
        x = ((j >= first) & (j < last)) ? x : splat<R>(kEmpty<R>);
      }
      store(scores + where, x);
      top[n] = max(top[n], x);
    }
  }
}

// Scores become weights against the raised reference; keep is what the old sum was scaled by. As
// operands of a product they go to `weights`, in place where those are numbers. Pairs round them:
// `mass` is the sum of the rounded ones, null otherwise.
template <class X, int N>
inline void absorb_scores(SumOf<X>* scores, const Reach<N>& reach, const Vec<SumOf<X>> (&top)[N],
                          SumOf<X>* ref, SumOf<X>* sum, SumOf<X>* mass, X* weights,
                          Vec<SumOf<X>> (&keep)[N]) {
  using R = SumOf<X>;
  constexpr int kRow = N * kWidth<R>;
  for (int n = 0; n < N; ++n) {
    const int column = n * kWidth<R>;
    Softmax<Vec<R>> state{load(ref + column), load(sum + column)};
    keep[n] = raise<IntegerGauge>(state, top[n]);
    const Vec<R> against = anchor(state.ref);
    Vec<R> total{}, other{}, rounded{};
    const auto absorb = [&](int key, Vec<R> x, Vec<R> y) {
      store(scores + key * kRow + column, x);
      total += x;
      if constexpr (kTerms<X> == 2) {
        constexpr Pair kOnes = 0x3F803F80;
        const Vec<Pair> both = pairs_of(x, y);
        store(weights + key / 2 * kRow + column, both);
        rounded = multiply_add(both, splat(kOnes), rounded);
      }
    };
    const int num_keys = reach.keys[n];
    int key = 0;
    for (; key + 2 <= num_keys; key += 2) {
      R* at = scores + key * kRow + column;
      const Vec<R> y = weight_from(load(at + kRow), against);
      absorb(key, weight_from(load(at), against), y);
      store(at + kRow, y);
      other += y;
    }
    if (key < num_keys) {
      absorb(key, weight_from(load(scores + key * kRow + column), against), Vec<R>{});
    }
    store(ref + column, state.ref);
    store(sum + column, state.sum + (total + other));
    if constexpr (kTerms<X> == 2) {
      store(mass + column, load(mass + column) * keep[n] + rounded);
    }
  }
}

// Weights after dropout, factors being 0 or 1.
template <class X>
inline void drop_weights(const SumOf<X>* factors, int num_keys, int row, SumOf<X>* scores,
                         X* weights) {
  for (int x = 0; x < num_keys * row; ++x) scores[x] *= factors[x];
  if constexpr (kTerms<X> == 2) {
    for (int key = 0; key < num_keys; key += 2) {
      for (int lane = 0; lane < row; ++lane) {
        const float* at = factors + key * row + lane;
        const Pair low = at[0] != 0 ? 0x0000FFFF : 0;
        const Pair high = key + 1 < num_keys && at[row] != 0 ? static_cast<Pair>(0xFFFF0000) : 0;
        weights[key / 2 * row + lane] &= low | high;
      }
    }
  }
}

}  // namespace onefold::cpu::ONEFOLD_ISA
