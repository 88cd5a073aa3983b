// What the tests of the run-time compiler share: a folder of their own, environment variables that
// are put back, child processes, and NVRTC where the machine has it. Includes gtest.
#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <system_error>
#include <utility>

#include "jit/jit.h"
#include "jit/nvrtc.h"

namespace onefold::test {

// A new folder that goes with the test.
class ScratchFolder {
 public:
  ScratchFolder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "onefold-test-XXXXXX").string();
    if (mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("no temporary folder");
    path_ = pattern;
  }
  ~ScratchFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

// Sets a variable (nullptr: unsets it) and puts back what was there.
class ScopedVariable {
 public:
  ScopedVariable(const char* name, const char* value) : name_(name) {
    const char* before = std::getenv(name);
    had_ = before != nullptr;
    if (had_) before_ = before;
    value != nullptr ? setenv(name, value, 1) : unsetenv(name);
  }
  ~ScopedVariable() { had_ ? setenv(name_, before_.c_str(), 1) : unsetenv(name_); }
  ScopedVariable(const ScopedVariable&) = delete;
  ScopedVariable& operator=(const ScopedVariable&) = delete;

 private:
  const char* name_;
  bool had_;
  std::string before_;
};

inline std::string read_text(const std::filesystem::path& file) {
  std::ifstream in(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

inline void write_text(const std::filesystem::path& file, const std::string& content) {
  std::ofstream out(file, std::ios::binary);
  out << content;
  if (!out.flush()) throw std::runtime_error("cannot write " + file.string());
}

// Runs body() in a child; its result, 0 to 255, is the child's exit status.
template <class Body>
pid_t start_child(Body body) {
  const pid_t child = fork();
  if (child != 0) return child;
  int status = 255;
  try {
    status = body();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "child: %s\n", error.what());
  }
  _exit(status);
}

inline int exit_status(pid_t child) {
  int status = 0;
  if (waitpid(child, &status, 0) != child) return -1;
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

// For SetUp of tests that compile. `dev` says where NVRTC is, and then it has to be there; whoever
// builds by hand may be without.
inline void need_compiler() {
  const char* folder = std::getenv("ONEFOLD_TEST_NVRTC");
  if (folder != nullptr) jit::add_search_path(folder);
  std::string why_not;
  if (jit::Nvrtc::find(&why_not) != nullptr) return;
  ASSERT_EQ(folder, nullptr) << why_not;
  GTEST_SKIP() << why_not;
}

// Tests that compile into a cache of their own derive from this.
class CompilerTest : public testing::Test {
 protected:
  void SetUp() override { need_compiler(); }

  ScratchFolder cache_;
  ScopedVariable variable_{"ONEFOLD_CACHE_DIR", cache_.path().c_str()};
};

}  // namespace onefold::test
