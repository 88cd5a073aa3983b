// What is read out of the compiler's log, in the words of NVRTC 12 and 13, and facts.json.

#include "jit/facts.h"

#include <gtest/gtest.h>

#include <string>

namespace onefold::jit {
namespace {

const char kLog13[] = R"(ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'other' for 'sm_90a'
ptxas info    : Function properties for other
ptxas         .     16 bytes stack frame, 24 bytes spill stores, 32 bytes spill loads
ptxas info    : Used 99 registers, used 3 barriers, 512 bytes smem
ptxas info    : Compile time = 0.987 ms
ptxas info    : Compiling entry function 'k' for 'sm_90a'
ptxas info    : Function properties for k
ptxas         .     6160 bytes stack frame, 5636 bytes spill stores, 7616 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 6160 bytes cumulative stack size, 256 bytes smem
ptxas info    : Compile time = 173.578 ms
)";

const char kLog12[] = R"(ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'k' for 'sm_80'
ptxas info    : Function properties for k
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Function properties for helper
    8 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 255 registers, 360 bytes cmem[0]
)";

TEST(Facts, AreThoseOfTheEntryAndOfNoOtherKernelInTheLog) {
  const Facts facts = parse_log(kLog13, "k");
  EXPECT_EQ(facts.registers, 32);
  EXPECT_EQ(facts.local_bytes, 6160);
  EXPECT_EQ(facts.spill_store_bytes, 5636);
  EXPECT_EQ(facts.spill_load_bytes, 7616);
  EXPECT_EQ(facts.static_shared_bytes, 256);
  EXPECT_TRUE(facts.warnings.empty()) << facts.warnings.front();
}

TEST(Facts, CountFunctionsThatWereNotInlinedAndUnderstandOlderLogs) {
  const Facts facts = parse_log(kLog12, "k");
  EXPECT_EQ(facts.registers, 255);
  EXPECT_EQ(facts.local_bytes, 16);
  EXPECT_EQ(facts.spill_store_bytes, 4);
  EXPECT_EQ(facts.spill_load_bytes, 12);
  EXPECT_EQ(facts.static_shared_bytes, 0);
}

TEST(Facts, KnowAnEntryByItsWholeName) {
  EXPECT_TRUE(defines_entry(kLog13, "k"));
  EXPECT_TRUE(defines_entry(kLog13, "other"));
  EXPECT_FALSE(defines_entry(kLog13, "othe"));
  EXPECT_FALSE(defines_entry(kLog13, "ther"));
}

TEST(Facts, KeepEveryLineThatCostsSpeedOrCorrectness) {
  const std::string remarks[] = {
      "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are "
      "serialized due to non wgmma instructions defining accumulator registers",
      "ptxas info    : (C7508) 'setmaxnreg' ignored; unable to determine register count at entry",
      "k.cu(3): warning #177-D: variable \"x\" was declared but never referenced"};
  std::string log = kLog12;
  for (const std::string& remark : remarks) log += remark + "\n";
  const Facts facts = parse_log(log, "k");
  EXPECT_EQ(facts.warnings, std::vector<std::string>(std::begin(remarks), std::end(remarks)));
}

TEST(Facts, ComeBackFromTheirTextAsTheyWere) {
  Binary binary;
  binary.name = "a \"name\" with \\ and \n and \x01 and \t";
  binary.digest = "0123";
  binary.nvrtc = "13.2";
  binary.entry = "k";
  binary.target = "sm_90a";
  binary.options = {"--x=\"1, 2\"", "", "ünïcode]"};
  binary.facts = {168, 1, 2, 3, std::int64_t{1} << 40, 0.1234567890123456789, {"w, [1]", "\"}"}};

  Binary again;
  ASSERT_TRUE(read_facts(write_facts(binary), again));
  EXPECT_EQ(again.name, binary.name);
  EXPECT_EQ(again.digest, binary.digest);
  EXPECT_EQ(again.nvrtc, binary.nvrtc);
  EXPECT_EQ(again.entry, binary.entry);
  EXPECT_EQ(again.target, binary.target);
  EXPECT_EQ(again.options, binary.options);
  EXPECT_EQ(again.facts.registers, 168);
  EXPECT_EQ(again.facts.spill_store_bytes, 1);
  EXPECT_EQ(again.facts.spill_load_bytes, 2);
  EXPECT_EQ(again.facts.local_bytes, 3);
  EXPECT_EQ(again.facts.static_shared_bytes, std::int64_t{1} << 40);
  EXPECT_EQ(again.facts.compile_seconds, binary.facts.compile_seconds);
  EXPECT_EQ(again.facts.warnings, binary.facts.warnings);
}

TEST(Facts, AreNotReadOutOfAnythingShorterOrLongerThanTheirText) {
  Binary binary;
  binary.facts.warnings = {"one", "two"};
  const std::string text = write_facts(binary);
  Binary ignored;
  for (std::size_t length = 0; length < text.size(); ++length) {
    EXPECT_FALSE(read_facts(text.substr(0, length), ignored)) << "the first " << length << " bytes";
  }
  EXPECT_FALSE(read_facts(text + " ", ignored));
}

}  // namespace
}  // namespace onefold::jit
