// Monoids, folds, and the two ways of running a fold that need no machine: left to right and as a
// balanced tree.
//
// Invariant: an executor never knows what it folds, a fold never knows how it is run. Includes
// nothing.
#pragma once

namespace onefold {

// identity() is neutral and merge is associative (up to rounding) and commutative.
template <class M>
concept Monoid = requires(typename M::State a, typename M::State b) {
  {M::identity()};
  {M::merge(a, b)};
};

// lift turns one item into a state, finish a state into the answer.
template <class F, class Item>
concept Fold = Monoid<F> && requires(Item item, typename F::State state) {
  {F::lift(item)};
  {F::finish(state)};
};

// The state of items[0, count), merged from the left.
template <class F, class Item>
requires Fold<F, Item>
constexpr typename F::State fold_left(const Item* items, long long count) {
  typename F::State state = F::identity();
  for (long long idx = 0; idx < count; ++idx) state = F::merge(state, F::lift(items[idx]));
  return state;
}

// The same, merged as a balanced tree whose shape depends on count alone.
template <class F, class Item>
requires Fold<F, Item>
constexpr typename F::State fold_tree(const Item* items, long long count) {
  if (count == 0) return F::identity();
  if (count == 1) return F::lift(items[0]);
  const long long half = count / 2;
  return F::merge(fold_tree<F>(items, half), fold_tree<F>(items + half, count - half));
}

// A plain sum, the monoid of gradients. Minus zero is the number that IEEE addition leaves every
// other one alone by, signs of zeros included; the sum over nothing is plus zero.
template <class T>
struct Sum {
  using State = T;
  static constexpr T identity() { return -T(0); }
  static constexpr T merge(T a, T b) { return a + b; }
  static constexpr T lift(T item) { return item; }
  static constexpr T finish(T state) { return state + T(0); }
};

}  // namespace onefold
