// Compiled programs on disk: one folder per program, shared by any number of processes.
//
// Invariant: a folder appears and disappears whole, by one rename, and holds source.cu,
// kernel.cubin and facts.json, whose checksum covers all three. What does not agree is deleted and
// counts as absent; what cannot be read counts as absent and is left alone. Nothing is locked, so
// nothing stays locked. No failure here is an error for the caller: a cache can only save time.
// Includes jit.h and the standard library.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "jit/jit.h"

namespace onefold::jit {

inline constexpr std::size_t kDigestLength = 40;  // hexadecimal digits

class Store {
 public:
  struct Limits {
    std::int64_t bytes = std::int64_t{1} << 30;
    // At most one process looks at sizes in each period; 0: after every save.
    std::chrono::seconds sweep_period{60};
  };

  struct Entry {
    std::string folder;
    Binary binary;  // without the cubin
    std::int64_t bytes = 0;
    std::int64_t last_used = 0;  // seconds since 1970
  };

  // The first folder is written and read, the others are read. None: nothing is ever found.
  explicit Store(std::vector<std::filesystem::path> folders);
  Store(std::vector<std::filesystem::path> folders, Limits limits);

  std::optional<Binary> load(const std::string& name, const std::string& digest,
                             const std::string& nvrtc) const;

  // What the newest NVRTC up to `max_major` compiled: for machines that have none.
  std::optional<Binary> load_any(const std::string& name, const std::string& digest,
                                 int max_major) const;

  void save(const Binary& binary, std::string_view source) const;

  // What the first folder holds, unverified; what has no readable facts is left out.
  std::vector<Entry> list() const;

  // Removes every entry, and what killed processes left; returns how many entries it removed.
  int clear() const;

  // Copies every entry of all folders into another cache and returns how many that has gained.
  // Throws Error when that cannot be written.
  int copy_to(const std::filesystem::path& folder) const;

  // Removes what was not used for longest until less than 80 % of the limit is left.
  void sweep() const;

 private:
  std::vector<std::filesystem::path> folders_;
  Limits limits_;
};

}  // namespace onefold::jit
