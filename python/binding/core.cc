// onefold._core: the C++ API with positional arguments, for the Python front ends alone.
//
// Every call begins with the same `kNumArguments` objects, in the order of `kArgumentNames`; what
// follows is per function and listed in _core.pyi. Arrays are borrowed; outputs are the caller's.
// The GIL is released while numbers are computed. Includes nanobind and the public headers.
#include <nanobind/nanobind.h>

#include <array>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "arguments.h"
#include "cpu/cpu.h"
#include "cpu/thread_pool.h"
#include "gil.h"
#include "onefold/attention.h"
#include "tensor.h"

namespace nb = nanobind;

namespace onefold::python {
namespace {

enum Position : std::size_t {
  kQ,
  kK,
  kV,
  kBias,
  kMask,
  kSlopes,
  kSinks,
  kCuQ,
  kCuK,
  kUsedQ,
  kUsedK,
  kSeed,
  kScale,
  kCausal,
  kLeft,
  kRight,
  kSoftcap,
  kDropoutP,
  kMaxQ,
  kMaxK,
};
constexpr std::array<const char*, kNumArguments> kArgumentNames = {"q",
                                                                   "k",
                                                                   "v",
                                                                   "bias",
                                                                   "mask",
                                                                   "alibi_slopes",
                                                                   "sinks",
                                                                   "cu_seqlens_q",
                                                                   "cu_seqlens_k",
                                                                   "seqused_q",
                                                                   "seqused_k",
                                                                   "seed",
                                                                   "scale",
                                                                   "causal",
                                                                   "window[0]",
                                                                   "window[1]",
                                                                   "softcap",
                                                                   "dropout_p",
                                                                   "max_seqlen_q",
                                                                   "max_seqlen_k"};

[[noreturn]] void wrong_type(const char* name, nb::handle object, const char* needed) {
  throw nb::type_error(concat(name, " is ", type_text(object), ": ", needed, " is needed").c_str());
}

// What converts to T without being rounded or read as something else.
template <class T>
T exactly(nb::handle object, const char* name, const char* needed) {
  T value{};
  if (!nb::try_cast<T>(object, value)) wrong_type(name, object, needed);
  return value;
}
bool flag(nb::handle object, const char* name) {
  return exactly<bool>(object, name, "True or False");
}

std::optional<double> optional_number(nb::handle object, const char* name) {
  if (object.is_none()) return std::nullopt;
  if (!PyFloat_Check(object.ptr()) && !PyLong_Check(object.ptr())) {
    wrong_type(name, object, "a Python number");
  }
  const double x = PyFloat_AsDouble(object.ptr());
  if (x == -1.0 && PyErr_Occurred() != nullptr) throw nb::python_error();
  return x;
}

double number(nb::handle object, const char* name) {
  const std::optional<double> x = optional_number(object, name);
  if (!x) wrong_type(name, object, "a Python number");
  return *x;
}

// Integers beyond 64 bits are clamped: as a window, a maximum or a count they mean the same.
std::optional<std::int64_t> optional_integer(nb::handle object, const char* name) {
  if (object.is_none()) return std::nullopt;
  if (!PyLong_Check(object.ptr())) wrong_type(name, object, "an integer");
  int overflow = 0;
  const long long x = PyLong_AsLongLongAndOverflow(object.ptr(), &overflow);
  if (overflow > 0) return std::numeric_limits<std::int64_t>::max();
  if (overflow < 0) return std::numeric_limits<std::int64_t>::min();
  return x;
}

// An int from -2^63 to 2^64 - 1, taken modulo 2^64, or an int64 tensor of one element.
void read_seed(nb::handle object, Attention& a) {
  if (object.is_none()) return;
  if (PyLong_Check(object.ptr())) {
    a.seed = PyLong_AsUnsignedLongLongMask(object.ptr());
    if (PyErr_Occurred() != nullptr) throw nb::python_error();
    return;
  }
  a.seed_tensor = tensor_from_python(object, {"seed", "int64"});
}

Causal read_causal(nb::handle object) {
  const auto is = [object](const char* text) {
    return PyUnicode_Check(object.ptr()) &&
           PyUnicode_CompareWithASCIIString(object.ptr(), text) == 0;
  };
  if (is("none")) return Causal::kNone;
  if (is("bottom_right")) return Causal::kBottomRight;
  if (is("top_left")) return Causal::kTopLeft;
  invalid("causal is ", nb::repr(object).c_str(),
          ": False, True, \"bottom_right\" or \"top_left\" is needed");
}

Expected output(const char* name) {
  Expected expected{name};
  expected.writable = true;
  return expected;
}

// What a call runs on, alive until it has returned, and destroyed with the GIL held.
struct Place {
  Context context;
  std::shared_ptr<Executor> threads;   // of context.executor
  std::shared_ptr<nb::object> memory;  // what the allocator of context gave
};

// Memory of the framework that owns `like`, whose pool gives it and takes it back, with `owner`, in
// the order of the current stream. The GIL is not held where C++ asks for it.
std::shared_ptr<void> framework_memory(nb::handle allocate, nb::handle like, std::size_t bytes,
                                       const std::shared_ptr<nb::object>& owner) {
  const WithGil gil;
  PyObject* given = nullptr;
  void* address = nullptr;
  run_python([&] {
    given = PyObject_CallFunction(allocate.ptr(), "On", like.ptr(), static_cast<Py_ssize_t>(bytes));
    PyObject* const number =
        given == nullptr ? nullptr : PyObject_CallMethod(given, "data_ptr", nullptr);
    if (number == nullptr) return;
    address = PyLong_AsVoidPtr(number);
    Py_DECREF(number);
  });
  *owner = nb::steal(given);
  if (PyErr_Occurred() != nullptr) throw nb::python_error();
  return {owner, address};
}

// Where a call on `tensor` runs. `where` is, on the CPU, how many threads the host has set for
// itself; else the stream (an int), and `allocate` is called with `like` and a number of bytes,
// once a call. None where there is nothing to say, null for the allocator of a call that asks for
// no memory.
Place place_of(nb::handle where, nb::handle allocate, const Tensor& tensor, nb::handle like) {
  Place place;
  place.context.device = tensor.device;
  if (where.is_none()) return place;
  if (tensor.device.type == DeviceType::kCpu) {
    place.threads = cpu::pool_for_host(exactly<int>(where, "num_threads", "an int of 32 bits"));
    place.context.executor = place.threads.get();
    return place;
  }
  place.context.stream =
      reinterpret_cast<void*>(exactly<std::uintptr_t>(where, "stream", "an address"));
  if (!allocate.is_valid()) return place;
  place.memory = std::make_shared<nb::object>();
  place.context.allocate = [allocate, like, owner = place.memory](std::size_t bytes) {
    return framework_memory(allocate, like, bytes, owner);
  };
  return place;
}
Place place_of(const nb::args& args, std::size_t at, const Tensor& tensor, nb::handle like) {
  const nb::handle where = args[at];
  const nb::handle allocate = at + 1 < args.size() ? nb::handle(args[at + 1]) : nb::handle();
  return place_of(where, allocate, tensor, like);
}

// ---- the calls ----

void call_forward(const nb::args& args) {
  check_count(args, 4, "forward");
  const Attention attention = read_attention(args, 0);
  const Tensor out = tensor_from_python(args[kNumArguments], output("out"));
  const std::optional<Tensor> lse = optional_tensor(args[kNumArguments + 1], output("lse"));
  const Place place = place_of(args, kNumArguments + 2, attention.q, args[0]);
  const WithoutGil release;
  forward(place.context, attention, out, lse);
}

// ---- a plain call of torch ----

// What the front end hands over once and for all, in this order: see _torch_ops.PLAIN.
enum Host : std::size_t {
  kTensorType,
  kParameterType,
  kIsNeg,
  kEmptyLike,
  kOutLike,
  kNewEmpty,
  kFloat32On,
  kNumThreads,
  kCurrentStream,
  kAllocate,
  kWatchers,  // and all that follow
};

nb::handle item(const nb::tuple& of, std::size_t at) { return of[at]; }

void check_plain_call(const nb::tuple& question, const nb::tuple& host) {
  if (question.size() == kNumArguments && host.size() >= kWatchers) return;
  throw nb::type_error(concat("question has ", question.size(), " items and host ", host.size(),
                              ": ", kNumArguments, " and at least ", int{kWatchers}, " are needed")
                           .c_str());
}

// A plain tensor of rows on a device of ours; what is wrong with others is for others to say.
bool is_plain_tensor(nb::handle object, const nb::tuple& host) {
  const nb::handle type = object.type();
  if (!type.is(item(host, kTensorType)) && !type.is(item(host, kParameterType))) return false;
  if (nb::cast<bool>(item(host, kIsNeg)(object))) return false;
  try {
    const Tensor tensor = tensor_from_python(object, {"q"});
    return tensor.rank == 4 && (tensor.data != nullptr || tensor.elements() == 0);
  } catch (const Error&) {
    return false;
  } catch (const nb::python_error&) {
    return false;
  }
}

// Whether q, k and v are all the arrays there are, as their memory describes them, and nothing has
// to be drawn, cast or shown to somebody else on the way to it.
bool is_plain(const nb::tuple& question, const nb::tuple& host) {
  check_plain_call(question, host);
  for (std::size_t position = kBias; position <= kSeed; ++position) {
    if (!item(question, position).is_none()) return false;
  }
  const nb::handle dropout_p = item(question, kDropoutP);
  if (!PyFloat_Check(dropout_p.ptr()) || PyFloat_AsDouble(dropout_p.ptr()) != 0) return false;
  for (std::size_t position = kQ; position <= kV; ++position) {
    if (!is_plain_tensor(item(question, position), host)) return false;
  }
  for (std::size_t watcher = kWatchers; watcher < host.size(); ++watcher) {
    const nb::object answer = item(host, watcher)();
    const int some = PyObject_IsTrue(answer.ptr());
    if (some < 0) throw nb::python_error();
    if (some != 0) return false;
  }
  return true;
}

// Memory for out: that of empty_like where this is packed like q.
nb::object new_out(const Attention& a, const nb::tuple& question, const nb::tuple& host) {
  std::int64_t packed = 1;
  bool like_q = a.q.shape[3] == a.v.shape[3];
  for (int axis = 3; like_q && axis >= 0; --axis) {
    like_q = a.q.stride[axis] == packed && a.q.shape[axis] > 0;
    packed *= a.q.shape[axis];
  }
  return like_q ? item(host, kEmptyLike)(item(question, kQ))
                : item(host, kOutLike)(item(question, kQ), item(question, kV));
}

// For lse, (B, H, Sq) in q's own dtype where that is wide enough.
nb::object new_lse(const Attention& a, const nb::tuple& question, const nb::tuple& host) {
  const bool wide = a.q.dtype == DType::kFloat32 || a.q.dtype == DType::kFloat64;
  const int cuda_index = a.q.device.type == DeviceType::kCpu ? -1 : a.q.device.index;
  const nb::object like =
      wide ? nb::borrow(item(question, kQ)) : nb::object(item(host, kFloat32On)(cuda_index));
  return item(host, kNewEmpty)(like, a.q.shape[0], a.q.shape[2], a.q.shape[1]);
}

// A question that is_plain: (out, lse), without lse if not wanted.
nb::object call_forward_plain(const nb::tuple& question, bool want_lse, const nb::tuple& host) {
  check_plain_call(question, host);
  const Attention a = read_attention(question, 0);
  const nb::object out = new_out(a, question, host);
  const nb::object lse = want_lse ? new_lse(a, question, host) : nb::none();
  const Tensor to = tensor_from_python(out, output("out"));
  const std::optional<Tensor> lse_to = optional_tensor(lse, output("lse"));
  const bool on_cpu = a.q.device.type == DeviceType::kCpu;
  const nb::object where =
      on_cpu ? item(host, kNumThreads)() : item(host, kCurrentStream)(a.q.device.index);
  {
    const Place place = place_of(where, item(host, kAllocate), a.q, item(question, kQ));
    const WithoutGil release;
    forward(place.context, a, to, lse_to);
  }
  if (want_lse) return nb::make_tuple(out, lse);
  return out;
}

// dout, dlse, the arguments, out, lse, the six gradients to write, None where not wanted, whether
// their bits have to repeat, then the place.
void call_backward(const nb::args& args) {
  check_count(args, 13, "backward");
  const std::optional<Tensor> dout = optional_tensor(args[0], {"dout"});
  const std::optional<Tensor> dlse = optional_tensor(args[1], {"dlse"});
  const Attention attention = read_attention(args, 2);
  std::size_t next = 2 + kNumArguments;
  const Tensor out = tensor_from_python(args[next++], {"out"});
  const Tensor lse = tensor_from_python(args[next++], {"lse"});
  Gradients gradients;
  gradients.dq = optional_tensor(args[next++], output("dq"));
  gradients.dk = optional_tensor(args[next++], output("dk"));
  gradients.dv = optional_tensor(args[next++], output("dv"));
  gradients.dbias = optional_tensor(args[next++], output("dbias"));
  gradients.dslopes = optional_tensor(args[next++], output("dslopes"));
  gradients.dsinks = optional_tensor(args[next++], output("dsinks"));
  gradients.deterministic = flag(args[next++], "deterministic");
  const Place place = place_of(args, next, attention.q, args[2]);
  const WithoutGil release;
  backward(place.context, attention, out, lse, dout, dlse, gradients);
}

// Gradients of the inputs in their own places, for calls that write none; absent for None.
std::optional<Gradients> wanted(const Attention& a, nb::handle needs, nb::handle deterministic) {
  if (needs.is_none()) return std::nullopt;
  const auto like = [&needs](int i, const std::optional<Tensor>& input) {
    return flag(needs[i], "needs") ? input : std::nullopt;
  };
  return Gradients{like(0, a.q),
                   like(1, a.k),
                   like(2, a.v),
                   like(3, a.bias),
                   like(4, a.alibi_slopes),
                   like(5, a.sinks),
                   flag(deterministic, "deterministic")};
}

nb::tuple call_plan(const nb::args& args) {
  check_count(args, 4, "plan");
  const Attention attention = read_attention(args, 0);
  const auto gradients = wanted(attention, args[kNumArguments], args[kNumArguments + 1]);
  const Place place = place_of(args, kNumArguments + 2, attention.q, args[0]);
  const Plan p = gradients ? plan(place.context, attention, *gradients)
                           : plan(place.context, attention, Direction::kForward);
  return nb::make_tuple(text(p.backend), text(p.kernel), p.work_items, p.workspace_bytes,
                        text(p.why));
}

nb::list to_python(const std::vector<std::string>& lines) {
  nb::list list;
  for (const std::string& line : lines) list.append(text(line));
  return list;
}

nb::list call_warm_up(const nb::args& args) {
  check_count(args, 2, "warm_up");
  const Attention attention = read_attention(args, 0);
  const auto gradients = wanted(attention, args[kNumArguments], args[kNumArguments + 1]);
  Context context;
  context.device = attention.q.device;
  std::vector<std::string> ready;
  {
    const WithoutGil release;
    ready = gradients ? warm_up(context, attention, *gradients) : warm_up(context, attention);
  }
  return to_python(ready);
}

nb::list call_prebuild(const nb::args& args) {
  check_count(args, 3, "prebuild");
  const Attention attention = read_attention(args, 0);
  const auto gradients = wanted(attention, args[kNumArguments], args[kNumArguments + 1]);
  const int arch = exactly<int>(args[kNumArguments + 2], "arch", "an int of 32 bits");
  std::vector<std::string> built;
  {
    const WithoutGil release;
    built = gradients ? prebuild(arch, attention, *gradients) : prebuild(arch, attention);
  }
  return to_python(built);
}

// outs, lses, out, lse, then the host's threads or the stream.
void call_merge_states(const nb::args& args) {
  if (args.size() != 5) throw nb::type_error("merge_states takes 5 positional arguments");
  const Tensor parts = tensor_from_python(args[0], {"outs"});
  const Tensor part_lses = tensor_from_python(args[1], {"lses"});
  const Tensor merged = tensor_from_python(args[2], output("out"));
  const Tensor merged_lse = tensor_from_python(args[3], output("lse"));
  const Place place = place_of(args, 4, parts, args[0]);
  const WithoutGil release;
  merge_states(place.context, parts, part_lses, merged, merged_lse);
}

// ---- what the calls would refuse, told without running them ----

// The arguments, then out or None.
void check_forward(const nb::args& args) {
  check_count(args, 1, "check_forward");
  const Attention attention = read_attention(args, 0);
  Context context;
  context.device = attention.q.device;
  check(context, attention, optional_tensor(args[kNumArguments], output("out")));
}

// dout, dlse, the arguments, out, lse.
void check_backward(const nb::args& args) {
  check_count(args, 4, "check_backward");
  const std::optional<Tensor> dout = optional_tensor(args[0], {"dout"});
  const std::optional<Tensor> dlse = optional_tensor(args[1], {"dlse"});
  const Attention attention = read_attention(args, 2);
  const Tensor out = tensor_from_python(args[2 + kNumArguments], {"out"});
  const Tensor lse = tensor_from_python(args[3 + kNumArguments], {"lse"});
  Context context;
  context.device = attention.q.device;
  check(context, attention, out, lse, dout, dlse);
}

// outs, lses, out, lse.
void check_merge(nb::handle outs, nb::handle lses, nb::handle out, nb::handle lse) {
  const Tensor parts = tensor_from_python(outs, {"outs"});
  Context context;
  context.device = parts.device;
  check_merge_states(context, parts, tensor_from_python(lses, {"lses"}),
                     tensor_from_python(out, output("out")),
                     tensor_from_python(lse, output("lse")));
}

// Two packed arrays, then seconds.
double call_read_rate(nb::handle first, nb::handle second, double seconds) {
  std::vector<std::span<const std::byte>> memory;
  for (const auto& [name, array] : {std::pair{"first", first}, {"second", second}}) {
    const Tensor t = tensor_from_python(array, {name});
    memory.emplace_back(static_cast<const std::byte*>(t.data),
                        static_cast<std::size_t>(t.elements() * size_bytes(t.dtype)));
  }
  const WithoutGil release;
  return cpu::read_rate(memory, seconds);
}

// onefold::Error as ValueError, NotImplementedError or RuntimeError.
void translate_error(const std::exception_ptr& thrown, void*) {
  try {
    std::rethrow_exception(thrown);
  } catch (const Error& error) {
    PyObject* type = PyExc_RuntimeError;
    if (error.kind() == ErrorKind::kInvalidArgument) type = PyExc_ValueError;
    if (error.kind() == ErrorKind::kUnsupported) type = PyExc_NotImplementedError;
    PyErr_SetObject(type, text(error.what()).ptr());
  }
}

}  // namespace

nb::str text(std::string_view utf8) {
  return nb::steal<nb::str>(
      PyUnicode_DecodeUTF8(utf8.data(), static_cast<Py_ssize_t>(utf8.size()), "backslashreplace"));
}

void check_count(const nb::args& args, std::size_t more, const char* function) {
  const std::size_t want = kNumArguments + more;
  if (args.size() == want) return;
  throw nb::type_error(
      concat(function, " takes ", want, " positional arguments, not ", args.size()).c_str());
}

std::optional<Tensor> optional_tensor(nb::handle object, const Expected& expected) {
  if (object.is_none()) return std::nullopt;
  return tensor_from_python(object, expected);
}

Attention read_attention(const nb::tuple& args, std::size_t first) {
  const auto at = [&args, first](Position position) -> nb::handle {
    return args[first + position];
  };
  const auto floats = [&at](Position position) {
    return optional_tensor(at(position), {kArgumentNames[position]});
  };
  const auto indices = [&at](Position position) {
    return optional_tensor(at(position), {kArgumentNames[position], "int32 or int64"});
  };
  const auto integer = [&at](Position position) {
    return optional_integer(at(position), kArgumentNames[position]);
  };
  Attention a;
  a.q = tensor_from_python(at(kQ), {"q"});
  a.k = tensor_from_python(at(kK), {"k"});
  a.v = tensor_from_python(at(kV), {"v"});
  a.bias = floats(kBias);
  a.mask = optional_tensor(at(kMask), {"mask", "bool"});
  a.alibi_slopes = floats(kSlopes);
  a.sinks = floats(kSinks);
  a.cu_seqlens_q = indices(kCuQ);
  a.cu_seqlens_k = indices(kCuK);
  a.seqused_q = indices(kUsedQ);
  a.seqused_k = indices(kUsedK);
  read_seed(at(kSeed), a);
  a.scale = optional_number(at(kScale), "scale");
  a.causal = read_causal(at(kCausal));
  a.window_left = integer(kLeft);
  a.window_right = integer(kRight);
  a.softcap = number(at(kSoftcap), "softcap");
  a.dropout_p = number(at(kDropoutP), "dropout_p");
  a.max_seqlen_q = integer(kMaxQ);
  a.max_seqlen_k = integer(kMaxK);
  return a;
}

}  // namespace onefold::python

NB_MODULE(_core, m) {
  using namespace onefold::python;
  nb::register_exception_translator(translate_error);
  m.attr("__version__") = ONEFOLD_VERSION;
  nb::list names;
  for (const char* name : kArgumentNames) names.append(name);
  m.attr("argument_names") = nb::tuple(names);
  m.def("forward", &call_forward);
  m.def("is_plain", &is_plain);
  m.def("forward_plain", &call_forward_plain);
  m.def("backward", &call_backward);
  m.def("plan", &call_plan);
  m.def("warm_up", &call_warm_up);
  m.def("prebuild", &call_prebuild);
  m.def("merge_states", &call_merge_states);
  m.def("check_forward", &check_forward);
  m.def("check_backward", &check_backward);
  m.def("check_merge_states", &check_merge);
  m.def("check_tensor",
        [](nb::handle tensor, const char* name) { tensor_from_python(tensor, {name}); });
  m.def("set_num_threads",
        [](const nb::int_& count) { onefold::set_num_threads(*optional_integer(count, "count")); });
  m.def("num_threads", [] { return onefold::num_threads(); });
  m.def("info", [] { return text(onefold::info()); });
  m.def(
      "fma_rate", [](double seconds) { return onefold::cpu::fma_rate(seconds); },
      nb::call_guard<WithoutGil>());
  m.def("read_rate", &call_read_rate);
  m.def("instruction_set", [] { return onefold::cpu::instruction_set(); });
  define_reference(m);
  define_jit(m);
}
