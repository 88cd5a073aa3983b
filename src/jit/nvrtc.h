// NVRTC, opened at run time with own declarations, and one compilation with it.
//
// Invariant: which library serves is decided once per process: the newest major that the driver can
// load (any, without a driver), and among equals the one already in the process, a folder of
// add_search_path, CUDA_HOME, the loader's, in this order. Never closed. Includes jit.h.
#pragma once

#include <string>
#include <vector>

#include "jit/jit.h"

namespace onefold::jit {

struct Compiled {
  std::string cubin;
  std::string log;
  double seconds = 0;
};

class Nvrtc {
 public:
  // nullptr when there is none, and then `why_not` names the places looked at. Tried again on the
  // next call, since it may be installed meanwhile.
  static const Nvrtc* find(std::string* why_not = nullptr);

  int major() const { return major_; }
  int minor() const { return minor_; }
  std::string version() const;  // "13.2"
  const std::string& path() const { return path_; }

  // Throws Error(kRuntime): what does not compile, the first error or the nearest architecture
  // that this NVRTC knows, and the whole log. Threads may compile different programs at once.
  Compiled compile(const Program& program, const std::vector<std::string>& options) const;

 private:
  struct Functions;
  Nvrtc() = default;
  static const Nvrtc* open(const std::string& file, bool only_if_loaded, std::string& tried);
  void check_target(const Program& program) const;

  const Functions* functions_ = nullptr;
  int major_ = 0;
  int minor_ = 0;
  std::string path_;
};

// The major version of CUDA that the driver of this machine can load; 0 without a driver.
int driver_major();

}  // namespace onefold::jit
