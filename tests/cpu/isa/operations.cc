#include "tests/cpu/isa/operations.h"

#include "cpu/decode.h"
#include "cpu/isa/pack.h"

namespace onefold::test::ONEFOLD_ISA {
namespace {

namespace simd = cpu::ONEFOLD_ISA;
using simd::Vec;

template <class R>
using Arithmetic = simd::VectorArith<R>;

template <class R>
VectorOperations<R> vector_operations() {
  VectorOperations<R> t{};
  t.width = simd::kWidth<R>;
  t.splat = [](R x, R* to) { simd::store(to, simd::splat<R>(x)); };
  t.fma = [](const R* a, const R* b, const R* c, R* to) {
    simd::store(to, Arithmetic<R>::fma(simd::load(a), simd::load(b), simd::load(c)));
  };
  t.max = [](const R* a, const R* b, R* to) {
    simd::store(to, Arithmetic<R>::max(simd::load(a), simd::load(b)));
  };
  t.min = [](const R* a, const R* b, R* to) {
    simd::store(to, simd::min(simd::load(a), simd::load(b)));
  };
  t.ceil = [](const R* x, R* to) { simd::store(to, Arithmetic<R>::ceil(simd::load(x))); };
  t.abs = [](const R* x, R* to) { simd::store(to, Arithmetic<R>::abs(simd::load(x))); };
  t.exp2 = [](const R* x, R* to) { simd::store(to, Arithmetic<R>::exp2(simd::load(x))); };
  t.tanh = [](const R* x, R* to) { simd::store(to, Arithmetic<R>::tanh(simd::load(x))); };
  t.select_less = [](const R* a, const R* b, R* to) {
    const Vec<R> x = simd::load(a), y = simd::load(b);
    simd::store(to, Arithmetic<R>::select(Arithmetic<R>::less(x, y), x, y));
  };
  t.select_equal = [](const R* a, const R* b, R* to) {
    const Vec<R> x = simd::load(a), y = simd::load(b);
    simd::store(to, Arithmetic<R>::select(Arithmetic<R>::equal(x, y), x, Vec<R>{}));
  };
  t.load_row = &simd::load_row<R>;
  t.store_row = &simd::store_row<R>;
  t.transpose = &simd::transpose<R>;
  t.all_finite = &simd::all_finite<R>;
  return t;
}

template <int kCount>
void sums_of(const float* x, float* to) {
  Vec<float> vectors[kCount];
  for (int p = 0; p < kCount; ++p) {
    vectors[simd::lane_order<kCount>(p)] = simd::load(x + p * simd::kWidth<float>);
  }
  simd::sum_lanes_of<kCount>(vectors, to);
}

Operations all_operations() {
  Operations t{};
  t.of_float = vector_operations<float>();
  t.of_double = vector_operations<double>();
  t.widen_float = [](const float* from, float* to) { simd::store(to, simd::widen(from)); };
  t.widen_bfloat16 = [](const std::uint16_t* from, float* to) {
    simd::store(to, simd::widen(reinterpret_cast<const simd::BFloat16*>(from)));
  };
  t.widen_float16 = [](const std::uint16_t* from, float* to) {
    simd::store(to, simd::widen(reinterpret_cast<const simd::Float16*>(from)));
  };
  t.store_float16 = [](std::uint16_t* to, const float* from, std::int64_t count) {
    simd::store_row(to, DType::kFloat16, 1, from, count);
  };
  t.sum_lanes = [](const float* x) { return simd::sum_lanes(simd::load(x)); };
  t.max_lane = [](const float* x) { return simd::max_lane(simd::load(x)); };
  t.sums_of_8 = &sums_of<8>;
  t.sums_of_most = &sums_of<simd::kDecodeRegisters>;
  t.most_sums = simd::kDecodeRegisters;
  t.multiply_pairs = [](const simd::Pair* a, const simd::Pair* b, const float* c, float* to) {
    simd::store(to, simd::multiply_add(simd::load(a), simd::load(b), simd::load(c)));
  };
  t.narrow_row = &simd::narrow_row;
  t.interleave_rows = [](const float* low, const float* high, std::int64_t count, simd::Pair* to) {
    simd::interleave_rows(low, high, count, to);
  };
  t.interleave = [](const simd::Pair* first, const simd::Pair* second, float* lows) {
    const simd::Interleaved both = simd::interleave(simd::load(first), simd::load(second));
    Vec<float> low = simd::low_of(both.low), high = simd::low_of(both.high);
    simd::in_order(low, high);
    simd::store(lows, low);
    simd::store(lows + simd::kWidth<float>, high);
  };
  return t;
}

}  // namespace

const Operations& operations() {
  static const Operations table = all_operations();
  return table;
}

}  // namespace onefold::test::ONEFOLD_ISA
