// The oracle: attention and all its gradients, naive, in float64, one row at a time.
//
// It reads like the formulas and shares no code with what it judges. Beside the values it gives the
// terms of their rounding error bounds. Every argument is read as onefold/attention.h describes it;
// results are owned, float64 and row-major. Includes attention.h, tensor.h, error.h only.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "onefold/attention.h"
#include "onefold/tensor.h"

namespace onefold::reference {

// A row-major array that owns its numbers.
struct Array {
  std::vector<std::int64_t> shape;
  std::vector<double> data;
};

// out: (B, Sq, Hq, Dv) or (Tq, Hq, Dv). lse, natural: (B, Hq, Sq) or (Hq, Tq).
struct Forward {
  Array out, lse;
};
Forward forward(const Attention& attention);

// Each of the shape of its input; absent when the input is. dbias is summed over broadcast axes.
struct Backward {
  Array dq, dk, dv;
  std::optional<Array> dbias, dslopes, dsinks;
};
// Gradients of sum(out * dout) + sum(lse * dlse), absent cotangents counting as zero.
Backward backward(const Attention& attention, const std::optional<Tensor>& dout,
                  const std::optional<Tensor>& dlse);

// Where a computation in limited precision goes wrong. A bound on the error of a result is
//
//   sum over sources of  size[source] * term[source]
//
// with the terms given below, to which the caller adds the final rounding u_out * |result|. P is
// the weight of a key after the normaliser, w = v * keep / (1 - p), a sink is a key with w = 0.
enum class Source : std::uint8_t {
  kScore,       // relative error of each product in q.k: gamma of the depth of that sum.
                //   out: sum_j P |w - out| A_j,  A_j = |scale| sum_d |q_d k_jd|
  kAdded,       // relative error of each addend of a score after q.k (cap, bias, ALiBi).
                //   out: sum_j P |w - out| M_j,  M_j = |capped score| + |bias| + |slope * distance|
  kExponent,    // relative error of the exponent z_j - ref: 2 u.
                //   out: sum_j P |w - out| tau_j,  tau_j = max z - z_j
  kWeight,      // relative error of a weight: exp2, rescales, a lagging ref; and the rounding of P
                //   if the denominator is summed from rounded P.  out: sum_j P |w - out|
  kSum,         // the sums over keys in forward; and the rounding of P if the denominator is
                //   summed from unrounded P.  out: sum_j P |w|;  lse: 1
  kUnderflow,   // absolute error of a weight e^(z - max z).  out: count / l * max_j |w_j|
  kOut,         // relative error of out as stored.  out: |out|, at least the smallest normal number
  kLse,         // relative error of lse as stored.  lse: |lse|
  kProduct,     // the sums over head_dim in backward (dout.v, dout.out) and what is added to them
  kAccumulate,  // the sums that make a gradient: gamma of their depth, and the rounding of P or dS
                //   as stored.  dv: sum_i P keep / (1 - p) |dout|;  dq: |scale| sum_j |dS_j k_j|
};
inline constexpr int kNumSources = 10;
const char* name(Source source);

// The terms of a result of shape S: shape (kNumSources, S...).
struct ForwardTerms {
  Array out, lse;
  // What the predicted RMS error of out needs: sum_j P^2 w^2 and sum_j P^2 (w - out)^2 over the
  // keys without the sink.
  Array squared_value, squared_deviation;
  // Of each row, in lse's shape: the largest score (sink included), l = sum_j e^(z_j - max z), the
  // number of visible keys and the largest A_j.
  Array max_score, sum, count, max_magnitude;
};
ForwardTerms forward_terms(const Attention& attention);

// First-order terms for a backward that is given out and lse as a forward with the same error sizes
// computed and stored them.
struct BackwardTerms {
  Array dq, dk, dv;
  std::optional<Array> dbias, dslopes, dsinks;
};
BackwardTerms backward_terms(const Attention& attention, const std::optional<Tensor>& dout,
                             const std::optional<Tensor>& dlse);

// Four 32-bit words per counter; the generator behind dropout. J. K. Salmon, M. A. Moraes,
// R. O. Dror, D. E. Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
std::array<std::uint32_t, 4> philox4x32_10(std::array<std::uint32_t, 4> counter,
                                           std::array<std::uint32_t, 2> key);

}  // namespace onefold::reference
