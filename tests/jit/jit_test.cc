// Programs compiled by NVRTC for every architecture, what their keys depend on, and what errors
// say.

#include "jit/jit.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "jit/headers.h"
#include "jit/store.h"
#include "tests/jit/scratch.h"

namespace onefold::jit {
namespace {

using namespace onefold::test;
namespace fs = std::filesystem;

// Every test has programs of its own: what is in memory stays there for the process.
Program program(const std::string& name, const std::string& body) {
  Program p;
  p.name = name;
  p.source =
      "// " + name + "\nextern \"C\" __global__ void k(float* x, int n) {\n" + body + "\n}\n";
  p.entry = "k";
  p.arch = 900;
  p.suffix = 'a';
  return p;
}

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

std::string error_of(const Program& p) {
  try {
    get(p);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kRuntime);
    return error.what();
  }
  return "no error";
}

int count(const std::string& text, const std::string& part) {
  int found = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) {
    ++found;
  }
  return found;
}

TEST(JitKey, CoversTextEntryOptionsAndTargetButNotTheName) {
  const Program base = program("base", "x[0] = 1;");
  std::vector<Program> others(6, base);
  others[0].source += " ";
  others[1].entry = "k2";
  others[2].options = {"--use_fast_math"};
  others[3].options = {"--use_fast_math", "--maxrregcount=64"};
  others[4].arch = 800;
  others[5].suffix = '\0';
  // The digest on disk and what stands for it in memory must agree on what differs.
  for (const auto key : {digest, identity}) {
    std::set<std::string> keys{key(base)};
    for (const Program& other : others) keys.insert(key(other));
    {
      const ScopedVariable checked("ONEFOLD_CHECKED", "1");
      keys.insert(key(base));
    }
    EXPECT_EQ(keys.size(), others.size() + 2);
  }

  Program renamed = base;
  renamed.name = "renamed";
  EXPECT_EQ(digest(renamed), digest(base));
  EXPECT_EQ(identity(renamed), identity(base));
  EXPECT_EQ(digest(base).size(), kDigestLength);
}

TEST(JitKey, IsTheSameInEveryProcess) {
  const Program p = program("stable", "x[0] = 1;");
  const std::string here = digest(p);
  EXPECT_EQ(exit_status(start_child([&] { return digest(p) == here ? 0 : 1; })), 0);
}

TEST(JitHeaders, AreTheFilesOfTheSourceTreeUnderTheNamesTheHostUses) {
  const fs::path root = ONEFOLD_SOURCE_DIR;
  std::set<std::string> embedded;
  for (std::size_t i = 0; i < kNumHeaders; ++i) {
    const fs::path inside = kHeaders[i].name;
    const fs::path file =
        fs::exists(root / "include" / inside) ? root / "include" / inside : root / "src" / inside;
    EXPECT_TRUE(read_text(file) == kHeaders[i].text) << file << " is newer than the library";
    EXPECT_TRUE(embedded.insert(kHeaders[i].name).second) << inside << " is there twice";
  }
  EXPECT_TRUE(embedded.count("core/variant.h"));
  for (const auto& entry : fs::directory_iterator(root / "include/onefold/algebra")) {
    EXPECT_TRUE(embedded.count("onefold/algebra/" + entry.path().filename().string()));
  }
  if (!fs::exists(root / "src/kernels")) return;
  for (const auto& entry : fs::recursive_directory_iterator(root / "src/kernels")) {
    const std::string suffix = entry.path().extension().string();
    if (suffix != ".h" && suffix != ".cuh") continue;
    EXPECT_TRUE(embedded.count(fs::relative(entry.path(), root / "src").string())) << entry.path();
  }
}

class Jit : public CompilerTest {};

TEST_F(Jit, CompilesEachHeaderOnItsOwn) {
  for (std::size_t i = 0; i < kNumHeaders; ++i) {
    Program p = program(std::string("header-") + std::to_string(i), "x[0] = 1;");
    p.source = std::string("#include \"") + kHeaders[i].name + "\"\n" + p.source;
    EXPECT_NO_THROW(get(p)) << kHeaders[i].name << ": " << error_of(p);
  }
}

TEST_F(Jit, CompilesForEveryArchitectureFromTheSameText) {
  struct Target {
    int arch;
    char suffix;
    const char* name;
  };
  for (const Target& t : {Target{800, 0, "sm_80"}, Target{860, 0, "sm_86"}, Target{890, 0, "sm_89"},
                          Target{900, 0, "sm_90"}, Target{900, 'a', "sm_90a"},
                          Target{1000, 0, "sm_100"}, Target{1200, 0, "sm_120"}}) {
    // The text itself refuses any other architecture.
    Program p =
        program("architectures", "static_assert(__CUDA_ARCH__ == " + std::to_string(t.arch) +
                                     ");\n  x[threadIdx.x] = n;");
    p.arch = t.arch;
    p.suffix = t.suffix;
    ASSERT_EQ(target(p), t.name);
    if (t.arch > 900 && Nvrtc::find()->major() < 13) continue;  // NVRTC 12.0 to 12.7 know less
    const Binary& binary = get(p);
    EXPECT_EQ(binary.cubin.substr(0, 4),
              "\x7f"
              "ELF");
    EXPECT_GT(binary.facts.registers, 0) << t.name;
    EXPECT_EQ(binary.facts.warnings, std::vector<std::string>{}) << t.name;
    EXPECT_EQ(binary.target, t.name);
  }
}

TEST_F(Jit, OffersWhatOnlyOneChipCanDo) {
  Program p = program("suffix", "asm volatile(\"wgmma.fence.sync.aligned;\");");
  EXPECT_NO_THROW(get(p));
  p.suffix = '\0';
  EXPECT_NE(error_of(p), "no error");
}

TEST_F(Jit, ReportsRegistersSharedMemoryAndSpills) {
  const Binary& small = get(program(
      "small", "__shared__ float s[64]; s[threadIdx.x] = n; __syncthreads(); x[n] = s[n];"));
  EXPECT_GT(small.facts.registers, 0);
  EXPECT_LT(small.facts.registers, 64);
  EXPECT_EQ(small.facts.static_shared_bytes, 256);
  EXPECT_EQ(small.facts.spill_store_bytes + small.facts.spill_load_bytes, 0);
  EXPECT_EQ(small.facts.local_bytes, 0);
  EXPECT_GT(small.facts.compile_seconds, 0);

  // 100 values live at once and 32 registers.
  Program spilling = program("spilling", R"(
  float a[100];
#pragma unroll
  for (int i = 0; i < 100; ++i) a[i] = x[i * n];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 100; ++i) x[i * n + 1] = a[i] * a[99 - i];)");
  spilling.options = {"--maxrregcount=32"};
  const Binary& spilled = get(spilling);
  EXPECT_EQ(spilled.facts.registers, 32);
  EXPECT_GT(spilled.facts.spill_store_bytes, 0);
  EXPECT_GT(spilled.facts.spill_load_bytes, 0);
  EXPECT_GE(spilled.facts.local_bytes, spilled.facts.spill_store_bytes / 2);

  const Binary& indexed = get(program("indexed", R"(
  int a[64] = {};
  for (int i = 0; i < n; ++i) ++a[static_cast<int>(x[i]) & 63];
  x[0] = a[n & 63];)"));
  EXPECT_GE(indexed.facts.local_bytes, 256) << "an array that registers cannot hold";
}

TEST_F(Jit, ReportsWhatPtxasIgnores) {
  const Binary& binary =
      get(program("ignored", "asm volatile(\"setmaxnreg.dec.sync.aligned.u32 24;\"); x[n] = 1;"));
  ASSERT_FALSE(binary.facts.warnings.empty());
  EXPECT_NE(binary.facts.warnings[0].find("setmaxnreg"), std::string::npos)
      << binary.facts.warnings[0];
}

TEST_F(Jit, NamesTheProgramTheTargetAndTheFirstErrorAndAppendsTheLog) {
  const std::string error = error_of(program("broken", "x[0] = undeclared;\n  int y = \"text\";"));
  const std::string sentence = first_line(error);
  EXPECT_NE(sentence.find("program broken does not compile for sm_90a with NVRTC"),
            std::string::npos)
      << sentence;
  EXPECT_NE(sentence.find("broken.cu(3): error: identifier \"undeclared\" is undefined"),
            std::string::npos)
      << sentence;
  EXPECT_NE(error.find("2 errors detected"), std::string::npos) << error;
}

TEST_F(Jit, TriesAgainAfterAFailureAndFailsTheSameWay) {
  const Program p = program("twice", "x[0] = undeclared;");
  EXPECT_EQ(error_of(p), error_of(p));
  EXPECT_FALSE(in_memory(p));
}

TEST_F(Jit, NamesTheNearestArchitectures) {
  Program p = program("future", "x[0] = 1;");
  p.arch = 9990;
  EXPECT_NE(error_of(p).find("is for sm_999a, and NVRTC"), std::string::npos) << error_of(p);
  EXPECT_NE(error_of(p).find("pip install --upgrade"), std::string::npos) << error_of(p);
  p.arch = 200;
  EXPECT_NE(error_of(p).find("an older NVRTC is needed"), std::string::npos) << error_of(p);
}

TEST_F(Jit, MissesAnEntryThatTheTextDoesNotDefine) {
  Program p = program("entryless", "x[0] = 1;");
  p.entry = "kernel";
  EXPECT_NE(error_of(p).find("program entryless has no kernel named kernel"), std::string::npos)
      << error_of(p);
}

TEST_F(Jit, HasNoHeadersButTheEmbeddedOnes) {
  for (const char* name : {"cstdint", "cuda_fp16.h", "variant.h"}) {
    Program p = program("includes", "x[0] = 1;");
    p.source = std::string("#include \"") + name + "\"\n" + p.source;
    EXPECT_NE(error_of(p).find("cannot open source file"), std::string::npos) << error_of(p);
  }
}

TEST_F(Jit, CompilesOnceForAnyNumberOfThreads) {
  const ScopedVariable log("ONEFOLD_LOG", "1");
  const Program p = program("threads", "x[0] = n;"), q = program("threads-too", "x[1] = n;");
  EXPECT_FALSE(in_memory(p));
  testing::internal::CaptureStderr();
  std::vector<const Binary*> got(16);
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < got.size(); ++i) {
    threads.emplace_back([&, i] { got[i] = &get(i % 2 == 0 ? p : q); });
  }
  for (std::thread& thread : threads) thread.join();
  const std::string said = testing::internal::GetCapturedStderr();
  for (std::size_t i = 0; i < got.size(); ++i) EXPECT_EQ(got[i], got[i % 2]);
  EXPECT_EQ(count(said, "compiled threads for"), 1) << said;
  EXPECT_EQ(count(said, "compiled threads-too for"), 1) << said;
  EXPECT_TRUE(in_memory(p));
}

TEST_F(Jit, LoadsWhatAnotherProcessCompiled) {
  const Program p = program("another", "x[0] = n;");
  const auto compiles = [&] { return get(p).origin == Origin::kCompiled ? 0 : 1; };
  EXPECT_EQ(exit_status(start_child(compiles)), 0);
  const Binary& binary = get(p);
  EXPECT_EQ(binary.origin, Origin::kDisk);
  EXPECT_GT(binary.facts.registers, 0);
  EXPECT_EQ(binary.digest, digest(p));
  const auto kept = Store({cache_.path()}).list();
  ASSERT_EQ(kept.size(), 1u);
  EXPECT_EQ(read_text(cache_.path() / kept[0].folder / "source.cu"), p.source);
}

TEST_F(Jit, CompilesAgainWhatWasDamagedOnDisk) {
  const Program p = program("damaged", "x[0] = n;");
  const auto origin = [&] { return static_cast<int>(get(p).origin); };
  EXPECT_EQ(exit_status(start_child(origin)), static_cast<int>(Origin::kCompiled));
  EXPECT_EQ(exit_status(start_child(origin)), static_cast<int>(Origin::kDisk));
  for (const auto& entry : fs::directory_iterator(cache_.path())) {
    if (entry.is_directory()) write_text(entry.path() / "kernel.cubin", "no cubin");
  }
  EXPECT_EQ(exit_status(start_child(origin)), static_cast<int>(Origin::kCompiled));
  EXPECT_EQ(exit_status(start_child(origin)), static_cast<int>(Origin::kDisk)) << "healed";
}

TEST_F(Jit, LeavesOneEntryPerProgramWhenManyProcessesStartAtOnce) {
  std::vector<Program> programs;
  for (int i = 0; i < 3; ++i) {
    programs.push_back(program("race-" + std::to_string(i), "x[0] = " + std::to_string(i) + ";"));
  }
  std::vector<pid_t> children;
  for (int process = 0; process < 6; ++process) {
    children.push_back(start_child([&] {
      for (const Program& p : programs) {
        if (get(p).facts.registers == 0) return 1;
      }
      return 0;
    }));
  }
  for (const pid_t child : children) EXPECT_EQ(exit_status(child), 0);
  EXPECT_EQ(Store({cache_.path()}).list().size(), programs.size());
  for (const Program& p : programs) EXPECT_EQ(get(p).origin, Origin::kDisk);
}

TEST_F(Jit, WorksWhereNothingCanBeKept) {
  write_text(cache_.path() / "file", "");
  const ScopedVariable nowhere("ONEFOLD_CACHE_DIR", (cache_.path() / "file" / "cache").c_str());
  EXPECT_EQ(get(program("nowhere", "x[0] = n;")).origin, Origin::kCompiled);
}

TEST_F(Jit, DumpsTextCubinAndLog) {
  ScratchFolder folder;
  const ScopedVariable dump("ONEFOLD_DUMP", (folder.path() / "new").c_str());
  const Program p = program("dumped", "x[0] = n;");
  const Binary& binary = get(p);
  const std::string stem = "dumped-" + binary.digest.substr(0, 8);
  EXPECT_EQ(read_text(folder.path() / "new" / (stem + ".cu")), p.source);
  EXPECT_EQ(read_text(folder.path() / "new" / (stem + ".cubin")), binary.cubin);
  EXPECT_NE(read_text(folder.path() / "new" / (stem + ".log")).find("registers"),
            std::string::npos);
}

}  // namespace
}  // namespace onefold::jit
