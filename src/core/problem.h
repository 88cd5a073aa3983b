// What is asked, validated and canonical: the only thing plan and backends see.
//
// Invariant: a Problem can be executed. Every shape agrees, every index lies inside its tensor,
// every option has its canonical form (a window that hides nothing is no window). Views borrow the
// caller's memory. Includes the public headers, dtype.h and variant.h.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "core/variant.h"
#include "onefold/attention.h"

namespace onefold {

// Rows of heads: q, k, v, out and their gradients. Element (b, row, h, d) of sequence b, where row
// counts from the tensor's own start: packed tensors have batch stride 0.
struct Rows {
  void* data = nullptr;  // null: absent
  DType dtype = DType::kFloat32;
  std::int64_t batch = 0, row = 0, head = 0, dim = 1;  // strides in elements

  explicit operator bool() const { return present; }
  bool present = false;
  // Address of element d = 0.
  std::byte* at(std::int64_t b, std::int64_t r, std::int64_t h) const {
    return static_cast<std::byte*>(data) + (b * batch + r * row + h * head) * size_bytes(dtype);
  }
};

// A tensor indexed by (b, h, i, j) with positions local to the sequence: bias, mask, their
// gradients. Broadcast axes have stride 0 and extent 1.
struct Grid {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  std::array<std::int64_t, 4> extent{1, 1, 1, 1};
  std::array<std::int64_t, 4> stride{};

  explicit operator bool() const { return present; }
  bool present = false;
  std::int64_t offset(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) const {
    return b * stride[0] + h * stride[1] + i * stride[2] + j * stride[3];
  }
};

// One number per (b, h) or per (b, h, row): slopes, sinks, lse and their gradients.
struct Numbers {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  std::int64_t batch = 0, head = 0, row = 0;
  bool per_sequence = false;  // of slopes: (B, H), however many sequences there are

  explicit operator bool() const { return present; }
  bool present = false;
  double load(std::int64_t b, std::int64_t h, std::int64_t r = 0) const {
    return load_number(data, dtype, b * batch + h * head + r * row);
  }
  void store(std::int64_t b, std::int64_t h, std::int64_t r, double x) const {
    store_number(data, dtype, b * batch + h * head + r * row, x);
  }
};

// Where sequence b lies in the tensors and how much of it is used.
struct Sequence {
  std::int64_t q_begin, k_begin;  // first row in q and k
  Lengths used;
  std::int64_t q_rows, k_rows;  // rows that belong to it, used or not
};

// An index tensor that only the device reads.
struct Indices {
  const void* data = nullptr;
  DType dtype = DType::kInt64;
  std::int64_t stride = 0;

  explicit operator bool() const { return present; }
  bool present = false;
};

struct Problem {
  Device device;
  DType dtype = DType::kFloat32;
  std::int64_t batch = 0, heads_q = 0, heads_k = 0, group = 1;  // group = heads_q / heads_k
  std::int64_t dim = 0, dim_v = 0;
  std::int64_t rows_q = 0, rows_k = 0;  // extent of the row axis of q and k
  bool packed = false;
  bool padded = false;  // some rows of q or k belong to no sequence or lie beyond a used length
  // On the CPU: one for each of the batch, none when neither a query nor a key exists. Elsewhere
  // lengths are read on the device, and the host knows bounds of them only.
  std::vector<Sequence> sequences;
  std::int64_t longest_q = 0, longest_k = 0;  // used lengths, or bounds of them
  Indices cu_q, cu_k, used_q, used_k;
  Rows q, k, v;
  Grid bias, mask;
  Numbers slopes, sinks;
  Variant variant;
  const std::uint64_t* device_seed = nullptr;  // read on the device instead of variant.seed
};

// What forward writes.
struct ForwardTensors {
  Rows out;
  Numbers lse;
};

// Everything backward reads and writes besides the problem.
struct BackwardTensors {
  Rows out, dout, dq, dk, dv;
  Numbers lse, dlse, dslopes, dsinks;
  Grid dbias;
};

// Throw onefold::Error with one sentence when something does not fit. Every tensor must be on
// `device`.
Problem make_problem(const Attention& attention, Device device = {});
ForwardTensors make_forward(const Problem& problem, const Attention& attention, const Tensor& out,
                            const std::optional<Tensor>& lse);
BackwardTensors make_backward(const Problem& problem, const Attention& attention, const Tensor& out,
                              const Tensor& lse, const std::optional<Tensor>& dout,
                              const std::optional<Tensor>& dlse, const Gradients& gradients);
void check_merge(const Tensor& outs, const Tensor& lses, const Tensor& out, const Tensor& lse,
                 Device device = {});

}  // namespace onefold
