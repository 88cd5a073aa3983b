#include "tensor.h"

#include <array>
#include <cstring>
#include <string>
#include <string_view>

#include "dlpack_abi.h"
#include "onefold/error.h"

namespace nb = nanobind;

namespace onefold::python {
namespace {

std::string text_of(nb::handle object) { return nb::str(object).c_str(); }

// str(dtype) without the "torch." that torch puts before it.
std::string dtype_text(nb::handle object) {
  std::string text = text_of(object.attr("dtype"));
  return text.starts_with("torch.") ? text.substr(6) : text;
}

[[noreturn]] void refuse_dtype(nb::handle object, const Expected& expected) {
  invalid("dtype of ", expected.name, " is ", dtype_text(object), ": ", expected.dtypes,
          " is needed");
}

Tensor with_rank(const char* name, std::int64_t rank) {
  if (rank > kMaxRank) invalid(name, " has ", rank, " axes: at most ", kMaxRank, " are needed");
  Tensor t;
  t.rank = static_cast<int>(rank);
  return t;
}

void check_memory(nb::handle object, const Tensor& t, const char* name) {
  if (t.data != nullptr || t.elements() == 0) return;
  const nb::object zeros = nb::getattr(object, "_is_zerotensor", nb::none());
  if (!zeros.is_none() && nb::cast<bool>(zeros())) {
    invalid(name, " is torch._efficientzerotensor, zeros without memory: torch.zeros is needed");
  }
  invalid(name, " has ", t.elements(),
          " elements but a null data pointer (a fake or functional tensor, or a freed storage): ",
          "real memory is needed");
}

// ---- torch by the DLPack C exchange table ----

// type -> table, null for a type that has none. Types are kept alive so that no address is reused;
// the handful of types a program passes fits, further ones are looked up each time.
struct TypeTable {
  PyTypeObject* type;
  const dlpack::ExchangeTable* table;
};
constexpr int kCachedTypes = 16;
std::array<TypeTable, kCachedTypes> cached_types;
int num_cached_types = 0;

const dlpack::ExchangeTable* find_exchange_table(nb::handle type) {
  const nb::object capsule = nb::getattr(type, "__dlpack_c_exchange_api__", nb::none());
  if (!PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) return nullptr;
  auto* header = static_cast<dlpack::ExchangeHeader*>(
      PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  while (header != nullptr && header->version.major > dlpack::kMajorVersion) header = header->older;
  if (header == nullptr || header->version.major != dlpack::kMajorVersion) return nullptr;
  const auto* table = reinterpret_cast<const dlpack::ExchangeTable*>(header);
  return table->describe != nullptr ? table : nullptr;
}

const dlpack::ExchangeTable* exchange_table(PyTypeObject* type) {
  for (int i = 0; i < num_cached_types; ++i) {
    if (cached_types[i].type == type) return cached_types[i].table;
  }
  const nb::handle handle(reinterpret_cast<PyObject*>(type));
  const dlpack::ExchangeTable* table = find_exchange_table(handle);
  if (num_cached_types < kCachedTypes) {
    handle.inc_ref();
    cached_types[num_cached_types++] = {type, table};
  }
  return table;
}

bool read_dtype(dlpack::DataType dtype, DType& out) {
  const auto is = [dtype](std::uint8_t code, int bits) {
    return dtype.lanes == 1 && dtype.code == code && dtype.bits == bits;
  };
  if (is(dlpack::kFloat, 32)) return out = DType::kFloat32, true;
  if (is(dlpack::kBfloat, 16)) return out = DType::kBFloat16, true;
  if (is(dlpack::kFloat, 16)) return out = DType::kFloat16, true;
  if (is(dlpack::kFloat, 64)) return out = DType::kFloat64, true;
  if (is(dlpack::kBool, 8)) return out = DType::kBool, true;
  if (is(dlpack::kInt, 32)) return out = DType::kInt32, true;
  if (is(dlpack::kInt, 64)) return out = DType::kInt64, true;
  return false;
}

bool is(nb::handle object, const char* property) {
  return nb::cast<bool>(nb::getattr(object, property, nb::bool_(false)));
}

// What gives no address, or is elsewhere.
[[noreturn]] void refuse_memory(nb::handle object, const char* name) {
  PyErr_Clear();
  if (is(object, "is_nested")) {
    unsupported(name, " is a nested tensor: a dense one is needed, padded, or packed and with the ",
                "offsets in cu_seqlens_q and cu_seqlens_k");
  }
  const std::string layout = text_of(nb::getattr(object, "layout", nb::none()));
  if (layout != "torch.strided") {
    unsupported(name, " has layout ", layout, ": a dense tensor is needed, as to_dense() gives");
  }
  if (is(object, "is_quantized")) {
    unsupported(name, " is quantized: a tensor of floats is needed, as dequantize() gives");
  }
  const std::string where = text_of(object.attr("device").attr("type"));
  if (where != "cpu" && where != "cuda") {
    unsupported(name, " is on ", where, ": a tensor on the CPU or a CUDA device is needed");
  }
  unsupported(name,
              " is wrapped by a transform such as vmap and has no memory of its own: a tensor ",
              "from outside of it is needed");
}

Tensor from_exchange(nb::handle object, const dlpack::ExchangeTable& table,
                     const Expected& expected) {
  const char* name = expected.name;
  dlpack::DlTensor dl;
  if (table.describe(object.ptr(), &dl) != 0) refuse_memory(object, name);
  Tensor t = with_rank(name, dl.ndim);
  if (!read_dtype(dl.dtype, t.dtype)) {
    refuse_dtype(object, expected);
  }
  if (dl.device_type == dlpack::kDeviceCuda) {
    t.device = {DeviceType::kCuda, dl.device_id};
  } else if (dl.device_type != dlpack::kDeviceCpu && dl.device_type != dlpack::kDeviceCudaHost) {
    refuse_memory(object, name);
  }
  std::int64_t packed = 1;
  for (int axis = t.rank - 1; axis >= 0; --axis) {
    t.shape[axis] = dl.shape[axis];
    t.stride[axis] = dl.strides != nullptr ? dl.strides[axis] : packed;
    packed *= dl.shape[axis];
  }
  t.data = dl.data == nullptr ? nullptr : static_cast<std::byte*>(dl.data) + dl.byte_offset;
  check_memory(object, t, name);
  return t;
}

// ---- torch by its attributes ----

bool read_dtype(const std::string& text, DType& out) {
  for (int i = 0; i <= static_cast<int>(DType::kInt64); ++i) {
    if (text == onefold::name(static_cast<DType>(i))) return out = static_cast<DType>(i), true;
  }
  return false;
}

Tensor from_attributes(nb::handle object, const Expected& expected) {
  const char* name = expected.name;
  if (is(object, "is_nested") || is(object, "is_quantized")) refuse_memory(object, name);
  std::uintptr_t data = 0;
  try {
    data = nb::cast<std::uintptr_t>(object.attr("data_ptr")());
  } catch (const nb::python_error&) {  // torch has no address to give
    refuse_memory(object, name);
  }
  const nb::object shape = object.attr("shape");
  Tensor t = with_rank(name, static_cast<std::int64_t>(nb::len(shape)));
  if (!read_dtype(dtype_text(object), t.dtype)) refuse_dtype(object, expected);
  const nb::object device = object.attr("device");
  const std::string where = text_of(device.attr("type"));
  if (where != "cpu" && where != "cuda") refuse_memory(object, name);
  try {
    if (where == "cuda") t.device = {DeviceType::kCuda, nb::cast<int>(device.attr("index"))};
    const nb::object stride = object.attr("stride")();
    for (int axis = 0; axis < t.rank; ++axis) {
      t.shape[axis] = nb::cast<std::int64_t>(shape[axis]);
      t.stride[axis] = nb::cast<std::int64_t>(stride[axis]);
    }
  } catch (const nb::python_error&) {  // nor strides
    refuse_memory(object, name);
  }
  t.data = reinterpret_cast<void*>(data);
  check_memory(object, t, name);
  return t;
}

// ---- NumPy by __array_struct__ ----

// The array interface, version 3, C side (numpy.org, "The array interface protocol").
struct ArrayStruct {
  int two;  // a check value
  int nd;
  char typekind;
  int itemsize;
  int flags;
  std::intptr_t* shape;
  std::intptr_t* strides;  // in bytes
  void* data;
  PyObject* descr;
};
constexpr int kAligned = 0x100, kNotSwapped = 0x200, kWriteable = 0x400;

bool read_dtype(const ArrayStruct& array, nb::handle object, DType& out) {
  const auto is = [&array](char kind, int bytes) {
    return array.typekind == kind && array.itemsize == bytes;
  };
  if (is('f', 4)) return out = DType::kFloat32, true;
  if (is('f', 8)) return out = DType::kFloat64, true;
  if (is('f', 2)) return out = DType::kFloat16, true;
  if (is('b', 1)) return out = DType::kBool, true;
  if (is('i', 4)) return out = DType::kInt32, true;
  if (is('i', 8)) return out = DType::kInt64, true;
  // ml_dtypes registers its bfloat16 under another kind; only the name tells.
  if (array.itemsize == 2 && dtype_text(object) == "bfloat16") return out = DType::kBFloat16, true;
  return false;
}

Tensor from_array_struct(nb::handle object, const nb::object& capsule, const Expected& expected) {
  const char* name = expected.name;
  const auto* array = static_cast<const ArrayStruct*>(PyCapsule_GetPointer(capsule.ptr(), nullptr));
  if (array == nullptr) throw nb::python_error();
  if (array->two != 2) invalid(name, " has an array interface of an unknown version");
  Tensor t = with_rank(name, array->nd);
  if (!read_dtype(*array, object, t.dtype)) {
    refuse_dtype(object, expected);
  }
  if ((array->flags & kNotSwapped) == 0) {
    invalid("dtype of ", name, " is ", text_of(object.attr("dtype").attr("str")),
            ", byte-swapped: the machine's own byte order is needed");
  }
  if ((array->flags & kAligned) == 0) {
    invalid(name, " is not aligned to its items: pass a copy of it");
  }
  if (expected.writable && (array->flags & kWriteable) == 0) {
    invalid(name, " is read-only: an output needs memory that can be written");
  }
  for (int axis = 0; axis < t.rank; ++axis) {
    t.shape[axis] = array->shape[axis];
    if (array->strides[axis] % array->itemsize != 0) {
      invalid(name, " has a stride of ", array->strides[axis], " bytes on axis ", axis,
              ": a multiple of its item size, ", array->itemsize, ", is needed");
    }
    t.stride[axis] = array->strides[axis] / array->itemsize;
  }
  t.data = array->data;
  check_memory(object, t, name);
  return t;
}

}  // namespace

std::string type_text(nb::handle object) {
  if (object.is_none()) return "None";
  const std::string name = text_of(object.type().attr("__name__"));
  const bool vowel = std::string_view("aeiouAEIOU").find(name.front()) != std::string_view::npos;
  return (vowel || name == "ndarray" ? "an " : "a ") + name;
}

Tensor tensor_from_python(nb::handle object, const Expected& expected) {
  if (const auto* table = exchange_table(Py_TYPE(object.ptr()))) {
    return from_exchange(object, *table, expected);
  }
  if (nb::hasattr(object, "data_ptr")) return from_attributes(object, expected);
  const nb::object capsule = nb::getattr(object, "__array_struct__", nb::none());
  if (PyCapsule_CheckExact(capsule.ptr())) {
    return from_array_struct(object, capsule, expected);
  }
  throw nb::type_error(concat(expected.name, " is ", type_text(object),
                              ": a torch tensor or a NumPy array is needed")
                           .c_str());
}

}  // namespace onefold::python
