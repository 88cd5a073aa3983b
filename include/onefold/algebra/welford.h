// Mean and variance as a monoid: the same construction as softmax with another action.
//
// A state stands for (count, sum, sum of squares), stored with the mean as reference so that it
// does not cancel; merge is Chan's update. Includes scalar.h only.
#pragma once

#include "onefold/algebra/scalar.h"

namespace onefold {

template <class T>
struct Moments {
  T count = T(0);
  T mean = T(0);
  T m2 = T(0);  // sum of squared deviations from the mean
};

template <class T>
struct WelfordFold {
  using State = Moments<T>;
  static State identity() { return {}; }
  static State lift(T x) { return {T(1), x, T(0)}; }

  // T. F. Chan, G. H. Golub, R. J. LeVeque, "Updating formulae and a pairwise algorithm for
  // computing sample variances", 1979. The sides are ordered by count and then by mean so that the
  // result does not depend on which came first, bit for bit.
  static State merge(const State& x, const State& y) {
    if (x.count == T(0)) return y;
    if (y.count == T(0)) return x;
    const bool swap = y.count > x.count || (y.count == x.count && y.mean > x.mean);
    const State& a = swap ? y : x;
    const State& b = swap ? x : y;
    const T count = a.count + b.count;
    const T delta = b.mean - a.mean;
    const T share = b.count / count;
    return {count, Arith<T>::fma(delta, share, a.mean),
            Arith<T>::fma(delta * delta * a.count, share, a.m2 + b.m2)};
  }

  // Population variance; 0 for the empty set.
  static T finish(const State& s) { return s.count == T(0) ? T(0) : s.m2 / s.count; }
};

}  // namespace onefold
