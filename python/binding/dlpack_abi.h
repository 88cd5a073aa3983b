// The few structures of DLPack 1.x (dmlc/dlpack) that the C exchange table needs, by their binary
// layout, so that building needs no header of another project.
//
// Invariant: layouts are those of DLPack major version 1; a reader checks the version first.
// Includes the standard library only.
#pragma once

#include <cstdint>

namespace onefold::dlpack {

inline constexpr std::uint32_t kMajorVersion = 1;
inline constexpr std::int32_t kDeviceCpu = 1;
inline constexpr std::int32_t kDeviceCuda = 2;
inline constexpr std::int32_t kDeviceCudaHost = 3;

enum : std::uint8_t { kInt = 0, kUInt = 1, kFloat = 2, kBfloat = 4, kBool = 6 };

struct DataType {
  std::uint8_t code, bits;
  std::uint16_t lanes;
};

struct DlTensor {
  void* data;
  std::int32_t device_type, device_id;
  std::int32_t ndim;
  DataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;  // in elements; null when packed
  std::uint64_t byte_offset;
};

struct Version {
  std::uint32_t major, minor;
};

struct ExchangeHeader {
  Version version;
  ExchangeHeader* older;
};

// The function table behind type(x).__dlpack_c_exchange_api__.
struct ExchangeTable {
  ExchangeHeader header;
  void* allocate;
  void* export_managed;
  void* import_managed;
  // Describes `object` in `out` for as long as it lives; 0 on success, else a Python error is set.
  int (*describe)(void* object, DlTensor* out);
  void* current_stream;
};

}  // namespace onefold::dlpack
