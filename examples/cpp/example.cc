// Attention from C++: build it against an installed onefold with
//
//   find_package(onefold CONFIG REQUIRED)
//   target_link_libraries(example PRIVATE onefold::onefold)
//
// Computes causal attention, then the same in two halves of the keys merged into one, and compares.

#include <onefold/attention.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <limits>
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

double largest_difference(const std::vector<float>& a, const float* b) {
  double largest = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    // A NaN on either side must not compare as "no difference".
    const double difference = std::fabs(static_cast<double>(a[i]) - b[i]);
    if (!(difference <= largest)) largest = difference;
  }
  return largest;
}

}  // namespace

int main() try {
  const onefold::Context cpu;  // onefold's own threads, workspace from the heap
  Array q({kBatch, kQueries, kHeads, kDim});
  Array k({kBatch, kKeys, kKvHeads, kDim}), v({kBatch, kKeys, kKvHeads, kDim});
  fill(q, 0.0f), fill(k, 1.0f), fill(v, 2.0f);

  // One call. Two query heads share each key/value head; the shapes say so.
  onefold::Attention question{.q = q.tensor, .k = k.tensor, .v = v.tensor};
  Array out({kBatch, kQueries, kHeads, kDim}), lse({kBatch, kHeads, kQueries});
  onefold::forward(cpu, question, out.tensor, lse.tensor);

  // The same in two parts: attention over a union is the merge of the parts. An output row has one
  // lse; merge_states wants both in the same order, so out is written as (batch, heads, queries).
  const std::int64_t rows = kBatch * kHeads * kQueries;
  Array outs({2, kBatch, kHeads, kQueries, kDim}), lses({2, rows});
  for (int part = 0; part < 2; ++part) {
    question.k = keys(k.tensor, part * kKeys / 2, (part + 1) * kKeys / 2);
    question.v = keys(v.tensor, part * kKeys / 2, (part + 1) * kKeys / 2);
    float* part_out = outs.values.data() + part * rows * kDim;
    float* part_lse = lses.values.data() + part * rows;
    onefold::Tensor view = out.tensor;  // (batch, queries, heads, dim) over the other order
    view.data = part_out;
    view.stride = {kHeads * kQueries * kDim, kDim, kQueries * kDim, 1};
    onefold::forward(
        cpu, question, view,
        onefold::Tensor::packed(part_lse, onefold::DType::kFloat32, {kBatch, kHeads, kQueries}));
  }
  Array merged({rows, kDim}), merged_lse({rows});
  onefold::merge_states(
      cpu, onefold::Tensor::packed(outs.values.data(), onefold::DType::kFloat32, {2, rows, kDim}),
      lses.tensor, merged.tensor, merged_lse.tensor);

  // The gradient of sum(out): of the whole, with respect to the queries.
  question.k = k.tensor, question.v = v.tensor;
  Array ones({kBatch, kQueries, kHeads, kDim}), dq({kBatch, kQueries, kHeads, kDim});
  ones.values.assign(ones.values.size(), 1.0f);
  onefold::backward(cpu, question, out.tensor, lse.tensor, ones.tensor, std::nullopt,
                    {.dq = dq.tensor});

  const double difference = largest_difference(lse.values, merged_lse.values.data());
  std::printf("%s\n\n", onefold::info().c_str());
  std::printf("plan: %s\n",
              onefold::plan(cpu, question, onefold::Direction::kForward).kernel.c_str());
  std::printf("out[0] = %.6f, lse[0] = %.6f, dq[0] = %.6f\n", out.values[0], lse.values[0],
              dq.values[0]);
  std::printf("whole and merged halves differ by at most %.1e in lse\n", difference);
  return difference < 1e-5 && std::isfinite(dq.values[0]) ? 0 : 1;
} catch (const onefold::Error& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
