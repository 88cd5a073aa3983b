// Forward and backward, row by row, as the formulas read:
//
//   O = Pd V          dV = Pd^T dO        dP = (dO V^T) keep / (1 - p)       delta = dO . O
//   dZ = P (dP - delta + dLSE)            dX = dZ (1 - tanh^2(X / cap))
//   dQ = scale dX K   dK = scale dX^T Q   dB = dZ   dSlope = -dZ . distance
//   dSink = e^(sink - lse) (dLSE - delta)
#include "reference/reference.h"

#include <cmath>

#include "reference/question.h"

namespace onefold::reference {
namespace {

Array zeros(std::vector<std::int64_t> shape) {
  std::int64_t count = 1;
  for (const std::int64_t extent : shape) count *= extent;
  return {std::move(shape), std::vector<double>(static_cast<std::size_t>(count), 0.0)};
}
Array like(const Tensor& t) {
  return zeros(std::vector<std::int64_t>(t.shape.begin(), t.shape.begin() + t.rank));
}
std::optional<Array> like(const std::optional<Tensor>& t) {
  if (!t) return std::nullopt;
  return like(*t);
}
double& at(Array& array, std::int64_t index) { return array.data[static_cast<std::size_t>(index)]; }

// out of one row: keys that it does not see are not touched, whatever their values are.
std::vector<double> weighted_values(const Question& n, std::int64_t b, std::int64_t h,
                                    const Row& row) {
  std::vector<double> out(static_cast<std::size_t>(n.dim_v), 0.0);
  for (const Key& key : row.keys) {
    for (std::int64_t d = 0; d < n.dim_v; ++d) {
      out[static_cast<std::size_t>(d)] += key.p * key.keep * n.v(b, key.j, h / n.group, d);
    }
  }
  if (n.a.dropout_p >= 1) std::fill(out.begin(), out.end(), 0.0);
  return out;
}

template <class Visit>
void for_each_row(const Question& n, Visit&& visit) {
  for (std::int64_t b = 0; b < n.batch; ++b) {
    for (std::int64_t h = 0; h < n.heads_q; ++h) {
      for (std::int64_t i = 0; i < n.spans[static_cast<std::size_t>(b)].q_count; ++i) {
        visit(b, h, i, n.row(b, h, i));
      }
    }
  }
}

}  // namespace

Forward forward(const Attention& attention) {
  const Question n(attention);
  Forward f{zeros(n.out_shape()), zeros(n.lse_shape())};
  for (double& x : f.lse.data) x = -INFINITY;
  for_each_row(n, [&](std::int64_t b, std::int64_t h, std::int64_t i, const Row& row) {
    at(f.lse, n.lse_index(b, i, h)) = row.lse;
    const std::vector<double> out = weighted_values(n, b, h, row);
    for (std::int64_t d = 0; d < n.dim_v; ++d) {
      at(f.out, n.q_index(b, i, h) * n.dim_v + d) = out[static_cast<std::size_t>(d)];
    }
  });
  return f;
}

Backward backward(const Attention& a, const std::optional<Tensor>& dout,
                  const std::optional<Tensor>& dlse) {
  const Question n(a);
  Backward g{like(a.q), like(a.k), like(a.v), like(a.bias), like(a.alibi_slopes), like(a.sinks)};
  for_each_row(n, [&](std::int64_t b, std::int64_t h, std::int64_t i, const Row& row) {
    if (row.empty) return;
    const std::vector<double> out = weighted_values(n, b, h, row);
    const std::int64_t hk = h / n.group;
    const auto dO = [&](std::int64_t d) { return dout ? n.dout(*dout, b, i, h, d) : 0.0; };
    const double dL = dlse ? n.dlse(*dlse, b, i, h) : 0.0;
    double delta = 0;
    for (std::int64_t d = 0; d < n.dim_v; ++d) delta += dO(d) * out[static_cast<std::size_t>(d)];
    for (const Key& key : row.keys) {
      double dp = 0;
      for (std::int64_t d = 0; d < n.dim_v; ++d) {
        dp += dO(d) * n.v(b, key.j, hk, d);
        at(g.dv, n.k_index(b, key.j, hk) * n.dim_v + d) += key.p * key.keep * dO(d);
      }
      const double dz = key.p * (dp * key.keep - delta + dL);
      const double dx = n.scale * dz * (a.softcap > 0 ? 1 - key.tanh * key.tanh : 1);
      for (std::int64_t d = 0; d < n.dim; ++d) {
        at(g.dq, n.q_index(b, i, h) * n.dim + d) += dx * n.k(b, key.j, hk, d);
        at(g.dk, n.k_index(b, key.j, hk) * n.dim + d) += dx * n.q(b, i, h, d);
      }
      if (a.bias) at(*g.dbias, Question::grid_index(*a.bias, b, h, i, key.j)) += dz;
      if (a.alibi_slopes) {
        const std::int64_t slope = a.alibi_slopes->rank == 1 ? h : b * n.heads_q + h;
        at(*g.dslopes, slope) -= dz * key.distance;
      }
    }
    if (row.has_sink) at(*g.dsinks, h) += row.sink_p * (dL - delta);
  });
  return g;
}

// ---- error terms ----

const char* name(Source source) {
  constexpr const char* kNames[kNumSources] = {"score",   "added",     "exponent", "weight",
                                               "sum",     "underflow", "out",      "lse",
                                               "product", "accumulate"};
  return kNames[static_cast<int>(source)];
}

namespace {

using Terms = std::array<double, kNumSources>;

Array terms_of(std::vector<std::int64_t> shape) {
  shape.insert(shape.begin(), kNumSources);
  return zeros(std::move(shape));
}
std::optional<Array> terms_like(const std::optional<Tensor>& t) {
  if (!t) return std::nullopt;
  return terms_of(like(*t).shape);
}
void add(Array& to, std::int64_t index, const Terms& terms, double factor) {
  const std::size_t plane = to.data.size() / kNumSources;
  for (int source = 0; source < kNumSources; ++source) {
    to.data[static_cast<std::size_t>(source) * plane + static_cast<std::size_t>(index)] +=
        terms[static_cast<std::size_t>(source)] * factor;
  }
}
double& of(Terms& terms, Source source) { return terms[static_cast<std::size_t>(source)]; }

// Terms of the relative error of e^(z - reference) for one key (or the sink).
Terms weight_terms(double magnitude, double added, double exponent) {
  Terms t{};
  of(t, Source::kScore) = magnitude;
  of(t, Source::kAdded) = added;
  of(t, Source::kExponent) = exponent;
  of(t, Source::kWeight) = 1;
  return t;
}

struct RowTerms {
  Terms lse{};
  std::vector<Terms> out;
  std::vector<double> squared_value, squared_deviation;
};

RowTerms row_terms(const Question& n, std::int64_t b, std::int64_t h, const Row& row,
                   const std::vector<double>& out) {
  RowTerms t;
  const auto dim_v = static_cast<std::size_t>(n.dim_v);
  t.out.resize(dim_v);
  t.squared_value.resize(dim_v);
  t.squared_deviation.resize(dim_v);
  const double count = double(row.keys.size()) + row.has_sink;
  const auto absorb = [&](const Terms& weight, double p, std::size_t d, double w) {
    for (std::size_t s = 0; s < kNumSources; ++s) {
      t.out[d][s] += p * std::fabs(w - out[d]) * weight[s];
    }
    of(t.out[d], Source::kSum) += p * std::fabs(w);
  };
  std::vector<double> largest(dim_v, 0.0);
  for (const Key& key : row.keys) {
    const Terms weight = weight_terms(key.magnitude, key.added, row.top - key.z);
    for (std::size_t s = 0; s < kNumSources; ++s) t.lse[s] += key.p * weight[s];
    for (std::size_t d = 0; d < dim_v; ++d) {
      const double w = key.keep * n.v(b, key.j, h / n.group, static_cast<std::int64_t>(d));
      absorb(weight, key.p, d, w);
      largest[d] = std::fmax(largest[d], std::fabs(w));
      t.squared_value[d] += key.p * key.p * w * w;
      t.squared_deviation[d] += key.p * key.p * (w - out[d]) * (w - out[d]);
    }
  }
  if (row.has_sink) {
    const Terms weight = weight_terms(0, std::fabs(row.sink), row.top - row.sink);
    for (std::size_t s = 0; s < kNumSources; ++s) t.lse[s] += row.sink_p * weight[s];
    for (std::size_t d = 0; d < dim_v; ++d) absorb(weight, row.sink_p, d, 0);
  }
  of(t.lse, Source::kSum) += 1;
  of(t.lse, Source::kUnderflow) += count / row.sum;
  of(t.lse, Source::kLse) += std::fabs(row.lse);
  for (std::size_t d = 0; d < dim_v; ++d) {
    of(t.out[d], Source::kUnderflow) += count / row.sum * largest[d];
    of(t.out[d], Source::kOut) += std::fabs(out[d]);
  }
  return t;
}

// Adds factor * from to `to`, source by source.
void accumulate(Terms& to, const Terms& from, double factor) {
  for (std::size_t s = 0; s < kNumSources; ++s) to[s] += from[s] * factor;
}

}  // namespace

ForwardTerms forward_terms(const Attention& attention) {
  const Question n(attention);
  ForwardTerms f{terms_of(n.out_shape()), terms_of(n.lse_shape()), zeros(n.out_shape()),
                 zeros(n.out_shape()),    zeros(n.lse_shape()),    zeros(n.lse_shape()),
                 zeros(n.lse_shape()),    zeros(n.lse_shape())};
  for (double& x : f.max_score.data) x = -INFINITY;
  for_each_row(n, [&](std::int64_t b, std::int64_t h, std::int64_t i, const Row& row) {
    if (row.empty) return;
    const RowTerms t = row_terms(n, b, h, row, weighted_values(n, b, h, row));
    const std::int64_t lse = n.lse_index(b, i, h), out = n.q_index(b, i, h) * n.dim_v;
    add(f.lse, lse, t.lse, 1);
    for (std::int64_t d = 0; d < n.dim_v; ++d) {
      add(f.out, out + d, t.out[static_cast<std::size_t>(d)], 1);
      at(f.squared_value, out + d) = t.squared_value[static_cast<std::size_t>(d)];
      at(f.squared_deviation, out + d) = t.squared_deviation[static_cast<std::size_t>(d)];
    }
    at(f.max_score, lse) = row.top;
    at(f.sum, lse) = row.sum;
    at(f.count, lse) = double(row.keys.size());
    for (const Key& key : row.keys) {
      at(f.max_magnitude, lse) = std::fmax(at(f.max_magnitude, lse), key.magnitude);
    }
  });
  return f;
}

BackwardTerms backward_terms(const Attention& a, const std::optional<Tensor>& dout,
                             const std::optional<Tensor>& dlse) {
  const Question n(a);
  BackwardTerms g{terms_of(like(a.q).shape), terms_of(like(a.k).shape),  terms_of(like(a.v).shape),
                  terms_like(a.bias),        terms_like(a.alibi_slopes), terms_like(a.sinks)};
  for_each_row(n, [&](std::int64_t b, std::int64_t h, std::int64_t i, const Row& row) {
    if (row.empty) return;
    const std::vector<double> out = weighted_values(n, b, h, row);
    const RowTerms forward = row_terms(n, b, h, row, out);
    const std::int64_t hk = h / n.group;
    const auto dO = [&](std::int64_t d) { return dout ? n.dout(*dout, b, i, h, d) : 0.0; };
    const double dL = dlse ? n.dlse(*dlse, b, i, h) : 0.0;
    // delta inherits every error of out, and has its own.
    double delta = 0, size = 0;
    Terms delta_terms{};
    for (std::int64_t d = 0; d < n.dim_v; ++d) {
      const auto at_d = static_cast<std::size_t>(d);
      delta += dO(d) * out[at_d];
      size += std::fabs(dO(d) * out[at_d]);
      accumulate(delta_terms, forward.out[at_d], std::fabs(dO(d)));
    }
    of(delta_terms, Source::kProduct) += size + std::fabs(dL);
    const auto weight_error = [&](double magnitude, double added, double z) {
      Terms t = weight_terms(magnitude, added, std::fabs(z - row.lse));
      accumulate(t, forward.lse, 1);
      return t;
    };
    for (const Key& key : row.keys) {
      const Terms weight = weight_error(key.magnitude, key.added, key.z);
      double dp = 0, dp_size = 0;
      for (std::int64_t d = 0; d < n.dim_v; ++d) {
        const double product = dO(d) * n.v(b, key.j, hk, d);
        dp += product;
        dp_size += std::fabs(product);
        const std::int64_t index = n.k_index(b, key.j, hk) * n.dim_v + d;
        Terms dv{};
        accumulate(dv, weight, key.p * key.keep * std::fabs(dO(d)));
        of(dv, Source::kUnderflow) += key.keep * std::fabs(dO(d));
        of(dv, Source::kAccumulate) += key.p * key.keep * std::fabs(dO(d));
        add(g.dv, index, dv, 1);
      }
      const double inner = dp * key.keep - delta + dL, dz = key.p * inner;
      Terms dz_terms{};
      accumulate(dz_terms, weight, key.p * std::fabs(inner));
      accumulate(dz_terms, delta_terms, key.p);
      of(dz_terms, Source::kProduct) += key.p * (dp_size * key.keep + std::fabs(inner));
      of(dz_terms, Source::kUnderflow) += std::fabs(inner);
      // d(cap)/dX = 1 - tanh^2, whose own error follows the score's.
      const double cap = a.softcap > 0 ? 1 - key.tanh * key.tanh : 1;
      Terms dx_terms{};
      accumulate(dx_terms, dz_terms, cap);
      if (a.softcap > 0) {
        of(dx_terms, Source::kScore) +=
            std::fabs(dz) * 2 * std::fabs(key.tanh) * cap / a.softcap * key.magnitude;
        of(dx_terms, Source::kAdded) += std::fabs(dz) * 2;
      }
      const double dx = n.scale * dz * cap;
      for (std::int64_t d = 0; d < n.dim; ++d) {
        const double k = std::fabs(n.k(b, key.j, hk, d)), q = std::fabs(n.q(b, i, h, d));
        Terms dq{}, dk{};
        accumulate(dq, dx_terms, std::fabs(n.scale) * k);
        of(dq, Source::kAccumulate) += std::fabs(dx) * k;
        add(g.dq, n.q_index(b, i, h) * n.dim + d, dq, 1);
        accumulate(dk, dx_terms, std::fabs(n.scale) * q);
        of(dk, Source::kAccumulate) += std::fabs(dx) * q;
        add(g.dk, n.k_index(b, key.j, hk) * n.dim + d, dk, 1);
      }
      of(dz_terms, Source::kAccumulate) += std::fabs(dz);
      if (a.bias) add(*g.dbias, Question::grid_index(*a.bias, b, h, i, key.j), dz_terms, 1);
      if (a.alibi_slopes) {
        const std::int64_t slope = a.alibi_slopes->rank == 1 ? h : b * n.heads_q + h;
        add(*g.dslopes, slope, dz_terms, key.distance);
      }
    }
    if (row.has_sink) {
      Terms sink{};
      const double inner = std::fabs(dL - delta);
      accumulate(sink, weight_error(0, std::fabs(row.sink), row.sink), row.sink_p * inner);
      accumulate(sink, delta_terms, row.sink_p);
      of(sink, Source::kProduct) += row.sink_p * inner;
      of(sink, Source::kAccumulate) += row.sink_p * inner;
      add(*g.dsinks, h, sink, 1);
    }
  });
  return g;
}

}  // namespace onefold::reference
