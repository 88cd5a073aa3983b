// What the oracle refuses: one sentence that names the argument, before anything is read.

#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "onefold/error.h"
#include "reference/reference.h"

namespace onefold::test {
namespace {

struct Case {
  const char* name;  // the argument that the sentence names
  std::function<void(Attention&)> spoil;
};

class Refusal : public ::testing::Test {
 protected:
  Refusal() {
    a.q = Tensor::packed(memory.data(), DType::kFloat32, {2, 3, 2, 4});
    a.k = Tensor::packed(memory.data(), DType::kFloat32, {2, 5, 1, 4});
    a.v = Tensor::packed(memory.data(), DType::kFloat32, {2, 5, 1, 6});
    packed.q = Tensor::packed(memory.data(), DType::kFloat32, {6, 2, 4});
    packed.k = Tensor::packed(memory.data(), DType::kFloat32, {9, 1, 4});
    packed.v = Tensor::packed(memory.data(), DType::kFloat32, {9, 1, 6});
    packed.cu_seqlens_q = Tensor::packed(cu_q.data(), DType::kInt32, {3});
    packed.cu_seqlens_k = Tensor::packed(cu_k.data(), DType::kInt32, {3});
  }

  void expect_refused(const Attention& good, const std::vector<Case>& cases) {
    ASSERT_NO_THROW(reference::forward(good));
    for (const Case& c : cases) {
      SCOPED_TRACE(c.name);
      Attention spoiled = good;
      c.spoil(spoiled);
      try {
        reference::forward(spoiled);
        ADD_FAILURE() << "nothing was thrown";
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::kInvalidArgument);
        const std::string sentence = error.what(), argument = c.name;
        const bool named = argument.size() == 1 ? sentence.rfind(argument + " ", 0) == 0
                                                : sentence.find(argument) != std::string::npos;
        EXPECT_TRUE(named) << sentence;
      }
    }
  }

  Tensor floats(std::initializer_list<std::int64_t> shape) {
    return Tensor::packed(memory.data(), DType::kFloat32, shape);
  }

  std::vector<float> memory = std::vector<float>(400, 0.5f);
  std::array<std::int32_t, 3> cu_q = {0, 2, 5}, cu_k = {0, 4, 9};
  std::array<std::int32_t, 2> lengths = {1, 6};
  Attention a, packed;
};

TEST_F(Refusal, of_shapes_and_types_that_do_not_fit) {
  expect_refused(
      a, {{"q", [](Attention& x) { x.q.rank = 3; }},
          {"k", [](Attention& x) { x.k.shape[0] = 1; }},
          {"k", [](Attention& x) { x.k.shape[3] = 3; }},
          {"v", [](Attention& x) { x.v.shape[1] = 4; }},
          {"v", [](Attention& x) { x.v.dtype = DType::kInt32; }},
          {"q", [](Attention& x) { x.q.data = nullptr; }},
          {"q", [](Attention& x) { x.q.device.type = DeviceType::kCuda; }},
          {"heads", [](Attention& x) { x.q.shape[2] = 3, x.k.shape[2] = x.v.shape[2] = 2; }},
          {"bias",
           [this](Attention& x) {
             x.bias = floats({3, 4});
           }},
          {"bias", [](Attention& x) { x.bias = x.q, x.bias->dtype = DType::kBool; }},
          {"mask",
           [this](Attention& x) {
             x.mask = floats({3, 5});
           }},
          {"alibi_slopes", [this](Attention& x) { x.alibi_slopes = floats({3}); }},
          {"alibi_slopes",
           [this](Attention& x) {
             x.alibi_slopes = floats({1, 2});
           }},
          {"sinks", [this](Attention& x) { x.sinks = floats({1}); }}});
}

TEST_F(Refusal, of_numbers_out_of_range) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  expect_refused(a, {{"scale", [=](Attention& x) { x.scale = nan; }},
                     {"softcap", [](Attention& x) { x.softcap = -1; }},
                     {"softcap", [=](Attention& x) { x.softcap = nan; }},
                     {"dropout_p", [](Attention& x) { x.dropout_p = 1.5; }},
                     {"dropout_p", [=](Attention& x) { x.dropout_p = nan; }}});
}

TEST_F(Refusal, of_lengths_and_offsets_that_leave_the_tensors) {
  expect_refused(
      a,
      {{"seqused_k[1]",
        [this](Attention& x) { x.seqused_k = Tensor::packed(lengths.data(), DType::kInt32, {2}); }},
       {"seqused_q", [this](Attention& x) {
          x.seqused_q = Tensor::packed(lengths.data(), DType::kInt32, {1});
        }}});
  static std::array<std::int32_t, 3> falling = {0, 5, 4}, late = {1, 2, 5}, far = {0, 2, 7};
  const auto offsets = [](std::array<std::int32_t, 3>& numbers) {
    return
        [&](Attention& x) { x.cu_seqlens_q = Tensor::packed(numbers.data(), DType::kInt32, {3}); };
  };
  expect_refused(packed,
                 {{"cu_seqlens_k", [](Attention& x) { x.cu_seqlens_k.reset(); }},
                  {"cu_seqlens_q", offsets(falling)},
                  {"cu_seqlens_q", offsets(late)},
                  {"cu_seqlens_q", offsets(far)},
                  {"cu_seqlens_k", [](Attention& x) { x.cu_seqlens_k->shape[0] = 2; }},
                  {"cu_seqlens_k", [](Attention& x) { x.cu_seqlens_k->dtype = DType::kFloat32; }},
                  {"max_seqlen_q", [this](Attention& x) { x.bias = floats({5}); }},
                  {"max_seqlen_q", [this](Attention& x) {
                     x.bias = floats({1}), x.max_seqlen_q = 2, x.max_seqlen_k = 5;
                   }}});
}

TEST_F(Refusal, of_cotangents_of_another_shape) {
  EXPECT_NO_THROW(reference::backward(a, floats({2, 3, 2, 6}), floats({2, 2, 3})));
  EXPECT_THROW(reference::backward(a, floats({2, 3, 2, 4}), std::nullopt), Error);
  EXPECT_THROW(reference::backward(a, std::nullopt, floats({2, 3, 2})), Error);
  EXPECT_THROW(reference::backward_terms(a, floats({3, 2, 6}), std::nullopt), Error);
}

}  // namespace
}  // namespace onefold::test
