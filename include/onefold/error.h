// The one exception that leaves onefold, and the one way to build its sentence.
//
// Invariant: every message is one sentence that names the argument, what came and what is needed.
// Includes the standard library only.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace onefold {

enum class ErrorKind {
  kInvalidArgument,  // the call can never work: wrong shape, dtype, value
  kUnsupported,      // a legal call that this build or path does not offer (yet)
  kRuntime,          // the machine said no: memory, driver, compiler
};

#pragma GCC visibility push(default)  // thrown across the border of a shared library
class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}
  ErrorKind kind() const { return kind_; }

 private:
  ErrorKind kind_;
};
#pragma GCC visibility pop

// Streams its arguments into one string.
template <class... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

// invalid("head_dim of v is ", n, ": ...") throws; so do its siblings.
template <class... Parts>
[[noreturn]] void invalid(const Parts&... parts) {
  throw Error(ErrorKind::kInvalidArgument, concat(parts...));
}
template <class... Parts>
[[noreturn]] void unsupported(const Parts&... parts) {
  throw Error(ErrorKind::kUnsupported, concat(parts...));
}

}  // namespace onefold
