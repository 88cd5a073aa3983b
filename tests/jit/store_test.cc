// The cache on disk: what is saved is found again by any process, what is damaged never is, and
// nothing that a process does or leaves undone disturbs another.

#include "jit/store.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <time.h>

#include <algorithm>
#include <chrono>
#include <set>
#include <string>
#include <vector>

#include "tests/jit/scratch.h"

namespace onefold::jit {
namespace {

namespace fs = std::filesystem;
using namespace onefold::test;

constexpr char kVersion[] = "13.2";
const char* const kFileNames[] = {"source.cu", "kernel.cubin", "facts.json"};

std::string digest_of(int number) {
  std::string digest = std::to_string(number);
  return std::string(kDigestLength - digest.size(), 'a') + digest;
}

std::string source_of(int number) { return concat("// source ", number, "\n"); }

// A binary whose content follows from its number, about `bytes` long.
Binary binary_of(int number, std::size_t bytes = 300) {
  Binary binary;
  binary.name = "program";
  binary.digest = digest_of(number);
  binary.nvrtc = kVersion;
  binary.entry = "entry";
  binary.target = "sm_90a";
  binary.options = {"--std=c++20"};
  binary.facts.registers = number;
  binary.cubin = std::string(bytes, static_cast<char>(number));
  return binary;
}

std::optional<Binary> load(const Store& store, int number) {
  return store.load("program", digest_of(number), kVersion);
}

// Whether it is absent or exactly what was saved.
bool absent_or_right(const std::optional<Binary>& found, int number) {
  return !found ||
         (found->cubin.find_first_not_of(static_cast<char>(number)) == std::string::npos &&
          found->facts.registers == number);
}

std::set<std::string> names_in(const fs::path& folder) {
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) {
    names.insert(entry.path().filename().string());
  }
  return names;
}

std::string folder_of(int number) {
  return concat("program-", digest_of(number), "-nvrtc", kVersion);
}

bool drafts_left(const fs::path& root) {
  const auto names = names_in(root);
  return std::any_of(names.begin(), names.end(),
                     [](const std::string& name) { return name.rfind("tmp-", 0) == 0; });
}

void set_age(const fs::path& path, long seconds) {
  const timespec then{time(nullptr) - seconds, 0};
  const timespec times[2] = {then, then};
  ASSERT_EQ(utimensat(AT_FDCWD, path.c_str(), times, 0), 0);
}

TEST(Store, FindsWhatWasSavedAndNothingElse) {
  const ScratchFolder scratch;
  const Store store({scratch.path() / "deeper" / "cache"});
  EXPECT_FALSE(load(store, 1));
  store.save(binary_of(1), source_of(1));
  EXPECT_FALSE(load(store, 2));

  const auto found = load(store, 1);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->cubin, binary_of(1).cubin);
  EXPECT_EQ(found->facts.registers, 1);
  EXPECT_EQ(found->origin, Origin::kDisk);
  EXPECT_FALSE(store.load("program", digest_of(1), "13.3")) << "another compiler's work";
  EXPECT_FALSE(drafts_left(scratch.path() / "deeper" / "cache"));
}

TEST(Store, WithoutAFolderFindsNothingAndKeepsNothing) {
  const Store store(std::vector<fs::path>{});
  store.save(binary_of(1), source_of(1));
  EXPECT_FALSE(load(store, 1));
  EXPECT_TRUE(store.list().empty());
  EXPECT_EQ(store.clear(), 0);
}

TEST(Store, TakesNamesThatAreNoFileNames) {
  const ScratchFolder scratch;
  const Store store({scratch.path()});
  Binary binary = binary_of(1);
  binary.name = concat("../up/and away\n", std::string(300, 'x'));
  store.save(binary, source_of(1));
  EXPECT_TRUE(store.load(binary.name, binary.digest, kVersion));
  EXPECT_EQ(store.list().size(), 1u);
  EXPECT_EQ(store.clear(), 1);
}

TEST(Store, DeletesAnEntryInWhichAByteOfAnyFileIsWrong) {
  const ScratchFolder scratch;
  const Store store({scratch.path()});
  const fs::path folder = scratch.path() / folder_of(1);
  for (const char* name : kFileNames) {
    store.save(binary_of(1, 40), source_of(1));
    const std::string good = read_text(folder / name);
    ASSERT_FALSE(good.empty());
    for (std::size_t at = 0; at < good.size(); at += 3) {
      std::string bad = good;
      bad[at] = static_cast<char>(bad[at] ^ 1);
      write_text(folder / name, bad);
      EXPECT_FALSE(load(store, 1)) << name << ", byte " << at;
      ASSERT_FALSE(fs::exists(folder)) << name << ", byte " << at;
      store.save(binary_of(1, 40), source_of(1));
      ASSERT_TRUE(load(store, 1)) << "healed after " << name << ", byte " << at;
    }
  }
}

TEST(Store, DeletesAnEntryThatIsCutExtendedOrIncomplete) {
  const ScratchFolder scratch;
  const Store store({scratch.path()});
  const fs::path folder = scratch.path() / folder_of(1);
  for (const char* name : kFileNames) {
    for (const char* damage : {"empty", "cut", "longer", "missing"}) {
      store.save(binary_of(1), source_of(1));
      const std::string good = read_text(folder / name);
      const std::string what = damage;
      if (what == "empty") write_text(folder / name, "");
      if (what == "cut") write_text(folder / name, good.substr(0, good.size() - 1));
      if (what == "longer") write_text(folder / name, good + "\n");
      if (what == "missing") fs::remove(folder / name);
      EXPECT_FALSE(load(store, 1)) << name << " " << damage;
      EXPECT_FALSE(fs::exists(folder)) << name << " " << damage;
    }
  }
}

TEST(Store, DoesNotTakeOneEntryForAnother) {
  const ScratchFolder scratch;
  const Store store({scratch.path()});
  store.save(binary_of(1), source_of(1));
  fs::rename(scratch.path() / folder_of(1), scratch.path() / folder_of(2));
  EXPECT_FALSE(load(store, 2));
  EXPECT_FALSE(fs::exists(scratch.path() / folder_of(2)));
}

TEST(Store, LeavesAloneWhatItCannotRead) {
  const ScratchFolder scratch;
  const Store store({scratch.path()});
  store.save(binary_of(1), source_of(1));
  const fs::path cubin = scratch.path() / folder_of(1) / "kernel.cubin";
  fs::remove(cubin);
  fs::create_directory(cubin);  // reading it is an I/O error for any user
  EXPECT_FALSE(load(store, 1));
  EXPECT_TRUE(fs::exists(cubin));

  fs::remove(cubin);
  write_text(cubin, binary_of(1).cubin);
  EXPECT_TRUE(load(store, 1));
}

TEST(Store, ReadsAFolderThatItMayNotWrite) {
  const ScratchFolder scratch;
  const fs::path root = scratch.path() / "shared";
  const Store store({root});
  store.save(binary_of(1), source_of(1));
  store.save(binary_of(2), source_of(2));
  write_text(root / folder_of(2) / "source.cu", "damaged");
  chmod(scratch.path().c_str(), 0755);
  chmod(root.c_str(), 0555);
  const auto before = names_in(root);
  const pid_t child = start_child([&] {
    if (geteuid() == 0 && setuid(65534) != 0) return 1;  // root may write everywhere
    if (!load(store, 1)) return 2;
    if (load(store, 2)) return 3;
    store.save(binary_of(3), source_of(3));
    store.sweep();
    return load(store, 3) ? 4 : 0;
  });
  EXPECT_EQ(exit_status(child), 0);
  EXPECT_EQ(names_in(root), before);
  chmod(root.c_str(), 0755);
}

TEST(Store, IsNoErrorWhereNoFolderCanBe) {
  const ScratchFolder scratch;
  write_text(scratch.path() / "file", "");
  const Store store({scratch.path() / "file" / "cache"});
  store.save(binary_of(1), source_of(1));
  EXPECT_FALSE(load(store, 1));
  EXPECT_TRUE(store.list().empty());
}

TEST(Store, ReadsTheFurtherFoldersAndWritesOnlyTheFirst) {
  const ScratchFolder scratch;
  const fs::path mine = scratch.path() / "mine", shared = scratch.path() / "shared";
  Store({shared}).save(binary_of(1), source_of(1));
  Store({shared}).save(binary_of(2), source_of(2));
  write_text(shared / folder_of(2) / "source.cu", "damaged");
  const auto before = names_in(shared);

  const Store store({mine, shared});
  EXPECT_TRUE(load(store, 1));
  EXPECT_FALSE(load(store, 2));
  EXPECT_EQ(names_in(shared), before) << "damaged or not, it is not ours to change";
  store.save(binary_of(2), source_of(2));
  EXPECT_TRUE(load(store, 2)) << "the good one in the first folder";
  EXPECT_EQ(names_in(shared), before);
}

TEST(Store, KeepsWhatCameFirstWhenTwoSaveTheSame) {
  const ScratchFolder scratch;
  const Store store({scratch.path()});
  Binary first = binary_of(1), second = binary_of(1);
  first.facts.compile_seconds = 1;
  second.facts.compile_seconds = 2;
  store.save(first, source_of(1));
  store.save(second, source_of(1));
  EXPECT_EQ(load(store, 1)->facts.compile_seconds, 1);
  EXPECT_FALSE(drafts_left(scratch.path()));
}

TEST(Store, ServesManyProcessesThatSaveLoadDamageAndSweepAtOnce) {
  const ScratchFolder scratch;
  constexpr int kPrograms = 6;
  Store::Limits limits;
  limits.bytes = 6 * 2000;  // about three of them fit below 80 %
  limits.sweep_period = std::chrono::seconds(0);
  const Store store({scratch.path()}, limits);
  std::vector<pid_t> children;
  for (int process = 0; process < 6; ++process) {
    children.push_back(start_child([&store, &scratch, process] {
      unsigned random = 17u * static_cast<unsigned>(process) + 1;
      for (int step = 0; step < 300; ++step) {
        random = random * 1664525u + 1013904223u;
        const int number = 1 + static_cast<int>(random >> 16) % kPrograms;
        if (random >> 30 == 0) {
          std::ofstream(scratch.path() / folder_of(number) / "source.cu") << "damaged";
        }
        if (!absent_or_right(load(store, number), number)) return 1;
        store.save(binary_of(number, 2000), source_of(number));
      }
      return 0;
    }));
  }
  for (const pid_t child : children) EXPECT_EQ(exit_status(child), 0);
  EXPECT_FALSE(drafts_left(scratch.path()));
  for (int number = 1; number <= kPrograms; ++number) {
    store.save(binary_of(number, 100), source_of(number));
    EXPECT_TRUE(absent_or_right(load(store, number), number));
  }
}

TEST(Store, SurvivesAWriterThatIsKilledAtAnyMoment) {
  const ScratchFolder scratch;
  const Store store({scratch.path()});
  constexpr int kPrograms = 200;
  int killed_with_a_draft = 0;
  // At least 30 kills, and then until one has met a write: on a busy machine that takes a few more.
  for (int round = 0; round < 30 || (killed_with_a_draft == 0 && round < 1000); ++round) {
    const pid_t child = start_child([&store] {
      while (true) {
        for (int number = 1; number <= kPrograms; ++number) {
          store.save(binary_of(number % 100, 200000), source_of(number % 100));
        }
        store.clear();
      }
      return 0;
    });
    usleep(static_cast<useconds_t>(3000 + 700 * (round % 30)));
    kill(child, SIGKILL);
    EXPECT_EQ(exit_status(child), -1);
    killed_with_a_draft += drafts_left(scratch.path());
    for (int number = 0; number < 100; ++number) {
      const bool there = fs::exists(scratch.path() / folder_of(number));
      const auto found = load(store, number);
      EXPECT_EQ(there, found.has_value()) << "visible means complete";
      EXPECT_TRUE(absent_or_right(found, number));
    }
    store.save(binary_of(7), source_of(7));
    EXPECT_TRUE(load(store, 7)) << "and nothing is locked";
  }
  EXPECT_GT(killed_with_a_draft, 0) << "the kill never came in the middle of a write";
}

TEST(Store, ForgetsWhatWasNotUsedForLongestWhenItGrowsTooLarge) {
  const ScratchFolder scratch;
  Store::Limits limits;
  limits.bytes = 100'000;
  limits.sweep_period = std::chrono::seconds(3600);
  const Store store({scratch.path()}, limits);
  fs::create_directory(scratch.path() / "not-ours");
  write_text(scratch.path() / "not-ours" / "facts.json", std::string(200'000, 'x'));
  for (int number = 1; number <= 9; ++number) {
    store.save(binary_of(number, 10'000), source_of(number));
    set_age(scratch.path() / folder_of(number), 1000 - number);
  }
  store.sweep();
  EXPECT_EQ(store.list().size(), 9u) << "all of it fits";

  EXPECT_TRUE(load(store, 1)) << "the oldest, but now it was used";
  store.save(binary_of(10, 10'000), source_of(10));
  store.sweep();
  std::set<int> left;
  std::int64_t bytes = 0;
  for (const Store::Entry& entry : store.list()) {
    left.insert(entry.binary.facts.registers);
    bytes += entry.bytes;
  }
  EXPECT_LE(bytes, 80'000);
  EXPECT_EQ(left, (std::set<int>{1, 5, 6, 7, 8, 9, 10}));
  EXPECT_TRUE(fs::exists(scratch.path() / "not-ours" / "facts.json"));
}

TEST(Store, ElectsOneProcessPerPeriodToSweep) {
  const ScratchFolder scratch;
  Store::Limits limits;
  limits.bytes = 1;
  limits.sweep_period = std::chrono::hours(1'000'000);
  const Store store({scratch.path()}, limits);
  write_text(scratch.path() / "swept-12345", "");  // of a period long ago
  store.save(binary_of(1), source_of(1));
  EXPECT_FALSE(load(store, 1)) << "the first save of the period sweeps, and nothing fits";
  EXPECT_FALSE(fs::exists(scratch.path() / "swept-12345"));
  store.save(binary_of(2), source_of(2));
  EXPECT_TRUE(load(store, 2)) << "the second does not sweep";
}

TEST(Store, RemovesDraftsThatWereAbandonedADayAgo) {
  const ScratchFolder scratch;
  const Store store({scratch.path()});
  for (const char* name : {"tmp-old", "tmp-new"}) {
    fs::create_directory(scratch.path() / name);
    write_text(scratch.path() / name / "source.cu", "half");
  }
  set_age(scratch.path() / "tmp-old", 2 * 86400);
  store.sweep();
  EXPECT_FALSE(fs::exists(scratch.path() / "tmp-old"));
  EXPECT_TRUE(fs::exists(scratch.path() / "tmp-new")) << "somebody may be writing it";
}

TEST(Store, ClearsItsOwnEntriesAndNothingElse) {
  const ScratchFolder scratch;
  const Store store({scratch.path()});
  for (int number = 1; number <= 3; ++number) store.save(binary_of(number), source_of(number));
  const std::string others[] = {"precious", "program-123-nvrtc13.2", "program-nvrtc13.2",
                                concat("x", digest_of(1), "-nvrtc13.2"),
                                concat("program-", digest_of(1), "-nvrtcX")};
  for (const std::string& name : others) fs::create_directory(scratch.path() / name);
  EXPECT_EQ(store.clear(), 3);
  EXPECT_EQ(names_in(scratch.path()), std::set<std::string>(std::begin(others), std::end(others)));
  EXPECT_EQ(store.clear(), 0);
}

TEST(Store, ListsWhatItHolds) {
  const ScratchFolder scratch;
  const Store store({scratch.path()});
  store.save(binary_of(1, 1000), source_of(1));
  set_age(scratch.path() / folder_of(1), 500);
  fs::create_directory(scratch.path() / folder_of(2));
  const auto entries = store.list();
  ASSERT_EQ(entries.size(), 1u);
  EXPECT_EQ(entries[0].folder, folder_of(1));
  EXPECT_EQ(entries[0].binary.name, "program");
  EXPECT_EQ(entries[0].binary.target, "sm_90a");
  EXPECT_GT(entries[0].bytes, 1000);
  EXPECT_NEAR(static_cast<double>(time(nullptr) - entries[0].last_used), 500, 5);
}

TEST(Store, CopiesEveryGoodEntryOfAllItsFolders) {
  const ScratchFolder scratch;
  const fs::path mine = scratch.path() / "mine", shared = scratch.path() / "shared";
  Store({mine}).save(binary_of(1), source_of(1));
  Store({shared}).save(binary_of(1), source_of(1));
  Store({shared}).save(binary_of(2), source_of(2));
  Store({shared}).save(binary_of(3), source_of(3));
  write_text(shared / folder_of(3) / "kernel.cubin", "damaged");

  const fs::path target = scratch.path() / "target";
  EXPECT_EQ(Store({mine, shared}).copy_to(target), 2);
  EXPECT_TRUE(load(Store({target}), 1));
  EXPECT_TRUE(load(Store({target}), 2));
  EXPECT_FALSE(load(Store({target}), 3));
  EXPECT_EQ(Store({mine, shared}).copy_to(target), 0) << "all of it is there already";

  write_text(scratch.path() / "file", "");
  EXPECT_THROW(Store({mine}).copy_to(scratch.path() / "file" / "target"), Error);
}

TEST(Store, FindsTheNewestCompilersWorkWhenThereIsNoCompiler) {
  const ScratchFolder scratch;
  const Store store({scratch.path()});
  EXPECT_FALSE(store.load_any("program", digest_of(1), 99));
  for (const char* version : {"12.9", "13.0", "13.10", "13.2", "14.0"}) {
    Binary binary = binary_of(1);
    binary.nvrtc = version;
    store.save(binary, source_of(1));
  }
  EXPECT_EQ(store.load_any("program", digest_of(1), 13)->nvrtc, "13.10");
  EXPECT_EQ(store.load_any("program", digest_of(1), 12)->nvrtc, "12.9");
  EXPECT_FALSE(store.load_any("program", digest_of(1), 11));
  EXPECT_FALSE(store.load_any("program", digest_of(2), 99));
}

}  // namespace
}  // namespace onefold::jit
