// Holds a CUDA device to the oracle: options alone and combined, every dtype, hostile shapes and
// layouts. Not a unit test, since it needs a device; prints one line per case and a summary.
//
//   device_check [--host] [--compile] [--only words] [--cases n] [--seed s] [--threads n]
//                [--from case] [--to case] [--every n] [--trace]
//
// --host runs the CPU backend instead, to check the checker. --compile only compiles (for compute
// capability 9.0 unless there is a device), for a cache to take along. --from and --every share the
// cases among processes, since one process compiles one kernel at a time.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <thread>

#include "cuda/device.h"
#include "cuda/program.h"
#include "plan/cuda_plan.h"
#include "reference/reference.h"
#include "tests/kernels/device_case.h"

namespace onefold::test {
namespace {

constexpr double kU32 = 0x1p-24;

struct Options {
  bool host = false, compile = false;
  std::string only;
  int cases = 200, threads = 0;
  bool trace = false;                             // tell when a case reaches the device
  std::size_t from = 0, to = 1 << 30, every = 1;  // of the cases that there are
  std::uint64_t seed = 1;
};

double unit(DType t) {
  return t == DType::kFloat16 ? 0x1p-11 : t == DType::kBFloat16 ? 0x1p-8 : 0x1p-24;
}
double gamma(double n, double u) { return n < 32 ? n * u / (1 - n * u) : 6 * std::sqrt(n) * u; }

// What the tensor-core kernels do wrong, by source; see reference.h.
std::vector<double> sizes(const Wish& w) {
  const bool wide = w.dtype == DType::kFloat32;
  // The accumulators of tensor cores truncate: twice the roundoff. A product of split float32 is
  // good to 2^-21.
  const double product = wide ? 0x1p-21 : 0;
  const double sum_d = gamma(double(std::max(w.dim, w.dim_v)) + 2, 2 * kU32) + product;
  const double weight = wide ? 0x1p-21 : unit(w.dtype);
  const double moves = std::min<double>(double(w.sk) / 16 + 1, 16);
  std::vector<double> s(reference::kNumSources, 0.0);
  const auto set = [&](reference::Source source, double x) { s[std::size_t(source)] = x; };
  using reference::Source;
  set(Source::kScore, sum_d);
  set(Source::kAdded, 8 * kU32);
  set(Source::kExponent, 2 * kU32);
  set(Source::kWeight, (16 + 5 * moves) * kU32);
  set(Source::kSum, 2 * gamma(double(w.sk), 2 * kU32) + weight + product + 6 * kU32);
  set(Source::kUnderflow, w.dtype == DType::kFloat16 ? 0x1p-25 : 0x1p-126);
  set(Source::kOut, unit(w.dtype));
  set(Source::kLse, 4 * kU32);
  set(Source::kProduct, sum_d);
  const double most = double(std::max(w.sq * w.heads, w.sk));
  set(Source::kAccumulate, gamma(most, 2 * kU32) + weight + product + 4 * kU32);
  return s;
}

// The same in backward: weights times 2^14 are handed over in float16.
std::vector<double> backward_sizes(const Wish& w) {
  std::vector<double> s = sizes(w);
  if (w.dtype == DType::kFloat32) return s;
  s[std::size_t(reference::Source::kWeight)] += 0x1p-11;
  double& underflow = s[std::size_t(reference::Source::kUnderflow)];
  underflow = std::max(underflow, 0x1p-39);
  return s;
}
// dS is rounded to float16, whose small numbers have an absolute error: what that makes of a
// component of dq (`of`: k) or dk (`of`: q), at most.
double small_ds(const Wish& w, const Attention& a, const Tensor& of) {
  if (w.dtype != DType::kFloat16) return 0;
  const double scale = std::fabs(a.scale.value_or(1 / std::sqrt(double(w.dim))));
  const int rank = of.rank;
  std::vector<double> sums(std::size_t(of.shape[rank - 2] * of.shape[rank - 1]));
  std::size_t n = 0;
  for_each_element(of, [&](std::int64_t at) {
    const double x = std::fabs(load_number(of.data, of.dtype, at));
    if (std::isfinite(x)) sums[n % sums.size()] += x;
    ++n;
  });
  double most = 0;
  for (const double x : sums) most = std::max(most, x);
  return 0x1p-25 * scale * most * double(w.heads / w.kv_heads);
}

struct Verdict {
  bool ok = true;
  double worst = 0;  // of error / bound
  std::string text;
};

// `got` against `want`, with bound = sum of size * term (+ own rounding). `may_miss`: elements that
// may be finite where `want` is not.
void judge(Verdict& v, const char* what, const std::vector<double>& got,
           const reference::Array& want, const reference::Array& terms,
           const std::vector<double>& size, double rounding, double tiny,
           const std::vector<bool>& may_miss = {}) {
  const std::size_t count = want.data.size();
  int shown = 0;
  for (std::size_t n = 0; n < count; ++n) {
    double bound = tiny + rounding * std::fabs(want.data[n]);
    for (std::size_t s = 0; s < size.size(); ++s) {
      if (size[s] > 0) bound += size[s] * terms.data[s * count + n];
    }
    const double x = want.data[n], y = got[n];
    bool good;
    double ratio = 0;
    if (!std::isfinite(x)) {
      good = std::isnan(x) ? !std::isfinite(y) : (y == x || (std::isnan(y) && x > 0));
      good = good || (!may_miss.empty() && may_miss[n]);
    } else if (!std::isfinite(bound)) {
      good = true;
    } else {
      ratio = std::fabs(y - x) / std::max(bound, 1e-300);
      good = ratio <= 1;  // false for NaN
    }
    if (std::isfinite(ratio)) v.worst = std::max(v.worst, ratio);
    if (!good && shown++ < 3) {
      char line[160];
      std::snprintf(line, sizeof line, "\n      %s[%zu] is %.9g, want %.9g +- %.3g", what, n, y, x,
                    bound);
      v.text += line;
    }
    v.ok &= good;
  }
  if (shown > 3) v.text += concat("\n      ", shown, " of ", count, " wrong in ", what);
}

// Nothing but elements of an output has been written.
void check_margins(Verdict& v, const char* what, const Tensor& t, const std::byte* base,
                   std::size_t bytes) {
  std::vector<bool> own(bytes, false);
  const auto first = static_cast<const std::byte*>(t.data) - base;
  const int size = size_bytes(t.dtype);
  for_each_element(t, [&](std::int64_t at) {
    for (int n = 0; n < size; ++n) own[std::size_t(first + at * size + n)] = true;
  });
  for (std::size_t n = 0; n < bytes; ++n) {
    if (own[n] || base[n] == std::byte{0xa5}) continue;
    v.ok = false;
    v.text += concat("\n      ", what, ": wrote beyond its elements, byte ", n);
    return;
  }
}

std::mutex device_mutex;

// Workspaces begin as NaN.
std::shared_ptr<void> spoiled(std::size_t bytes) {
  std::shared_ptr<void> memory = cuda::allocate(bytes, 0, nullptr);
  cuda::fill(memory.get(), 0xff, bytes, 0, nullptr);
  return memory;
}

void judge_margins(Verdict& v, const char* what, const Tensor& t, Case& c) {
  const auto& bytes = c.slabs.bytes(t);
  check_margins(v, what, t, bytes.data(), bytes.size());
}

// Elements of dk whose key no row with a dO that is not finite sees with a weight that 16 bits
// have: smaller ones count as zero. With 1 for such rows in place of dO, dv is the sum of weights.
std::vector<bool> weightless(Case& c) {
  if (!c.w.has("nan_dout") || c.w.dtype == DType::kFloat32) return {};
  const reference::Array weights = reference::backward(c.attention, c.rows_not_finite(), {}).dv;
  const auto rows = static_cast<std::size_t>(c.attention.k.elements() / c.w.dim);
  const std::size_t columns = weights.data.size() / rows;
  std::vector<bool> found;
  for (std::size_t row = 0; row < rows; ++row) {
    found.insert(found.end(), std::size_t(c.w.dim), weights.data[row * columns] < 0x1p-39);
  }
  return found;
}

void judge_backward(Verdict& v, Case& c, const char* how) {
  if (c.w.has("huge_v")) return;  // dP is beyond float32
  const std::optional<Tensor> dout = c.given_dout();
  const reference::Backward want = reference::backward(c.attention, dout, c.dlse);
  const reference::BackwardTerms terms = reference::backward_terms(c.attention, dout, c.dlse);
  const std::vector<double> size = backward_sizes(c.w);
  const double u = unit(c.w.dtype);
  const double tiny = c.w.dtype == DType::kFloat16 ? 0x1p-24 : 0x1p-126;
  const auto one = [&](const char* name, const Tensor& got, const reference::Array& exact,
                       const reference::Array& bound, double rounding, double more,
                       const std::vector<bool>& may_miss = {}) {
    judge(v, concat(how, name).c_str(), numbers(got), exact, bound, size, rounding, tiny + more,
          may_miss);
    judge_margins(v, name, got, c);
  };
  const Gradients& g = c.gradients;
  const Attention& a = c.attention;
  one("dq", *g.dq, want.dq, terms.dq, u, small_ds(c.w, a, a.k));
  one("dk", *g.dk, want.dk, terms.dk, u, small_ds(c.w, a, a.q), weightless(c));
  one("dv", *g.dv, want.dv, terms.dv, u, 0);
  if (g.dbias) one("dbias", *g.dbias, *want.dbias, *terms.dbias, unit(g.dbias->dtype), 0);
  if (g.dslopes) one("dslopes", *g.dslopes, *want.dslopes, *terms.dslopes, kU32, 0);
  if (g.dsinks) one("dsinks", *g.dsinks, *want.dsinks, *terms.dsinks, kU32, 0);
}

// Forward and backward on the device, each twice: the bits repeat.
void run_on_device(Verdict& v, Case& c) {
  Context context;
  context.device = {DeviceType::kCuda, 0};
  context.allocate = spoiled;
  const Attention a = c.on_device();
  const Tensor out = c.slabs.there(c.out), lse = c.slabs.there(c.lse);
  const auto fetch = [&](const Tensor& t, int repeat, std::vector<std::byte>& first,
                         const char* what) {
    c.slabs.fetch(t);
    if (repeat == 0) first = c.slabs.bytes(t);
    if (first == c.slabs.bytes(t)) return;
    v.ok = false;
    v.text += concat("\n      ", what, " differs between two equal calls");
  };
  std::vector<std::byte> first_out, first_lse;
  for (int repeat = 0; repeat < 2; ++repeat) {
    forward(context, a, out, lse);
    fetch(c.out, repeat, first_out, "out");
    fetch(c.lse, repeat, first_lse, "lse");
  }
  const std::optional<Tensor> dout = c.slabs.there(c.given_dout());
  const Tensor dlse = c.slabs.there(c.dlse);
  Gradients g = c.gradients_on_device();
  g.deterministic = true;
  std::vector<std::byte> first[6];
  for (int repeat = 0; repeat < 2; ++repeat) {
    backward(context, a, out, lse, dout, dlse, g);
    int n = 0;
    for (const auto& [what, t] : c.named_gradients()) fetch(t, repeat, first[n++], what);
  }
}

Verdict run(const Wish& wish, std::uint64_t seed, const Options& options) {
  Verdict v;
  Case c(wish, seed, !options.host);
  const reference::Forward want = reference::forward(c.attention);
  const reference::ForwardTerms terms = reference::forward_terms(c.attention);
  if (options.host) {
    forward({}, c.attention, c.out, c.lse);
    backward({}, c.attention, c.out, c.lse, c.given_dout(), c.dlse, c.gradients);
  } else {
    const std::lock_guard lock(device_mutex);
    if (options.trace) std::fprintf(stderr, "on the device: %s\n", wish.text().c_str());
    run_on_device(v, c);
  }
  const std::vector<double> size = sizes(wish);
  const double tiny = wish.dtype == DType::kFloat16 ? 0x1p-24 : 0x1p-126;
  judge(v, "out", numbers(c.out), want.out, terms.out, size, 0, tiny);
  judge(v, "lse", numbers(c.lse), want.lse, terms.lse, size, 0, tiny);
  judge_margins(v, "out", c.out, c);
  judge_margins(v, "lse", c.lse, c);
  judge_backward(v, c, "");
  if (options.host) return v;
  {
    const std::lock_guard lock(device_mutex);
    Context context;
    context.device = {DeviceType::kCuda, 0};
    context.allocate = spoiled;
    backward(context, c.on_device(), c.slabs.there(c.out), c.slabs.there(c.lse),
             c.slabs.there(c.given_dout()), c.slabs.there(c.dlse), c.gradients_on_device());
    for (const auto& [what, t] : c.named_gradients()) c.slabs.fetch(t);
  }
  judge_backward(v, c, "atomic ");
  return v;
}

Wish random_wish(Random& r) {
  Wish w;
  const auto pick = [&r](std::initializer_list<int> all) {
    return all.begin()[r.integer(0, int(all.size()) - 1)];
  };
  const double kind = r.uniform();
  w.dtype = kind < 0.45 ? DType::kBFloat16 : kind < 0.75 ? DType::kFloat16 : DType::kFloat32;
  w.dim = pick({1, 8, 16, 32, 40, 64, 64, 64, 72, 80, 96, 100, 128, 128, 128, 160, 192, 256, 13});
  w.dim_v = r.chance(0.7) ? w.dim : pick({1, 8, 32, 64, 128, 200, 256});
  w.batch = r.integer(1, 3);
  w.kv_heads = r.integer(1, 2);
  w.heads = w.kv_heads * r.integer(1, 3);
  w.sq = pick({1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 130, 191, 257});
  w.sk = pick({0, 1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 193, 256, 300});
  while (w.batch * w.heads * w.sq * w.sk * (w.dim + w.dim_v) > 60'000'000) {
    if (w.batch > 1) {
      --w.batch;
    } else if (w.heads > 1) {
      w.heads = w.kv_heads = 1;
    } else {
      w.sq = std::max<std::int64_t>(w.sq / 2, 1);
    }
  }
  w.packed = r.chance(0.25);
  w.hostile = r.chance(0.2);
  w.spread = r.chance(0.1) ? 8 : 1;
  for (const auto& [word, chance] :
       {std::pair{"causal ", 0.35}, {"topleft ", 0.1}, {"window ", 0.25},   {"softcap ", 0.2},
        {"slopes ", 0.2},           {"bias ", 0.15},   {"bias32 ", 0.05},   {"mask ", 0.2},
        {"sinks ", 0.25},           {"dropout ", 0.2}, {"dropout1 ", 0.02}, {"used ", 0.15},
        {"scale0 ", 0.04},          {"scale- ", 0.08}, {"scale+ ", 0.05},   {"nan_q ", 0.05},
        {"nan_k ", 0.05},           {"nan_v ", 0.08},  {"nan_dout ", 0.08}, {"inf_v ", 0.03}}) {
    if (r.chance(chance)) w.options += word;
  }
  return w;
}

Wish wish_of(DType dtype, std::int64_t dim, const char* words, std::int64_t rows = 200) {
  Wish w;
  w.dtype = dtype;
  w.dim = w.dim_v = dim;
  w.batch = 1;
  w.heads = 2;
  w.kv_heads = 1;
  w.sq = rows;
  w.sk = 333;
  w.options = words;
  return w;
}
// Each option alone, for each dtype and the usual head dims; tiles with one row; numbers at the
// ends of float32; then random ones.
std::vector<Wish> all_wishes(const Options& options) {
  std::vector<Wish> all;
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
    for (const std::int64_t dim : {64, 128, 256}) {
      for (const char* words :
           {"", "causal", "window", "softcap", "slopes", "bias full", "mask", "sinks", "dropout",
            "scale-", "causal nan_v", "causal nan_k nan_q nan_dout", "no_dout nan_v",
            "causal no_dout nan_v nan_q", "sinks slopes no_dout nan_v",
            "bias full no_dout nan_v"}) {
        all.push_back(wish_of(dtype, dim, words));
      }
      for (const std::int64_t rows : {1, 65, 129}) {
        all.push_back(wish_of(dtype, dim, "causal left5 nan_before", rows));
      }
      if (dtype == DType::kFloat16) continue;
      for (const char* words : {"huge_v", "causal huge_v", "causal huge_v nan_v", "mask huge_v",
                                "scale_tiny", "causal scale_tiny", "slopes softcap scale_tiny"}) {
        if (dim > 128 && std::string(words) == "mask huge_v") continue;  // not held there
        all.push_back(wish_of(dtype, dim, words));
      }
    }
  }
  Random r(options.seed);
  for (int n = 0; n < options.cases; ++n) all.push_back(random_wish(r));
  std::vector<Wish> chosen;
  for (const Wish& w : all) {
    if (w.text().find(options.only) != std::string::npos) chosen.push_back(w);
  }
  return chosen;
}

// Compiles what a case needs.
std::string compile(const Wish& wish, std::uint64_t seed) {
  Case c(wish, seed, false);
  const CudaFacts facts{900, 132, 227 * 1024, 228 * 1024};
  Attention a = c.attention;
  const auto move = [](Tensor& t) { t.device = {DeviceType::kCuda, 0}; };
  for (Tensor* t : {&a.q, &a.k, &a.v, &c.out, &c.lse, &c.dout, &c.dlse}) move(*t);
  Gradients& g = c.gradients;
  for (std::optional<Tensor>* t :
       {&a.alibi_slopes, &a.bias, &a.mask, &a.sinks, &a.cu_seqlens_q, &a.cu_seqlens_k, &a.seqused_q,
        &a.seqused_k, &g.dq, &g.dk, &g.dv, &g.dbias, &g.dslopes, &g.dsinks}) {
    if (*t) move(**t);
  }
  const Problem p = make_problem(a, {DeviceType::kCuda, 0});
  std::string text;
  const auto compiled = [&](const auto& spec) {
    const jit::Facts& f = jit::get(cuda::program(spec)).facts;
    text += concat(f.registers, f.local_bytes > 0 ? concat(" LOCAL ", f.local_bytes) : "", " ");
  };
  const kernels::ForwardPlan plan = plan_cuda_forward(p, make_forward(p, a, c.out, c.lse), facts);
  if (p.mask) compiled(kernels::MaskClassesSpec{900});
  compiled(plan.spec);
  const BackwardTensors t = make_backward(p, a, c.out, c.lse, c.dout, c.dlse, g);
  for (const bool deterministic : {false, true}) {
    const kernels::BackwardPlan back = plan_cuda_backward(p, t, deterministic, facts);
    compiled(back.spec);
    compiled(kernels::BackwardRowsSpec{back.spec});
    compiled(kernels::BackwardDqSpec{back.spec});
    if (back.bias) {
      compiled(back.bias_spec);
      compiled(kernels::GradientSumsSpec{900, back.spec.features.bias});
    }
    if (back.slopes || back.sinks) {
      compiled(back.rows_spec);
      compiled(kernels::HeadSumsSpec{900});
    }
  }
  return text + "registers";
}

// Partial results merged on the device, against the formula in double.
bool check_merging(const Options& options) {
  Random r(options.seed);
  bool ok = true;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64}) {
    const std::int64_t parts = r.integer(1, 6), rows = r.integer(1, 99), dim = r.integer(1, 130);
    const DType lse_dtype = dtype == DType::kFloat64 ? dtype : DType::kFloat32;
    Slabs slabs(true);
    const auto make = [&](DType type, std::initializer_list<std::int64_t> shape, auto&& fill) {
      Tensor t = Tensor::packed(nullptr, type, shape);
      t.data = slabs.add(std::size_t(t.elements() * size_bytes(type)), 0);
      for_each_element(t, [&](std::int64_t at) { store_number(t.data, type, at, fill()); });
      return t;
    };
    const auto no_number = [] { return 0.0; };
    const Tensor outs = make(dtype, {parts, rows, dim}, [&] { return r.normal(); });
    const Tensor lses = make(lse_dtype, {parts, rows}, [&] {
      return r.chance(0.2) ? -std::numeric_limits<double>::infinity() : 3 * r.normal();
    });
    const Tensor out = make(dtype, {rows, dim}, no_number),
                 lse = make(lse_dtype, {rows}, no_number);
    Context context;
    context.device = {DeviceType::kCuda, 0};
    merge_states(context, slabs.there(outs), slabs.there(lses), slabs.there(out), slabs.there(lse));
    slabs.fetch(out);
    slabs.fetch(lse);
    const std::vector<double> all = numbers(outs), all_lses = numbers(lses);
    const std::vector<double> got = numbers(out), got_lse = numbers(lse);
    const bool wide = dtype == DType::kFloat64;
    const double u = wide ? 0x1p-50 : kU32, stored = wide ? 0x1p-53 : unit(dtype);
    for (std::int64_t row = 0; row < rows; ++row) {
      double top = -std::numeric_limits<double>::infinity(), sum = 0;
      for (std::int64_t n = 0; n < parts; ++n) top = std::max(top, all_lses[n * rows + row]);
      const auto share = [&](std::int64_t n) {
        return std::isinf(top) ? 0 : std::exp(all_lses[n * rows + row] - top);
      };
      for (std::int64_t n = 0; n < parts; ++n) sum += share(n);
      const double want_lse = sum > 0 ? top + std::log(sum) : top;
      ok &= got_lse[row] == want_lse ||
            std::fabs(got_lse[row] - want_lse) <= u * (4 + std::fabs(want_lse));
      for (std::int64_t d = 0; d < dim; ++d) {
        double want = 0, size = 0;
        for (std::int64_t n = 0; sum > 0 && n < parts; ++n) {
          want += share(n) / sum * all[(n * rows + row) * dim + d];
          size += std::fabs(share(n) / sum * all[(n * rows + row) * dim + d]);
        }
        const double bound = double(parts + 3) * u * size + stored * std::fabs(want) + 0x1p-25;
        ok &= std::fabs(got[row * dim + d] - want) <= (wide ? bound - 0x1p-25 : bound);
      }
    }
    std::printf("%s merging %s, %lld parts\n", ok ? "ok  " : "FAIL", name(dtype),
                static_cast<long long>(parts));
  }
  return ok;
}

int main_of(const Options& options) {
  const std::vector<Wish> wishes = all_wishes(options);
  const int threads = options.threads > 0 ? options.threads
                                          : int(std::max(1u, std::thread::hardware_concurrency()));
  set_num_threads(1);
  std::atomic<std::size_t> next{options.from}, done{0}, failed{0};
  std::mutex print;
  double worst = 0;
  const auto work = [&] {
    for (std::size_t n;
         (n = next.fetch_add(options.every)) < std::min(wishes.size(), options.to);) {
      const std::uint64_t seed = options.seed * 1000003 + n;
      Verdict v;
      std::string note;
      try {
        if (options.compile) {
          note = compile(wishes[n], seed);
          v.ok = note.find("LOCAL") == std::string::npos;
        } else {
          v = run(wishes[n], seed, options);
        }
      } catch (const std::exception& e) {
        v.ok = false;
        v.text = concat("\n      ", e.what()).substr(0, 600);
      }
      const std::lock_guard lock(print);
      worst = std::max(worst, v.worst);
      ++done;
      failed += !v.ok;
      std::printf("%s %4zu %.3f  %s %s%s\n", v.ok ? "ok  " : "FAIL", n, v.worst,
                  wishes[n].text().c_str(), note.c_str(), v.text.c_str());
      std::fflush(stdout);
    }
  };
  std::vector<std::thread> pool;
  for (int n = 0; n < threads; ++n) pool.emplace_back(work);
  for (std::thread& thread : pool) thread.join();
  std::printf("%zu cases, %zu failed, worst error / bound %.3f\n", done.load(), failed.load(),
              worst);
  if (!options.host && !options.compile && options.only.empty()) failed += !check_merging(options);
  return failed == 0 ? 0 : 1;
}

}  // namespace
}  // namespace onefold::test

int main(int count, char** words) {
  onefold::test::Options options;
  for (int n = 1; n < count; ++n) {
    const std::string word = words[n];
    const auto value = [&] { return ++n < count ? words[n] : ""; };
    if (word == "--host") options.host = true;
    if (word == "--compile") options.compile = true;
    if (word == "--only") options.only = value();
    if (word == "--trace") options.trace = true;
    if (word == "--from") options.from = std::strtoull(value(), nullptr, 10);
    if (word == "--every") options.every = std::strtoull(value(), nullptr, 10);
    if (word == "--to") options.to = std::strtoull(value(), nullptr, 10);
    if (word == "--cases") options.cases = std::atoi(value());
    if (word == "--seed") options.seed = std::strtoull(value(), nullptr, 10);
    if (word == "--threads") options.threads = std::atoi(value());
  }
  return onefold::test::main_of(options);
}
