// From scores to weights and to the gradient of scores, as backward has them: lse is known, so a
// weight is final.
//
// Weights are kept times kMost, so that float16 holds the small ones, and delta, as it is stored,
// times kLeast. Includes scores.cuh.
#pragma once

#include "kernels/backward_spec.h"
#include "kernels/block/scores.cuh"

namespace onefold::kernels {

template <Element kElement, Features kFeatures>
struct Weights {
  static constexpr float kMost = static_cast<float>(1 << weight_log2(kElement));
  static constexpr float kLeast = 1.0f / kMost;
  static constexpr bool kNatural = Scores<kFeatures>::kNatural;

  // lse of a row as the kernels are told: in base 2 where a score is nothing but a product, and
  // then shifted so that weights come out times kMost.
  static __forceinline__ float stored_lse(float natural) {
    if constexpr (kNatural) return natural;
    return ::fmaf(natural, static_cast<float>(kLog2E), -static_cast<float>(weight_log2(kElement)));
  }
  // The weight of an attention sink.
  static __forceinline__ float of_sink(float sink, float lse) {
    if constexpr (kNatural) {
      return weight_from(Mufu{sink}, Mufu{lse}, Mufu{static_cast<float>(kLog2E)}).x;
    }
    return weight_from(Mufu{sink * static_cast<float>(kLog2E)}, Mufu{lse}).x * kLeast;
  }

  // What a product is multiplied by, of a k that has scale_power.
  static __forceinline__ float factor(const ProblemView& p) {
    return p.scale_sign * (kNatural ? p.score_factor : p.score_factor_log2);
  }
  // A weight is at most 1: what exceeds it is the rounding of a large lse.
  static __forceinline__ float of_product(float x, float factor, float lse) {
    return ptx::min_nan(weight_from(Mufu{x} * Mufu{factor}, Mufu{lse}).x, kMost);
  }
  // slope: of the cap.
  static __forceinline__ float of_score(const Scores<kFeatures>& scores, const At<Mufu>& position,
                                        float x, float factor, float lse, float& slope) {
    const Dual<Mufu> z = score(scores.modifier, Dual<Mufu>{{x * factor}, {1.0f}}, position);
    const Mufu to_base_2{static_cast<float>(kLog2E)};
    slope = z.slope.x;
    const float weight = weight_from(z.value, Mufu{lse}, to_base_2).x;
    return scores.hides(position) ? 0.0f : ptx::min_nan(weight * kMost, kMost);
  }

  // P (dP - delta). A dropped weight is negative. kSelect: a weight of 0 may be that of a hidden
  // key, whose dP may be anything.
  template <bool kSelect>
  static __forceinline__ float gradient(float weight, float dp, float delta, float keep_scale) {
    if constexpr (kFeatures.dropout) {
      dp = weight < 0.0f ? 0.0f : dp * keep_scale;
      weight = ::fabsf(weight);
    }
    const float x = weight * ::fmaf(dp, kLeast, -delta);
    return kSelect && weight == 0.0f ? 0.0f : x;
  }
};

}  // namespace onefold::kernels
