#include "jit/store.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <random>
#include <system_error>
#include <utility>

#include "jit/digest.h"
#include "jit/facts.h"
#include "jit/settings.h"

namespace onefold::jit {
namespace {

namespace fs = std::filesystem;

constexpr char kSource[] = "source.cu";
constexpr char kCubin[] = "kernel.cubin";
constexpr char kFacts[] = "facts.json";
constexpr char kPrivatePrefix[] = "tmp-";          // being written, or being deleted
constexpr char kSweepPrefix[] = "swept-";          // who makes one sweeps in that period
constexpr char kVersionMark[] = "-nvrtc";          // before the version in a folder's name
constexpr std::int64_t kAbandonedSeconds = 86400;  // no write and no deletion takes a day

struct Files {
  std::string source, cubin, facts;
};

// ---- names ----

// "<name>-<digest>-nvrtc<version>", and in the name what a file system may not like is replaced.
std::string folder_name(const std::string& name, const std::string& digest,
                        const std::string& nvrtc) {
  std::string out = name.substr(0, 100);
  for (char& c : out) {
    const bool plain = (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
    if (!plain && c != '_' && c != '-') c = '_';
  }
  return out + "-" + digest + kVersionMark + nvrtc;
}

// Whether a folder of this name is ours to delete: "...-<digest>-nvrtc<major>.<minor>".
bool is_entry(const std::string& folder) {
  const std::size_t at = folder.rfind(kVersionMark);
  if (at == std::string::npos || at <= kDigestLength || folder[at - kDigestLength - 1] != '-') {
    return false;
  }
  const auto all = [](std::string_view text, std::string_view of) {
    return !text.empty() && text.find_first_not_of(of) == std::string_view::npos;
  };
  const std::string_view text = folder;
  return all(text.substr(at - kDigestLength, kDigestLength), "0123456789abcdef") &&
         all(text.substr(at + sizeof kVersionMark - 1), "0123456789.");
}

bool starts_with(const std::string& text, const char* prefix) { return text.rfind(prefix, 0) == 0; }

// A name that no other process and no other thread uses.
std::string private_name() {
  thread_local std::random_device random;
  char name[40];
  std::snprintf(name, sizeof name, "%s%ld-%08x%08x", kPrivatePrefix, static_cast<long>(getpid()),
                random(), random());
  return name;
}

std::vector<std::string> names_in(const fs::path& folder) {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    names.push_back(it->path().filename().string());
  }
  return names;
}

// ---- reading ----

// A folder kept open: it can be read as it was even while it is renamed away.
class OpenFolder {
 public:
  explicit OpenFolder(const fs::path& path)
      : descriptor_(open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)), error_(errno) {}
  ~OpenFolder() {
    if (descriptor_ >= 0) close(descriptor_);
  }
  OpenFolder(const OpenFolder&) = delete;
  OpenFolder& operator=(const OpenFolder&) = delete;

  bool is_open() const { return descriptor_ >= 0; }
  int error() const { return error_; }

  // 0 and the content, or the errno of what went wrong.
  int read_file(const char* name, std::string& content) const {
    const int file = openat(descriptor_, name, O_RDONLY | O_CLOEXEC);
    if (file < 0) return errno;
    content.clear();
    char buffer[1 << 16];
    int error = 0;
    while (true) {
      const ssize_t got = read(file, buffer, sizeof buffer);
      if (got > 0) content.append(buffer, static_cast<std::size_t>(got));
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) error = errno;
      if (got <= 0) break;
    }
    close(file);
    return error;
  }

  // Whether `path` still leads to this very folder.
  bool is_at(const fs::path& path) const {
    struct stat here, there;
    return fstat(descriptor_, &here) == 0 && stat(path.c_str(), &there) == 0 &&
           here.st_dev == there.st_dev && here.st_ino == there.st_ino;
  }

 private:
  int descriptor_;
  int error_;
};

std::string checksum(std::string_view source, std::string_view cubin, std::string_view facts) {
  return Digest().add(source).add(cubin).add(facts).hex();
}

// The end of facts.json.
std::string seal(const std::string& checksum) {
  return "  \"checksum\": \"" + checksum + "\"\n}\n";
}

// What stands before the seal; nothing when there is no room for one.
std::string unsealed(const std::string& facts) {
  static const std::size_t seal_size = seal(checksum("", "", "")).size();
  return facts.size() < seal_size ? "" : facts.substr(0, facts.size() - seal_size);
}

// The three files as a Binary, when they agree with one another and with the folder's name.
bool unpack(const Files& files, const std::string& folder, Binary& binary) {
  const std::string body = unsealed(files.facts);
  if (files.facts != body + seal(checksum(files.source, files.cubin, body))) return false;
  if (!read_facts(body, binary)) return false;
  if (folder_name(binary.name, binary.digest, binary.nvrtc) != folder) return false;
  binary.cubin = files.cubin;
  binary.origin = Origin::kDisk;
  return true;
}

// Takes a folder out of sight in one step, then deletes it at leisure.
bool remove_whole(const fs::path& root, const std::string& folder) {
  const fs::path away = root / private_name();
  if (std::rename((root / folder).c_str(), away.c_str()) != 0) return false;
  std::error_code ignored;
  fs::remove_all(away, ignored);
  return true;
}

enum class Found { kAbsent, kGood, kBad, kUnreadable };

Found read_entry(const fs::path& root, const std::string& folder, bool may_delete, Files& files,
                 Binary& binary) {
  const OpenFolder open_folder(root / folder);
  if (!open_folder.is_open()) {
    return open_folder.error() == ENOENT ? Found::kAbsent : Found::kUnreadable;
  }
  for (const auto& [name, content] :
       {std::pair{kFacts, &files.facts}, {kCubin, &files.cubin}, {kSource, &files.source}}) {
    const int error = open_folder.read_file(name, *content);
    if (error != 0 && error != ENOENT) {
      log(LogLevel::kEvents, "cannot read ", (root / folder / name).string(), ": ",
          std::strerror(error));
      return Found::kUnreadable;
    }
    if (error == ENOENT) content->clear();  // a file that is missing is bad content
  }
  if (unpack(files, folder, binary)) return Found::kGood;
  // Another process may have mended it meanwhile; what is deleted must be what was read.
  const bool deleted = may_delete && open_folder.is_at(root / folder) && remove_whole(root, folder);
  log(LogLevel::kEvents, "the cached ", (root / folder).string(), " is damaged",
      deleted ? " and was deleted" : "");
  return Found::kBad;
}

// ---- writing ----

bool write_file(const fs::path& path, std::string_view content) {
  const int file = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (file < 0) return false;
  while (!content.empty()) {
    const ssize_t put = write(file, content.data(), content.size());
    if (put < 0 && errno == EINTR) continue;
    if (put <= 0) break;
    content.remove_prefix(static_cast<std::size_t>(put));
  }
  return (close(file) == 0) && content.empty();
}

enum class Published { kYes, kAlreadyThere, kFailed };

// Private first, then visible in one step. Not synced: after a power cut the checksum tells.
Published publish(const fs::path& root, const std::string& folder, const Files& files) {
  std::error_code ignored;
  fs::create_directories(root, ignored);
  const fs::path draft = root / private_name();
  int error = 0;
  if (mkdir(draft.c_str(), 0777) == 0 && write_file(draft / kSource, files.source) &&
      write_file(draft / kCubin, files.cubin) && write_file(draft / kFacts, files.facts)) {
    if (std::rename(draft.c_str(), (root / folder).c_str()) == 0) return Published::kYes;
  }
  error = errno;
  fs::remove_all(draft, ignored);
  if (error == EEXIST || error == ENOTEMPTY) return Published::kAlreadyThere;
  log(LogLevel::kEvents, "cannot keep ", (root / folder).string(), ": ", std::strerror(error));
  return Published::kFailed;
}

// True for one process per period. The name of the file is the period, so one that dies after
// making it holds up nobody beyond that period.
bool elected_to_sweep(const fs::path& root, std::chrono::seconds period) {
  if (period.count() == 0) return true;
  const std::string mine =
      kSweepPrefix + std::to_string(std::time(nullptr) / static_cast<long>(period.count()));
  if (!write_file(root / mine, "")) return false;
  for (const std::string& name : names_in(root)) {
    if (starts_with(name, kSweepPrefix) && name != mine) unlink((root / name).c_str());
  }
  return true;
}

void remove_abandoned(const fs::path& root) {
  for (const std::string& name : names_in(root)) {
    struct stat status;
    if (starts_with(name, kPrivatePrefix) && stat((root / name).c_str(), &status) == 0 &&
        std::time(nullptr) - status.st_mtime > kAbandonedSeconds) {
      std::error_code ignored;
      fs::remove_all(root / name, ignored);
    }
  }
}

std::int64_t bytes_of(const fs::path& folder) {
  std::int64_t bytes = 0;
  for (const char* name : {kSource, kCubin, kFacts}) {
    struct stat status;
    if (stat((folder / name).c_str(), &status) == 0) bytes += status.st_size;
  }
  return bytes;
}

}  // namespace

Store::Store(std::vector<fs::path> folders) : Store(std::move(folders), Limits()) {}
Store::Store(std::vector<fs::path> folders, Limits limits)
    : folders_(std::move(folders)), limits_(limits) {}

std::optional<Binary> Store::load(const std::string& name, const std::string& digest,
                                  const std::string& nvrtc) const {
  const std::string folder = folder_name(name, digest, nvrtc);
  for (const fs::path& root : folders_) {
    Files files;
    Binary binary;
    const bool may_delete = &root == &folders_.front();
    if (read_entry(root, folder, may_delete, files, binary) == Found::kGood) {
      // Its time is when it was last used. Fails where we may not write, and that is fine.
      utimensat(AT_FDCWD, (root / folder).c_str(), nullptr, 0);
      log(LogLevel::kEverything, "loaded ", (root / folder).string());
      return binary;
    }
  }
  return std::nullopt;
}

std::optional<Binary> Store::load_any(const std::string& name, const std::string& digest,
                                      int max_major) const {
  const std::string prefix = folder_name(name, digest, "");
  std::pair<int, int> best{0, 0};
  for (const fs::path& root : folders_) {
    for (const std::string& folder : names_in(root)) {
      std::pair<int, int> version;
      if (starts_with(folder, prefix.c_str()) &&
          std::sscanf(folder.c_str() + prefix.size(), "%d.%d", &version.first, &version.second) ==
              2 &&
          version.first <= max_major) {
        best = std::max(best, version);
      }
    }
  }
  if (best.first == 0) return std::nullopt;
  return load(name, digest, concat(best.first, ".", best.second));
}

void Store::save(const Binary& binary, std::string_view source) const {
  if (folders_.empty()) return;
  const fs::path& root = folders_.front();
  Files files{std::string(source), binary.cubin, write_facts(binary)};
  files.facts += seal(checksum(files.source, files.cubin, files.facts));
  if (publish(root, folder_name(binary.name, binary.digest, binary.nvrtc), files) ==
          Published::kYes &&
      elected_to_sweep(root, limits_.sweep_period)) {
    sweep();
  }
}

std::vector<Store::Entry> Store::list() const {
  std::vector<Entry> entries;
  if (folders_.empty()) return entries;
  const fs::path& root = folders_.front();
  for (const std::string& folder : names_in(root)) {
    Entry entry{folder, {}, 0, 0};
    struct stat status;
    if (!is_entry(folder) || stat((root / folder).c_str(), &status) != 0) continue;
    entry.last_used = status.st_mtime;
    entry.bytes = bytes_of(root / folder);
    std::string facts;
    const OpenFolder open_folder(root / folder);
    if (!open_folder.is_open() || open_folder.read_file(kFacts, facts) != 0) continue;
    if (read_facts(unsealed(facts), entry.binary)) entries.push_back(std::move(entry));
  }
  return entries;
}

int Store::clear() const {
  int count = 0;
  if (folders_.empty()) return count;
  const fs::path& root = folders_.front();
  for (const std::string& folder : names_in(root)) {
    if (is_entry(folder)) count += remove_whole(root, folder);
    if (starts_with(folder, kSweepPrefix)) unlink((root / folder).c_str());
  }
  remove_abandoned(root);
  return count;
}

int Store::copy_to(const fs::path& target) const {
  int count = 0;
  for (const fs::path& root : folders_) {
    for (const std::string& folder : names_in(root)) {
      Files files;
      Binary binary;
      if (!is_entry(folder)) continue;
      if (read_entry(root, folder, false, files, binary) != Found::kGood) continue;
      switch (publish(target, folder, files)) {
        case Published::kYes:
          ++count;
          break;
        case Published::kAlreadyThere:
          break;
        case Published::kFailed:
          throw Error(ErrorKind::kRuntime, concat("cannot write to ", target.string()));
      }
    }
  }
  return count;
}

void Store::sweep() const {
  if (folders_.empty()) return;
  const fs::path& root = folders_.front();
  remove_abandoned(root);

  struct Aged {
    fs::file_time_type used;
    std::int64_t bytes;
    std::string folder;
  };
  std::vector<Aged> all;
  std::int64_t total = 0;
  for (const std::string& folder : names_in(root)) {
    std::error_code error;
    const fs::file_time_type used = fs::last_write_time(root / folder, error);
    if (error || !is_entry(folder)) continue;
    all.push_back({used, bytes_of(root / folder), folder});
    total += all.back().bytes;
  }
  if (total <= limits_.bytes) return;
  std::sort(all.begin(), all.end(), [](const Aged& a, const Aged& b) { return a.used < b.used; });
  const std::int64_t before = total;
  for (const Aged& oldest : all) {
    if (total <= limits_.bytes / 5 * 4) break;
    remove_whole(root, oldest.folder);  // when another sweeper was faster, it is gone all the same
    total -= oldest.bytes;
  }
  log(LogLevel::kEvents, "the cache in ", root.string(), " had ", before >> 20, " MiB, now ",
      total >> 20);
}

}  // namespace onefold::jit
