#include "jit/nvrtc.h"

#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <sstream>

#include "jit/headers.h"
#include "jit/settings.h"

namespace onefold::jit {
namespace {

using Result = int;  // nvrtcResult
constexpr Result kSuccess = 0;
using Handle = struct _nvrtcProgram*;

// The newest major whose API this was written for; a driver may vouch for a newer one.
constexpr int kNewestMajor = 13;
constexpr int kOldestMajor = 12;

std::mutex search_mutex;
std::vector<std::string>& search_paths() {
  static auto& paths = *new std::vector<std::string>;
  return paths;
}

std::string soname(int major) { return "libnvrtc.so." + std::to_string(major); }

// The folders to look in, in order.
std::vector<std::string> folders() {
  std::vector<std::string> all = search_paths();
  for (const char* name : {"CUDA_HOME", "CUDA_PATH"}) {
    const char* home = std::getenv(name);
    if (home == nullptr || *home == '\0') continue;
    for (const char* sub : {"/lib64", "/lib"}) all.push_back(std::string(home) + sub);
  }
  all.emplace_back("/usr/local/cuda/lib64");  // what CUDA_HOME would say, mostly
  return all;
}

}  // namespace

struct Nvrtc::Functions {
  Result (*nvrtcVersion)(int* major, int* minor);
  const char* (*nvrtcGetErrorString)(Result);
  Result (*nvrtcGetNumSupportedArchs)(int* count);
  Result (*nvrtcGetSupportedArchs)(int* archs);
  Result (*nvrtcCreateProgram)(Handle*, const char* source, const char* name, int num_headers,
                               const char* const* headers, const char* const* header_names);
  Result (*nvrtcDestroyProgram)(Handle*);
  Result (*nvrtcCompileProgram)(Handle, int num_options, const char* const* options);
  Result (*nvrtcGetProgramLogSize)(Handle, std::size_t*);
  Result (*nvrtcGetProgramLog)(Handle, char*);
  Result (*nvrtcGetCUBINSize)(Handle, std::size_t*);
  Result (*nvrtcGetCUBIN)(Handle, char*);
};

void add_search_path(std::string_view folder) {
  const std::lock_guard lock(search_mutex);
  auto& paths = search_paths();
  if (std::find(paths.begin(), paths.end(), folder) == paths.end()) paths.emplace_back(folder);
}

int driver_major() {
  // Only this number is wanted, and it needs no cuInit; src/cuda talks to the driver.
  static const int major = [] {
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return 0;
    const auto version = reinterpret_cast<int (*)(int*)>(dlsym(library, "cuDriverGetVersion"));
    int number = 0;
    return version != nullptr && version(&number) == 0 ? number / 1000 : 0;
  }();
  return major;
}

std::string Nvrtc::version() const { return std::to_string(major_) + "." + std::to_string(minor_); }

const Nvrtc* Nvrtc::open(const std::string& file, bool only_if_loaded, std::string& tried) {
  void* library = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL | (only_if_loaded ? RTLD_NOLOAD : 0));
  if (library == nullptr) {
    if (!only_if_loaded) tried += concat("\n  ", dlerror());
    return nullptr;
  }
  auto f = std::make_unique<Functions>();
  bool complete = true;
  const auto bind = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
    complete = complete && function != nullptr;
  };
  bind(f->nvrtcVersion, "nvrtcVersion");
  bind(f->nvrtcGetErrorString, "nvrtcGetErrorString");
  bind(f->nvrtcGetNumSupportedArchs, "nvrtcGetNumSupportedArchs");
  bind(f->nvrtcGetSupportedArchs, "nvrtcGetSupportedArchs");
  bind(f->nvrtcCreateProgram, "nvrtcCreateProgram");
  bind(f->nvrtcDestroyProgram, "nvrtcDestroyProgram");
  bind(f->nvrtcCompileProgram, "nvrtcCompileProgram");
  bind(f->nvrtcGetProgramLogSize, "nvrtcGetProgramLogSize");
  bind(f->nvrtcGetProgramLog, "nvrtcGetProgramLog");
  bind(f->nvrtcGetCUBINSize, "nvrtcGetCUBINSize");
  bind(f->nvrtcGetCUBIN, "nvrtcGetCUBIN");

  std::unique_ptr<Nvrtc> nvrtc(new Nvrtc);
  if (!complete || f->nvrtcVersion(&nvrtc->major_, &nvrtc->minor_) != kSuccess) {
    tried += concat("\n  ", file, ": lacks functions of NVRTC ", kOldestMajor);
    return nullptr;
  }
  Dl_info where;
  const bool known = dladdr(reinterpret_cast<void*>(f->nvrtcVersion), &where) != 0;
  nvrtc->path_ = known && where.dli_fname ? where.dli_fname : file;
  // NVRTC opens this by its bare name, which an RPATH finds unless a sanitizer is in between.
  const std::string folder = nvrtc->path_.substr(0, nvrtc->path_.rfind('/') + 1);
  dlopen((folder + "libnvrtc-builtins.so." + nvrtc->version()).c_str(), RTLD_NOW | RTLD_LOCAL);
  nvrtc->functions_ = f.release();
  return nvrtc.release();  // for the life of the process, as the library is
}

const Nvrtc* Nvrtc::find(std::string* why_not) {
  static const Nvrtc* chosen = nullptr;
  const std::lock_guard lock(search_mutex);
  if (chosen != nullptr) return chosen;

  const int newest = driver_major() > 0 ? driver_major() : kNewestMajor;
  std::string tried;
  for (int major = newest; major >= kOldestMajor && chosen == nullptr; --major) {
    chosen = open(soname(major), true, tried);
    for (const std::string& folder : folders()) {
      if (chosen == nullptr) chosen = open(folder + "/" + soname(major), false, tried);
    }
    if (chosen == nullptr) chosen = open(soname(major), false, tried);
  }
  if (chosen != nullptr) {
    log(LogLevel::kEverything, "NVRTC ", chosen->version(), " at ", chosen->path());
  } else if (why_not != nullptr) {
    *why_not = newest < kOldestMajor
                   ? concat("the driver speaks CUDA ", newest, ", and ", kOldestMajor,
                            " is needed at least: update it")
                   : concat("NVRTC, CUDA's run-time compiler, was not found: `pip install ",
                            newest == 12 ? "nvidia-cuda-nvrtc-cu12" : "nvidia-cuda-nvrtc",
                            "` brings it. Tried:", tried);
  }
  return chosen;
}

// An architecture that NVRTC does not know would be an "invalid value" among its own words.
void Nvrtc::check_target(const Program& program) const {
  int count = 0;
  if (functions_->nvrtcGetNumSupportedArchs(&count) != kSuccess || count == 0) return;
  std::vector<int> archs(static_cast<std::size_t>(count));
  if (functions_->nvrtcGetSupportedArchs(archs.data()) != kSuccess) return;
  if (std::find(archs.begin(), archs.end(), program.arch / 10) != archs.end()) return;
  const auto [oldest, newest] = std::minmax_element(archs.begin(), archs.end());
  throw Error(ErrorKind::kRuntime,
              concat("program ", program.name, " is for ", target(program), ", and NVRTC ",
                     version(), " (", path_, ") compiles for sm_", *oldest, " to sm_", *newest,
                     program.arch / 10 > *newest
                         ? ": `pip install --upgrade nvidia-cuda-nvrtc` brings a newer one"
                         : ": an older NVRTC is needed"));
}

namespace {

// The line of the log that says what is wrong: the first with "error", else the first.
std::string first_error(const std::string& log) {
  std::istringstream lines(log);
  std::string line, first;
  while (std::getline(lines, line)) {
    if (first.empty()) first = line;
    if (line.find("error") != std::string::npos) return line;
  }
  return first;
}

}  // namespace

Compiled Nvrtc::compile(const Program& program, const std::vector<std::string>& options) const {
  check_target(program);
  const Functions& f = *functions_;
  const auto start = std::chrono::steady_clock::now();

  std::vector<const char*> texts, names, words;
  for (std::size_t i = 0; i < kNumHeaders; ++i) {
    names.push_back(kHeaders[i].name);
    texts.push_back(kHeaders[i].text);
  }
  for (const std::string& option : options) words.push_back(option.c_str());
  // From 12.9 on NVRTC has a cache of its own, and what comes out of that comes without a log.
  if (major_ > 12 || minor_ >= 9) words.push_back("--no-cache");

  const std::string file = program.name + ".cu";
  Handle raw = nullptr;
  Result result = f.nvrtcCreateProgram(&raw, program.source.c_str(), file.c_str(),
                                       static_cast<int>(names.size()), texts.data(), names.data());
  const auto destroy = [&f](Handle* handle) { f.nvrtcDestroyProgram(handle); };
  const std::unique_ptr<Handle, decltype(destroy)> owner(&raw, destroy);
  if (result == kSuccess) {
    result = f.nvrtcCompileProgram(raw, static_cast<int>(words.size()), words.data());
  }

  Compiled compiled;
  std::size_t size = 0;
  if (raw != nullptr && f.nvrtcGetProgramLogSize(raw, &size) == kSuccess && size > 1) {
    compiled.log.resize(size);
    f.nvrtcGetProgramLog(raw, compiled.log.data());
    compiled.log.resize(size - 1);  // the terminating zero
  }
  if (result == kSuccess) result = f.nvrtcGetCUBINSize(raw, &size);
  if (result == kSuccess) {
    compiled.cubin.resize(size);
    result = f.nvrtcGetCUBIN(raw, compiled.cubin.data());
  }
  if (result != kSuccess) {
    const std::string why =
        compiled.log.empty() ? f.nvrtcGetErrorString(result) : first_error(compiled.log);
    throw Error(ErrorKind::kRuntime,
                concat("program ", program.name, " does not compile for ", target(program),
                       " with NVRTC ", version(), ": ", why,
                       "\n(ONEFOLD_DUMP=<folder> keeps its text.) The whole log:\n", compiled.log));
  }
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  compiled.seconds = took.count();
  return compiled;
}

}  // namespace onefold::jit
