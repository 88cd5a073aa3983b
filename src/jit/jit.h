// Program text in, cubin out: NVRTC with a cache in memory and on disk in front of it.
//
// Invariant: what get() returns is a function of Program, the embedded headers, NVRTC's version and
// nothing else, whoever compiled it and wherever it was kept. Knows nothing about attention and
// needs neither a GPU nor its driver, so that any machine can compile for any architecture.
// Includes error.h and the standard library.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "onefold/error.h"

namespace onefold::jit {

// One translation unit with one kernel. The text may include the embedded headers by the names that
// the host uses ("onefold/algebra/scalar.h", "core/variant.h", "kernels/tile/fragment.h"); there
// are no other headers, the CUDA ones included.
struct Program {
  std::string name;                  // for people: log lines, errors, the folder in the cache
  std::string source;                // defines the extern "C" __global__ function `entry`
  std::string entry;                 // compiled with -std=c++20 -default-device and
  std::vector<std::string> options;  // these, e.g. "--use_fast_math"
  int arch = 0;                      // __CUDA_ARCH__: 800, 900, 1200
  char suffix = '\0';                // 'a' or 'f' for what one chip or one family can do
};

// What ptxas said about the entry, and what it cost.
struct Facts {
  int registers = 0;  // per thread
  std::int64_t spill_store_bytes = 0;
  std::int64_t spill_load_bytes = 0;
  std::int64_t local_bytes = 0;  // the stack frame, spills included
  std::int64_t static_shared_bytes = 0;
  double compile_seconds = 0;
  // Lines of the log that cost speed or correctness: ignored setmaxnreg, serialised wgmma,
  // warnings.
  std::vector<std::string> warnings;
};

enum class Origin : std::uint8_t { kCompiled, kDisk };

struct Binary {
  std::string digest;  // digest(program)
  std::string nvrtc;   // version of the compiler: "13.2"
  std::string name, entry, target;
  std::vector<std::string> options;  // all of them, --gpu-architecture among them
  std::string cubin;                 // bytes
  Facts facts;
  Origin origin = Origin::kCompiled;
};

// The compiled program: from memory, else from disk, else from the compiler. Any number of threads
// may ask, and a program is compiled once. The reference holds until the process ends. Costs about
// a microsecond when it is in memory. Throws Error(kRuntime): the program's
// name, what to do about it, and the compiler's log.
const Binary& get(const Program& program);

// What get() keeps the program under on disk, as 40 hexadecimal digits; NVRTC's version comes on
// top. Takes tens of microseconds.
std::string digest(const Program& program);

// What tells programs apart within this process: all that the digest covers but the headers, as it
// stands. Cheap enough for every launch.
std::string identity(const Program& program);

// Whether get() would return at once: the program is in memory already.
bool in_memory(const Program& program);

// The name of the architecture: "sm_90a".
std::string target(const Program& program);

// A folder to look for NVRTC in, beside the usual places. Call before the first get().
void add_search_path(std::string_view folder);

// One line for people: NVRTC's version and file, or why there is none; the folder of the cache.
std::string info();

}  // namespace onefold::jit
