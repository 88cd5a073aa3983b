// Every field of every tensor of every call: what no tensor can be is refused by name, and what one
// can is not.

#include "core/tensor_check.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "tests/core/problem_call.h"

namespace onefold::test {
namespace {

std::string message(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kInvalidArgument) << error.what();
    return error.what();
  }
  return "accepted";
}

// The first axis with more than one element, or -1.
int long_axis(const Tensor& t) {
  for (int axis = 0; axis < t.rank; ++axis) {
    if (t.shape[axis] > 1) return axis;
  }
  return -1;
}

struct Fault {
  std::string sentence;                // how it goes on after the tensor's name
  std::function<bool(Tensor&)> spoil;  // false: such a tensor cannot have it
};
const std::vector<Fault>& faults() {
  // Bytes have addresses up to 2^63, so that a mask may have the first two of the last four.
  const auto stride = [](std::int64_t value, int least_size = 1) {
    return [value, least_size](Tensor& t) {
      const int axis = long_axis(t);
      if (axis >= 0) t.stride[axis] = value;
      return axis >= 0 && size_bytes(t.dtype) >= least_size;
    };
  };
  static const std::vector<Fault> all = {
      {" has dtype 99: a value of onefold::DType is needed",
       [](Tensor& t) {
         t.dtype = static_cast<DType>(99);
         return true;
       }},
      {" has -1 axes, shape (): from 0 to 4 are possible",
       [](Tensor& t) {
         t.rank = -1;
         return true;
       }},
      {" has 5 axes, shape (",
       [](Tensor& t) {
         t.rank = 5;
         return true;
       }},
      {" has 1073741824 axes, shape (",
       [](Tensor& t) {
         t.rank = 1 << 30;
         return true;
       }},
      {" has shape (-",
       [](Tensor& t) {
         t.shape[0] = -t.shape[0];
         return true;
       }},
      {" has shape (9223372036854775807, ",  // times what the other axes have
       [](Tensor& t) {
         t.shape[0] = kLongest;
         t.stride[0] = 0;
         return t.rank > 1 && t.shape[t.rank - 1] > 1;
       }},
      {" is a null pointer with shape (",
       [](Tensor& t) {
         t.data = nullptr;
         return true;
       }},
      {" starts 1 byte past a multiple of ",
       [](Tensor& t) {
         t.data = static_cast<std::byte*>(t.data) + 1;
         return size_bytes(t.dtype) > 1;
       }},
      {" is on CPU device 3: the CPU has number 0 alone",
       [](Tensor& t) {
         t.device.index = 3;
         return true;
       }},
      {" is on device type 7: the call runs on the CPU, so move it there",
       [](Tensor& t) {
         t.device.type = static_cast<DeviceType>(7);
         return true;
       }},
      {" is on CUDA device 1: the call runs on the CPU, so move it there",
       [](Tensor& t) {
         t.device = {DeviceType::kCuda, 1};
         return true;
       }},
      // Products that wrap to small numbers, to 0, and to negative ones; addresses that do.
      {" has strides (", stride(kLongest)},
      {" has strides (", stride(kShortest)},
      {" has strides (", stride(std::int64_t{1} << 62, 4)},
      {" has strides (", stride(std::int64_t{1} << 61, 4)},
      {" has strides (", stride(-(std::int64_t{1} << 61))},
      {" has strides (", stride(-(std::int64_t{1} << 50))},
  };
  return all;
}

TEST(EveryTensor, is_refused_by_name_when_it_cannot_be_one) {
  for (const bool packed : {false, true}) {
    Call good;
    make_everything(good, packed);
    ASSERT_NO_THROW(good.run());
    const std::size_t count = tensors_of(good).size();
    for (std::size_t n = 0; n < count; ++n) {
      for (const Fault& fault : faults()) {
        Call c;
        make_everything(c, packed);
        const auto [name, tensor] = tensors_of(c)[n];
        if (!fault.spoil(*tensor)) continue;
        SCOPED_TRACE(name + fault.sentence);
        const std::string text = message([&] { c.run(); });
        EXPECT_EQ(text.substr(0, (name + fault.sentence).size()), name + fault.sentence) << text;
        EXPECT_NE(text.find(": "), std::string::npos) << text;
      }
    }
  }
}

TEST(EveryTensor, of_a_merge_is_refused_by_name_when_it_cannot_be_one) {
  for (int n = 0; n < 4; ++n) {
    for (const Fault& fault : faults()) {
      const char* const names[] = {"outs", "lses", "out", "lse"};
      Tensor t[] = {tensor({3, 5, 4}, DType::kFloat32, 0), tensor({3, 5}, DType::kFloat32, 4096),
                    tensor({5, 4}, DType::kFloat32, 8192), tensor({5}, DType::kFloat32, 12288)};
      ASSERT_NO_THROW(check_merge(t[0], t[1], t[2], t[3]));
      if (!fault.spoil(t[n])) continue;
      const std::string want = names[n] + fault.sentence;
      const std::string text = message([&] { check_merge(t[0], t[1], t[2], t[3]); });
      EXPECT_EQ(text.substr(0, want.size()), want) << text;
    }
  }
}

// An axis with one element is never stepped along.
TEST(EveryTensor, may_have_any_stride_along_an_axis_of_one_element) {
  for (const std::int64_t stride : {kLongest, kShortest, std::int64_t{0}}) {
    Attention a;
    a.q = tensor({1, 1, 1, 1});
    a.k = a.v = tensor({1, 1, 1, 1}, DType::kFloat32, 4096);
    a.bias = tensor({1, 1, 1, 1}, DType::kFloat32, 8192);
    a.sinks = tensor({1}, DType::kFloat32, 12288);
    Tensor out = tensor({1, 1, 1, 1}, DType::kFloat32, 16384);
    for (Tensor* t : {&a.q, &a.k, &a.v, &*a.bias, &*a.sinks, &out}) t->stride.fill(stride);
    const Problem p = make_problem(a);
    const ForwardTensors to = make_forward(p, a, out, std::nullopt);
    for (const Rows& rows : {p.q, p.k, p.v, to.out}) {
      EXPECT_EQ(rows.batch, 0);
      EXPECT_EQ(rows.row, 0);
      EXPECT_EQ(rows.head, 0);
      EXPECT_EQ(rows.dim, 1);
    }
  }
}

TEST(EveryTensor, may_lie_anywhere_when_it_has_no_elements) {
  Attention a;
  a.q = tensor({2, 0, 4, 5});
  a.k = a.v = tensor({2, 0, 4, 5});
  a.q.data = a.k.data = a.v.data = nullptr;
  EXPECT_NO_THROW(make_problem(a));
  a.q.data = pool.data() + 1;
  EXPECT_NO_THROW(make_problem(a));
}

TEST(EveryTensor, that_ends_with_the_address_space_fits_and_one_byte_further_does_not) {
  Tensor t = tensor({2, 3, 1, 4});
  constexpr std::int64_t kElements = 24;
  t.data = reinterpret_cast<void*>((std::uintptr_t{1} << 63) - kElements * sizeof(float));
  // The last byte is the last but one: INTPTR_MAX itself is no end.
  EXPECT_EQ(message([&] { check_tensor(t, "t", {}); }).substr(0, 13), "t has strides");
  t.data = static_cast<float*>(t.data) - 1;
  EXPECT_NO_THROW(check_tensor(t, "t", {}));
  std::swap(t.shape[0], t.shape[1]);
  t.stride = {-12, -4, 4, 1};
  t.data = reinterpret_cast<void*>(std::uintptr_t{28 * sizeof(float)});
  EXPECT_NO_THROW(check_tensor(t, "t", {}));
  t.data = reinterpret_cast<void*>(std::uintptr_t{27 * sizeof(float)});
  EXPECT_EQ(message([&] { check_tensor(t, "t", {}); }).substr(0, 13), "t has strides");
}

TEST(EveryTensor, reaches_from_its_lowest_to_its_highest_byte) {
  Tensor t = tensor({3, 4, 5});
  t.stride = {-100, 7, -2};
  const Reach reach = reach_of(t).value();
  EXPECT_EQ(reach.low, -4 * (200 + 8));
  EXPECT_EQ(reach.high, 4 * (21 + 1));
  EXPECT_EQ(reach_of(t, 1).value().low, -4 * 8);
  t.stride[1] = kLongest / 2;
  EXPECT_FALSE(reach_of(t));
}

TEST(Devices, that_do_not_exist_are_refused) {
  const auto text = [](Device device) {
    Call c;
    make_dense(c);
    for (Tensor* t : {&c.a.q, &c.a.k, &c.a.v}) t->device = device;
    return message([&] { make_problem(c.a, device); });
  };
  EXPECT_EQ(text({DeviceType::kCpu, 3}),
            "Context::device is CPU device 3: the CPU has number 0 alone");
  EXPECT_EQ(text({DeviceType::kCuda, -1}),
            "Context::device is CUDA device -1: numbers start with 0");
  EXPECT_EQ(text({static_cast<DeviceType>(7), 0}),
            "Context::device has type 7: a value of onefold::DeviceType is needed");
  EXPECT_EQ(text({DeviceType::kCuda, 1}), "accepted");
}

TEST(Packed, tensors_whose_strides_do_not_fit_are_refused) {
  const std::int64_t kMany = std::int64_t{1} << 31;
  EXPECT_THROW(Tensor::packed(nullptr, DType::kBool, {kMany, kMany, kMany}), Error);
  EXPECT_EQ(Tensor::packed(nullptr, DType::kBool, {kMany, kMany, 1}).elements(), kMany * kMany);
  EXPECT_EQ(tensor({0, kMany, kMany}).elements(), 0);
}

}  // namespace
}  // namespace onefold::test
