// SHA-256 against the examples of FIPS 180-4, and what makes a sequence of parts unambiguous.

#include "jit/digest.h"

#include <gtest/gtest.h>

#include <string>

namespace onefold::jit {
namespace {

TEST(Digest, GivesTheStandardsExamples) {
  EXPECT_EQ(sha256(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(sha256("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(sha256(std::string(1000000, 'a')),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(Digest, OfPartsIsThatOfTheirLengthsAndBytesHoweverTheyFallOnBlocks) {
  for (std::size_t first = 0; first < 130; ++first) {
    const std::string a(first, 'a'), b(137 - first, 'b');
    const auto length = [](std::size_t n) { return std::string(7, '\0') + static_cast<char>(n); };
    EXPECT_EQ(Digest().add(a).add(b).hex(), sha256(length(a.size()) + a + length(b.size()) + b))
        << first << " bytes, then " << b.size();
  }
}

TEST(Digest, TellsWhereOnePartEndsAndTheNextBegins) {
  EXPECT_NE(Digest().add("ab").add("c").hex(), Digest().add("a").add("bc").hex());
  EXPECT_NE(Digest().add("a").hex(), Digest().add("a").add("").hex());
}

}  // namespace
}  // namespace onefold::jit
