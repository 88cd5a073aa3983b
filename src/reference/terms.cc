// The terms of the error bounds: what each source of rounding does to each result, to first order.
//
// Forward. With weights in error by eta_j (relative), out = N / l moves by sum_j P_j |w_j - out|
// eta_j and lse by sum_j P_j eta_j. Backward. P = e^(Z - lse) carries the errors of Z and of lse,
// delta = dout . out those of out, and both reach the gradients through dZ = P * (dP - delta + dL).
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "reference/question.h"
#include "reference/reference.h"

namespace onefold::reference {
namespace {

using std::abs;
using Errors = std::array<double, kNumSources>;  // indexed by source

constexpr std::size_t at(Source source) { return static_cast<std::size_t>(source); }

// (kNumSources, S...) with a way to add to one element of S.
class Accumulator {
 public:
  explicit Accumulator(std::vector<std::int64_t> shape) {
    shape.insert(shape.begin(), kNumSources);
    array_ = filled(std::move(shape), 0.0);
    plane_ = static_cast<std::int64_t>(array_.data.size()) / kNumSources;
  }
  void add(std::int64_t place, const Errors& errors, double factor = 1) {
    add_row(place, errors, 1, &factor, 1);
  }
  // Adds errors * |factor * x_d| to elements place + d.
  void add_row(std::int64_t place, const Errors& errors, double factor, const double* x,
               std::int64_t width) {
    for (std::int64_t s = 0; s < kNumSources; ++s) {
      if (errors[s] == 0) continue;
      double* const to = array_.data.data() + s * plane_ + place;
      for (std::int64_t d = 0; d < width; ++d) to[d] += errors[s] * abs(factor * x[d]);
    }
  }
  Array take() { return std::move(array_); }

 private:
  Array array_;
  std::int64_t plane_ = 0;
};

Accumulator like(const Tensor& t) {
  return Accumulator({t.shape.begin(), t.shape.begin() + t.rank});
}
std::optional<Accumulator> like(const std::optional<Tensor>& t) {
  if (!t) return std::nullopt;
  return like(*t);
}
std::optional<Array> take(std::optional<Accumulator>& accumulator) {
  if (!accumulator) return std::nullopt;
  return accumulator->take();
}

// The sink as one more key: no product, its own size added, never kept.
Key sink_key(const Row& row) {
  Key key;
  key.score = row.sink;
  key.added = abs(row.sink);
  key.keep = 0;
  key.p = row.sink_p;
  return key;
}

std::vector<Key> keys_and_sink(const Row& row) {
  std::vector<Key> all = row.keys;
  if (row.has_sink) all.push_back(sink_key(row));
  return all;
}

double weight_count(const Row& row) {
  return static_cast<double>(row.keys.size()) + (row.has_sink ? 1 : 0);
}

double smallest_normal(DType dtype) {
  if (dtype == DType::kFloat64) return std::numeric_limits<double>::min();
  return dtype == DType::kFloat16 ? 0x1p-14 : std::numeric_limits<float>::min();
}

// ---- forward ----

Errors lse_errors(const Row& row) {
  Errors e{};
  for (const Key& key : keys_and_sink(row)) {
    if (key.p == 0) continue;
    e[at(Source::kScore)] += key.p * key.magnitude;
    e[at(Source::kAdded)] += key.p * key.added;
    e[at(Source::kExponent)] += key.p * (row.top - key.score);
  }
  e[at(Source::kWeight)] = 1;
  e[at(Source::kSum)] = 1;
  e[at(Source::kUnderflow)] = weight_count(row) / row.sum;
  e[at(Source::kLse)] = abs(row.lse);
  return e;
}

struct OutErrors {
  double out = 0, squared_value = 0, squared_deviation = 0;
  Errors errors{};
};

// Component d of a row's output. A key without v is the sink.
// `least`: the smallest normal number of out's dtype; below it errors are no longer relative.
OutErrors out_errors(const Row& row, const Matrix& v, std::int64_t d, double least) {
  const auto w = [&](const Key& key) { return key.keep * v.row(key.j)[d]; };
  OutErrors r;
  double largest = 0;
  for (const Key& key : row.keys) {
    r.out += key.p * w(key);
    largest = std::max(largest, abs(w(key)));
  }
  Errors& e = r.errors;
  const auto add = [&](const Key& key, double deviation) {
    e[at(Source::kScore)] += deviation * key.magnitude;
    e[at(Source::kAdded)] += deviation * key.added;
    e[at(Source::kExponent)] += deviation * (row.top - key.score);
    e[at(Source::kWeight)] += deviation;
  };
  for (const Key& key : row.keys) {
    if (key.p == 0) continue;
    const double value = key.p * w(key), deviation = key.p * (w(key) - r.out);
    add(key, abs(deviation));
    e[at(Source::kSum)] += abs(value);
    r.squared_value += value * value;
    r.squared_deviation += deviation * deviation;
  }
  if (row.sink_p != 0) add(sink_key(row), row.sink_p * abs(r.out));
  e[at(Source::kUnderflow)] = weight_count(row) / row.sum * largest;
  e[at(Source::kOut)] = std::max(abs(r.out), least);
  return r;
}

// ---- backward ----

// What a row's gradients are made of besides its keys.
struct RowGradient {
  const double* q = nullptr;
  const double* dO = nullptr;  // null: no dout
  double dL = 0, delta = 0;
  double delta_size = 0;  // sum_d |dO_d out_d|
  Errors delta_errors{};  // of delta, as it comes from out
  Errors lse{};           // of lse
};

RowGradient row_gradient(const Row& row, const Matrix& v, const double* q, const double* dO,
                         double dL, double least) {
  RowGradient g;
  g.q = q;
  g.dO = dO;
  g.dL = dL;
  g.lse = lse_errors(row);
  for (std::int64_t d = 0; dO != nullptr && d < v.width; ++d) {
    const OutErrors out = out_errors(row, v, d, least);
    g.delta += dO[d] * out.out;
    g.delta_size += abs(dO[d] * out.out);
    for (int s = 0; s < kNumSources; ++s) g.delta_errors[s] += abs(dO[d]) * out.errors[s];
  }
  return g;
}

struct KeyGradient {
  double dX = 0, dZ = 0;
  Errors p{}, dx{}, dz{};  // errors of P * keep, dX, dZ
};

// `v` is null for the sink.
KeyGradient key_gradient(const Row& row, const RowGradient& g, const Key& key, const double* v,
                         std::int64_t dim_v, double softcap) {
  KeyGradient r;
  double dP = 0, dP_size = 0;
  for (std::int64_t d = 0; g.dO != nullptr && v != nullptr && d < dim_v; ++d) {
    dP += key.keep * g.dO[d] * v[d];
    dP_size += abs(key.keep * g.dO[d] * v[d]);
  }
  const double inner = dP - g.delta + g.dL;
  r.dZ = key.p * inner;
  r.dX = r.dZ * key.cap_slope;
  r.p[at(Source::kUnderflow)] = key.keep;
  r.dz[at(Source::kUnderflow)] = abs(inner);
  if (key.p != 0) {
    // P = e^(Z - lse): the errors of Z, of the exponent and of lse itself; exp2 once more.
    Errors relative = g.lse;
    relative[at(Source::kScore)] += key.magnitude;
    relative[at(Source::kAdded)] += key.added;
    relative[at(Source::kExponent)] += abs(key.score - row.lse);
    relative[at(Source::kWeight)] += 1;
    Errors of_inner = g.delta_errors;
    of_inner[at(Source::kProduct)] += dP_size + g.delta_size + abs(g.dL);
    for (int s = 0; s < kNumSources; ++s) {
      r.p[s] += key.p * key.keep * relative[s];
      r.dz[s] += abs(r.dZ) * relative[s] + key.p * of_inner[s];
    }
  }
  for (int s = 0; s < kNumSources; ++s) r.dx[s] = key.cap_slope * r.dz[s];
  if (softcap > 0) {  // the slope 1 - t^2 of the cap, from a t = tanh(X / softcap) with an error
    const double t = abs(key.capped);
    r.dx[at(Source::kScore)] += abs(r.dZ) * 2 * t * key.cap_slope / softcap * key.magnitude;
    r.dx[at(Source::kAdded)] += abs(r.dZ) * (1 + t * t);
  }
  return r;
}

Errors with_accumulation(Errors errors, double size) {
  errors[at(Source::kAccumulate)] += abs(size);
  return errors;
}

struct Accumulators {
  Accumulator dq, dk, dv;
  std::optional<Accumulator> dbias, dslopes, dsinks;
};

// What key `key` of row (b, h, i) adds to the terms of every gradient.
void add_key(const Question& ask, std::int64_t b, std::int64_t h, std::int64_t i,
             const RowGradient& g, const Key& key, const KeyGradient& e, const double* k,
             Accumulators& to) {
  const std::int64_t kv = ask.kv_head(h);
  const Errors dx = with_accumulation(e.dx, e.dX), dz = with_accumulation(e.dz, e.dZ);
  to.dq.add_row(ask.q_place(b, h, i) * ask.dim, dx, ask.scale, k, ask.dim);
  to.dk.add_row(ask.k_place(b, kv, key.j) * ask.dim, dx, ask.scale, g.q, ask.dim);
  if (g.dO != nullptr) {
    const Errors p = with_accumulation(e.p, key.p * key.keep);
    to.dv.add_row(ask.k_place(b, kv, key.j) * ask.dim_v, p, 1, g.dO, ask.dim_v);
  }
  if (to.dbias) to.dbias->add(ask.bias_place(b, h, i, key.j), dz);
  if (to.dslopes) to.dslopes->add(ask.slope_place(b, h), dz, key.distance);
}

}  // namespace

ForwardTerms forward_terms(const Attention& attention) {
  const Question ask(attention);
  const auto like_out = [&](double value) { return filled(ask.out_shape(), value); };
  const auto like_lse = [&](double value) { return filled(ask.lse_shape(), value); };
  Accumulator out(ask.out_shape()), lse(ask.lse_shape());
  ForwardTerms t{{},
                 {},
                 like_out(0),
                 like_out(0),
                 like_lse(-std::numeric_limits<double>::infinity()),
                 like_lse(0),
                 like_lse(0),
                 like_lse(0)};
  for_each_row(ask, std::nullopt, [&](const Visit& at) {
    const Row& row = at.row;
    const std::int64_t place = ask.lse_place(at.b, at.h, at.i);
    t.max_score.data[place] = row.top;
    t.sum.data[place] = row.sum;
    t.count.data[place] = static_cast<double>(row.keys.size());
    for (const Key& key : row.keys) {
      t.max_magnitude.data[place] = std::max(t.max_magnitude.data[place], key.magnitude);
    }
    if (!row.live) return;
    lse.add(place, lse_errors(row));
    // All dropped: out is 0, whatever v holds.
    for (std::int64_t d = 0; attention.dropout_p < 1 && d < ask.dim_v; ++d) {
      const OutErrors r = out_errors(row, at.v, d, smallest_normal(attention.q.dtype));
      const std::int64_t component = ask.q_place(at.b, at.h, at.i) * ask.dim_v + d;
      out.add(component, r.errors);
      t.squared_value.data[component] = r.squared_value;
      t.squared_deviation.data[component] = r.squared_deviation;
    }
  });
  t.out = out.take();
  t.lse = lse.take();
  return t;
}

BackwardTerms backward_terms(const Attention& attention, const std::optional<Tensor>& dout,
                             const std::optional<Tensor>& dlse) {
  const Question ask(attention);
  ask.check_cotangents(dout, dlse);
  Accumulators to{like(attention.q),
                  like(attention.k),
                  like(attention.v),
                  like(attention.bias),
                  like(attention.alibi_slopes),
                  like(attention.sinks)};
  for_each_row(ask, used_dout(attention, dout), [&](const Visit& at) {
    const auto& [b, h, i, kv, row, q, k, v, dO] = at;
    if (!row.live) return;
    const double dL = dlse ? ask.like_lse(*dlse, b, h, i) : 0;
    const RowGradient g = row_gradient(row, v, q, dO, dL, smallest_normal(attention.q.dtype));
    for (const Key& key : row.keys) {
      const KeyGradient e = key_gradient(row, g, key, v.row(key.j), ask.dim_v, attention.softcap);
      add_key(ask, b, h, i, g, key, e, k.row(key.j), to);
    }
    if (to.dsinks && row.sink_p != 0) {
      const KeyGradient e = key_gradient(row, g, sink_key(row), nullptr, 0, 0);
      to.dsinks->add(h, with_accumulation(e.dz, e.dZ));
    }
  });
  return {to.dq.take(),   to.dk.take(),     to.dv.take(),
          take(to.dbias), take(to.dslopes), take(to.dsinks)};
}

}  // namespace onefold::reference
