// Questions for a device, made on the host: random options and layouts, NaN around everything, and
// a copy of every tensor on the device.
//
// Invariant: what no row may read holds NaN, on the device too; outputs start as a pattern, so that
// what is written beyond them shows. Includes the public headers, cuda/ and tests/algebra/random.h.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "cuda/launch.h"
#include "onefold/attention.h"
#include "onefold/error.h"
#include "tests/algebra/random.h"

namespace onefold::test {

using Shape = std::vector<std::int64_t>;

// Memory of one tensor, here and there.
struct Slab {
  std::vector<std::byte> host;
  void* there = nullptr;
};

class Slabs {
 public:
  explicit Slabs(bool with_device) : with_device_(with_device) {}
  ~Slabs() {
    if (!with_device_) return;
    const cuda::DeviceGuard guard(0);
    for (const auto& slab : slabs_) {
      cuda::driver().cuMemFreeAsync(reinterpret_cast<cuda::CUdeviceptr>(slab->there), nullptr);
    }
  }
  Slabs(const Slabs&) = delete;
  Slabs& operator=(const Slabs&) = delete;

  std::byte* add(std::size_t bytes, unsigned char fill) {
    auto& slab = slabs_.emplace_back(std::make_unique<Slab>());
    slab->host.assign(std::max<std::size_t>(bytes, 16), std::byte{fill});
    return slab->host.data();
  }
  // The same tensor on the device.
  Tensor there(const Tensor& t) {
    Slab& slab = slab_of(t);
    if (with_device_ && slab.there == nullptr) {
      const cuda::DeviceGuard guard(0);
      cuda::CUdeviceptr memory = 0;
      cuda::check(cuda::driver().cuMemAllocAsync(&memory, slab.host.size(), nullptr), "alloc");
      slab.there = reinterpret_cast<void*>(memory);
      copy(memory, reinterpret_cast<cuda::CUdeviceptr>(slab.host.data()), slab.host.size());
    }
    Tensor moved = t;
    moved.device = {DeviceType::kCuda, 0};
    const auto offset = static_cast<const std::byte*>(t.data) - slab.host.data();
    moved.data = static_cast<std::byte*>(slab.there) + offset;
    return moved;
  }
  std::optional<Tensor> there(const std::optional<Tensor>& t) {
    return t ? std::optional<Tensor>(there(*t)) : std::nullopt;
  }
  void fetch(const Tensor& t) {
    Slab& slab = slab_of(t);
    if (slab.there == nullptr) return;
    copy(reinterpret_cast<cuda::CUdeviceptr>(slab.host.data()),
         reinterpret_cast<cuda::CUdeviceptr>(slab.there), slab.host.size());
  }
  const std::vector<std::byte>& bytes(const Tensor& t) { return slab_of(t).host; }

 private:
  static void copy(cuda::CUdeviceptr to, cuda::CUdeviceptr from, std::size_t bytes) {
    const cuda::DeviceGuard guard(0);
    cuda::check(cuda::driver().cuMemcpyAsync(to, from, bytes, nullptr), "copy");
    cuda::check(cuda::driver().cuStreamSynchronize(nullptr), "copy");
  }
  Slab& slab_of(const Tensor& t) {
    for (const auto& slab : slabs_) {
      const auto* data = static_cast<const std::byte*>(t.data);
      if (data >= slab->host.data() && data <= slab->host.data() + slab->host.size()) return *slab;
    }
    throw Error(ErrorKind::kRuntime, "a tensor of no slab");
  }
  bool with_device_;
  std::vector<std::unique_ptr<Slab>> slabs_;
};

// Calls visit(element offset) for every element, in row-major order.
template <class Visit>
void for_each_element(const Tensor& t, Visit&& visit) {
  std::array<std::int64_t, kMaxRank> index{};
  const std::int64_t count = t.elements();
  for (std::int64_t flat = 0; flat < count; ++flat) {
    std::int64_t offset = 0;
    for (int axis = 0; axis < t.rank; ++axis) offset += index[axis] * t.stride[axis];
    visit(offset);
    for (int axis = t.rank - 1; axis >= 0 && ++index[axis] == t.shape[axis]; --axis)
      index[axis] = 0;
  }
}
inline std::vector<double> numbers(const Tensor& t) {
  std::vector<double> all;
  for_each_element(t, [&](std::int64_t at) { all.push_back(load_number(t.data, t.dtype, at)); });
  return all;
}

struct Wish {
  DType dtype = DType::kBFloat16;
  std::int64_t batch = 1, sq = 1, sk = 1, heads = 1, kv_heads = 1, dim = 64, dim_v = 64;
  bool packed = false, hostile = false;  // hostile: any strides
  double spread = 1;                     // of q
  std::string options;                   // words: causal, window, softcap, slopes, bias, mask, ...
  bool has(const char* word) const { return options.find(word) != std::string::npos; }
  std::string text() const {
    return concat(name(dtype), " b", batch, " sq", sq, " sk", sk, " h", heads, "/", kv_heads, " d",
                  dim, "/", dim_v, packed ? " packed" : "", hostile ? " hostile" : "", " ",
                  options);
  }
};

// A question as wished for.
class Case {
 public:
  Case(const Wish& wish, std::uint64_t seed, bool with_device)
      : w(wish), slabs(with_device), r_(seed) {
    rows(wish.packed);
    scores();
    grids();
    per_head();
    poison_values();
    out = output(out_shape_, w.dtype);
    lse = output(lse_shape_, DType::kFloat32);
    dout = normal(out_shape_, w.dtype, 1);
    dlse = normal(lse_shape_, DType::kFloat32, 1);
    for_absent(dout, q_);
    for (std::int64_t b = 0; b < w.batch; ++b) {
      const std::int64_t i = some_row(q_, b);
      if (w.has("nan_dout") && i >= 0) set_row(dout, b, i, 0, kNaN);
    }
    const auto like = [&](const std::optional<Tensor>& t) {
      return t ? std::optional<Tensor>(output_like(*t)) : std::nullopt;
    };
    gradients = {output_like(attention.q), output_like(attention.k),     output_like(attention.v),
                 like(attention.bias),     like(attention.alibi_slopes), like(attention.sinks)};
  }

  Attention on_device() {
    Attention a = attention;
    a.q = slabs.there(a.q);
    a.k = slabs.there(a.k);
    a.v = slabs.there(a.v);
    for (std::optional<Tensor>* t : {&a.alibi_slopes, &a.bias, &a.mask, &a.sinks, &a.cu_seqlens_q,
                                     &a.cu_seqlens_k, &a.seqused_q, &a.seqused_k}) {
      *t = slabs.there(*t);
    }
    return a;
  }

  Wish w;
  Slabs slabs;
  Attention attention;
  Tensor out, lse, dout, dlse;
  Gradients gradients;

  std::optional<Tensor> given_dout() const {
    return w.has("no_dout") ? std::nullopt : std::optional<Tensor>(dout);
  }
  // 1 for rows of dO that are not finite, else 0.
  Tensor rows_not_finite() {
    const std::vector<double> given = numbers(dout);
    std::size_t n = 0;
    return tensor(out_shape_, w.dtype, [&] { return std::isfinite(given[n++]) ? 0.0 : 1.0; });
  }
  Gradients gradients_on_device() {
    const Gradients& g = gradients;
    return {slabs.there(g.dq),    slabs.there(g.dk),      slabs.there(g.dv),
            slabs.there(g.dbias), slabs.there(g.dslopes), slabs.there(g.dsinks)};
  }
  std::vector<std::pair<const char*, Tensor>> named_gradients() const {
    const Gradients& g = gradients;
    std::vector<std::pair<const char*, Tensor>> all{{"dq", *g.dq}, {"dk", *g.dk}, {"dv", *g.dv}};
    if (g.dbias) all.push_back({"dbias", *g.dbias});
    if (g.dslopes) all.push_back({"dslopes", *g.dslopes});
    if (g.dsinks) all.push_back({"dsinks", *g.dsinks});
    return all;
  }

  Tensor output_like(const Tensor& t) {
    return output(Shape(t.shape.begin(), t.shape.begin() + t.rank), t.dtype);
  }

 private:
  template <class Fill>
  Tensor tensor(const Shape& shape, DType dtype, Fill&& fill) {
    Tensor t = memory(shape, dtype, w.hostile, 0xff);  // all ones: NaN in every float format
    for_each_element(t, [&](std::int64_t at) { store_number(t.data, dtype, at, fill()); });
    return t;
  }
  Tensor normal(const Shape& shape, DType dtype, double spread) {
    return tensor(shape, dtype, [&] { return spread * r_.normal(); });
  }
  Tensor output(const Shape& shape, DType dtype) { return memory(shape, dtype, w.hostile, 0xa5); }

  Tensor memory(const Shape& shape, DType dtype, bool hostile, unsigned char fill) {
    const int rank = static_cast<int>(shape.size());
    Tensor t;
    t.dtype = dtype;
    t.rank = rank;
    std::vector<int> order;  // innermost first
    for (int axis = rank - 1; axis >= 0; --axis) order.push_back(axis);
    if (hostile && rank > 1) std::swap(order[rank - 1], order[r_.integer(1, rank - 1)]);
    std::int64_t step = 1, first = 0;
    for (int n = 0; n < rank; ++n) {
      const int axis = order[n];
      if (hostile && (n > 0 || r_.chance(0.2))) step *= r_.integer(1, 2);
      t.shape[axis] = shape[axis];
      t.stride[axis] = hostile && r_.chance(0.3) ? -step : step;
      if (t.stride[axis] < 0) first += (std::max<std::int64_t>(shape[axis], 1) - 1) * step;
      step *= std::max<std::int64_t>(shape[axis], 1);
    }
    const std::int64_t size = size_bytes(dtype);
    constexpr std::int64_t kMargin = 64;  // bytes of pattern on either side
    std::byte* base = slabs.add(static_cast<std::size_t>(step * size + 2 * kMargin), fill);
    t.data = base + kMargin + first * size;
    return t;
  }

  Tensor index_vector(const std::vector<std::int64_t>& values) {
    Tensor t;
    t.rank = 1;
    t.dtype = r_.chance(0.5) ? DType::kInt64 : DType::kInt32;
    t.shape[0] = static_cast<std::int64_t>(values.size());
    t.stride[0] = 1;
    t.data = slabs.add(values.size() * size_bytes(t.dtype), 0);
    for (std::size_t n = 0; n < values.size(); ++n) {
      if (t.dtype == DType::kInt64) static_cast<std::int64_t*>(t.data)[n] = values[n];
      if (t.dtype == DType::kInt32) static_cast<std::int32_t*>(t.data)[n] = int(values[n]);
    }
    return t;
  }

  struct Sequence {
    std::int64_t begin, used, rows;
  };
  std::vector<Sequence> draw_sequences(std::int64_t rows, bool used, std::int64_t& total) {
    std::vector<Sequence> all;
    total = w.packed ? 0 : rows;
    for (std::int64_t b = 0; b < w.batch; ++b) {
      const std::int64_t own = w.packed ? r_.integer(0, int(rows)) : rows;
      all.push_back({w.packed ? total : 0, used ? r_.integer(0, int(own)) : own, own});
      if (w.packed) total += own;
    }
    if (w.packed) total += r_.integer(0, 3);
    return all;
  }

  void rows(bool packed) {
    std::int64_t tq = 0, tk = 0;
    q_ = draw_sequences(w.sq, w.has("used"), tq);
    k_ = draw_sequences(w.sk, w.has("used"), tk);
    const auto offsets = [](const std::vector<Sequence>& all) {
      std::vector<std::int64_t> cu{0};
      for (const Sequence& s : all) cu.push_back(s.begin + s.rows);
      return cu;
    };
    const auto used = [](const std::vector<Sequence>& all) {
      std::vector<std::int64_t> lengths;
      for (const Sequence& s : all) lengths.push_back(s.used);
      return lengths;
    };
    if (packed) {
      attention.cu_seqlens_q = index_vector(offsets(q_));
      attention.cu_seqlens_k = index_vector(offsets(k_));
      attention.max_seqlen_q = w.sq;
      attention.max_seqlen_k = w.sk;
    }
    if (w.has("used")) {
      attention.seqused_q = index_vector(used(q_));
      attention.seqused_k = index_vector(used(k_));
    }
    const auto shape = [&](std::int64_t total, std::int64_t heads, std::int64_t dim) {
      return packed ? Shape{total, heads, dim} : Shape{w.batch, total, heads, dim};
    };
    const double huge = w.has("scale_tiny") ? kHuge : 1;
    attention.q = normal(shape(tq, w.heads, w.dim), w.dtype, w.spread * huge);
    attention.k = normal(shape(tk, w.kv_heads, w.dim), w.dtype, huge);
    const Shape of_v = shape(tk, w.kv_heads, w.dim_v);
    attention.v = w.has("huge_v") ? tensor(of_v, w.dtype, [&] { return r_.uniform(2e38, 3e38); })
                                  : normal(of_v, w.dtype, 1);
    out_shape_ = shape(tq, w.heads, w.dim_v);
    lse_shape_ = packed ? Shape{w.heads, tq} : Shape{w.batch, w.heads, tq};
    for_absent(attention.q, q_);
    for_absent(attention.k, k_);
    for_absent(attention.v, k_);
  }

  void set_row(const Tensor& t, std::int64_t b, std::int64_t row, std::int64_t head, double x) {
    const bool packed = t.rank == 3;
    const int axis = packed ? 0 : 1;
    for (std::int64_t h = head < 0 ? 0 : head; h < (head < 0 ? t.shape[axis + 1] : head + 1); ++h) {
      for (std::int64_t d = 0; d < t.shape[axis + 2]; ++d) {
        const std::int64_t at = (packed ? 0 : b * t.stride[0]) + row * t.stride[axis] +
                                h * t.stride[axis + 1] + d * t.stride[axis + 2];
        store_number(t.data, t.dtype, at, x);
      }
    }
  }
  // Rows that belong to no sequence or lie beyond a used length hold NaN.
  void for_absent(const Tensor& t, const std::vector<Sequence>& all) {
    const bool packed = t.rank == 3;
    const std::int64_t outer = packed ? 1 : t.shape[0], total = t.shape[packed ? 0 : 1];
    for (std::int64_t b = 0; b < outer; ++b) {
      for (std::int64_t row = 0; row < total; ++row) {
        bool used = false;
        for (std::size_t n = 0; n < all.size(); ++n) {
          if (!packed && static_cast<std::int64_t>(n) != b) continue;
          used |= row >= all[n].begin && row < all[n].begin + all[n].used;
        }
        if (!used) set_row(t, b, row, -1, std::numeric_limits<double>::quiet_NaN());
      }
    }
  }

  // Products of such numbers leave float32, and with the scale "scale_tiny" scores do not.
  static constexpr double kHuge = 0x1p70, kTiny = 0x1.2345p-143;

  void scores() {
    Attention& a = attention;
    if (w.has("causal")) a.causal = Causal::kBottomRight;
    if (w.has("topleft")) a.causal = Causal::kTopLeft;
    if (w.has("window")) {
      a.window_left = r_.integer(-2, int(w.sk / 2) + 2);
      if (r_.chance(0.5)) a.window_right = r_.integer(-2, int(w.sk / 2) + 2);
    }
    if (w.has("softcap")) a.softcap = r_.uniform(1, 4);
    if (w.has("left5")) a.window_left = kLeft;
    if (w.has("scale_tiny")) a.scale = kTiny;
    if (w.has("scale0")) a.scale = 0.0;
    if (w.has("scale-")) a.scale = -0.2;
    if (w.has("scale+")) a.scale = 0.7;
    if (w.has("dropout")) {
      a.dropout_p = w.has("dropout1") ? 1.0 : r_.uniform(0.1, 0.6);
      a.seed = r_.bits();
    }
  }

  Shape grid_shape() {
    const Shape full{w.batch, w.heads, w.sq, w.sk};
    Shape shape(full.begin() + (w.has("full") ? 0 : r_.integer(0, 4)), full.end());
    for (std::int64_t& extent : shape) extent = !w.has("full") && r_.chance(0.4) ? 1 : extent;
    return shape;
  }
  void grids() {
    if (w.has("bias")) {
      const DType dtype = w.has("bias32") ? DType::kFloat32 : w.dtype;
      attention.bias = tensor(grid_shape(), dtype, [&] {
        return r_.chance(0.1) ? -std::numeric_limits<double>::infinity() : r_.normal();
      });
    }
    if (w.has("mask")) {
      const double share = r_.chance(0.3) ? 0.01 : 0.7;
      attention.mask =
          tensor(grid_shape(), DType::kBool, [&] { return r_.chance(share) ? 1.0 : 0.0; });
      Tensor& t = *attention.mask;  // store_number writes floats only
      for_each_element(t, [&](std::int64_t at) {
        static_cast<std::uint8_t*>(t.data)[at] = r_.chance(share) ? 1 : 0;
      });
    }
  }
  void per_head() {
    if (w.has("slopes")) {
      const Shape shape = r_.chance(0.5) ? Shape{w.heads} : Shape{w.batch, w.heads};
      attention.alibi_slopes = normal(shape, DType::kFloat32, 0.3);
    }
    if (w.has("sinks")) {
      attention.sinks = tensor({w.heads}, DType::kFloat32, [&] {
        return r_.chance(0.1) ? -std::numeric_limits<double>::infinity() : r_.normal();
      });
    }
  }
  // Values that are not finite, where sequences are long enough to have some.
  static constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
  static constexpr std::int64_t kLeft = 5;  // of the window "left5"
  std::int64_t some_row(const std::vector<Sequence>& all, std::int64_t b) {
    return all[b].used > 0 ? all[b].begin + r_.integer(0, int(all[b].used) - 1) : -1;
  }
  void poison_values() {
    const double nan = kNaN;
    for (std::int64_t b = 0; b < w.batch; ++b) {
      const std::int64_t i = some_row(q_, b), j = some_row(k_, b);
      if (w.has("nan_q") && i >= 0) set_row(attention.q, b, i, 0, nan);
      if (w.has("nan_k") && j >= 0) set_row(attention.k, b, j, 0, nan);
      if (w.has("nan_v") && j >= 0) set_row(attention.v, b, j, 0, nan);
      if (w.has("nan_before") && k_[b].used > kLeft + 1) {  // the last key that row Sq - 1 misses
        set_row(attention.v, b, k_[b].begin + k_[b].used - kLeft - 2, 0, nan);
      }
      if (w.has("inf_v") && j >= 0) {
        set_row(attention.v, b, j, 0, std::numeric_limits<double>::infinity());
      }
    }
  }

  Random r_;
  std::vector<Sequence> q_, k_;
  Shape out_shape_, lse_shape_;
};

}  // namespace onefold::test
