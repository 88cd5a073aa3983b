// The environment variables, as their comments promise.

#include "jit/settings.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/jit/scratch.h"

namespace onefold::jit {
namespace {

using onefold::test::ScopedVariable;
using Folders = std::vector<std::filesystem::path>;

TEST(Settings, CacheIsWhereTheVariableSaysElseWhereXdgSaysElseInTheHome) {
  const ScopedVariable home("HOME", "/home/ada");
  const ScopedVariable xdg("XDG_CACHE_HOME", "/scratch");
  const ScopedVariable own("ONEFOLD_CACHE_DIR", "/a:/b c::/d:");
  EXPECT_EQ(cache_folders(), (Folders{"/a", "/b c", "/d"}));
  const ScopedVariable empty("ONEFOLD_CACHE_DIR", "");
  EXPECT_EQ(cache_folders(), (Folders{"/scratch/onefold"}));
  const ScopedVariable relative("XDG_CACHE_HOME", "scratch");
  EXPECT_EQ(cache_folders(), (Folders{"/home/ada/.cache/onefold"}));
  const ScopedVariable homeless("HOME", nullptr);
  EXPECT_EQ(cache_folders(), Folders{});
}

TEST(Settings, LogLevelsContainOneAnother) {
  const ScopedVariable unset("ONEFOLD_LOG", nullptr);
  EXPECT_FALSE(logs(LogLevel::kEvents));
  const ScopedVariable one("ONEFOLD_LOG", "1");
  EXPECT_TRUE(logs(LogLevel::kEvents));
  EXPECT_FALSE(logs(LogLevel::kEverything));
  const ScopedVariable two("ONEFOLD_LOG", "2");
  EXPECT_TRUE(logs(LogLevel::kEvents));
  EXPECT_TRUE(logs(LogLevel::kEverything));
  const ScopedVariable zero("ONEFOLD_LOG", "0");
  EXPECT_FALSE(logs(LogLevel::kEvents));
}

TEST(Settings, CheckedIsOffUnlessSetToSomethingOtherThanZero) {
  for (const auto& [value, expected] : std::vector<std::pair<const char*, bool>>{
           {nullptr, false}, {"", false}, {"0", false}, {"1", true}}) {
    const ScopedVariable variable("ONEFOLD_CHECKED", value);
    EXPECT_EQ(checked(), expected) << (value ? value : "unset");
  }
}

}  // namespace
}  // namespace onefold::jit
