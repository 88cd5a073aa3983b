#include "core/overlap.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <numeric>

#include "core/tensor_check.h"

namespace onefold {
namespace {

struct Bytes {
  std::intptr_t begin, end;
};

// The bytes between the first and the last element, over axes [first_axis, rank) alone.
Bytes extent_bytes(const Tensor& t, int first_axis) {
  const auto base = reinterpret_cast<std::intptr_t>(t.data);
  const Reach reach = reach_of(t, first_axis).value();
  return {base + reach.low, base + reach.high};
}

std::int64_t common_step(const Tensor& t, int num_axes, std::int64_t step) {
  for (int axis = 0; axis < num_axes; ++axis) {
    if (t.shape[axis] > 1) step = std::gcd(step, t.stride[axis] * size_bytes(t.dtype));
  }
  return step;
}

// Every element lies at an inner block plus a multiple of the outer axes' common step: apart when
// the blocks are, modulo the step.
bool apart_modulo_step(const Tensor& x, const Tensor& y, int inner_axes) {
  const int x_axis = std::max(x.rank - inner_axes, 0), y_axis = std::max(y.rank - inner_axes, 0);
  const std::int64_t step = common_step(y, y_axis, common_step(x, x_axis, 0));
  if (step == 0) return false;
  const Bytes a = extent_bytes(x, x_axis), b = extent_bytes(y, y_axis);
  const std::int64_t gap = ((b.begin - a.begin) % step + step) % step;
  return gap >= a.end - a.begin && gap + (b.end - b.begin) <= step;
}

// An axis whose steps may land on an element of the axes with smaller strides, or -1. What slicing
// and permuting make of a packed tensor has none. A few tensors without repetition have one all the
// same, such as shape (2, 3) with strides (3, 2): nothing makes them but by hand.
int repeating_axis(const Tensor& t) {
  if (t.elements() == 0) return -1;
  std::array<int, kMaxRank> axes{};
  std::iota(axes.begin(), axes.end(), 0);
  const auto step = [&t](int axis) { return t.shape[axis] > 1 ? std::abs(t.stride[axis]) : 0; };
  std::stable_sort(axes.begin(), axes.begin() + t.rank,
                   [&](int a, int b) { return step(a) < step(b); });
  std::int64_t reach = 0;
  for (int idx = 0; idx < t.rank; ++idx) {
    const int axis = axes[idx];
    if (t.shape[axis] == 1) continue;
    if (step(axis) <= reach) return axis;
    reach += (t.shape[axis] - 1) * step(axis);
  }
  return -1;
}

}  // namespace

bool may_overlap(const Tensor& x, const Tensor& y) {
  if (x.elements() == 0 || y.elements() == 0) return false;
  const Bytes a = extent_bytes(x, 0), b = extent_bytes(y, 0);
  if (a.begin >= b.end || b.begin >= a.end) return false;
  for (int inner_axes = std::max(x.rank, y.rank) - 1; inner_axes >= 0; --inner_axes) {
    if (apart_modulo_step(x, y, inner_axes)) return false;
  }
  return true;
}

void Footprint::reads(const char* name, const Tensor& tensor) {
  seen_.at(static_cast<std::size_t>(count_++)) = {name, &tensor};
}
void Footprint::reads(const char* name, const std::optional<Tensor>& tensor) {
  if (tensor) reads(name, *tensor);
}

void Footprint::writes(const char* name, const Tensor& tensor) {
  const int axis = repeating_axis(tensor);
  if (axis >= 0) {
    invalid(name, " has stride ", tensor.stride[axis], " on axis ", axis,
            tensor.stride[axis] == 0 ? "" : " and may reach elements twice",
            ": an output needs memory of its own");
  }
  for (int idx = 0; idx < count_; ++idx) {
    const Named& other = seen_[static_cast<std::size_t>(idx)];
    if (may_overlap(tensor, *other.tensor)) {
      invalid(name, " shares memory with ", other.name, ": an output needs memory of its own");
    }
  }
  reads(name, tensor);
}
void Footprint::writes(const char* name, const std::optional<Tensor>& tensor) {
  if (tensor) writes(name, *tensor);
}

}  // namespace onefold
