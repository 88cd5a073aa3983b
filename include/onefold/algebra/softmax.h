// The normaliser of a safe softmax as a monoid, in base 2.
//
// A state stands for the number 2^ref * sum. `ref` is a shared exponent, usually but not
// necessarily the running maximum; the empty set is ref = kEmpty, sum = 0. Templates on T: float,
// double, a vector of rows. The exponential of a difference is written here and nowhere else.
// Includes scalar.h only.
#pragma once

#include "onefold/algebra/scalar.h"

namespace onefold {

template <class T>
inline T empty_ref() {
  return Arith<T>::splat(kEmpty<typename Arith<T>::Scalar>);
}
template <class T>
inline T zero() {
  return Arith<T>::splat(typename Arith<T>::Scalar(0));
}

template <class T>
struct Softmax {
  T ref = empty_ref<T>();
  T sum = zero<T>();
};

// How much each side counts after a merge, and the exponent they now share.
template <class T>
struct Weights {
  T ref, a, b;
};

// An empty reference read as 0, so that empty minus empty is never evaluated.
template <class T>
inline T anchor(T ref) {
  return Arith<T>::select(Arith<T>::equal(ref, empty_ref<T>()), zero<T>(), ref);
}
// 2^(from - to). `to` has been anchored.
template <class T>
inline T weight_from(T from, T anchored_to) {
  return Arith<T>::exp2(from - anchored_to);
}
template <class T>
inline T weight(T from, T to) {
  return weight_from(from, anchor(to));
}

template <class T>
inline Weights<T> weigh(T a, T b) {
  const T ref = Arith<T>::max(a, b);
  return {ref, weight(a, ref), weight(b, ref)};
}

// w.a * a + w.b * b with one rounding. One of the weights is 1 (or both sides are empty), so this
// is bitwise commutative; which one is read off the references, so that a compiler that contracts
// their difference changes nothing. An empty side is skipped, so it is bitwise neutral; what stands
// beside an empty reference and is not zero is a NaN that a maximum has dropped, and stays one.
template <class T>
inline T combine(const Weights<T>& w, T a_ref, T a, T b_ref, T b) {
  using A = Arith<T>;
  const T sum = A::select(A::equal(b_ref, w.ref), A::fma(a, w.a, b), A::fma(b, w.b, a));
  const T without_a = A::select(A::equal(a, zero<T>()), b, sum);
  const T without_b = A::select(A::equal(b, zero<T>()), a, sum);
  return A::select(A::equal(b_ref, empty_ref<T>()), without_b,
                   A::select(A::equal(a_ref, empty_ref<T>()), without_a, sum));
}

template <class T>
inline Softmax<T> merge(const Softmax<T>& x, const Softmax<T>& y) {
  const Weights<T> w = weigh(x.ref, y.ref);
  return {w.ref, combine(w, x.ref, x.sum, y.ref, y.sum)};
}

// Base-2 log-sum-exp; kEmpty for the empty set.
template <class T>
inline T lse(const Softmax<T>& s) {
  using A = Arith<T>;
  return A::select(A::equal(s.sum, zero<T>()), empty_ref<T>(), s.ref + A::log2(s.sum));
}

// Reference policies: what ref becomes when scores up to `top` join. Any choice that keeps
// 2^(score - ref) finite represents the same number.
struct MaximumGauge {
  template <class T>
  static T raise(T ref, T top) {
    return Arith<T>::max(ref, top);
  }
};
// Integers only: rescaling multiplies by a power of two and is exact.
struct IntegerGauge {
  template <class T>
  static T raise(T ref, T top) {
    return Arith<T>::max(ref, Arith<T>::ceil(top));
  }
};
// Moves only when the new maximum is more than a lag above: weights stay below 2^lag.
template <class T>
inline T raise_beyond(T ref, T top, T lag) {
  return Arith<T>::select(Arith<T>::less(ref + lag, top), top, ref);
}
template <int kLag>
struct LaggingGauge {
  template <class T>
  static T raise(T ref, T top) {
    return raise_beyond(ref, top, Arith<T>::splat(typename Arith<T>::Scalar(kLag)));
  }
};
// The same with the lag in the units of the reference.
template <class T>
struct LaggingBy {
  T lag;
  T raise(T ref, T top) const { return raise_beyond(ref, top, lag); }
};

// Raises the reference for scores whose maximum (in units of ref) is `top`. Returns the factor by
// which whatever was accumulated against the old reference must be multiplied; sum already is.
template <class Gauge, class T>
inline T raise(Softmax<T>& state, T top) {
  const T ref = Gauge::raise(state.ref, top);
  const T keep = weight(state.ref, ref);
  state.sum = state.sum * keep;
  state.ref = ref;
  return keep;
}

// The same for a state whose reference is in other units: c * ref is in base 2, c > 0.
template <class T>
inline T weight_from(T from, T anchored_to, T c) {
  return Arith<T>::exp2((from - anchored_to) * c);
}
template <class Gauge, class T>
inline T raise(Softmax<T>& state, T top, T c, const Gauge& gauge) {
  const T ref = gauge.raise(state.ref, top);
  const T keep = weight_from(state.ref, anchor(ref), c);
  state.sum = state.sum * keep;
  state.ref = ref;
  return keep;
}

// Absorbs a tile: merge fused with lift. `scores` are unscaled, c * score is in base 2 (c > 0). On
// return they are weights against state.ref. Returns the factor of whatever was there before.
template <class Gauge, class T>
inline T absorb(Softmax<T>& state, T* scores, long long count, T c) {
  using A = Arith<T>;
  T top = empty_ref<T>();
  for (long long idx = 0; idx < count; ++idx) top = A::max(top, scores[idx] * c);
  const T keep = raise<Gauge>(state, top);
  const T against = anchor(state.ref);
  T sum = zero<T>();
  for (long long idx = 0; idx < count; ++idx) {
    scores[idx] = weight_from(scores[idx] * c, against);
    sum = sum + scores[idx];
  }
  state.sum = state.sum + sum;
  return keep;
}

// The normaliser as a fold over base-2 scores.
template <class T>
struct SoftmaxFold {
  using State = Softmax<T>;
  static State identity() { return {}; }
  static State merge(const State& a, const State& b) { return onefold::merge(a, b); }
  // A key weighs 1 against itself, a hidden one 0: lift(kEmpty) is the identity. A score of NaN or
  // plus infinity has no weight; its NaN is in `sum` and survives every merge.
  static State lift(T score) { return {score, weight(score, score)}; }
  static T finish(const State& s) { return lse(s); }
};

}  // namespace onefold
