// A question as the oracle reads it: numbers as double, one row with all the keys it sees.
//
// Invariant: whatever a row does not see (padding, other lengths, hidden keys) is never read into
// it. Private to the oracle; includes reference.h and what that includes.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "onefold/attention.h"
#include "onefold/tensor.h"
#include "reference/reference.h"

namespace onefold::reference {

// An array of the given shape with every number `value`.
Array filled(std::vector<std::int64_t> shape, double value);

// Rows of one head: row r begins at data[r * width].
struct Matrix {
  std::int64_t width = 0;
  std::vector<double> data;
  const double* row(std::int64_t r) const { return data.data() + r * width; }
};

// The used rows of one sequence and where they begin in packed tensors.
struct Sequence {
  std::int64_t q_begin = 0, k_begin = 0, q_rows = 0, k_rows = 0;
};

// What row i makes of a key j that it sees. The letters are those of onefold/attention.h.
struct Key {
  std::int64_t j = 0;
  double magnitude = 0;  // A: |scale| sum_d |q_d k_jd|
  double capped = 0;     // tanh(X / softcap), 0 without a cap
  double cap_slope = 1;  // dY / dX
  double distance = 0;   // |i + Sk - Sq - j|
  double added = 0;      // M: |Y| if capped, + |bias| + |slope * distance|
  double score = 0;      // Z
  double keep = 1;       // 0 when dropped, else 1 / (1 - p)
  double p = 0;          // e^(Z - lse)
};

struct Row {
  std::vector<Key> keys;
  bool live = false;     // sees a key or a sink with a weight
  double top, sum, lse;  // max Z, sum of e^(Z - top), top + log(sum)
  bool has_sink = false;
  double sink = 0, sink_p = 0;  // its score and e^(sink - lse)
};

class Question {
 public:
  // Throws onefold::Error when shapes, types or lengths do not fit together.
  explicit Question(const Attention& attention);

  std::int64_t batch = 0, heads = 0, kv_heads = 0, dim = 0, dim_v = 0;
  std::int64_t q_extent = 0, k_extent = 0;  // of the row axis of q and k
  bool packed = false;
  double scale = 0;
  std::vector<Sequence> sequences;

  std::int64_t kv_head(std::int64_t h) const { return h / (heads / kv_heads); }

  // Rows of q, of k, of v, of a tensor shaped like out.
  Matrix queries(std::int64_t b, std::int64_t h) const;
  Matrix keys(std::int64_t b, std::int64_t kv_head) const;
  Matrix values(std::int64_t b, std::int64_t kv_head) const;
  Matrix like_out(const Tensor& tensor, std::int64_t b, std::int64_t h) const;
  double like_lse(const Tensor& tensor, std::int64_t b, std::int64_t h, std::int64_t i) const;

  Row row(std::int64_t b, std::int64_t h, std::int64_t i, const double* q, const Matrix& k) const;

  // Places in row-major results.
  std::int64_t q_place(std::int64_t b, std::int64_t h, std::int64_t i) const;   // row of q or out
  std::int64_t k_place(std::int64_t b, std::int64_t kv, std::int64_t j) const;  // row of k or v
  std::int64_t lse_place(std::int64_t b, std::int64_t h, std::int64_t i) const;
  std::int64_t bias_place(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) const;
  std::int64_t slope_place(std::int64_t b, std::int64_t h) const;

  std::vector<std::int64_t> out_shape() const;
  std::vector<std::int64_t> lse_shape() const;
  void check_cotangents(const std::optional<Tensor>& dout, const std::optional<Tensor>& dlse) const;

 private:
  bool visible(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) const;
  double keep(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) const;
  Key key(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j, const double* q,
          const double* k) const;
  void read_shapes();
  void read_sequences();
  void check_options() const;
  void read_seed();

  const Attention& a_;
  std::uint64_t seed_ = 0;
};

// One query row (b, h, i) and what it meets.
struct Visit {
  std::int64_t b, h, i, kv;  // kv: its key/value head
  const Row& row;
  const double* q;
  const Matrix &k, &v;  // of kv
  const double* dO;     // null without dout
};

// dout, unless nothing depends on v, whatever v holds: with every weight dropped.
inline std::optional<Tensor> used_dout(const Attention& attention,
                                       const std::optional<Tensor>& dout) {
  return attention.dropout_p < 1 ? dout : std::nullopt;
}

// Calls body(visit) for every used query row, in order. `dout` is shaped like out, or absent.
template <class Body>
void for_each_row(const Question& ask, const std::optional<Tensor>& dout, const Body& body) {
  for (std::int64_t b = 0; b < ask.batch; ++b) {
    for (std::int64_t h = 0; h < ask.heads; ++h) {
      const std::int64_t kv = ask.kv_head(h);
      const Matrix q = ask.queries(b, h), k = ask.keys(b, kv), v = ask.values(b, kv);
      const Matrix dO = dout ? ask.like_out(*dout, b, h) : Matrix{};
      for (std::int64_t i = 0; i < ask.sequences[static_cast<std::size_t>(b)].q_rows; ++i) {
        const Row row = ask.row(b, h, i, q.row(i), k);
        body(Visit{b, h, i, kv, row, q.row(i), k, v, dout ? dO.row(i) : nullptr});
      }
    }
  }
}

}  // namespace onefold::reference
