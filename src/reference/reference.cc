// The values: each function is one formula per line of onefold/attention.h.
#include "reference/reference.h"

#include <limits>
#include <utility>

#include "reference/question.h"

namespace onefold::reference {

Array filled(std::vector<std::int64_t> shape, double value) {
  std::int64_t count = 1;
  for (const std::int64_t extent : shape) count *= extent;
  return {std::move(shape), std::vector<double>(static_cast<std::size_t>(count), value)};
}

namespace {

Array zeros_like(const Tensor& t) {
  return filled({t.shape.begin(), t.shape.begin() + t.rank}, 0.0);
}

std::optional<Array> zeros_like(const std::optional<Tensor>& t) {
  if (!t) return std::nullopt;
  return zeros_like(*t);
}

// out_d = sum_j P_j keep_j v_jd. The sink's value is 0, which a weight of NaN does not leave 0.
std::vector<double> weighted_values(const Row& row, const Matrix& v) {
  std::vector<double> out(static_cast<std::size_t>(v.width), row.sink_p * 0.0);
  for (const Key& key : row.keys) {
    for (std::int64_t d = 0; d < v.width; ++d) out[d] += key.p * key.keep * v.row(key.j)[d];
  }
  return out;
}

double dot(const double* a, const double* b, std::int64_t width) {
  double sum = 0;
  for (std::int64_t d = 0; d < width; ++d) sum += a[d] * b[d];
  return sum;
}

}  // namespace

Forward forward(const Attention& attention) {
  const Question ask(attention);
  Forward answer{filled(ask.out_shape(), 0.0),
                 filled(ask.lse_shape(), -std::numeric_limits<double>::infinity())};
  for_each_row(ask, std::nullopt, [&](const Visit& at) {
    if (!at.row.live) return;
    answer.lse.data[ask.lse_place(at.b, at.h, at.i)] = at.row.lse;
    if (attention.dropout_p == 1) return;  // out is 0, whatever v holds
    const std::vector<double> out = weighted_values(at.row, at.v);
    for (std::int64_t d = 0; d < ask.dim_v; ++d) {
      answer.out.data[ask.q_place(at.b, at.h, at.i) * ask.dim_v + d] = out[d];
    }
  });
  return answer;
}

Backward backward(const Attention& attention, const std::optional<Tensor>& dout,
                  const std::optional<Tensor>& dlse) {
  const Question ask(attention);
  ask.check_cotangents(dout, dlse);
  Backward g{zeros_like(attention.q),
             zeros_like(attention.k),
             zeros_like(attention.v),
             zeros_like(attention.bias),
             zeros_like(attention.alibi_slopes),
             zeros_like(attention.sinks)};
  const std::int64_t dim = ask.dim, dim_v = ask.dim_v;
  for_each_row(ask, used_dout(attention, dout), [&](const Visit& at) {
    const auto& [b, h, i, kv, row, q, k, v, dO] = at;
    if (!row.live) return;
    const double delta = dO ? dot(dO, weighted_values(row, v).data(), dim_v) : 0;
    const double dL = dlse ? ask.like_lse(*dlse, b, h, i) : 0;
    double* const dq = g.dq.data.data() + ask.q_place(b, h, i) * dim;
    for (const Key& key : row.keys) {
      const double dP = dO ? key.keep * dot(dO, v.row(key.j), dim_v) : 0;
      const double dZ = key.p * (dP - delta + dL);
      const double dX = dZ * key.cap_slope;
      double* const dk = g.dk.data.data() + ask.k_place(b, kv, key.j) * dim;
      double* const dv = g.dv.data.data() + ask.k_place(b, kv, key.j) * dim_v;
      for (std::int64_t d = 0; d < dim; ++d) {
        dq[d] += ask.scale * dX * k.row(key.j)[d];
        dk[d] += ask.scale * dX * q[d];
      }
      for (std::int64_t d = 0; dO && d < dim_v; ++d) dv[d] += key.p * key.keep * dO[d];
      if (g.dbias) g.dbias->data[ask.bias_place(b, h, i, key.j)] += dZ;
      if (g.dslopes) g.dslopes->data[ask.slope_place(b, h)] -= dZ * key.distance;
    }
    if (g.dsinks && row.has_sink) g.dsinks->data[h] += row.sink_p * (dL - delta);
  });
  return g;
}

const char* name(Source source) {
  switch (source) {
    case Source::kScore:
      return "score";
    case Source::kAdded:
      return "added";
    case Source::kExponent:
      return "exponent";
    case Source::kWeight:
      return "weight";
    case Source::kSum:
      return "sum";
    case Source::kUnderflow:
      return "underflow";
    case Source::kOut:
      return "out";
    case Source::kLse:
      return "lse";
    case Source::kProduct:
      return "product";
    case Source::kAccumulate:
      return "accumulate";
  }
  return "?";
}

std::array<std::uint32_t, 4> philox4x32_10(std::array<std::uint32_t, 4> x,
                                           std::array<std::uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t a = std::uint64_t{0xD2511F53u} * x[0];
    const std::uint64_t b = std::uint64_t{0xCD9E8D57u} * x[2];
    const auto high = [](std::uint64_t product) {
      return static_cast<std::uint32_t>(product >> 32);
    };
    const auto low = [](std::uint64_t product) { return static_cast<std::uint32_t>(product); };
    x = {high(b) ^ x[1] ^ key[0], low(b), high(a) ^ x[3] ^ key[1], low(a)};
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
  return x;
}

}  // namespace onefold::reference
