// The oracle in onefold._core. An array returns as (shape, bytearray of float64, row-major), which
// both torch and NumPy wrap without a copy.
#include "reference/reference.h"

#include <nanobind/nanobind.h>

#include "arguments.h"
#include "gil.h"

namespace nb = nanobind;

namespace onefold::python {
namespace {

nb::object to_python(const reference::Array& array) {
  nb::list shape;
  for (const std::int64_t extent : array.shape) shape.append(extent);
  return nb::make_tuple(nb::tuple(shape),
                        nb::bytearray(array.data.data(), array.data.size() * sizeof(double)));
}

nb::object to_python(const std::optional<reference::Array>& array) {
  return array ? to_python(*array) : nb::none();
}

template <class Call>
auto without_gil(const Call& call) {
  const WithoutGil release;
  return call();
}

nb::tuple call_forward(const nb::args& args) {
  check_count(args, 0, "reference_forward");
  const Attention attention = read_attention(args, 0);
  const auto r = without_gil([&] { return reference::forward(attention); });
  return nb::make_tuple(to_python(r.out), to_python(r.lse));
}

nb::tuple call_forward_terms(const nb::args& args) {
  check_count(args, 0, "reference_forward_terms");
  const Attention attention = read_attention(args, 0);
  const auto r = without_gil([&] { return reference::forward_terms(attention); });
  return nb::make_tuple(to_python(r.out), to_python(r.lse), to_python(r.squared_value),
                        to_python(r.squared_deviation), to_python(r.max_score), to_python(r.sum),
                        to_python(r.count), to_python(r.max_magnitude));
}

template <class Function>
nb::tuple six_gradients(const nb::args& args, const char* name, Function function) {
  check_count(args, 2, name);
  const Attention attention = read_attention(args, 0);
  const std::optional<Tensor> dout = optional_tensor(args[kNumArguments], {"dout"});
  const std::optional<Tensor> dlse = optional_tensor(args[kNumArguments + 1], {"dlse"});
  const auto r = without_gil([&] { return function(attention, dout, dlse); });
  return nb::make_tuple(to_python(r.dq), to_python(r.dk), to_python(r.dv), to_python(r.dbias),
                        to_python(r.dslopes), to_python(r.dsinks));
}

}  // namespace

void define_reference(nb::module_& m) {
  m.def("reference_forward", &call_forward);
  m.def("reference_forward_terms", &call_forward_terms);
  m.def("reference_backward", [](const nb::args& args) {
    return six_gradients(args, "reference_backward", &reference::backward);
  });
  m.def("reference_backward_terms", [](const nb::args& args) {
    return six_gradients(args, "reference_backward_terms", &reference::backward_terms);
  });
  nb::list sources;
  for (int i = 0; i < reference::kNumSources; ++i) {
    sources.append(nb::str(reference::name(static_cast<reference::Source>(i))));
  }
  m.attr("reference_sources") = nb::tuple(sources);
}

}  // namespace onefold::python
