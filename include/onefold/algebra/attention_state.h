// Attention over a set of keys as a monoid: the vector 2^ref * (sum, out).
//
// The same weights move sum and out; finish divides once. The partial result that travels between
// splits, devices and calls is (lse, out / sum), the same vector with sum = 1 and ref = lse.
// Includes softmax.h only.
#pragma once

#include "onefold/algebra/softmax.h"

namespace onefold {

template <class T, int kDim>
struct AttentionState {
  Softmax<T> norm;
  T out[kDim] = {};
};

// One key: its base-2 score and its value.
template <class T, int kDim>
struct ScoredValue {
  T score;
  T value[kDim];
};

// A finished result: out / sum and the base-2 log-sum-exp.
template <class T, int kDim>
struct Wire {
  T lse;
  T out[kDim];
};

template <class T, int kDim>
struct AttentionFold {
  using State = AttentionState<T, kDim>;
  using Item = ScoredValue<T, kDim>;

  static State identity() { return {}; }

  static State merge(const State& x, const State& y) {
    const Weights<T> w = weigh(x.norm.ref, y.norm.ref);
    State z;
    z.norm = {w.ref, combine(w, x.norm.ref, x.norm.sum, y.norm.ref, y.norm.sum)};
    for (int d = 0; d < kDim; ++d) {
      z.out[d] = combine(w, x.norm.ref, x.out[d], y.norm.ref, y.out[d]);
    }
    return z;
  }

  static State lift(const Item& key) {
    State s;
    s.norm = SoftmaxFold<T>::lift(key.score);
    for (int d = 0; d < kDim; ++d) s.out[d] = unless_empty(s, key.value[d]);
    return s;
  }

  // An attention sink is one more key with value zero.
  static State lift_sink(T score) {
    State s;
    s.norm = SoftmaxFold<T>::lift(score);
    return s;
  }

  static Wire<T, kDim> finish(const State& s) {
    Wire<T, kDim> w;
    w.lse = lse(s.norm);
    for (int d = 0; d < kDim; ++d) w.out[d] = unless_empty(s, s.out[d] / s.norm.sum);
    return w;
  }

  static State from_wire(const Wire<T, kDim>& w) {
    State s;
    s.norm = SoftmaxFold<T>::lift(w.lse);
    for (int d = 0; d < kDim; ++d) s.out[d] = unless_empty(s, w.out[d]);
    return s;
  }

 private:
  // Zero by selection: whatever stands at the value of a hidden key has no effect.
  static T unless_empty(const State& s, T x) {
    return Arith<T>::select(Arith<T>::equal(s.norm.sum, zero<T>()), zero<T>(), x);
  }
};

}  // namespace onefold
