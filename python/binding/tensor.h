// A Python array as an onefold::Tensor, without a header of torch or NumPy.
//
// torch: the DLPack C exchange table of the type (torch 2.10 and later), else the plain attributes
// data_ptr, shape, stride, dtype, device. NumPy: __array_struct__. Invariant: the tensor borrows
// the memory of `object`; the caller keeps the object alive and its negative bit resolved. The GIL
// is held. Includes nanobind and the public headers.
#pragma once

#include <nanobind/nanobind.h>

#include <string>

#include "onefold/tensor.h"

namespace onefold::python {

// What an argument is called in an error's sentence and which dtypes it may have.
struct Expected {
  const char* name;
  const char* dtypes = "float32, bfloat16, float16 or float64";
  bool writable = false;  // an output: read-only memory is refused
};

Tensor tensor_from_python(nanobind::handle object, const Expected& expected);

// The name of the object's type with its article, for an error's sentence: "an int".
std::string type_text(nanobind::handle object);

}  // namespace onefold::python
