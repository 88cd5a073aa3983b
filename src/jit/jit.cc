#include "jit/jit.h"

#include <atomic>
#include <fstream>
#include <limits>
#include <memory>
#include <mutex>
#include <system_error>
#include <unordered_map>

#include "jit/digest.h"
#include "jit/facts.h"
#include "jit/headers.h"
#include "jit/nvrtc.h"
#include "jit/settings.h"
#include "jit/store.h"

namespace onefold::jit {
namespace {

// Changes when what is kept on disk changes its meaning.
constexpr char kFormat[] = "onefold jit 1";

std::vector<std::string> all_options(const Program& program) {
  std::vector<std::string> options{"--std=c++20", "--device-as-default-execution-space",
                                   "--gpu-architecture=" + target(program), "--ptxas-options=-v"};
  if (checked()) options.emplace_back("--generate-line-info");
  options.insert(options.end(), program.options.begin(), program.options.end());
  return options;
}

const std::string& headers_digest() {
  static const std::string& hex = *new std::string([] {
    Digest parts;
    for (std::size_t i = 0; i < kNumHeaders; ++i) parts.add(kHeaders[i].name).add(kHeaders[i].text);
    return parts.hex();
  }());
  return hex;
}

// ---- memory ----

struct Slot {
  std::mutex making;
  std::atomic<const Binary*> ready{nullptr};
};

std::mutex slots_mutex;

// Never emptied and never destroyed: threads may still launch while the process ends.
std::unordered_map<std::string, std::unique_ptr<Slot>>& slots() {
  static auto& table = *new std::unordered_map<std::string, std::unique_ptr<Slot>>;
  return table;
}

Slot& slot_of(const Program& program) {
  const std::string id = identity(program);
  const std::lock_guard lock(slots_mutex);
  std::unique_ptr<Slot>& slot = slots()[id];
  if (!slot) slot = std::make_unique<Slot>();
  return *slot;
}

// ---- one program ----

// Best effort: what cannot be written is logged.
void dump(const Program& program, const std::string& digest, const char* suffix,
          const std::string& content) {
  const std::filesystem::path folder = dump_folder();
  if (folder.empty()) return;
  std::error_code ignored;
  std::filesystem::create_directories(folder, ignored);
  const auto file = folder / concat(program.name, "-", digest.substr(0, 8), suffix);
  std::ofstream out(file, std::ios::binary);
  if (!(out << content).flush()) log(LogLevel::kEvents, "cannot write ", file.string());
}

Binary compile(const Nvrtc& nvrtc, const Program& program, const std::string& digest) {
  Binary binary;
  binary.digest = digest;
  binary.nvrtc = nvrtc.version();
  binary.name = program.name;
  binary.entry = program.entry;
  binary.target = target(program);
  binary.options = all_options(program);
  Compiled compiled = nvrtc.compile(program, binary.options);
  dump(program, digest, ".log", compiled.log);
  binary.facts = parse_log(compiled.log, program.entry);
  binary.facts.compile_seconds = compiled.seconds;
  if (!defines_entry(compiled.log, program.entry)) {
    throw Error(ErrorKind::kRuntime,
                concat("program ", program.name, " has no kernel named ", program.entry,
                       ": it must be extern \"C\". The log:\n", compiled.log));
  }
  binary.cubin = std::move(compiled.cubin);
  log(LogLevel::kEvents, "compiled ", program.name, " for ", target(program), " in ",
      compiled.seconds, " s: ", describe(binary.facts));
  return binary;
}

// From disk, else from the compiler.
Binary make(const Program& program, const std::string& digest) {
  const Store store(cache_folders());
  dump(program, digest, ".cu", program.source);
  std::string why_not;
  const Nvrtc* nvrtc = Nvrtc::find(&why_not);
  if (nvrtc == nullptr) {
    const int newest = driver_major() > 0 ? driver_major() : std::numeric_limits<int>::max();
    if (auto kept = store.load_any(program.name, digest, newest)) return *std::move(kept);
    throw Error(ErrorKind::kRuntime,
                concat("program ", program.name, " for ", target(program),
                       " is not in the cache and cannot be compiled: ", why_not));
  }
  if (auto kept = store.load(program.name, digest, nvrtc->version())) return *std::move(kept);
  Binary binary = compile(*nvrtc, program, digest);
  store.save(binary, program.source);
  return binary;
}

}  // namespace

std::string target(const Program& program) {
  std::string text = "sm_" + std::to_string(program.arch / 10);
  if (program.suffix != '\0') text += program.suffix;
  return text;
}

std::string digest(const Program& program) {
  Digest parts;
  parts.add(kFormat).add(headers_digest()).add(program.entry).add(program.source);
  for (const std::string& option : all_options(program)) parts.add(option);
  return parts.hex().substr(0, kDigestLength);
}

std::string identity(const Program& program) {
  // Each part after its length, so that no two programs read the same.
  std::string id = std::to_string(program.arch) + program.suffix + (checked() ? '1' : '0');
  const auto add = [&id](const std::string& part) {
    id += std::to_string(part.size()) + ':';
    id += part;
  };
  id.reserve(program.source.size() + 256);
  add(program.entry);
  for (const std::string& option : program.options) add(option);
  add(program.source);
  return id;
}

bool in_memory(const Program& program) {
  return slot_of(program).ready.load(std::memory_order_acquire) != nullptr;
}

const Binary& get(const Program& program) {
  Slot& slot = slot_of(program);
  const Binary* ready = slot.ready.load(std::memory_order_acquire);
  if (ready != nullptr) return *ready;

  // Those who ask for the same program wait here; after a failure the next of them tries again.
  const std::lock_guard lock(slot.making);
  ready = slot.ready.load(std::memory_order_relaxed);
  if (ready == nullptr) {
    ready = new Binary(make(program, digest(program)));
    dump(program, ready->digest, ".cubin", ready->cubin);
    slot.ready.store(ready, std::memory_order_release);
  }
  return *ready;
}

std::string info() {
  std::string why_not, text;
  if (const Nvrtc* nvrtc = Nvrtc::find(&why_not)) {
    text = concat("NVRTC ", nvrtc->version(), " at ", nvrtc->path());
  } else {
    text = why_not.substr(0, why_not.find(". Tried"));
  }
  const auto folders = cache_folders();
  return text + "; kernel cache " + (folders.empty() ? "in memory" : folders.front().string());
}

}  // namespace onefold::jit
