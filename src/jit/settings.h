// The environment variables that steer the run-time compiler, and its log.
//
// Invariant: read when asked, so that a program may set them before its first call. Includes
// error.h and the standard library.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "onefold/error.h"

namespace onefold::jit {

inline std::string_view variable(const char* name) {
  const char* text = std::getenv(name);
  return text != nullptr ? text : "";
}

// ONEFOLD_CACHE_DIR: folders separated by ':'; the first is written and read, the others are read.
// Default: onefold in XDG_CACHE_HOME or ~/.cache. None when there is no home: memory alone then.
inline std::vector<std::filesystem::path> cache_folders() {
  std::vector<std::filesystem::path> folders;
  std::string_view rest = variable("ONEFOLD_CACHE_DIR");
  while (!rest.empty()) {
    const std::size_t end = std::min(rest.find(':'), rest.size());
    if (end > 0) folders.emplace_back(rest.substr(0, end));
    rest.remove_prefix(std::min(end + 1, rest.size()));
  }
  if (!folders.empty()) return folders;
  const std::filesystem::path base = variable("XDG_CACHE_HOME");
  if (base.is_absolute()) return {base / "onefold"};  // the XDG rules ignore a relative one
  const std::filesystem::path home = variable("HOME");
  if (home.is_absolute()) return {home / ".cache" / "onefold"};
  return {};
}

// ONEFOLD_CHECKED=1: kernels carry line numbers, so that a debugger or compute-sanitizer can name
// the line of a fault.
inline bool checked() {
  const std::string_view text = variable("ONEFOLD_CHECKED");
  return !text.empty() && text != "0";
}

// ONEFOLD_DUMP: a folder that gets the text, the cubin and the compiler's log of what is compiled
// or loaded. Empty when unset.
inline std::filesystem::path dump_folder() { return variable("ONEFOLD_DUMP"); }

// ONEFOLD_LOG: 0 is silent, 1 tells what costs time or goes wrong, 2 tells everything.
enum class LogLevel { kSilent, kEvents, kEverything };
inline bool logs(LogLevel level) {
  const std::string_view text = variable("ONEFOLD_LOG");
  const auto wanted = text.empty() || text == "0" ? LogLevel::kSilent
                      : text == "1"               ? LogLevel::kEvents
                                                  : LogLevel::kEverything;
  return level <= wanted && level != LogLevel::kSilent;
}

// One line on stderr, written at once so that threads do not mix.
template <class... Parts>
void log(LogLevel level, const Parts&... parts) {
  if (!logs(level)) return;
  const std::string line = concat("onefold: ", parts..., "\n");
  std::fwrite(line.data(), 1, line.size(), stderr);
}

}  // namespace onefold::jit
