// What cannot be answered: an onefold::Error of the right kind whose one sentence names the
// argument, from every entry point alike, and not a number written.

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "onefold/attention.h"
#include "tests/cpp_api/numbers.h"

namespace onefold::test {
namespace {

// One sentence for a person: no line break, no full stop, the argument at the front, what is needed
// after a colon.
void expect_sentence(const Error& error, ErrorKind kind, const std::string& argument) {
  const std::string text = error.what();
  EXPECT_EQ(error.kind(), kind) << text;
  EXPECT_EQ(text.find(argument), 0u) << text;
  EXPECT_EQ(text.find('\n'), std::string::npos) << text;
  EXPECT_NE(text.find(": "), std::string::npos) << text;
  EXPECT_NE(text.back(), '.') << text;
}

void expect_refused(const std::function<void()>& call, ErrorKind kind,
                    const std::string& argument) {
  try {
    call();
    ADD_FAILURE() << "accepted; the error should begin with: " << argument;
  } catch (const Error& error) {
    expect_sentence(error, kind, argument);
  }
}

struct Case {
  std::string argument;  // the sentence begins with it
  std::function<void(Attention&)> spoil;
  ErrorKind kind = ErrorKind::kInvalidArgument;
};

TEST(Errors, a_bad_question_is_refused_alike_by_plan_check_forward_and_backward) {
  static std::int32_t offsets[] = {0, 3};
  static Numbers four({4});
  const std::vector<Case> cases = {
      {"q has 3 axes", [](Attention& a) { a.q.rank = 3; }},
      {"q is a null pointer", [](Attention& a) { a.q.data = nullptr; }},
      {"q is int32", [](Attention& a) { a.q.dtype = DType::kInt32; }},
      {"k is float16", [](Attention& a) { a.k.dtype = DType::kFloat16; }},
      {"k is on CUDA",
       [](Attention& a) {
         a.k.device = {DeviceType::kCuda, 0};
       }},
      {"batch of k is 1", [](Attention& a) { a.k.shape[0] = 1; }},
      {"head_dim of k is 7", [](Attention& a) { a.k.shape[3] = 7; }},
      {"q has 4 heads and k has 3", [](Attention& a) { a.k.shape[2] = a.v.shape[2] = 3; }},
      {"head_dim is 1048577",
       [](Attention& a) {
         for (Tensor* t : {&a.q, &a.k, &a.v}) t->shape[3] = 1048577, t->stride[3] = 0;
       },
       ErrorKind::kUnsupported},
      {"scale is nan", [](Attention& a) { a.scale = std::nan(""); }},
      {"softcap is -1", [](Attention& a) { a.softcap = -1; }},
      {"dropout_p is 1.5", [](Attention& a) { a.dropout_p = 1.5; }},
      {"bias has shape (4,)", [](Attention& a) { a.bias = four; }},
      {"mask is float32", [](Attention& a) { a.mask = four; }},
      {"heads of sinks is 3",
       [](Attention& a) {
         a.sinks = four;
         a.sinks->shape[0] = 3;
       }},
      {"cu_seqlens_k is missing",
       [](Attention& a) { a.cu_seqlens_q = Tensor::packed(offsets, DType::kInt32, {2}); }},
      {"max_seqlen_q was given", [](Attention& a) { a.max_seqlen_q = 3; }},
  };
  for (const Case& bad : cases) {
    SCOPED_TRACE(bad.argument);
    Call c(2, 5, 6, 4, 2, 8);
    c.run();
    Call fresh(2, 5, 6, 4, 2, 8);
    bad.spoil(fresh.a);
    expect_refused([&] { plan({}, fresh.a, Direction::kForward); }, bad.kind, bad.argument);
    expect_refused([&] { plan({}, fresh.a, Direction::kBackward); }, bad.kind, bad.argument);
    expect_refused([&] { forward({}, fresh.a, fresh.out, fresh.lse); }, bad.kind, bad.argument);
    expect_refused([&] { check({}, fresh.a); }, bad.kind, bad.argument);
    expect_refused([&] { check({}, fresh.a, c.out, c.lse, fresh.dout, fresh.dlse); }, bad.kind,
                   bad.argument);
    expect_refused(
        [&] { backward({}, fresh.a, c.out, c.lse, fresh.dout, fresh.dlse, fresh.gradients()); },
        bad.kind, bad.argument);
    for (const Numbers* output : {&fresh.out, &fresh.lse, &fresh.dq, &fresh.dk, &fresh.dv}) {
      for (const float x : output->values()) ASSERT_TRUE(std::isnan(x)) << "was written";
    }
  }
}

TEST(Errors, what_is_no_direction_no_device_and_no_diagonal_is_refused) {
  Call c(2, 5, 6, 4, 2, 8);
  const ErrorKind invalid = ErrorKind::kInvalidArgument;
  expect_refused([&] { plan({}, c.a, static_cast<Direction>(2)); }, invalid, "direction is 2");
  Context context;
  context.device.index = 3;
  expect_refused([&] { c.run(context); }, invalid, "Context::device is CPU device 3");
  context.device = {static_cast<DeviceType>(9), 0};
  for (Tensor* t : {&c.a.q, &c.a.k, &c.a.v}) t->device = context.device;
  expect_refused([&] { plan(context, c.a, Direction::kForward); }, invalid,
                 "Context::device has type 9");
  c.point();
  c.a.causal = static_cast<Causal>(9);
  expect_refused([&] { forward({}, c.a, c.out, c.lse); }, invalid, "causal is 9");
}

// The product with the size of an element wraps to where the tensor lies.
TEST(Errors, an_output_whose_strides_wrap_around_is_refused_and_nothing_is_written) {
  Call c(2, 5, 6, 4, 2, 8);
  for (const std::int64_t stride : {std::int64_t{1} << 62, std::int64_t{1} << 60}) {
    Tensor out = c.out;
    out.stride[1] = stride;
    expect_refused([&] { forward({}, c.a, out, c.lse); }, ErrorKind::kInvalidArgument,
                   "out has strides");
  }
  for (const float x : c.out.values()) ASSERT_TRUE(std::isnan(x)) << "was written";
}

TEST(Errors, outputs_that_do_not_fit_or_overlap_are_refused_and_nothing_is_written) {
  const ErrorKind invalid = ErrorKind::kInvalidArgument;
  Call c(2, 5, 6, 4, 2, 8);
  c.run();
  Call fresh(2, 5, 6, 4, 2, 8);
  const auto try_forward = [&](const Tensor& out, const Tensor& lse, const char* argument) {
    SCOPED_TRACE(argument);
    expect_refused([&] { forward({}, fresh.a, out, lse); }, invalid, argument);
  };
  Tensor out = fresh.out;
  out.shape[3] = 7;
  try_forward(out, fresh.lse, "out has shape (2, 5, 4, 7)");
  expect_refused([&] { check({}, fresh.a, out); }, invalid, "out has shape (2, 5, 4, 7)");
  expect_refused([&] { check({}, fresh.a, fresh.a.q); }, invalid, "out shares memory with q");
  out = fresh.out;
  out.dtype = DType::kFloat16;
  try_forward(out, fresh.lse, "out is float16");
  out = fresh.out;
  out.data = nullptr;
  try_forward(out, fresh.lse, "out is a null pointer");
  out = fresh.out;
  out.stride[1] = 0;
  try_forward(out, fresh.lse, "out");
  try_forward(fresh.a.q, fresh.lse, "out");
  Tensor lse = fresh.lse;
  lse.shape[1] = 3;
  try_forward(fresh.out, lse, "heads of lse is 3");
  try_forward(fresh.out, Tensor::packed(fresh.out.tensor().data, DType::kFloat32, {2, 4, 5}),
              "lse");

  expect_refused([&] { check({}, fresh.a, c.out, lse, fresh.dout, fresh.dlse); }, invalid,
                 "heads of lse is 3");
  Tensor dout = fresh.dout;
  dout.dtype = DType::kFloat16;
  expect_refused([&] { check({}, fresh.a, c.out, c.lse, dout, fresh.dlse); }, invalid,
                 "dout is float16");

  const auto try_backward = [&](const Gradients& g, const char* argument) {
    SCOPED_TRACE(argument);
    expect_refused([&] { backward({}, fresh.a, c.out, c.lse, fresh.dout, fresh.dlse, g); }, invalid,
                   argument);
  };
  try_backward({fresh.dk, {}, {}, {}, {}, {}}, "dq");
  try_backward({{}, {}, {}, fresh.dq, {}, {}}, "dbias was asked for without bias");
  try_backward({{}, {}, {}, {}, fresh.dq, {}}, "dslopes was asked for without");
  try_backward({{}, {}, {}, {}, {}, fresh.dq}, "dsinks was asked for without sinks");
  try_backward({{}, fresh.dk, fresh.dk, {}, {}, {}}, "dv");
  try_backward({fresh.dout, {}, {}, {}, {}, {}}, "dq");
  for (const Numbers* output : {&fresh.out, &fresh.lse, &fresh.dq, &fresh.dk, &fresh.dv}) {
    for (const float x : output->values()) ASSERT_TRUE(std::isnan(x)) << "was written";
  }
  Call again(2, 5, 6, 4, 2, 8);
  expect_same_bits(fresh.q, again.q);
  expect_same_bits(fresh.dout, again.dout);
}

TEST(Errors, an_output_may_not_be_an_input_not_even_by_one_element) {
  Call c(1, 5, 6, 2, 2, 8);
  for (const std::int64_t shift : {-79, 0, 1, 79}) {
    std::vector<float> memory(400, 1.0f);
    Attention a = c.a;
    a.q.data = memory.data() + 100;
    Tensor out = c.out;
    out.data = memory.data() + 100 + shift;
    expect_refused([&] { forward({}, a, out); }, ErrorKind::kInvalidArgument, "out");
    for (const float x : memory) ASSERT_EQ(x, 1.0f);
  }
  std::vector<float> memory(400, 1.0f);  // side by side is fine
  Attention a = c.a;
  a.q.data = memory.data() + 100;
  Tensor out = c.out;
  out.data = memory.data() + 180;
  EXPECT_NO_THROW(forward({}, a, out));
}

TEST(Errors, parts_that_do_not_match_are_not_merged) {
  Numbers outs({3, 4, 5}), lses({3, 4}), out({4, 5}), lse({4});
  outs.wave(1), lses.wave(2);
  const auto refused = [&](const std::function<void(Tensor&, Tensor&, Tensor&, Tensor&)>& spoil,
                           const char* argument) {
    SCOPED_TRACE(argument);
    Tensor o = outs, l = lses, to = out, lse_to = lse;
    spoil(o, l, to, lse_to);
    expect_refused([&] { merge_states({}, o, l, to, lse_to); }, ErrorKind::kInvalidArgument,
                   argument);
    expect_refused([&] { check_merge_states({}, o, l, to, lse_to); }, ErrorKind::kInvalidArgument,
                   argument);
    for (const float x : out.values()) ASSERT_TRUE(std::isnan(x)) << "was written";
  };
  check_merge_states({}, outs, lses, out, lse);  // good parts, and not a number is written
  using T = Tensor&;
  refused([](T o, T, T, T) { o.rank = 2; }, "outs has 2 axes");
  refused([](T o, T, T, T) { o.dtype = DType::kInt32; }, "outs is int32");
  refused([](T, T l, T, T) { l.shape[0] = 2; }, "lses has shape (2, 4)");
  refused([](T, T l, T, T) { l.dtype = DType::kBool; }, "lses is bool");
  refused([](T, T, T to, T) { to.shape[1] = 6; }, "out has shape (4, 6)");
  refused([](T, T, T, T lse_to) { lse_to.data = nullptr; }, "lse is a null pointer");
  refused([](T o, T, T to, T) { to.data = o.data; }, "out");
}

TEST(Errors, a_tensor_of_more_axes_than_there_are_is_refused_when_it_is_made) {
  float x = 0;
  expect_refused(
      [&] {
        Tensor::packed(&x, DType::kFloat32, {1, 1, 1, 1, 1});
      },
      ErrorKind::kInvalidArgument, "a tensor has 5 axes");
}

}  // namespace
}  // namespace onefold::test
