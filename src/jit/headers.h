// The device headers, as text inside the library, so that compiling needs no file at run time.
//
// Invariant: a header's name is what an #include of it says, on the host too. The table is written
// by CMake (cmake/embed_headers.cmake). Includes the standard library only.
#pragma once

#include <cstddef>

namespace onefold::jit {

struct Header {
  const char* name;
  const char* text;
};

extern const Header kHeaders[];
extern const std::size_t kNumHeaders;

}  // namespace onefold::jit
