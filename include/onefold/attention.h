// Exact attention: the question, the answers and the three calls.
//
//   onefold::Attention question{.q = q, .k = k, .v = v, .causal = onefold::Causal::kBottomRight};
//   onefold::forward({}, question, out, lse);
//
// Notation: B sequences, Hq query heads, Hk key/value heads (Hk divides Hq), Sq queries, Sk keys,
// head dims D (q, k) and Dv (v, out). Every tensor is borrowed for the call. Errors are
// onefold::Error. Includes tensor.h, error.h and the standard library.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "onefold/error.h"
#include "onefold/tensor.h"

#pragma GCC visibility push(default)  // this is what a shared library exports

namespace onefold {

// Which diagonal is the causal border. kTopLeft: query i sees key j when j <= i. kBottomRight: when
// j <= i + Sk - Sq, so that the last query sees every key. Lengths are each sequence's own.
enum class Causal : std::uint8_t { kNone, kBottomRight, kTopLeft };

// What is asked. One query row i of head h in sequence b sees
//
//   X_j = scale * q_i . k_j                      Y_j = softcap * tanh(X_j / softcap)   (or X_j)
//   Z_j = Y_j + bias_ij - slope_h * |i + Sk - Sq - j|     over the visible keys j
//   lse = log(sum_j e^Z_j + e^sink_h)            out = sum_j e^(Z_j - lse) keep_ij v_j / (1 - p)
//
// Key j is visible when it lies inside the sequence, inside the causal border and the window, when
// mask_ij is true and bias_ij is not minus infinity. A row that sees nothing and has no sink gives
// out 0, lse minus infinity and zero gradients.
struct Attention {
  // Dense: (B, Sq, Hq, D), (B, Sk, Hk, D), (B, Sk, Hk, Dv). Packed (with cu_seqlens): (Tq, Hq, D),
  // (Tk, Hk, D), (Tk, Hk, Dv). One dtype: float32, bfloat16, float16 or float64. Any strides.
  Tensor q, k, v;

  std::optional<double> scale{};  // default 1 / sqrt(D); any finite value
  Causal causal = Causal::kNone;
  // Keys visible left and right of the diagonal, inclusive; absent = unbounded; negative numbers
  // keep their plain meaning. The diagonal is the bottom-right one unless causal is kTopLeft.
  std::optional<std::int64_t> window_left{}, window_right{};
  double softcap = 0.0;                  // 0 = off
  std::optional<Tensor> alibi_slopes{};  // (Hq) or (B, Hq), float32 (float64 when q is)
  std::optional<Tensor> bias{};          // broadcastable to (B, Hq, Sq, Sk), any float dtype
  std::optional<Tensor> mask{};          // bool, the same broadcasting; true = visible
  std::optional<Tensor> sinks{};         // (Hq), dtype as slopes; minus infinity is no sink

  // Dropout of P after the normaliser: Philox4x32-10, key = seed, counter = (i/2, j/2, h, b), word
  // 2*(i%2) + j%2; kept when word >= floor(p * 2^32). 1 drops everything.
  double dropout_p = 0.0;
  std::uint64_t seed = 0;
  std::optional<Tensor> seed_tensor{};  // one int64, read where q is, instead of `seed`

  // Packed variable length: B + 1 offsets (int32 or int64). Bias and mask are then indexed by the
  // position inside a sequence and need both maxima for their extent.
  std::optional<Tensor> cu_seqlens_q{}, cu_seqlens_k{};
  std::optional<std::int64_t> max_seqlen_q{}, max_seqlen_k{};
  // (B), used lengths, each at most the sequence's own. Rows beyond give out 0 and lse -inf.
  std::optional<Tensor> seqused_q{}, seqused_k{};
};

// Where backward writes. Absent = not wanted. Shapes and dtypes are those of the inputs.
struct Gradients {
  std::optional<Tensor> dq{}, dk{}, dv{}, dbias{}, dslopes{}, dsinks{};
  // The same bits in every call. On the CPU they always are; on CUDA it makes dq slower.
  bool deterministic = false;
};

// Runs `body(context, index, worker)` for every index in [0, count), at most concurrency() at a
// time; worker is in [0, concurrency()) and no two calls running at once share one. Returns when
// all are done. Results never depend on who ran what.
class Executor {
 public:
  using Body = void (*)(void* context, std::int64_t index, int worker);
  virtual ~Executor() = default;
  virtual int concurrency() const = 0;
  virtual void parallel_for(std::int64_t count, Body body, void* context) = 0;
};

// Where a call runs and what it may use; the default is the CPU with onefold's own threads.
struct Context {
  Device device{};
  void* stream = nullptr;  // of the device; unused on the CPU
  // Gives the workspace, asked for at most once per call; 64-byte aligned. Default: the heap.
  std::function<std::shared_ptr<void>(std::size_t bytes)> allocate{};
  Executor* executor = nullptr;  // default: onefold's thread pool
};

enum class Direction : std::uint8_t { kForward, kBackward };

// How a call will be executed. Same plan, same bits.
struct Plan {
  std::string backend;              // "cpu" or "cuda"
  std::string kernel;               // one line: instruction set, tiles
  std::int64_t work_items = 0;      // units handed to the executor
  std::size_t workspace_bytes = 0;  // what Context::allocate will be asked for
  std::string why;                  // lines: each choice and each faster path not taken
};

// Validates `attention` and tells how it would run: backward for these gradients, by default for
// all there are, or forward.
Plan plan(const Context& context, const Attention& attention, Direction direction);
Plan plan(const Context& context, const Attention& attention, const Gradients& gradients);

// Makes ready what forward needs besides memory, or backward for these gradients, so that the call
// can be captured into a CUDA graph: kernels are compiled and loaded on the device. No tensor is
// read or written. Names them, one a line; the CPU has none to make.
std::vector<std::string> warm_up(const Context& context, const Attention& attention);
std::vector<std::string> warm_up(const Context& context, const Attention& attention,
                                 const Gradients& gradients);

// Compiles the same for tensors on a CUDA device of an architecture that need not be here (900 is
// compute capability 9.0), into the cache on disk.
std::vector<std::string> prebuild(int arch, const Attention& attention);
std::vector<std::string> prebuild(int arch, const Attention& attention, const Gradients& gradients);

// out: (B, Sq, Hq, Dv) or (Tq, Hq, Dv), q's dtype, any strides, overlapping no input.
// lse (optional): natural log-sum-exp, (B, Hq, Sq) or (Hq, Tq), float32 (float64 when q is).
void forward(const Context& context, const Attention& attention, const Tensor& out,
             const std::optional<Tensor>& lse = std::nullopt);

// Gradients of sum(out * dout) + sum(lse * dlse); out and lse are those of forward. An absent dout
// or dlse counts as zero.
void backward(const Context& context, const Attention& attention, const Tensor& out,
              const Tensor& lse, const std::optional<Tensor>& dout,
              const std::optional<Tensor>& dlse, const Gradients& gradients);

// Throw what forward and backward would, as far as the arguments alone tell, and run nothing. Of
// tensors on the CPU offsets, lengths and the seed are read, of all others addresses alone count.
void check(const Context& context, const Attention& attention,
           const std::optional<Tensor>& out = std::nullopt);
void check(const Context& context, const Attention& attention, const Tensor& out, const Tensor& lse,
           const std::optional<Tensor>& dout, const std::optional<Tensor>& dlse);

// Merges partial results over disjoint sets of keys. outs: (N, ..., D) as (N, R, D) and lses
// (N, R), natural; writes out (R, D) and lse (R). At most one part may carry the sink.
void merge_states(const Context& context, const Tensor& outs, const Tensor& lses, const Tensor& out,
                  const Tensor& lse);
// Throws what that would and reads nothing.
void check_merge_states(const Context& context, const Tensor& outs, const Tensor& lses,
                        const Tensor& out, const Tensor& lse);

// Threads of onefold's own pool; 0 = as many as the process may use.
void set_num_threads(std::int64_t count);
int num_threads();

// Lines of text: the version, then for each backend what it runs on (instruction set, threads,
// caches).
std::string info();

}  // namespace onefold

#pragma GCC visibility pop
