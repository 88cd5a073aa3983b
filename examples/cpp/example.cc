// Attention from C++: build it against an installed onefold with
//
//   find_package(onefold CONFIG REQUIRED)
//   target_link_libraries(example PRIVATE onefold::onefold)
//
// Computes attention, the same in two halves of the keys that are merged, and a gradient.

#include <onefold/attention.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <initializer_list>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

namespace {

constexpr std::int64_t kBatch = 2, kQueries = 5, kKeys = 64, kHeads = 4, kKvHeads = 2, kDim = 16;

// Storage with the tensor that describes it.
struct Array {
  std::vector<float> values;
  onefold::Tensor tensor;

  explicit Array(std::initializer_list<std::int64_t> shape) {
    std::int64_t count = 1;
    for (const std::int64_t extent : shape) count *= extent;
    values.resize(count, std::numeric_limits<float>::quiet_NaN());  // outputs must be written
    tensor = onefold::Tensor::packed(values.data(), onefold::DType::kFloat32, shape);
  }
};

// Any smooth numbers will do.
void fill(Array& array, float phase) {
  for (std::size_t i = 0; i < array.values.size(); ++i) {
    array.values[i] = std::sin(0.37f * static_cast<float>(i) + phase);
  }
}

// The keys [begin, end) of a (batch, keys, heads, dim) tensor: a view, nothing is copied.
onefold::Tensor keys(onefold::Tensor whole, std::int64_t begin, std::int64_t end) {
  whole.data = static_cast<float*>(whole.data) + begin * whole.stride[1];
  whole.shape[1] = end - begin;
  return whole;
}

// (batch, heads, queries, dim) seen as (batch, queries, heads, dim): strides are part of a tensor.
onefold::Tensor queries_first(float* data) {
  onefold::Tensor t =
      onefold::Tensor::packed(data, onefold::DType::kFloat32, {kBatch, kHeads, kQueries, kDim});
  std::swap(t.shape[1], t.shape[2]);
  std::swap(t.stride[1], t.stride[2]);
  return t;
}

onefold::Tensor lse_of(float* data) {
  return onefold::Tensor::packed(data, onefold::DType::kFloat32, {kBatch, kHeads, kQueries});
}

double largest_difference(const std::vector<float>& a, const std::vector<float>& b) {
  double largest = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double difference = std::fabs(static_cast<double>(a[i]) - b[i]);
    if (!(difference <= largest)) largest = difference;  // NaN counts as a difference
  }
  return largest;
}

}  // namespace

int main() try {
  const onefold::Context cpu;  // onefold's own threads, workspace from the heap
  Array q({kBatch, kQueries, kHeads, kDim});
  Array k({kBatch, kKeys, kKvHeads, kDim}), v({kBatch, kKeys, kKvHeads, kDim});
  fill(q, 0.0f), fill(k, 1.0f), fill(v, 2.0f);
  onefold::Attention question{.q = q.tensor, .k = k.tensor, .v = v.tensor};

  // One call. Two query heads share each key/value head; the shapes say so. A row of the result is
  // one (batch, head, query).
  constexpr std::int64_t kRows = kBatch * kHeads * kQueries;
  Array out({kRows, kDim}), lse({kRows});
  const onefold::Tensor out_view = queries_first(out.values.data());
  onefold::forward(cpu, question, out_view, lse_of(lse.values.data()));

  // The same in two parts: attention over a union of keys is the merge of the parts.
  Array part_outs({2, kRows, kDim}), part_lses({2, kRows});
  for (int part = 0; part < 2; ++part) {
    question.k = keys(k.tensor, part * kKeys / 2, (part + 1) * kKeys / 2);
    question.v = keys(v.tensor, part * kKeys / 2, (part + 1) * kKeys / 2);
    onefold::forward(cpu, question, queries_first(part_outs.values.data() + part * kRows * kDim),
                     lse_of(part_lses.values.data() + part * kRows));
  }
  Array merged({kRows, kDim}), merged_lse({kRows});
  onefold::merge_states(cpu, part_outs.tensor, part_lses.tensor, merged.tensor, merged_lse.tensor);

  // The gradient of sum(out) with respect to the queries.
  question.k = k.tensor, question.v = v.tensor;
  Array ones({kRows, kDim}), dq({kBatch, kQueries, kHeads, kDim});
  ones.values.assign(ones.values.size(), 1.0f);
  onefold::backward(cpu, question, out_view, lse_of(lse.values.data()),
                    queries_first(ones.values.data()), std::nullopt, {.dq = dq.tensor});

  const double difference = std::max(largest_difference(out.values, merged.values),
                                     largest_difference(lse.values, merged_lse.values));
  std::printf("%s", onefold::info().c_str());
  std::printf("plan: %s\n",
              onefold::plan(cpu, question, onefold::Direction::kForward).kernel.c_str());
  std::printf("out[0] = %.6f, lse[0] = %.6f, dq[0] = %.6f\n", out.values[0], lse.values[0],
              dq.values[0]);
  std::printf("the whole and its merged halves differ by at most %.1e\n", difference);
  return difference < 1e-5 && std::isfinite(dq.values[0]) ? 0 : 1;
} catch (const onefold::Error& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
