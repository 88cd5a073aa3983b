// Questions that are the same question get the same bits: layouts, batches, masks, powers of two,
// executors. These hold for every path because a row's arithmetic depends on its own scores and on
// absolute key tiles alone.

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "tests/cpu/everything.h"

namespace onefold::test {
namespace {

constexpr int kCases = 60;

class Identities : public Backend {};

// ---- who runs it ----

TEST_F(Identities, threads_executors_and_workspace_do_not_change_a_bit) {
  for_random_cases(affordable(kCases), [](Random& random) {
    Question x = draw_question(random, random.chance(0.1) ? 4e6 : 4e5);
    draw_cotangents(x, random);
    SCOPED_TRACE(x.text);
    set_num_threads(1);
    const Everything one = everything({}, x.a, cotangents(x));
    for (const int threads : {1, 2, 7}) {
      SCOPED_TRACE(concat(threads, " threads"));
      set_num_threads(threads);
      expect_same(everything({}, x.a, cotangents(x)), one);
      HostileExecutor executor(threads, random.bits());
      Context context;
      context.executor = &executor;
      context.allocate = poisoned;
      expect_same(everything(context, x.a, cotangents(x)), one);
    }
    set_num_threads(0);
  });
}

// Heads as items, their chunks summed on the spot; or chunks as items, summed afterwards.
TEST_F(Identities, chunks_apart_are_summed_as_chunks_in_turn) {
  for_random_cases(affordable(6), [](Random& random) {
    Question x = dense(random, 1, 40);
    x.kv_heads = x.heads = 1;
    x.q_extent = random.integer(513, 2500);
    x.q_lengths = x.q_used = {x.q_extent};
    draw_inputs(x, random);
    x.a.q = x.q.tensor(), x.a.k = x.k.tensor(), x.a.v = x.v.tensor();
    draw_score_options(x, random);
    draw_visibility(x, random);
    draw_cotangents(x, random);
    SCOPED_TRACE(describe(x));
    HostileExecutor alone(1, 1), many(5, random.bits());
    Context one, five;
    one.executor = &alone;
    five.executor = &many;
    const auto by_chunk = [&x](const Context& context) {
      return plan(context, x.a, Direction::kBackward).why.find("chunks of") != std::string::npos;
    };
    EXPECT_FALSE(by_chunk(one));
    EXPECT_TRUE(by_chunk(five));
    expect_same(everything(five, x.a, cotangents(x)), everything(one, x.a, cotangents(x)));
  });
}

TEST_F(Identities, a_gradient_does_not_depend_on_which_others_are_wanted) {
  for_random_cases(affordable(kCases), [](Random& random) {
    Question x = dense_with_options(random, random.integer(1, 2));
    SCOPED_TRACE(x.text);
    const Everything all = everything({}, x.a, cotangents(x));
    const Answer answer = run_forward({}, x, random);
    x.write = Layout::kPacked;
    for (int only = 0; only < 6; ++only) {
      Wanted w{only == 0, only == 1, only == 2, only == 3, only == 4, only == 5};
      const Derived d = run_backward({}, x, answer, w, random);
      const auto both = [&](const char* name, const auto& a, const auto& b) {
        if (a) expect_same_bits(name, a->tensor(), b->tensor());
      };
      both("dq", d.dq, all.dq);
      both("dk", d.dk, all.dk);
      both("dv", d.dv, all.dv);
      both("dbias", d.dbias, all.dbias);
      both("dslopes", d.dslopes, all.dslopes);
      both("dsinks", d.dsinks, all.dsinks);
    }
  });
}

// ---- where it lies ----

TEST_F(Identities, strides_do_not_change_a_bit) {
  for_random_cases(affordable(kCases), [](Random& random) {
    Question x = dense_with_options(random, random.integer(1, 3));
    SCOPED_TRACE(x.text);
    Attention a = x.a;
    const auto moved = [&](const Tensor& t) {
      Array copy = copy_of(t, t.dtype, Layout::kWrite, random);
      return copy;
    };
    Array q = moved(a.q), k = moved(a.k), v = moved(a.v);
    Array dout = moved(x.dout.tensor()), dlse = moved(x.dlse.tensor()), bias, mask;
    a.q = q.tensor(), a.k = k.tensor(), a.v = v.tensor();
    if (a.bias) a.bias = (bias = moved(*a.bias)).tensor();
    if (a.mask) a.mask = (mask = moved(*a.mask)).tensor();
    expect_same(everything({}, a, {dout.tensor(), dlse.tensor()}),
                everything({}, x.a, cotangents(x)));
  });
}

TEST_F(Identities, a_batch_entry_alone_or_among_others) {
  for_random_cases(affordable(kCases), [](Random& random) {
    Question x = dense_with_options(random, 3);
    x.a.dropout_p = 0;  // its counter holds the batch index
    SCOPED_TRACE(describe(x));
    const Everything all = everything({}, x.a, cotangents(x));
    for (std::int64_t b = 0; b < 3; ++b) {
      Attention a = x.a;
      for (Tensor* t : {&a.q, &a.k, &a.v}) *t = slice(*t, 0, b, b + 1);
      for (auto* t : {&a.bias, &a.mask}) {
        if (*t) *t = slice_from_right(**t, 4, b, b + 1);
      }
      if (a.alibi_slopes) a.alibi_slopes = slice_from_right(*a.alibi_slopes, 2, b, b + 1);
      const Everything alone = everything(
          {}, a, {slice(x.dout.tensor(), 0, b, b + 1), slice(x.dlse.tensor(), 0, b, b + 1)});
      const auto part = [b](const Array& array) { return slice(array.tensor(), 0, b, b + 1); };
      expect_same_bits("out", alone.out.tensor(), part(all.out));
      expect_same_bits("lse", alone.lse.tensor(), part(all.lse));
      expect_same_bits("dq", alone.dq->tensor(), part(*all.dq));
      expect_same_bits("dk", alone.dk->tensor(), part(*all.dk));
      expect_same_bits("dv", alone.dv->tensor(), part(*all.dv));
    }
  });
}

// A packed sequence, a padded one cut by its used lengths, and the same tensors cut to size.
TEST_F(Identities, packed_padded_and_cut_sequences_are_one) {
  for_random_cases(affordable(kCases), [](Random& random) {
    Question x = dense_with_options(random, 1);
    const std::int64_t nq = random.integer(0, static_cast<int>(x.q_extent));
    const std::int64_t nk = random.integer(0, static_cast<int>(x.k_extent));
    SCOPED_TRACE(concat(describe(x), ", of which used ", nq, " and ", nk));
    Attention cut = x.a;
    cut.q = slice(cut.q, 1, 0, nq);
    cut.k = slice(cut.k, 1, 0, nk);
    cut.v = slice(cut.v, 1, 0, nk);
    for (auto* t : {&cut.bias, &cut.mask}) {
      if (*t) *t = slice_from_right(slice_from_right(**t, 2, 0, nq), 1, 0, nk);
    }
    const Cotangents small{slice(x.dout.tensor(), 1, 0, nq), slice(x.dlse.tensor(), 2, 0, nq)};
    const Everything want = everything({}, cut, small);

    std::vector<std::int64_t> used_q{nq}, used_k{nk};
    Attention padded = x.a;
    padded.seqused_q = Tensor::packed(used_q.data(), DType::kInt64, {1});
    padded.seqused_k = Tensor::packed(used_k.data(), DType::kInt64, {1});
    const Everything got = everything({}, padded, cotangents(x));
    expect_same_bits("out", slice(got.out.tensor(), 1, 0, nq), want.out.tensor());
    expect_same_bits("lse", slice(got.lse.tensor(), 2, 0, nq), want.lse.tensor());
    expect_same_bits("dq", slice(got.dq->tensor(), 1, 0, nq), want.dq->tensor());
    expect_same_bits("dk", slice(got.dk->tensor(), 1, 0, nk), want.dk->tensor());
    expect_same_bits("dv", slice(got.dv->tensor(), 1, 0, nk), want.dv->tensor());
    for (std::int64_t n = nq * x.heads * x.dim_v; n < got.out.elements(); ++n) {
      ASSERT_EQ(got.out.get(n), 0.0) << "a row that is not used";
    }

    // The sequence in the middle of three, its neighbours full of NaN.
    const auto rows = [](const Tensor& t) {
      return Tensor::packed(nullptr, t.dtype, {t.shape[1] + 20, t.shape[2], t.shape[3]});
    };
    const auto embed = [&](const Tensor& t) {
      Array whole(t.dtype, shape_of(rows(t)), Layout::kPacked, random);  // NaN
      const std::int64_t inner = t.shape[2] * t.shape[3];
      for (std::int64_t r = 0; r < t.shape[1]; ++r) {
        for (std::int64_t y = 0; y < inner; ++y) {
          whole.set((r + 10) * inner + y, load_number(t.data, t.dtype, r * t.stride[1] + y));
        }
      }
      return whole;
    };
    std::vector<std::int64_t> cu_q{0, 10, 10 + nq, 20 + nq}, cu_k{0, 10, 10 + nk, 20 + nk};
    Array q = embed(cut.q), k = embed(cut.k), v = embed(cut.v), dout = embed(small.dout);
    Array dlse(x.dlse.tensor().dtype, {x.heads, nq + 20}, Layout::kPacked, random);
    for (std::int64_t h = 0; h < x.heads; ++h) {
      for (std::int64_t r = 0; r < nq; ++r) {
        dlse.set(h * (nq + 20) + 10 + r, x.dlse.get(h * x.q_extent + r));
      }
    }
    Attention packed = cut;
    packed.q = q.tensor(), packed.k = k.tensor(), packed.v = v.tensor();
    packed.cu_seqlens_q = Tensor::packed(cu_q.data(), DType::kInt64, {4});
    packed.cu_seqlens_k = Tensor::packed(cu_k.data(), DType::kInt64, {4});
    packed.dropout_p = 0;
    if (packed.bias || packed.mask) return;  // their extents would be others'
    if (packed.alibi_slopes && packed.alibi_slopes->rank == 2) {
      Tensor& slopes = *packed.alibi_slopes;  // (1, H) for all three
      slopes.shape[0] = 3;
      slopes.stride[0] = 0;
    }
    cut.dropout_p = 0;
    const Everything again = everything({}, cut, small);
    const Everything middle = everything({}, packed, {dout.tensor(), dlse.tensor()});
    const auto part = [](const Array& array, std::int64_t count) {
      Tensor t = slice(array.tensor(), 0, 10, 10 + count);
      return t;
    };
    const auto flat = [](const Array& array) {
      Tensor t = array.tensor();
      for (int axis = 0; axis < 3; ++axis) {
        t.shape[axis] = t.shape[axis + 1];
        t.stride[axis] = t.stride[axis + 1];
      }
      --t.rank;
      return t;
    };
    expect_same_bits("packed out", part(middle.out, nq), flat(again.out));
    expect_same_bits("packed lse", slice(middle.lse.tensor(), 1, 10, 10 + nq), flat(again.lse));
    expect_same_bits("packed dq", part(*middle.dq, nq), flat(*again.dq));
    expect_same_bits("packed dk", part(*middle.dk, nk), flat(*again.dk));
    expect_same_bits("packed dv", part(*middle.dv, nk), flat(*again.dv));
  });
}

// ---- what is visible ----

TEST_F(Identities, causal_and_windows_equal_their_explicit_mask) {
  for_random_cases(affordable(kCases), [](Random& random) {
    Question x = dense(random, random.integer(1, 2));
    draw_visibility(x, random);
    if (x.a.causal == Causal::kNone && !x.a.window_left) x.a.causal = Causal::kBottomRight;
    SCOPED_TRACE(describe(x));
    Array mask(DType::kBool, {x.q_extent, x.k_extent}, Layout::kPacked, random);
    mask.each([&](std::int64_t n, std::int64_t) {
      const std::int64_t i = n / x.k_extent, j = n % x.k_extent;
      const std::int64_t right_of =
          x.a.causal == Causal::kTopLeft ? j - i : j - (i + x.k_extent - x.q_extent);
      const bool seen = (x.a.causal == Causal::kNone || right_of <= 0) &&
                        (!x.a.window_right || right_of <= *x.a.window_right) &&
                        (!x.a.window_left || -right_of <= *x.a.window_left);
      mask.set(n, seen);
    });
    Attention masked = x.a;
    masked.causal = Causal::kNone;
    masked.window_left.reset();
    masked.window_right.reset();
    masked.mask = mask.tensor();
    expect_same(everything({}, x.a, cotangents(x)), everything({}, masked, cotangents(x)));
  });
}

TEST_F(Identities, windows_as_wide_as_everything_and_masks_of_ones_are_none) {
  for_random_cases(affordable(kCases), [](Random& random) {
    Question x = dense(random, 2);
    if (random.chance(0.5)) x.a.causal = Causal::kBottomRight;
    SCOPED_TRACE(describe(x));
    const Everything plain = everything({}, x.a, cotangents(x));
    Attention a = x.a;
    a.window_left = random.chance(0.5) ? x.k_extent : std::numeric_limits<std::int64_t>::max();
    a.window_right = random.chance(0.5) ? x.q_extent : std::numeric_limits<std::int64_t>::max();
    Array mask(DType::kBool, {x.q_extent, x.k_extent}, Layout::kPacked, random);
    mask.fill([] { return 1.0; });
    if (random.chance(0.5)) a.mask = mask.tensor();
    expect_same(everything({}, a, cotangents(x)), plain);
  });
}

TEST_F(Identities, a_bias_of_minus_infinity_is_a_mask) {
  for_random_cases(affordable(kCases), [](Random& random) {
    Question x = dense(random, 1);
    Array zeros(DType::kFloat32, {x.heads, x.q_extent, x.k_extent}, Layout::kPacked, random);
    Array hidden(DType::kFloat32, {x.heads, x.q_extent, x.k_extent}, Layout::kPacked, random);
    Array mask(DType::kBool, {x.heads, x.q_extent, x.k_extent}, Layout::kPacked, random);
    for (std::int64_t n = 0; n < mask.elements(); ++n) {
      const bool seen = random.chance(0.6);
      zeros.set(n, 0);
      hidden.set(n, seen ? 0 : -std::numeric_limits<double>::infinity());
      mask.set(n, seen);
    }
    SCOPED_TRACE(describe(x));
    Attention by_mask = x.a, by_bias = x.a;
    by_mask.bias = zeros.tensor();
    by_mask.mask = mask.tensor();
    by_bias.bias = hidden.tensor();
    expect_same(everything({}, by_bias, cotangents(x)), everything({}, by_mask, cotangents(x)));
  });
}

TEST_F(Identities, rows_that_see_nothing_do_not_disturb_their_neighbours) {
  for_random_cases(affordable(kCases), [](Random& random) {
    Question x = dense(random, 1);
    SCOPED_TRACE(describe(x));
    Array mask(DType::kBool, {x.q_extent, 1}, Layout::kPacked, random);
    mask.fill([&] { return random.chance(0.7) ? 1.0 : 0.0; });
    Attention a = x.a;
    a.mask = mask.tensor();
    const Everything plain = everything({}, x.a, cotangents(x));
    const Everything some = everything({}, a, cotangents(x));
    for (std::int64_t i = 0; i < x.q_extent; ++i) {
      const auto row = [i](const Array& t) { return slice(t.tensor(), 1, i, i + 1); };
      if (mask.get(i) != 0) {
        expect_same_bits("out", row(some.out), row(plain.out));
        expect_same_bits("dq", row(*some.dq), row(*plain.dq));
        continue;
      }
      for (std::int64_t h = 0; h < x.heads; ++h) {
        ASSERT_EQ(some.lse.get(h * x.q_extent + i), -std::numeric_limits<double>::infinity());
        ASSERT_EQ(some.out.get((i * x.heads + h) * x.dim_v), 0.0);
        ASSERT_EQ(some.dq->get((i * x.heads + h) * x.dim), 0.0);
      }
    }
  });
}

// ---- heads ----

// Rows that share keys are lanes of one tile; repeated heads are tiles of their own.
TEST_F(Identities, grouped_heads_equal_repeated_keys_and_values) {
  for_random_cases(affordable(kCases), [](Random& random) {
    Question x = dense_with_options(random, 2);
    SCOPED_TRACE(x.text);
    // How few rows are attended to depends on their number; see explain.
    if (x.q_extent <= 16 && x.heads != x.kv_heads) return;
    const auto repeated = [&](const Tensor& t) {
      Array all(t.dtype, {t.shape[0], t.shape[1], x.heads, t.shape[3]}, Layout::kPacked, random);
      all.each([&](std::int64_t n, std::int64_t) {
        const std::int64_t d = n % t.shape[3], h = n / t.shape[3] % x.heads;
        const std::int64_t rows = n / t.shape[3] / x.heads;
        all.set(n,
                load_number(t.data, t.dtype, (rows * t.shape[2] + h / x.group()) * t.shape[3] + d));
      });
      return all;
    };
    Array k = repeated(x.a.k), v = repeated(x.a.v);
    Attention a = x.a;
    a.k = k.tensor();
    a.v = v.tensor();
    const Everything grouped = everything({}, x.a, cotangents(x));
    const Everything apart = everything({}, a, cotangents(x));
    expect_same_forward(grouped, apart);
    expect_same_bits("dq", grouped.dq->tensor(), apart.dq->tensor());
  });
}

TEST_F(Identities, permuted_heads_give_permuted_answers) {
  for_random_cases(affordable(kCases), [](Random& random) {
    Question x = dense(random, 1);
    x.a.causal = static_cast<Causal>(random.integer(0, 2));
    SCOPED_TRACE(describe(x));
    // All heads backwards: a view.
    const auto reversed = [](Tensor t, int axis) {
      t.data = static_cast<std::byte*>(t.data) +
               (t.shape[axis] - 1) * t.stride[axis] * size_bytes(t.dtype);
      t.stride[axis] = -t.stride[axis];
      return t;
    };
    Attention a = x.a;
    for (Tensor* t : {&a.q, &a.k, &a.v}) *t = reversed(*t, 2);
    const Everything plain = everything({}, x.a, cotangents(x));
    const Everything back =
        everything({}, a, {reversed(x.dout.tensor(), 2), reversed(x.dlse.tensor(), 1)});
    expect_same_bits("out", reversed(back.out.tensor(), 2), plain.out.tensor());
    expect_same_bits("lse", reversed(back.lse.tensor(), 1), plain.lse.tensor());
    // Inside a group the order of heads orders the sums of dk and dv.
    expect_same_bits("dq", reversed(back.dq->tensor(), 2), plain.dq->tensor());
    if (x.heads != x.kv_heads) return;
    expect_same_bits("dk", reversed(back.dk->tensor(), 2), plain.dk->tensor());
    expect_same_bits("dv", reversed(back.dv->tensor(), 2), plain.dv->tensor());
  });
}

// ---- numbers ----

TEST_F(Identities, powers_of_two_pass_through) {
  for_random_cases(affordable(kCases), [](Random& random) {
    Question x = dense_with_options(random, 1);
    if (x.dtype == DType::kFloat16) return;  // small values would leave its normal range
    SCOPED_TRACE(x.text);
    const auto times = [&](const Tensor& t, double factor) {
      Array copy = copy_of(t, t.dtype, Layout::kPacked, random);
      for (std::int64_t n = 0; n < copy.elements(); ++n) copy.set(n, factor * copy.get(n));
      return copy;
    };
    const Everything plain = everything({}, x.a, cotangents(x));
    Array v4 = times(x.a.v, 4), q2 = times(x.a.q, 2);

    Attention a = x.a;
    a.v = v4.tensor();
    const Everything fourfold = everything({}, a, cotangents(x));
    expect_same_bits("out of 4 v", fourfold.out.tensor(), times(plain.out.tensor(), 4).tensor());
    expect_same_bits("lse of 4 v", fourfold.lse.tensor(), plain.lse.tensor());
    expect_same_bits("dv of 4 v", fourfold.dv->tensor(), plain.dv->tensor());

    a = x.a;
    a.q = q2.tensor();
    a.scale = (x.a.scale ? *x.a.scale : 1 / std::sqrt(static_cast<double>(x.dim))) / 2;
    const Everything halved = everything({}, a, cotangents(x));
    expect_same_forward(halved, plain);
    expect_same_bits("dk of 2 q", halved.dk->tensor(), plain.dk->tensor());
    expect_same_bits("dv of 2 q", halved.dv->tensor(), plain.dv->tensor());
    expect_same_bits("dq of 2 q", times(halved.dq->tensor(), 2).tensor(), plain.dq->tensor());
  });
}

TEST_F(Identities, a_negative_scale_is_that_of_minus_q) {
  for_random_cases(affordable(kCases), [](Random& random) {
    Question x = dense_with_options(random, 1);
    if (!x.a.scale) x.a.scale = 0.3;
    SCOPED_TRACE(x.text);
    Array minus = copy_of(x.a.q, x.dtype, Layout::kPacked, random);
    for (std::int64_t n = 0; n < minus.elements(); ++n) minus.set(n, -minus.get(n));
    Attention a = x.a;
    a.q = minus.tensor();
    a.scale = -*a.scale;
    const Everything plain = everything({}, x.a, cotangents(x));
    const Everything turned = everything({}, a, cotangents(x));
    expect_same_forward(turned, plain);
    expect_same_bits("dv", turned.dv->tensor(), plain.dv->tensor());
  });
}

TEST_F(Identities, a_sink_of_minus_infinity_is_none) {
  for_random_cases(affordable(kCases), [](Random& random) {
    Question x = dense_with_options(random, 2);
    x.a.sinks.reset();
    SCOPED_TRACE(describe(x));
    Array sinks(DType::kFloat32, {x.heads}, Layout::kPacked, random);
    sinks.fill([] { return -std::numeric_limits<double>::infinity(); });
    Attention a = x.a;
    a.sinks = sinks.tensor();
    const Everything with = everything({}, a, cotangents(x));
    expect_same(with, everything({}, x.a, cotangents(x)));
    for (std::int64_t h = 0; h < x.heads; ++h) EXPECT_EQ(with.dsinks->get(h), 0.0);
  });
}

TEST_F(Identities, a_bias_counts_by_its_values_and_not_by_its_dtype) {
  for_random_cases(affordable(kCases), [](Random& random) {
    Question x = dense(random, 1);
    SCOPED_TRACE(describe(x));
    Array narrow(random.chance(0.5) ? DType::kBFloat16 : DType::kFloat16,
                 {x.heads, x.q_extent, x.k_extent}, Layout::kPacked, random);
    narrow.fill([&] { return random.normal(); });
    Array wide = copy_of(narrow.tensor(), DType::kFloat32, Layout::kPacked, random);
    Attention a = x.a, b = x.a;
    a.bias = narrow.tensor();
    b.bias = wide.tensor();
    Everything x_narrow = everything({}, a, cotangents(x)),
               x_wide = everything({}, b, cotangents(x));
    // The gradient is the same one, rounded.
    Array rounded = copy_of(x_wide.dbias->tensor(), narrow.tensor().dtype, Layout::kPacked, random);
    expect_same_bits("dbias", x_narrow.dbias->tensor(), rounded.tensor());
    x_narrow.dbias.reset();
    expect_same(x_narrow, x_wide);
  });
}

TEST_F(Identities, all_weights_dropped_is_zero_and_keeps_lse) {
  for_random_cases(affordable(20), [](Random& random) {
    Question x = dense(random, 1);
    SCOPED_TRACE(describe(x));
    const Everything plain = everything({}, x.a, cotangents(x));
    x.a.dropout_p = 1;
    const Everything none = everything({}, x.a, cotangents(x));
    expect_same_bits("lse", none.lse.tensor(), plain.lse.tensor());
    for (std::int64_t n = 0; n < none.out.elements(); ++n) ASSERT_EQ(none.out.get(n), 0.0);
    for (std::int64_t n = 0; n < none.dv->elements(); ++n) ASSERT_EQ(none.dv->get(n), 0.0);
  });
}

}  // namespace
}  // namespace onefold::test
