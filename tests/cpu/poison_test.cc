// What lies around, between and beyond the elements of a tensor is never read into a result and
// never written. Each question is asked three times, in memory filled with NaN (for integers -1,
// for booleans true), with zeros and with large numbers: the answers must have the same bits, and
// the filling must be what it was.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tests/cpu/everything.h"

namespace onefold::test {
namespace {

// Repeated: NaN of every float dtype; zeros; about 1e36, and 6e4 in float16.
constexpr std::uint8_t kFillings[] = {0xFF, 0x00, 0x7B};

// A copy of a tensor, strides and all, in the middle of filled memory.
class Framed {
 public:
  Framed(std::string name, const Tensor& source, std::uint8_t filling)
      : name_(std::move(name)), filling_(filling), view_(source) {
    const std::int64_t size = size_bytes(source.dtype);
    std::int64_t low = 0, high = 0;
    for (int axis = 0; axis < source.rank; ++axis) {
      const std::int64_t reach =
          std::max<std::int64_t>(source.shape[axis] - 1, 0) * source.stride[axis];
      (reach < 0 ? low : high) += reach;
    }
    memory_.assign(static_cast<std::size_t>((high - low + 1) * size) + 2 * kMargin,
                   std::byte{filling});
    inside_.assign(memory_.size(), false);
    view_.data = memory_.data() + kMargin - low * size;
    each([&](std::int64_t at) {
      const std::byte* from = static_cast<const std::byte*>(source.data) + at * size;
      std::memcpy(address(at), from, static_cast<std::size_t>(size));
      for (std::int64_t x = 0; x < size; ++x) {
        inside_[static_cast<std::size_t>(address(at) - memory_.data() + x)] = true;
      }
    });
    before_ = memory_;
  }

  const Tensor& view() const { return view_; }
  // For an output: its elements are filled too, so that one left out shows.
  void empty() {
    std::fill(memory_.begin(), memory_.end(), std::byte{filling_});
    before_ = memory_;
  }
  void expect_unchanged(bool elements_too) const {
    for (std::size_t x = 0; x < memory_.size(); ++x) {
      if (inside_[x] && !elements_too) continue;
      ASSERT_EQ(memory_[x], before_[x])
          << name_ << ": byte " << static_cast<std::int64_t>(x) - std::int64_t{kMargin}
          << (inside_[x] ? ", an element of an input," : ", outside every element,")
          << " was written";
    }
  }

 private:
  static constexpr std::size_t kMargin = 512;  // a few vectors, and any alignment

  std::byte* address(std::int64_t offset) {
    return static_cast<std::byte*>(view_.data) + offset * size_bytes(view_.dtype);
  }
  template <class Body>
  void each(Body&& body) {
    for (std::int64_t n = 0; n < view_.elements(); ++n) {
      std::int64_t rest = n, at = 0;
      for (int axis = view_.rank - 1; axis >= 0; --axis) {
        at += rest % view_.shape[axis] * view_.stride[axis];
        rest /= view_.shape[axis];
      }
      body(at);
    }
  }

  std::string name_;
  std::uint8_t filling_;
  Tensor view_;
  std::vector<std::byte> memory_, before_;
  std::vector<bool> inside_;
};

// Rows of q, k, v and the cotangents that belong to no sequence are surroundings too.
void fill_dead_rows(Question& x, std::uint8_t filling) {
  if (!x.a.cu_seqlens_q && !x.a.seqused_q && !x.a.seqused_k) return;
  const double number = filling == 0xFF ? std::numeric_limits<double>::quiet_NaN()
                        : filling == 0  ? 0
                                        : 6e4;
  x.poison_rows(x.q, true, number);
  x.poison_rows(x.dout, true, number);
  x.poison_rows(x.k, false, number);
  x.poison_rows(x.v, false, number);
  const Tensor& dlse = x.dlse.tensor();
  for (int axis = 0; axis < dlse.rank; ++axis) {
    if (dlse.shape[axis] > 1 && dlse.stride[axis] == 0) return;
  }
  const std::int64_t rows = std::max<std::int64_t>(x.q_extent, 1);
  x.dlse.each([&](std::int64_t n, std::int64_t) {
    const std::int64_t b = x.packed ? 0 : n / rows / x.heads;
    if (!x.is_live(x.q_lengths, x.q_used, b, n % rows)) x.dlse.set(n, number);
  });
}

using Bits = std::vector<std::byte>;
// Forward and backward in memory of one filling: the bits of every result, in order.
std::vector<Bits> answers(Question& x, std::uint8_t filling, std::uint64_t seed) {
  fill_dead_rows(x, filling);
  std::list<Framed> inputs, outputs;
  const auto put = [&](const char* name, auto& tensor) {
    if constexpr (std::is_same_v<std::decay_t<decltype(tensor)>, Tensor>) {
      tensor = inputs.emplace_back(name, tensor, filling).view();
    } else if (tensor) {
      tensor = inputs.emplace_back(name, *tensor, filling).view();
    }
  };
  Attention a = x.a;
  Tensor dout = x.dout.tensor(), dlse = x.dlse.tensor();
  put("q", a.q), put("k", a.k), put("v", a.v);
  put("bias", a.bias), put("mask", a.mask), put("slopes", a.alibi_slopes), put("sinks", a.sinks);
  put("cu_seqlens_q", a.cu_seqlens_q), put("cu_seqlens_k", a.cu_seqlens_k);
  put("seqused_q", a.seqused_q), put("seqused_k", a.seqused_k);
  put("dout", dout), put("dlse", dlse);

  Random random(seed);  // the same strides for every filling
  const auto output = [&](const char* name, const Tensor& like) {
    const Array array(like.dtype, shape_of(like), x.write, random);
    Framed& framed = outputs.emplace_back(name, array.tensor(), filling);
    framed.empty();
    return framed.view();
  };
  const Tensor out = output("out", dout), lse = output("lse", dlse);
  Gradients g;
  g.dq = output("dq", a.q), g.dk = output("dk", a.k), g.dv = output("dv", a.v);
  if (a.bias) g.dbias = output("dbias", *a.bias);
  if (a.alibi_slopes) g.dslopes = output("dslopes", *a.alibi_slopes);
  if (a.sinks) g.dsinks = output("dsinks", *a.sinks);

  // The workspace is memory like any other: filled before, and guarded behind its last byte.
  constexpr std::size_t kGuard = 512;
  std::vector<std::pair<std::shared_ptr<void>, std::size_t>> workspaces;
  Context context;
  context.allocate = [&](std::size_t bytes) {
    std::shared_ptr<void> p = poisoned(bytes + kGuard);
    std::memset(p.get(), filling, bytes + kGuard);
    workspaces.emplace_back(p, bytes);
    return p;
  };
  HostileExecutor executor(random.integer(1, 4), random.bits());
  context.executor = &executor;
  forward(context, a, out, lse);
  backward(context, a, out, lse, dout, dlse, g);

  for (const Framed& input : inputs) input.expect_unchanged(true);
  for (const Framed& written : outputs) written.expect_unchanged(false);
  for (const auto& [memory, bytes] : workspaces) {
    const auto* guard = static_cast<const std::byte*>(memory.get()) + bytes;
    EXPECT_TRUE(std::all_of(guard, guard + kGuard, [&](std::byte x) {
      return x == std::byte{filling};
    })) << "written beyond the workspace";
  }
  std::vector<Bits> bits;
  for (const Framed& written : outputs) bits.push_back(bits_of(written.view()));
  return bits;
}

void expect_surroundings_do_not_matter(Question& x, Random& random) {
  SCOPED_TRACE(x.text);
  const std::uint64_t seed = random.bits();
  const std::vector<Bits> first = answers(x, kFillings[0], seed);
  for (std::size_t n = 1; n < std::size(kFillings); ++n) {
    const std::vector<Bits> other = answers(x, kFillings[n], seed);
    ASSERT_EQ(other.size(), first.size());
    for (std::size_t result = 0; result < first.size(); ++result) {
      ASSERT_EQ(other[result] == first[result], true)
          << "result " << result << " of out, lse, dq, dk, dv and the options' gradients depends "
          << "on what surrounds the tensors";
    }
  }
}

class Poison : public Backend {};

TEST_F(Poison, memory_around_every_tensor_is_neither_read_nor_written) {
  for_random_cases(affordable(120), [](Random& random) {
    Question x = draw_question(random, 3e5);
    draw_cotangents(x, random);
    expect_surroundings_do_not_matter(x, random);
  });
}

TEST_F(Poison, the_same_of_few_rows_against_many_keys) {
  for_random_cases(affordable(20), [](Random& random) {
    Question x = dense(random, random.integer(1, 2), 8);
    x.kv_heads = random.integer(1, 2);
    x.heads = x.kv_heads * random.integer(1, 4);
    x.dim = x.dim_v = 16 * random.integer(1, 3);
    x.q_extent = random.integer(1, 3);
    x.k_extent = random.integer(900, 1400);
    x.q_lengths.assign(static_cast<std::size_t>(x.batch), x.q_extent);
    x.k_lengths.assign(static_cast<std::size_t>(x.batch), x.k_extent);
    x.read = random.chance(0.5) ? Layout::kPacked : Layout::kRead;
    draw_used(x, random);
    draw_inputs(x, random);
    x.a.q = x.q.tensor(), x.a.k = x.k.tensor(), x.a.v = x.v.tensor();
    draw_score_options(x, random);
    draw_visibility(x, random);
    draw_cotangents(x, random);
    x.text = describe(x);
    expect_surroundings_do_not_matter(x, random);
  });
}

// merge_states too: parts, their lses and the results in filled memory.
TEST_F(Poison, the_same_of_merging) {
  for_random_cases(affordable(100), [](Random& random) {
    const std::int64_t parts = random.integer(0, 4), rows = random.integer(0, 70);
    const std::int64_t dim = random.integer(0, 20);
    const DType dtype = draw_float(random);
    Array outs(dtype, {parts, rows, dim}, Layout::kRead, random);
    Array lses(lse_dtype(dtype), {parts, rows}, Layout::kRead, random);
    outs.fill([&] { return random.normal(); });
    lses.fill([&] { return 3 * random.normal(); });
    const Array out(dtype, {rows, dim}, Layout::kWrite, random);
    const Array lse(lse_dtype(dtype), {rows}, Layout::kWrite, random);
    std::optional<std::vector<Bits>> first;
    for (const std::uint8_t filling : kFillings) {
      const Framed o("outs", outs.tensor(), filling), l("lses", lses.tensor(), filling);
      Framed to("out", out.tensor(), filling), lse_to("lse", lse.tensor(), filling);
      to.empty(), lse_to.empty();
      merge_states({}, o.view(), l.view(), to.view(), lse_to.view());
      o.expect_unchanged(true), l.expect_unchanged(true);
      to.expect_unchanged(false), lse_to.expect_unchanged(false);
      const std::vector<Bits> bits = {bits_of(to.view()), bits_of(lse_to.view())};
      if (!first) first = bits;
      ASSERT_TRUE(bits == *first) << parts << " parts of " << rows << " rows of " << dim;
    }
  });
}

}  // namespace
}  // namespace onefold::test
