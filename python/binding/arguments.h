// What the two halves of onefold._core share: reading the common arguments, and the oracle's calls.
//
// Invariant: the GIL is held in every function here. Includes nanobind, the public headers and
// tensor.h.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <optional>
#include <string_view>

#include "onefold/attention.h"
#include "tensor.h"

namespace onefold::python {

inline constexpr std::size_t kNumArguments = 20;

// The question in args[first, first + kNumArguments), in the order of _core.pyi.
Attention read_attention(const nanobind::tuple& args, std::size_t first);

// Raises unless a question and `more` arguments were given.
void check_count(const nanobind::args& args, std::size_t more, const char* function);

// None is absent.
std::optional<Tensor> optional_tensor(nanobind::handle object, const Expected& expected);

// For people: a byte that is not UTF-8, as a path may have, is shown as an escape.
nanobind::str text(std::string_view utf8);

// Adds the functions reference_*.
void define_reference(nanobind::module_& m);

// Adds the functions of the run-time compiler and its cache.
void define_jit(nanobind::module_& m);

}  // namespace onefold::python
