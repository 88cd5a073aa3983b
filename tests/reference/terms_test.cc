// The terms of the error bounds: equal to their definitions, and never exceeded by a computation
// that errs at every step by as much as the sizes allow.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <vector>

#include "reference/reference.h"
#include "tests/algebra/random.h"
#include "tests/reference/random_question.h"

namespace onefold::test {
namespace {

using reference::kNumSources;
using reference::Source;

double term(const reference::Array& terms, Source source, std::size_t element) {
  const std::size_t plane = terms.data.size() / kNumSources;
  return terms.data[static_cast<std::size_t>(source) * plane + element];
}

// One sequence, one head, every option that changes a score.
struct Problem {
  std::int64_t rows, keys, dim, dim_v;
  std::vector<double> q, k, v, bias, slope, sink, dout, dlse;
  Attention a;

  explicit Problem(Random& random)
      : rows(random.integer(1, 3)),
        keys(random.integer(1, 6)),
        dim(random.integer(1, 3)),
        dim_v(random.integer(1, 3)) {
    const auto normal = [&](std::vector<double>& to, std::int64_t count, double size) {
      for (std::int64_t n = 0; n < count; ++n) to.push_back(size * random.normal());
    };
    const double spread = random.chance(0.3) ? 3 : 1;
    normal(q, rows * dim, spread);
    normal(k, keys * dim, spread);
    normal(v, keys * dim_v, 1);
    normal(bias, rows * keys, 1);
    normal(slope, 1, 0.3);
    normal(sink, 1, 1);
    normal(dout, rows * dim_v, 1);
    normal(dlse, rows, 1);
    if (random.chance(0.3)) {  // values around a common mean
      for (double& x : v) x = 10 + 0.1 * x;
    }
    const auto packed = [](std::vector<double>& data, std::initializer_list<std::int64_t> shape) {
      return Tensor::packed(data.data(), DType::kFloat64, shape);
    };
    a.q = packed(q, {1, rows, 1, dim});
    a.k = packed(k, {1, keys, 1, dim});
    a.v = packed(v, {1, keys, 1, dim_v});
    a.scale = random.uniform(-1, 1);
    if (random.chance(0.4)) a.softcap = random.uniform(0.5, 3);
    if (random.chance(0.5)) a.bias = packed(bias, {rows, keys});
    if (random.chance(0.5)) a.alibi_slopes = packed(slope, {1});
    if (random.chance(0.5)) a.sinks = packed(sink, {1});
    if (random.chance(0.3)) a.dropout_p = 0.4;
  }
  Tensor dout_tensor() { return Tensor::packed(dout.data(), DType::kFloat64, {1, rows, 1, dim_v}); }
  Tensor dlse_tensor() { return Tensor::packed(dlse.data(), DType::kFloat64, {1, 1, rows}); }
};

TEST(OracleTerms, are_those_of_their_definitions_for_two_keys) {
  // P = (1/4, 3/4), v = (8, 4), out = 5, A = (0, log 3), tau = (log 3, 0), l = 4/3.
  const double log3 = std::log(3.0);
  std::vector<double> q = {1}, k = {0, log3}, v = {8, 4};
  Attention a;
  a.q = Tensor::packed(q.data(), DType::kFloat64, {1, 1, 1, 1});
  a.k = Tensor::packed(k.data(), DType::kFloat64, {1, 2, 1, 1});
  a.v = Tensor::packed(v.data(), DType::kFloat64, {1, 2, 1, 1});
  const reference::ForwardTerms t = reference::forward_terms(a);
  EXPECT_EQ(t.out.shape, (Shape{kNumSources, 1, 1, 1, 1}));
  EXPECT_EQ(t.lse.shape, (Shape{kNumSources, 1, 1, 1}));
  const auto expect = [](const reference::Array& terms,
                         const std::array<double, kNumSources>& expected) {
    for (int s = 0; s < kNumSources; ++s) {
      EXPECT_NEAR(term(terms, static_cast<Source>(s), 0), expected[s], 32 * 0x1p-53)
          << reference::name(static_cast<Source>(s));
    }
  };
  // score added exponent weight sum underflow out lse product accumulate
  expect(t.out, {0.75 * log3, 0, 0.75 * log3, 1.5, 5, 2 / (4 / 3.0) * 8, 5, 0, 0, 0});
  expect(t.lse, {0.75 * log3, 0, 0.25 * log3, 1, 1, 2 / (4 / 3.0), 0, std::log(4.0), 0, 0});
  EXPECT_NEAR(t.squared_value.data[0], 4 + 9, 32 * 0x1p-53);
  EXPECT_NEAR(t.squared_deviation.data[0], 2 * 0.75 * 0.75, 32 * 0x1p-53);
  EXPECT_EQ(t.max_score.data[0], log3);
  EXPECT_NEAR(t.sum.data[0], 4 / 3.0, 32 * 0x1p-53);
  EXPECT_EQ(t.count.data[0], 2);
  EXPECT_EQ(t.max_magnitude.data[0], log3);
}

TEST(OracleTerms, every_source_has_a_name_of_its_own) {
  for (int s = 0; s < kNumSources; ++s) {
    for (int t = 0; t < s; ++t) {
      EXPECT_STRNE(reference::name(static_cast<Source>(s)),
                   reference::name(static_cast<Source>(t)));
    }
  }
}

// Attention in which every operation errs: by a factor 1 + size * e, e in [-1, 1], where the source
// is relative, and by size * e where it is absolute.
class Noisy {
 public:
  using Sizes = std::array<double, kNumSources>;
  Noisy(Problem& p, const Sizes& sizes, Random& random)
      : p_(p),
        sizes_(sizes),
        r_(random),
        out(p.rows * p.dim_v),
        lse(p.rows),
        dq(p.rows * p.dim),
        dk(p.keys * p.dim),
        dv(p.keys * p.dim_v),
        dbias(p.rows * p.keys) {
    for (std::int64_t i = 0; i < p.rows; ++i) forward(i);
    for (std::int64_t i = 0; i < p.rows; ++i) backward(i);
  }

 private:
  Problem& p_;
  const Sizes& sizes_;
  Random& r_;

 public:
  std::vector<double> out, lse, dq, dk, dv, dbias;
  double dslope = 0, dsink = 0;

 private:
  double error(Source s) {
    const double e = r_.chance(0.5) ? (r_.chance(0.5) ? 1 : -1) : r_.uniform(-1, 1);
    return sizes_[static_cast<std::size_t>(s)] * e;
  }
  double off(Source s) { return 1 + error(s); }

  double distance(std::int64_t i, std::int64_t j) const {
    return static_cast<double>(std::abs(i + p_.keys - p_.rows - j));
  }
  double keep(std::int64_t i, std::int64_t j) const {
    if (p_.a.dropout_p == 0) return 1;
    const auto words = reference::philox4x32_10(
        {static_cast<std::uint32_t>(i / 2), static_cast<std::uint32_t>(j / 2), 0, 0}, {0, 0});
    const bool kept = words[2 * (i % 2) + j % 2] >= std::floor(p_.a.dropout_p * 0x1p32);
    return kept ? 1 / (1 - p_.a.dropout_p) : 0;
  }
  // Z, and tanh of the cap if there is one.
  double score(std::int64_t i, std::int64_t j, double& capped) {
    double dot = 0;
    for (std::int64_t d = 0; d < p_.dim; ++d) {
      dot += p_.q[i * p_.dim + d] * p_.k[j * p_.dim + d] * off(Source::kScore);
    }
    double z = *p_.a.scale * dot;
    if (p_.a.softcap > 0) {
      capped = std::tanh(z / p_.a.softcap) * off(Source::kAdded);
      z = p_.a.softcap * capped;
    }
    if (p_.a.bias) z += p_.bias[i * p_.keys + j] * off(Source::kAdded);
    if (p_.a.alibi_slopes) z -= p_.slope[0] * distance(i, j) * off(Source::kAdded);
    return z;
  }
  double sink() { return p_.sink[0] * off(Source::kAdded); }
  double weight(double z, double against) {
    const double exponent = (z - against) * off(Source::kExponent);
    return std::exp(exponent) * off(Source::kWeight) + error(Source::kUnderflow);
  }

  void forward(std::int64_t i) {
    double unused = 0;
    std::vector<double> z;
    for (std::int64_t j = 0; j < p_.keys; ++j) z.push_back(score(i, j, unused));
    double top = *std::max_element(z.begin(), z.end());
    const double sink_score = sink();
    if (p_.a.sinks) top = std::max(top, sink_score);
    double sum = p_.a.sinks ? weight(sink_score, top) : 0;
    std::vector<double> weights;
    for (const double score : z) weights.push_back(weight(score, top));
    for (const double w : weights) sum += w;
    lse[i] = (top + std::log(sum * off(Source::kSum))) * off(Source::kLse);
    for (std::int64_t d = 0; d < p_.dim_v; ++d) {
      double total = 0;  // the size of kSum is that of numerator and denominator together
      for (std::int64_t j = 0; j < p_.keys; ++j) {
        total += weights[j] * keep(i, j) * p_.v[j * p_.dim_v + d] * (1 + error(Source::kSum) / 2);
      }
      out[i * p_.dim_v + d] = total / sum * (1 + error(Source::kSum) / 2) * off(Source::kOut);
    }
  }

  void backward(std::int64_t i) {
    double delta = 0;
    for (std::int64_t d = 0; d < p_.dim_v; ++d) {
      delta += p_.dout[i * p_.dim_v + d] * out[i * p_.dim_v + d] * off(Source::kProduct);
    }
    const double dL = p_.dlse[i] * off(Source::kProduct);
    const double scale = *p_.a.scale;
    for (std::int64_t j = 0; j < p_.keys; ++j) {
      double capped = 0, dP = 0;
      const double p = weight(score(i, j, capped), lse[i]);
      for (std::int64_t d = 0; d < p_.dim_v; ++d) {
        const double dO = p_.dout[i * p_.dim_v + d];
        dP += keep(i, j) * dO * p_.v[j * p_.dim_v + d] * off(Source::kProduct);
        dv[j * p_.dim_v + d] += p * keep(i, j) * dO * off(Source::kAccumulate);
      }
      const double dZ = p * (dP - delta + dL);
      const double dX = p_.a.softcap > 0 ? dZ * (1 - capped * capped) : dZ;
      for (std::int64_t d = 0; d < p_.dim; ++d) {
        dq[i * p_.dim + d] += scale * dX * p_.k[j * p_.dim + d] * off(Source::kAccumulate);
        dk[j * p_.dim + d] += scale * dX * p_.q[i * p_.dim + d] * off(Source::kAccumulate);
      }
      dbias[i * p_.keys + j] += dZ * off(Source::kAccumulate);
      dslope -= dZ * distance(i, j) * off(Source::kAccumulate);
    }
    if (p_.a.sinks) {
      dsink += weight(sink(), lse[i]) * (dL - delta) * off(Source::kAccumulate);
    }
  }
};

// Returns the largest error over its bound.
double worst(const char* what, const std::vector<double>& noisy, const reference::Array& exact,
             const reference::Array& terms, const Noisy::Sizes& sizes) {
  double most = 0;
  for (std::size_t n = 0; n < noisy.size(); ++n) {
    double bound = 0, size = 0;
    for (int s = 0; s < kNumSources; ++s) {
      bound += sizes[s] * term(terms, static_cast<Source>(s), n);
      size += term(terms, static_cast<Source>(s), n);
    }
    // The rounding of both sides, which is far below errors of 1e-7.
    const double rounding = 100 * 0x1p-53 * (size + std::abs(exact.data[n]));
    const double error = std::abs(noisy[n] - exact.data[n]);
    // Second order: errors of 1e-7 move each other by that much, some twenty of them at once.
    EXPECT_LE(error, bound * (1 + 1e-5) + rounding) << what << "[" << n << "]";
    if (bound > 0) most = std::max(most, error / bound);
  }
  return most;
}

// The largest part of its bound that any error reached, per result.
std::array<double, 8> hold(Random& random, const Noisy::Sizes& sizes) {
  Problem p(random);
  const reference::Forward f = reference::forward(p.a);
  const reference::ForwardTerms ft = reference::forward_terms(p.a);
  const Tensor dout = p.dout_tensor(), dlse = p.dlse_tensor();
  const reference::Backward g = reference::backward(p.a, dout, dlse);
  const reference::BackwardTerms gt = reference::backward_terms(p.a, dout, dlse);
  const Noisy noisy(p, sizes, random);
  std::array<double, 8> most{};
  most[0] = worst("out", noisy.out, f.out, ft.out, sizes);
  most[1] = worst("lse", noisy.lse, f.lse, ft.lse, sizes);
  most[2] = worst("dq", noisy.dq, g.dq, gt.dq, sizes);
  most[3] = worst("dk", noisy.dk, g.dk, gt.dk, sizes);
  most[4] = worst("dv", noisy.dv, g.dv, gt.dv, sizes);
  if (g.dbias) most[5] = worst("dbias", noisy.dbias, *g.dbias, *gt.dbias, sizes);
  if (g.dslopes) most[6] = worst("dslopes", {noisy.dslope}, *g.dslopes, *gt.dslopes, sizes);
  if (g.dsinks) most[7] = worst("dsinks", {noisy.dsink}, *g.dsinks, *gt.dsinks, sizes);
  return most;
}

TEST(OracleTerms, bound_a_computation_that_errs_at_every_step) {
  std::array<double, 8> most{};
  for_random_cases(400, [&](Random& random) {
    Noisy::Sizes sizes;
    for (double& size : sizes) size = random.chance(0.3) ? 0 : 1e-7 * random.uniform();
    const std::array<double, 8> reached = hold(random, sizes);
    for (std::size_t n = 0; n < most.size(); ++n) most[n] = std::max(most[n], reached[n]);
  });
  // Bounds that nothing comes near would hold for wrong results as well.
  for (const double part : most) EXPECT_GT(part, 0.2);
}

TEST(OracleTerms, bound_each_source_alone) {
  for (int s = 0; s < kNumSources; ++s) {
    SCOPED_TRACE(reference::name(static_cast<Source>(s)));
    double most = 0;
    for_random_cases(150, [&](Random& random) {
      Noisy::Sizes sizes{};
      sizes[s] = 1e-7;
      for (const double part : hold(random, sizes)) most = std::max(most, part);
    });
    EXPECT_GT(most, 0.4);
  }
}

TEST(OracleTerms, of_a_row_that_sees_nothing_are_zero) {
  std::vector<double> q = {1}, dout = {kNaN}, dlse = {kNaN};
  Attention a;
  a.q = Tensor::packed(q.data(), DType::kFloat64, {1, 1, 1, 1});
  a.k = a.v = Tensor::packed(nullptr, DType::kFloat64, {1, 0, 1, 1});
  const reference::ForwardTerms t = reference::forward_terms(a);
  for (const double x : t.out.data) EXPECT_EQ(x, 0.0);
  for (const double x : t.lse.data) EXPECT_EQ(x, 0.0);
  EXPECT_EQ(t.max_score.data[0], -kInfinity);
  EXPECT_EQ(t.count.data[0], 0.0);
  const reference::BackwardTerms g =
      reference::backward_terms(a, Tensor::packed(dout.data(), DType::kFloat64, {1, 1, 1, 1}),
                                Tensor::packed(dlse.data(), DType::kFloat64, {1, 1, 1}));
  for (const double x : g.dq.data) EXPECT_EQ(x, 0.0);
}

TEST(OracleTerms, have_the_shapes_of_their_results_and_are_finite_for_every_option) {
  for_random_cases(100, [](Random& random) {
    RandomQuestion question(random);
    SCOPED_TRACE(question.text);
    const auto expect_terms = [](const reference::Array& terms, Shape shape) {
      shape.insert(shape.begin(), kNumSources);
      EXPECT_EQ(terms.shape, shape);
      for (const double x : terms.data) EXPECT_TRUE(x >= 0 && x < kInfinity) << x;
    };
    const Attention& a = question.attention;
    const reference::Forward f = reference::forward(a);
    const reference::ForwardTerms t = reference::forward_terms(a);
    expect_terms(t.out, f.out.shape);
    expect_terms(t.lse, f.lse.shape);
    EXPECT_EQ(t.squared_value.shape, f.out.shape);
    EXPECT_EQ(t.max_magnitude.shape, f.lse.shape);
    const reference::BackwardTerms g = reference::backward_terms(a, question.dout, question.dlse);
    expect_terms(g.dq, shape_of(a.q));
    expect_terms(g.dk, shape_of(a.k));
    expect_terms(g.dv, shape_of(a.v));
    if (a.bias) expect_terms(*g.dbias, shape_of(*a.bias));
    if (a.alibi_slopes) expect_terms(*g.dslopes, shape_of(*a.alibi_slopes));
    if (a.sinks) expect_terms(*g.dsinks, shape_of(*a.sinks));
  });
}

}  // namespace
}  // namespace onefold::test
