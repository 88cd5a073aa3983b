// The oracle's own reading of a question: every number as a double, every option as written.
//
// Invariant: nothing here is shared with the code that is judged. Slow and plain on purpose.
// Includes attention.h and tensor.h only.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "onefold/attention.h"
#include "onefold/tensor.h"

namespace onefold::reference {

// Element `index` (in elements, strides applied) of any dtype.
double read(const Tensor& t, std::int64_t index);

// One sequence: where it starts and how many rows of it are used.
struct Span {
  std::int64_t q_begin, q_count, k_begin, k_count;
};

// One visible key of a row, with everything that the formulas name.
struct Key {
  std::int64_t j;
  double x;          // scale * q . k
  double tanh;       // of x / softcap; 0 without a cap
  double z;          // the modified score
  double magnitude;  // A: |scale| sum |q_d k_d|
  double added;      // M: |cap| + |bias| + |slope * distance|
  double distance;   // |i + Sk - Sq - j|
  double keep;       // 0 or 1 / (1 - p)
  double p;          // the weight after the normaliser
};

struct Row {
  std::vector<Key> keys;
  bool has_sink = false;
  double sink = 0, sink_p = 0;
  double top = 0;  // largest score, the sink included
  double sum = 0;  // sum of e^(z - top)
  double lse = 0;
  bool empty = false;
};

struct Question {
  const Attention& a;
  bool packed = false;
  std::int64_t batch = 0, heads_q = 0, heads_k = 0, group = 1, dim = 0, dim_v = 0;
  std::int64_t rows_q = 0, rows_k = 0;
  double scale = 1;
  std::vector<Span> spans;

  explicit Question(const Attention& attention);

  // Row r is counted from the start of sequence b.
  double q(std::int64_t b, std::int64_t r, std::int64_t h, std::int64_t d) const;
  double k(std::int64_t b, std::int64_t r, std::int64_t h, std::int64_t d) const;
  double v(std::int64_t b, std::int64_t r, std::int64_t h, std::int64_t d) const;
  double slope(std::int64_t b, std::int64_t h) const;

  // Scores, weights and log-sum-exp of one row.
  Row row(std::int64_t b, std::int64_t h, std::int64_t i) const;

  // Index of a row in row-major arrays of shape q.shape[:-1], k.shape[:-1] and lse's.
  std::int64_t q_index(std::int64_t b, std::int64_t i, std::int64_t h) const;
  std::int64_t k_index(std::int64_t b, std::int64_t j, std::int64_t h) const;
  std::int64_t lse_index(std::int64_t b, std::int64_t i, std::int64_t h) const;
  // Index into a row-major array of the tensor's own shape, broadcast axes at 0.
  static std::int64_t grid_index(const Tensor& t, std::int64_t b, std::int64_t h, std::int64_t i,
                                 std::int64_t j);
  std::vector<std::int64_t> out_shape() const;
  std::vector<std::int64_t> lse_shape() const;

  // An element of a cotangent of out or lse.
  double dout(const Tensor& t, std::int64_t b, std::int64_t i, std::int64_t h,
              std::int64_t d) const;
  double dlse(const Tensor& t, std::int64_t b, std::int64_t i, std::int64_t h) const;
};

}  // namespace onefold::reference
