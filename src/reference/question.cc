#include "reference/question.h"

#include <bit>
#include <cmath>
#include <limits>

#include "onefold/error.h"
#include "reference/reference.h"

namespace onefold::reference {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

double half(std::uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const double sign = bits & 0x8000 ? -1 : 1;
  if (exponent == 31) {
    return fraction == 0 ? sign * kInfinity : std::numeric_limits<double>::quiet_NaN();
  }
  return sign *
         (exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25));
}

std::int64_t whole(const Tensor& t, std::int64_t n) {
  const std::int64_t at = n * t.stride[0];
  return t.dtype == DType::kInt32 ? static_cast<const std::int32_t*>(t.data)[at]
                                  : static_cast<const std::int64_t*>(t.data)[at];
}

// Element (b, h, i, j) of a tensor whose last axes are these and whose axes of extent 1 broadcast.
std::int64_t grid_offset(const Tensor& t, std::int64_t b, std::int64_t h, std::int64_t i,
                         std::int64_t j) {
  const std::int64_t at[4] = {b, h, i, j};
  std::int64_t offset = 0;
  for (int axis = 0; axis < t.rank; ++axis) {
    if (t.shape[axis] != 1) offset += at[4 - t.rank + axis] * t.stride[axis];
  }
  return offset;
}

}  // namespace

double read(const Tensor& t, std::int64_t n) {
  switch (t.dtype) {
    case DType::kFloat64:
      return static_cast<const double*>(t.data)[n];
    case DType::kFloat32:
      return static_cast<const float*>(t.data)[n];
    case DType::kFloat16:
      return half(static_cast<const std::uint16_t*>(t.data)[n]);
    case DType::kBFloat16: {
      const std::uint32_t bits = static_cast<const std::uint16_t*>(t.data)[n];
      return std::bit_cast<float>(bits << 16);
    }
    case DType::kBool:
      return static_cast<const std::uint8_t*>(t.data)[n] != 0;
    default:
      return static_cast<double>(t.dtype == DType::kInt32
                                     ? static_cast<const std::int32_t*>(t.data)[n]
                                     : static_cast<const std::int64_t*>(t.data)[n]);
  }
}

Question::Question(const Attention& attention) : a(attention) {
  packed = a.cu_seqlens_q.has_value();
  const int at = packed ? 0 : 1;
  if (a.q.rank != at + 3 || a.k.rank != at + 3 || a.v.rank != at + 3) {
    invalid("q, k and v have ", a.q.rank, ", ", a.k.rank, " and ", a.v.rank, " axes: ", at + 3,
            " are needed");
  }
  rows_q = a.q.shape[at];
  rows_k = a.k.shape[at];
  heads_q = a.q.shape[at + 1];
  heads_k = a.k.shape[at + 1];
  dim = a.q.shape[at + 2];
  dim_v = a.v.shape[at + 2];
  group = heads_k > 0 ? heads_q / heads_k : 1;
  if (a.k.shape[at + 2] != dim || a.v.shape[at] != rows_k || a.v.shape[at + 1] != heads_k ||
      group * heads_k != heads_q) {
    invalid("q, k and v do not fit together");
  }
  scale = a.scale ? *a.scale : dim > 0 ? 1 / std::sqrt(double(dim)) : 1;
  batch = packed ? a.cu_seqlens_q->shape[0] - 1 : a.q.shape[0];
  for (std::int64_t b = 0; b < batch; ++b) {
    Span s{0, rows_q, 0, rows_k};
    if (packed) {
      s.q_begin = whole(*a.cu_seqlens_q, b);
      s.q_count = whole(*a.cu_seqlens_q, b + 1) - s.q_begin;
      s.k_begin = whole(*a.cu_seqlens_k, b);
      s.k_count = whole(*a.cu_seqlens_k, b + 1) - s.k_begin;
    }
    if (a.seqused_q) s.q_count = whole(*a.seqused_q, b);
    if (a.seqused_k) s.k_count = whole(*a.seqused_k, b);
    spans.push_back(s);
  }
}

static double element(const Tensor& t, bool packed, std::int64_t b, std::int64_t r, std::int64_t h,
                      std::int64_t d) {
  const std::int64_t* stride = t.stride.data() + (packed ? 0 : 1);
  const std::int64_t outer = packed ? 0 : b * t.stride[0];
  return read(t, outer + r * stride[0] + h * stride[1] + d * stride[2]);
}
double Question::q(std::int64_t b, std::int64_t r, std::int64_t h, std::int64_t d) const {
  return element(a.q, packed, b, spans[b].q_begin + r, h, d);
}
double Question::k(std::int64_t b, std::int64_t r, std::int64_t h, std::int64_t d) const {
  return element(a.k, packed, b, spans[b].k_begin + r, h, d);
}
double Question::v(std::int64_t b, std::int64_t r, std::int64_t h, std::int64_t d) const {
  return element(a.v, packed, b, spans[b].k_begin + r, h, d);
}
double Question::slope(std::int64_t b, std::int64_t h) const {
  const Tensor& t = *a.alibi_slopes;
  return read(t, t.rank == 1 ? h * t.stride[0] : b * t.stride[0] + h * t.stride[1]);
}
double Question::dout(const Tensor& t, std::int64_t b, std::int64_t i, std::int64_t h,
                      std::int64_t d) const {
  return element(t, packed, b, spans[b].q_begin + i, h, d);
}
double Question::dlse(const Tensor& t, std::int64_t b, std::int64_t i, std::int64_t h) const {
  const std::int64_t r = spans[b].q_begin + i;
  return read(t, packed ? h * t.stride[0] + r * t.stride[1]
                        : b * t.stride[0] + h * t.stride[1] + r * t.stride[2]);
}

std::int64_t Question::q_index(std::int64_t b, std::int64_t i, std::int64_t h) const {
  return ((packed ? 0 : b * rows_q) + spans[b].q_begin + i) * heads_q + h;
}
std::int64_t Question::k_index(std::int64_t b, std::int64_t j, std::int64_t h) const {
  return ((packed ? 0 : b * rows_k) + spans[b].k_begin + j) * heads_k + h;
}
std::int64_t Question::lse_index(std::int64_t b, std::int64_t i, std::int64_t h) const {
  return ((packed ? 0 : b * heads_q) + h) * rows_q + spans[b].q_begin + i;
}
std::int64_t Question::grid_index(const Tensor& t, std::int64_t b, std::int64_t h, std::int64_t i,
                                  std::int64_t j) {
  const std::int64_t at[4] = {b, h, i, j};
  std::int64_t index = 0;
  for (int axis = 0; axis < t.rank; ++axis) {
    index = index * t.shape[axis] + (t.shape[axis] == 1 ? 0 : at[4 - t.rank + axis]);
  }
  return index;
}
std::vector<std::int64_t> Question::out_shape() const {
  if (packed) return {rows_q, heads_q, dim_v};
  return {batch, rows_q, heads_q, dim_v};
}
std::vector<std::int64_t> Question::lse_shape() const {
  if (packed) return {heads_q, rows_q};
  return {batch, heads_q, rows_q};
}

Row Question::row(std::int64_t b, std::int64_t h, std::int64_t i) const {
  Row row;
  const Span& span = spans[b];
  const std::int64_t shift = span.k_count - span.q_count;
  const std::int64_t diagonal = a.causal == Causal::kTopLeft ? i : i + shift;
  row.top = -kInfinity;
  for (std::int64_t j = 0; j < span.k_count; ++j) {
    if (a.causal != Causal::kNone && j > diagonal) continue;
    // Any 64-bit window: the sums must not overflow.
    if (a.window_right && j > static_cast<__int128>(diagonal) + *a.window_right) continue;
    if (a.window_left && j < static_cast<__int128>(diagonal) - *a.window_left) continue;
    if (a.mask && read(*a.mask, grid_offset(*a.mask, b, h, i, j)) == 0) continue;
    const double bias = a.bias ? read(*a.bias, grid_offset(*a.bias, b, h, i, j)) : 0;
    if (bias == -kInfinity) continue;
    Key key{};
    key.j = j;
    double dot = 0;
    for (std::int64_t d = 0; d < dim; ++d) {
      const double product = q(b, i, h, d) * k(b, j, h / group, d);
      dot += product;
      key.magnitude += std::fabs(product);
    }
    key.x = scale * dot;
    key.magnitude *= std::fabs(scale);
    key.z = key.x;
    if (a.softcap > 0) {
      key.tanh = std::tanh(key.x / a.softcap);
      key.z = a.softcap * key.tanh;
      key.added += std::fabs(key.z);
    }
    if (a.bias) {
      key.z += bias;
      key.added += std::fabs(bias);
    }
    if (a.alibi_slopes) {
      key.distance = std::fabs(double(i + shift - j));
      key.z -= slope(b, h) * key.distance;
      key.added += std::fabs(slope(b, h) * key.distance);
    }
    key.keep = 1;
    if (a.dropout_p > 0) {
      const auto word = philox4x32_10(
          {std::uint32_t(i / 2), std::uint32_t(j / 2), std::uint32_t(h), std::uint32_t(b)},
          {std::uint32_t(a.seed), std::uint32_t(a.seed >> 32)})[2 * (i % 2) + j % 2];
      const bool kept = double(word) >= std::floor(a.dropout_p * 4294967296.0);
      key.keep = kept ? 1 / (1 - a.dropout_p) : 0;
    }
    row.top = std::isnan(key.z) ? key.z : std::isnan(row.top) ? row.top : std::fmax(row.top, key.z);
    row.keys.push_back(key);
  }
  if (a.sinks) {
    row.sink = read(*a.sinks, h * a.sinks->stride[0]);
    row.has_sink = row.sink != -kInfinity;
    if (row.has_sink) {
      row.top = std::isnan(row.sink) || std::isnan(row.top) ? row.top + row.sink
                                                            : std::fmax(row.top, row.sink);
    }
  }
  row.empty = row.top == -kInfinity;
  if (row.empty) {
    row.keys.clear();
    row.lse = -kInfinity;
    return row;
  }
  for (const Key& key : row.keys) row.sum += std::exp(key.z - row.top);
  if (row.has_sink) row.sum += std::exp(row.sink - row.top);
  row.lse = row.top + std::log(row.sum);
  for (Key& key : row.keys) key.p = std::exp(key.z - row.top) / row.sum;
  if (row.has_sink) row.sink_p = std::exp(row.sink - row.top) / row.sum;
  return row;
}

std::array<std::uint32_t, 4> philox4x32_10(std::array<std::uint32_t, 4> c,
                                           std::array<std::uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t first = std::uint64_t{0xD2511F53} * c[0];
    const std::uint64_t second = std::uint64_t{0xCD9E8D57} * c[2];
    c = {std::uint32_t(second >> 32) ^ c[1] ^ key[0], std::uint32_t(second),
         std::uint32_t(first >> 32) ^ c[3] ^ key[1], std::uint32_t(first)};
    key = {key[0] + 0x9E3779B9u, key[1] + 0xBB67AE85u};
  }
  return c;
}

}  // namespace onefold::reference
