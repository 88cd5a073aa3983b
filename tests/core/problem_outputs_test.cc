// Outputs, cotangents and gradients: what does not fit or overlaps is refused, the rest may lie
// anywhere.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "core/problem.h"
#include "tests/core/problem_call.h"

namespace onefold::test {
namespace {

TEST(BadInput, outputs) {
  expect_refused(
      {
          {"out of another dtype", "out is float16: q is float32 and both must agree",
           [](Call& c) { c.out.dtype = DType::kFloat16; }},
          {"out with q's head_dim", "out has shape (2, 3, 4, 5): (2, 3, 4, 6) is needed",
           [](Call& c) {
             c.out = tensor({2, 3, 4, 5}, DType::kFloat32, 4096 * 3);
           }},
          {"rank of out", "out has 3 axes, shape (3, 4, 6): 4 are needed",
           [](Call& c) {
             c.out = tensor({3, 4, 6});
           }},
          {"out that repeats itself",
           "out has stride 0 on axis 1: an output needs memory of its own",
           [](Call& c) { c.out.stride[1] = 0; }},
          {"lse that repeats itself",
           "lse has stride 0 on axis 2: an output needs memory of its own",
           [](Call& c) { c.lse.stride[2] = 0; }},
          {"out in q", "out shares memory with q: an output needs memory of its own",
           [](Call& c) { c.out.data = static_cast<float*>(c.a.q.data) + 100; }},
          {"lse in out", "lse shares memory with out: an output needs memory of its own",
           [](Call& c) { c.lse.data = c.out.data; }},
          {"lse of another dtype", "lse is float64: float32 is needed",
           [](Call& c) { c.lse.dtype = DType::kFloat64; }},
          {"batch of lse", "batch of lse is 1: 2 is needed, the batch of q",
           [](Call& c) {
             c.lse = tensor({1, 4, 3}, DType::kFloat32, 4096 * 4);
           }},
          {"heads of lse", "heads of lse is 3: 4 is needed, the heads of q",
           [](Call& c) {
             c.lse = tensor({2, 3, 4}, DType::kFloat32, 4096 * 4);
           }},
          {"rows of lse", "rows of lse is 4: 3 is needed, the rows of q",
           [](Call& c) {
             c.lse = tensor({2, 4, 4}, DType::kFloat32, 4096 * 4);
           }},
      },
      make_dense);
}

TEST(BadInput, cotangents_and_gradients) {
  expect_refused(
      {
          {"shape of dout", "dout has shape (2, 3, 4, 5): (2, 3, 4, 6) is needed",
           [](Call& c) {
             c.dout = tensor({2, 3, 4, 5}, DType::kFloat32, 4096 * 5);
           }},
          {"dlse of another dtype", "dlse is bfloat16: float32 is needed",
           [](Call& c) { c.dlse->dtype = DType::kBFloat16; }},
          {"shape of dq", "dq has shape (2, 3, 4, 6): (2, 3, 4, 5) is needed",
           [](Call& c) {
             c.g.dq = tensor({2, 3, 4, 6}, DType::kFloat32, 4096 * 7);
           }},
          {"dtype of dk", "dk is float16: k is float32 and both must agree",
           [](Call& c) { c.g.dk->dtype = DType::kFloat16; }},
          {"dv with the heads of q", "dv has shape (2, 4, 4, 6): (2, 4, 2, 6) is needed",
           [](Call& c) {
             c.g.dv = tensor({2, 4, 4, 6}, DType::kFloat32, 4096 * 9);
           }},
          {"dq in dout", "dq shares memory with dout: an output needs memory of its own",
           [](Call& c) { c.g.dq->data = c.dout->data; }},
          {"dk in dq", "dk shares memory with dq: an output needs memory of its own",
           [](Call& c) { c.g.dk->data = c.g.dq->data; }},
          {"dv in k", "dv shares memory with k: an output needs memory of its own",
           [](Call& c) { c.g.dv->data = c.a.k.data; }},
          {"dbias without bias", "dbias was asked for without bias: there is nothing to derive by",
           [](Call& c) { c.g.dbias = tensor({4}, DType::kFloat32, 4096 * 13); }},
          {"dslopes without slopes",
           "dslopes was asked for without alibi_slopes: there is nothing to derive by",
           [](Call& c) { c.g.dslopes = tensor({4}, DType::kFloat32, 4096 * 13); }},
          {"dsinks without sinks",
           "dsinks was asked for without sinks: there is nothing to derive by",
           [](Call& c) { c.g.dsinks = tensor({4}, DType::kFloat32, 4096 * 13); }},
      },
      make_dense);
}

TEST(BadInput, gradients_of_options) {
  expect_refused(
      {
          {"dbias that is expanded",
           "dbias is float32 (4, 3, 4): float32 (4, 1, 4) is needed, as bias",
           [](Call& c) {
             c.g.dbias = tensor({4, 3, 4}, DType::kFloat32, 4096 * 13);
           }},
          {"dtype of dbias", "dbias is float64 (4, 1, 4): float32 (4, 1, 4) is needed, as bias",
           [](Call& c) { c.g.dbias->dtype = DType::kFloat64; }},
          {"rank of dslopes", "dslopes has 2 axes, shape (2, 4): 1 is needed",
           [](Call& c) {
             c.g.dslopes = tensor({2, 4}, DType::kFloat32, 4096 * 14);
           }},
          {"dsinks in sinks", "dsinks shares memory with sinks: an output needs memory of its own",
           [](Call& c) { c.g.dsinks->data = c.a.sinks->data; }},
      },
      [](Call& c) {
        make_dense(c);
        make_optional(c);
      });
}

// Whatever a call is given against whatever it writes, and what it writes against each other.
TEST(BadInput, an_output_that_shares_a_byte_with_any_other_tensor) {
  const std::vector<std::string> forward_writes = {"out", "lse"};
  const std::vector<std::string> backward_writes = {"dq", "dk", "dv", "dbias", "dslopes", "dsinks"};
  const auto is_in = [](const std::vector<std::string>& names, const std::string& name) {
    return std::find(names.begin(), names.end(), name) != names.end();
  };
  int pairs = 0;
  for (const bool packed : {false, true}) {
    Call all;
    make_everything(all, packed);
    const std::size_t count = tensors_of(all).size();
    for (std::size_t n = 0; n < count * count; ++n) {
      Call c;
      make_everything(c, packed);
      const auto [output, to] = tensors_of(c)[n / count];
      const auto [other, from] = tensors_of(c)[n % count];
      const bool forward = is_in(forward_writes, output);
      const bool part = forward ? !is_in(backward_writes, other) && other[0] != 'd' : true;
      if (output == other || !part || !(forward || is_in(backward_writes, output))) continue;
      // Index lists are read before: their numbers must stay what they are.
      const bool list = from->dtype == DType::kInt64;
      list ? to->data = from->data : from->data = to->data;
      ++pairs;
      std::string text = "accepted";
      try {
        c.run();
      } catch (const Error& error) {
        text = error.what();
      }
      const std::string one = concat(output, " shares memory with ", other);
      const std::string two = concat(other, " shares memory with ", output);
      const char* const rest = ": an output needs memory of its own";
      EXPECT_TRUE(text == one + rest || text == two + rest) << one << ", yet: " << text;
    }
  }
  EXPECT_GT(pairs, 250);
}

TEST(BadInput, merging) {
  struct Merge {
    Tensor outs = tensor({3, 5, 4}, DType::kFloat32, 0),
           lses = tensor({3, 5}, DType::kFloat32, 4096);
    Tensor out = tensor({5, 4}, DType::kFloat32, 8192), lse = tensor({5}, DType::kFloat32, 12288);
  };
  const auto message = [](const std::function<void(Merge&)>& spoil) {
    Merge m;
    spoil(m);
    try {
      check_merge(m.outs, m.lses, m.out, m.lse);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_EQ(message([](Merge&) {}), "");
  EXPECT_EQ(message([](Merge& m) {
              m.outs = tensor({5, 4});
            }),
            "outs has 2 axes, shape (5, 4): 3 are needed");
  EXPECT_EQ(message([](Merge& m) {
              m.lses = tensor({2, 5});
            }),
            "lses has shape (2, 5): (3, 5) is needed");
  EXPECT_EQ(message([](Merge& m) { m.lses.dtype = DType::kFloat16; }),
            "lses is float16: float32 or float64 is needed");
  EXPECT_EQ(message([](Merge& m) { m.out.dtype = DType::kBool; }),
            "out is bool: a float dtype is needed");
  EXPECT_EQ(message([](Merge& m) { m.lse.data = nullptr; }),
            "lse is a null pointer with shape (5,): it needs memory");
  EXPECT_EQ(message([](Merge& m) { m.out.data = m.outs.data; }),
            "out shares memory with outs: an output needs memory of its own");
  EXPECT_EQ(message([](Merge& m) { m.lse.stride[0] = 0; }),
            "lse has stride 0 on axis 0: an output needs memory of its own");
  EXPECT_EQ(message([](Merge& m) { m.outs.device.type = DeviceType::kCuda; }),
            "outs is on CUDA device 0: the call runs on the CPU, so move it there");
}

TEST(GoodInput, gradients_may_be_slices_of_one_buffer) {
  // dqkv of shape (2, 4, 3, 4, 5): sequences of equal length, as many key as query heads.
  Call c;
  const auto whole = [](std::size_t page) { return tensor({2, 4, 4, 5}, DType::kFloat32, page); };
  c.a.q = whole(0), c.a.k = whole(4096), c.a.v = whole(8192), c.out = whole(12288);
  c.dout = whole(16384);
  c.lse = tensor({2, 4, 4}, DType::kFloat32, 20480);
  const auto slice = [](std::size_t n) {
    Tensor t = tensor({2, 4, 4, 5}, DType::kFloat32, 24576 + n * 20 * sizeof(float));
    t.stride = {4 * 60, 60, 5, 1};
    return t;
  };
  c.g = {slice(0), slice(1), slice(2)};
  EXPECT_NO_THROW(c.run());
  // And so may the inputs with out: q, k, v and out as four slices.
  const auto quarter = [](std::size_t n) {
    Tensor t = tensor({2, 4, 4, 5}, DType::kFloat32, 32768 + n * 20 * sizeof(float));
    t.stride = {4 * 80, 80, 5, 1};
    return t;
  };
  c.a.q = quarter(0), c.a.k = quarter(1), c.a.v = quarter(2), c.out = quarter(3);
  EXPECT_NO_THROW(c.run());
  c.out.data = static_cast<float*>(c.out.data) - 1;
  EXPECT_THROW(c.run(), Error);
}

TEST(GoodInput, inputs_may_share_memory) {
  Call c;
  make_dense(c);
  c.a.k = c.a.v = tensor({2, 4, 2, 5}, DType::kFloat32, 4096);
  c.out = c.a.q, c.out.data = pool.data() + 12288;
  c.dout = c.out, c.g.dv = c.a.k, c.g.dv->data = pool.data() + 4096 * 9;
  EXPECT_NO_THROW(c.run());
}

}  // namespace
}  // namespace onefold::test
