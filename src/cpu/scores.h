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

// Turns scale * q.k into scores of the variant, in base 2 unless kUnits says natural, and hides
// what is hidden. `addend` is null when there is nothing to add; top becomes the largest of each
// lane.
enum class Units { kBase2, kNatural };
template <class R, int N, Units kUnits = Units::kBase2>
inline void modify_scores(const Problem& p, const LaneFacts<R>& lanes, R* scores, const R* addend,
                          int num_keys, bool border, std::int64_t key_begin, Vec<R> (&top)[N]) {
  constexpr int kRow = N * kWidth<R>;
  const bool natural = !p.variant.scale_only();
  for (int n = 0; n < N; ++n) {
    const IntVec<R> first = load(lanes.first_key + n * kWidth<R>);
    const IntVec<R> last = load(lanes.last_key + n * kWidth<R>);
    At<Vec<R>> at{};
    if (p.variant.has_slopes) at.slope = load(lanes.slope + n * kWidth<R>);
    top[n] = splat<R>(kEmpty<R>);
    for (int key = 0; key < num_keys; ++key) {
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

// Scores become weights against the raised reference; keep is what the old sum was scaled by.
template <class R, int N>
inline void absorb_scores(R* scores, int num_keys, const Vec<R> (&top)[N], R* ref, R* sum,
                          Vec<R> (&keep)[N]) {
  constexpr int kRow = N * kWidth<R>;
  for (int n = 0; n < N; ++n) {
    R* column = scores + n * kWidth<R>;
    Softmax<Vec<R>> state{load(ref + n * kWidth<R>), load(sum + n * kWidth<R>)};
    keep[n] = raise<IntegerGauge>(state, top[n]);
    const Vec<R> against = anchor(state.ref);
    Vec<R> total{}, other{};
    int key = 0;
    for (; key + 2 <= num_keys; key += 2) {
      R* at = column + key * kRow;
      const Vec<R> x = weight_from(load(at), against);
      const Vec<R> y = weight_from(load(at + kRow), against);
      store(at, x);
      store(at + kRow, y);
      total += x;
      other += y;
    }
    if (key < num_keys) {
      const Vec<R> x = weight_from(load(column + key * kRow), against);
      store(column + key * kRow, x);
      total += x;
    }
    store(ref + n * kWidth<R>, state.ref);
    store(sum + n * kWidth<R>, state.sum + (total + other));
  }
}

}  // namespace onefold::cpu::ONEFOLD_ISA
