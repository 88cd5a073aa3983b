// Random tiny questions with any combination of options, in odd layouts, NaN around everything.
//
// Invariant: what no row may read (gaps between elements, rows beyond a used length, rows behind
// the last offset) holds NaN. Includes the public headers, the oracle and tests/algebra/random.h.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "onefold/attention.h"
#include "onefold/tensor.h"
#include "tests/algebra/random.h"

namespace onefold::test {

inline constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
inline constexpr double kInfinity = std::numeric_limits<double>::infinity();

using Shape = std::vector<std::int64_t>;

// Calls visit(index) with every multi-index of the shape, in row-major order.
template <class Visit>
void for_each_index(const Shape& shape, Visit&& visit) {
  const std::int64_t count =
      std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
  for (std::int64_t flat = 0; flat < count; ++flat) {
    std::array<std::int64_t, kMaxRank> index{};
    std::int64_t rest = flat;
    for (int axis = static_cast<int>(shape.size()) - 1; axis >= 0; --axis) {
      index[axis] = rest % shape[axis];
      rest /= shape[axis];
    }
    visit(index);
  }
}

inline Shape shape_of(const Tensor& t) { return {t.shape.begin(), t.shape.begin() + t.rank}; }

// Pointers to the elements of a float64 tensor, in row-major order.
inline std::vector<double*> elements(const Tensor& t) {
  std::vector<double*> all;
  for_each_index(shape_of(t), [&](const auto& index) {
    std::int64_t offset = 0;
    for (int axis = 0; axis < t.rank; ++axis) offset += index[axis] * t.stride[axis];
    all.push_back(static_cast<double*>(t.data) + offset);
  });
  return all;
}

class RandomQuestion {
 public:
  explicit RandomQuestion(Random& random) : r_(random) {
    kv_heads_ = r_.integer(1, 2);
    heads_ = kv_heads_ * r_.integer(1, 3);
    dim_ = r_.integer(1, 4);
    dim_v_ = r_.integer(1, 4);
    batch_ = r_.integer(1, 2);
    r_.chance(0.4) ? draw_packed() : draw_dense();
    draw_scores();
    draw_mask_and_bias();
    draw_per_head();
    dout = normal_like(out_shape_);
    dlse = normal_like(lse_shape_);
    for_each_absent_row(true, [&](std::int64_t outer, std::int64_t row) {
      poison(attention.q, outer, row);
      poison(dout, outer, row);
    });
    for_each_absent_row(false, [&](std::int64_t outer, std::int64_t row) {
      poison(attention.k, outer, row);
      poison(attention.v, outer, row);
    });
  }
  RandomQuestion(const RandomQuestion&) = delete;
  RandomQuestion& operator=(const RandomQuestion&) = delete;

  Attention attention;
  Tensor dout, dlse;
  std::string text;  // the options, for a failing case

 private:
  struct Lengths {
    std::int64_t begin, used, rows;
  };

  Tensor normal_like(const Shape& shape) {
    return tensor(shape, [this] { return r_.normal(); });
  }

  // A float64 tensor with axes stored in any order, either direction, and gaps.
  template <class Fill>
  Tensor tensor(const Shape& shape, Fill&& fill) {
    const int rank = static_cast<int>(shape.size());
    Tensor t;
    t.dtype = DType::kFloat64;
    t.rank = rank;
    std::vector<int> order(rank);
    std::iota(order.begin(), order.end(), 0);
    for (int n = rank - 1; n > 0; --n) std::swap(order[n], order[r_.integer(0, n)]);
    std::int64_t step = 1, first = 0;
    for (const int axis : order) {
      step *= r_.integer(1, 2);
      t.shape[axis] = shape[axis];
      t.stride[axis] = r_.chance(0.3) ? -step : step;
      if (t.stride[axis] < 0) first += (std::max<std::int64_t>(shape[axis], 1) - 1) * step;
      step *= std::max<std::int64_t>(shape[axis], 1);
    }
    auto& memory = doubles_.emplace_back(
        std::make_unique<std::vector<double>>(static_cast<std::size_t>(step), kNaN));
    t.data = memory->data() + first;
    for (double* element : elements(t)) *element = fill();
    return t;
  }

  Tensor index_vector(const std::vector<std::int64_t>& numbers) {
    Tensor t;
    t.rank = 1;
    t.shape[0] = static_cast<std::int64_t>(numbers.size());
    t.stride[0] = 1;
    if (r_.chance(0.5)) {
      t.dtype = DType::kInt64;
      auto& memory = longs_.emplace_back(std::make_unique<std::vector<std::int64_t>>(numbers));
      t.data = memory->data();
    } else {
      t.dtype = DType::kInt32;
      auto& memory = ints_.emplace_back(
          std::make_unique<std::vector<std::int32_t>>(numbers.begin(), numbers.end()));
      t.data = memory->data();
    }
    return t;
  }

  void draw_used(bool queries) {
    std::vector<Lengths>& lengths = queries ? q_ : k_;
    if (!r_.chance(0.3)) return;
    std::vector<std::int64_t> used;
    for (Lengths& s : lengths) {
      s.used = r_.integer(0, static_cast<int>(s.rows));
      used.push_back(s.used);
    }
    (queries ? attention.seqused_q : attention.seqused_k) = index_vector(used);
    text += queries ? " seqused_q" : " seqused_k";
  }

  void draw_dense() {
    const std::int64_t sq = r_.integer(0, 5), sk = r_.integer(0, 6);
    attention.q = normal_like({batch_, sq, heads_, dim_});
    attention.k = normal_like({batch_, sk, kv_heads_, dim_});
    attention.v = normal_like({batch_, sk, kv_heads_, dim_v_});
    q_.assign(batch_, {0, sq, sq});
    k_.assign(batch_, {0, sk, sk});
    draw_used(true);
    draw_used(false);
    out_shape_ = {batch_, sq, heads_, dim_v_};
    lse_shape_ = {batch_, heads_, sq};
    most_q_ = sq;
    most_k_ = sk;
  }

  void draw_packed() {
    text += " packed";
    batch_ = r_.integer(0, 3);
    std::array<std::int64_t, 2> totals{};
    for (const bool queries : {true, false}) {
      std::vector<std::int64_t> offsets = {0};
      for (int b = 0; b < batch_; ++b) {
        const std::int64_t rows = r_.integer(0, 4);
        (queries ? q_ : k_).push_back({offsets.back(), rows, rows});
        offsets.push_back(offsets.back() + rows);
        (queries ? most_q_ : most_k_) = std::max(queries ? most_q_ : most_k_, rows);
      }
      totals[queries ? 0 : 1] = offsets.back() + r_.integer(0, 2);
      (queries ? attention.cu_seqlens_q : attention.cu_seqlens_k) = index_vector(offsets);
      draw_used(queries);
    }
    most_q_ += r_.integer(0, 1);
    most_k_ += r_.integer(0, 1);
    attention.max_seqlen_q = most_q_;
    attention.max_seqlen_k = most_k_;
    attention.q = normal_like({totals[0], heads_, dim_});
    attention.k = normal_like({totals[1], kv_heads_, dim_});
    attention.v = normal_like({totals[1], kv_heads_, dim_v_});
    out_shape_ = {totals[0], heads_, dim_v_};
    lse_shape_ = {heads_, totals[0]};
  }

  void draw_scores() {
    if (r_.chance(0.4)) {
      attention.scale = r_.chance(0.2) ? 0.0 : r_.uniform(-1, 1);
      text += " scale " + std::to_string(*attention.scale);
    }
    attention.causal = static_cast<Causal>(r_.integer(0, 2));
    text += " causal " + std::to_string(static_cast<int>(attention.causal));
    if (r_.chance(0.3)) attention.window_left = draw_window();
    if (r_.chance(0.3)) attention.window_right = draw_window();
    if (attention.window_left) text += " left " + std::to_string(*attention.window_left);
    if (attention.window_right) text += " right " + std::to_string(*attention.window_right);
    if (r_.chance(0.4)) {
      attention.softcap = r_.uniform(0.5, 3);
      text += " softcap";
    }
    if (r_.chance(0.3)) {
      attention.dropout_p = r_.chance(0.1) ? 1.0 : r_.uniform(0.1, 0.9);
      attention.seed = r_.bits();
      text += " dropout " + std::to_string(attention.dropout_p);
    }
  }

  std::int64_t draw_window() {
    if (!r_.chance(0.1)) return r_.integer(-2, 4);
    return r_.chance(0.5) ? std::numeric_limits<std::int64_t>::max() : (std::int64_t{1} << 31) - 1;
  }

  Shape broadcast_shape() {
    const Shape full = {batch_, heads_, most_q_, most_k_};
    Shape shape(full.begin() + r_.integer(0, 4), full.end());
    for (std::int64_t& extent : shape) extent = r_.chance(0.4) ? 1 : extent;
    return shape;
  }

  void draw_mask_and_bias() {
    if (r_.chance(0.4)) {
      attention.bias =
          tensor(broadcast_shape(), [this] { return r_.chance(0.1) ? -kInfinity : r_.normal(); });
      text += " bias";
    }
    if (r_.chance(0.3)) {
      const Shape shape = broadcast_shape();
      Tensor t;
      t.dtype = DType::kBool;
      t.rank = static_cast<int>(shape.size());
      std::int64_t step = 1;
      for (int axis = t.rank - 1; axis >= 0; --axis) {
        t.shape[axis] = shape[axis];
        t.stride[axis] = step;
        step *= shape[axis];
      }
      auto& memory =
          bytes_.emplace_back(std::make_unique<std::vector<std::uint8_t>>(step, std::uint8_t{0}));
      for (std::uint8_t& byte : *memory) byte = r_.chance(0.7) ? 1 : 0;
      t.data = memory->data();
      attention.mask = t;
      text += " mask";
    }
  }

  void draw_per_head() {
    if (r_.chance(0.3)) {
      const Shape shape = r_.chance(0.5) ? Shape{heads_} : Shape{batch_, heads_};
      attention.alibi_slopes = normal_like(shape);
      text += " slopes";
    }
    if (r_.chance(0.4)) {
      attention.sinks =
          tensor({heads_}, [this] { return r_.chance(0.1) ? -kInfinity : r_.normal(); });
      text += " sinks";
    }
  }

  // Rows (outer, row) of q or k that belong to no sequence or lie beyond a used length.
  template <class Visit>
  void for_each_absent_row(bool queries, Visit&& visit) {
    const Tensor& t = queries ? attention.q : attention.k;
    const std::vector<Lengths>& lengths = queries ? q_ : k_;
    const bool packed = t.rank == 3;
    const std::int64_t outer = packed ? 1 : t.shape[0], rows = t.shape[packed ? 0 : 1];
    for (std::int64_t b = 0; b < outer; ++b) {
      for (std::int64_t row = 0; row < rows; ++row) {
        bool used = false;
        for (std::size_t n = 0; n < lengths.size(); ++n) {
          const bool own = packed || static_cast<std::int64_t>(n) == b;
          used =
              used || (own && row >= lengths[n].begin && row < lengths[n].begin + lengths[n].used);
        }
        if (!used) visit(b, row);
      }
    }
  }

  static void poison(const Tensor& t, std::int64_t outer, std::int64_t row) {
    Tensor slice = t;
    const int axis = t.rank == 3 ? 0 : 1;
    std::int64_t offset = row * t.stride[axis];
    slice.shape[axis] = 1;
    if (t.rank == 4) {
      offset += outer * t.stride[0];
      slice.shape[0] = 1;
    }
    slice.data = static_cast<double*>(t.data) + offset;
    for (double* element : elements(slice)) *element = kNaN;
  }

  Random& r_;
  std::int64_t heads_ = 0, kv_heads_ = 0, dim_ = 0, dim_v_ = 0, batch_ = 0;
  std::int64_t most_q_ = 0, most_k_ = 0;
  std::vector<Lengths> q_, k_;
  Shape out_shape_, lse_shape_;
  std::vector<std::unique_ptr<std::vector<double>>> doubles_;
  std::vector<std::unique_ptr<std::vector<std::int64_t>>> longs_;
  std::vector<std::unique_ptr<std::vector<std::int32_t>>> ints_;
  std::vector<std::unique_ptr<std::vector<std::uint8_t>>> bytes_;
};

}  // namespace onefold::test
