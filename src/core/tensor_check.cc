#include "core/tensor_check.h"

#include <algorithm>
#include <limits>

namespace onefold {
namespace {

std::string list_text(const std::array<std::int64_t, kMaxRank>& numbers, int rank) {
  std::string text = "(";
  for (int axis = 0; axis < std::min(rank, kMaxRank); ++axis) {
    if (axis > 0) text += ", ";
    text += std::to_string(numbers[axis]);
  }
  if (rank > kMaxRank) text += ", ...";  // there are no more to print
  return text + (rank == 1 ? ",)" : ")");
}

std::string device_text(Device device) {
  if (device.type == DeviceType::kCuda) return concat("CUDA device ", device.index);
  if (device.type != DeviceType::kCpu) return concat("device type ", static_cast<int>(device.type));
  return device.index == 0 ? "the CPU" : concat("CPU device ", device.index);
}

void check_fields(const Tensor& t, const char* name) {
  if (size_bytes(t.dtype) == 0) {
    invalid(name, " has dtype ", static_cast<int>(t.dtype),
            ": a value of onefold::DType is needed");
  }
  if (t.rank < 0 || t.rank > kMaxRank) {
    invalid(name, " has ", t.rank, " axes, shape ", shape_text(t), ": from 0 to ", kMaxRank,
            " are possible");
  }
  bool fits = true, empty = false;
  std::int64_t count = 1;
  for (int axis = 0; axis < t.rank; ++axis) {
    const std::int64_t extent = t.shape[axis];
    if (extent < 0) invalid(name, " has shape ", shape_text(t), ": extents must be >= 0");
    empty |= extent == 0;
    fits &= !__builtin_mul_overflow(count, extent, &count);
  }
  if (!fits && !empty) {
    invalid(name, " has shape ", shape_text(t), ": fewer than 2^63 elements are needed");
  }
}

// Memory for every element, if there is one, where its dtype may lie.
void check_memory(const Tensor& t, const char* name) {
  if (t.elements() == 0) return;
  const std::optional<Reach> reach = reach_of(t);
  if (t.data == nullptr) {
    invalid(name, " is a null pointer with shape ", shape_text(t), ": it needs memory");
  }
  const auto at = reinterpret_cast<std::uintptr_t>(t.data);
  constexpr auto kEnd = static_cast<std::uintptr_t>(std::numeric_limits<std::intptr_t>::max());
  const bool outside = reach && (at < 0 - static_cast<std::uintptr_t>(reach->low) || at > kEnd ||
                                 kEnd - at < static_cast<std::uintptr_t>(reach->high));
  if (!reach || outside) {
    invalid(name, " has strides ", list_text(t.stride, t.rank), " with shape ", shape_text(t),
            ": every element needs an address, and some would lie beyond the last or first");
  }
  const auto past = at % static_cast<std::uintptr_t>(size_bytes(t.dtype));
  if (past != 0) {
    invalid(name, " starts ", past, past == 1 ? " byte" : " bytes", " past a multiple of ",
            size_bytes(t.dtype), ": ", onefold::name(t.dtype), " needs such a multiple");
  }
}

}  // namespace

std::string shape_text(const Tensor& tensor) { return list_text(tensor.shape, tensor.rank); }

std::optional<Reach> reach_of(const Tensor& t, int first_axis) {
  const std::int64_t size = size_bytes(t.dtype);
  Reach reach{0, size};
  for (int axis = first_axis; axis < t.rank; ++axis) {
    if (t.shape[axis] <= 1) continue;
    std::int64_t step = 0;
    if (__builtin_mul_overflow(t.shape[axis] - 1, t.stride[axis], &step) ||
        __builtin_mul_overflow(step, size, &step)) {
      return std::nullopt;
    }
    std::int64_t& end = step < 0 ? reach.low : reach.high;
    if (__builtin_add_overflow(end, step, &end)) return std::nullopt;
  }
  return reach;
}

void check_tensor(const Tensor& t, const char* name, Device device) {
  check_fields(t, name);
  if (t.device != device) {
    const bool number = t.device.type == DeviceType::kCpu && device.type == DeviceType::kCpu;
    invalid(name, " is on ", device_text(t.device), ": ",
            number ? "the CPU has number 0 alone"
                   : concat("the call runs on ", device_text(device), ", so move it there"));
  }
  check_memory(t, name);
}

void check_device(Device device) {
  const bool cpu = device.type == DeviceType::kCpu, cuda = device.type == DeviceType::kCuda;
  if (!cpu && !cuda) {
    invalid("Context::device has type ", static_cast<int>(device.type),
            ": a value of onefold::DeviceType is needed");
  }
  if (cpu ? device.index != 0 : device.index < 0) {
    invalid("Context::device is ", device_text(device), ": ",
            cpu ? "the CPU has number 0 alone" : "numbers start with 0");
  }
}

}  // namespace onefold
