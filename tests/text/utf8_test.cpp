// SPDX-License-Identifier: Apache-2.0
#include "cohort/text/utf8.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>
#include <string>
#include <vector>

#include "cohort/text/lower_case.h"

namespace cohort::text {
namespace utf8_test {

TEST(Utf8Test, EveryCodePointSurvivesTheRoundTrip) {
  for (char32_t c = 0; c <= 0x10FFFF; ++c) {
    if (c >= 0xD800 && c <= 0xDFFF) continue;
    std::string text;
    append_utf8(c, text);
    size_t offset = 0;
    ASSERT_EQ(next_code_point(text, offset), c);
    ASSERT_EQ(offset, text.size());
  }
}

TEST(Utf8Test, TheShareOfChineseCharactersLeavesOutWhiteSpaceAndWhatIsNoCharacter) {
  const auto share = [](std::vector<std::string> texts) { return han_share(texts); };
  EXPECT_EQ(share({}), 0);
  EXPECT_EQ(share({" ", ""}), 0);
  EXPECT_EQ(share({"red"}), 0);
  EXPECT_EQ(share({"\u7EA2 a", "\u732B\u3000b\xFF"}), 0.5);
  EXPECT_EQ(share({"\u3400\u9FFF"}), 1);
  EXPECT_EQ(share({"\u3042\uAC00\u33FF\uA000"}), 0) << "kana, hangul and the neighbours";
}

TEST(Utf8Test, IllFormedBytesAreFoundAtTheirOffset) {
  EXPECT_EQ(find_invalid_utf8("plain \xE4\xBD\xA0 \xF0\x9F\x98\x80"), std::nullopt);
  EXPECT_EQ(find_invalid_utf8(""), std::nullopt);
  const std::string_view bad[] = {
      "ab\x80",              // Continuation without lead.
      "ab\xC3",              // Cut short.
      "ab\xE4\xBD",          // Cut short.
      "ab\xC0\x80",          // Overlong.
      "ab\xE0\x80\x80",      // Overlong.
      "ab\xF0\x80\x80\x80",  // Overlong.
      "ab\xED\xA0\x80",      // Surrogate.
      "ab\xF4\x90\x80\x80",  // Above U+10FFFF.
      "ab\xF8\x88\x80\x80\x80",
      "ab\xFF",
      "ab\xE4\xBDx",
  };
  for (const std::string_view text : bad) EXPECT_EQ(find_invalid_utf8(text), 2u) << text;
  EXPECT_THROW(decode_utf8("ab\xFF"), c10::ValueError);
}

TEST(Utf8Test, TrimRemovesUnicodeSpacesOnly) {
  EXPECT_EQ(trim("\xE3\x80\x80\t a b\xC2\xA0 \xE2\x80\xA8\r\n"), "a b");
  EXPECT_EQ(trim_right(" a\x1F "), " a");
  EXPECT_EQ(trim("\xE2\x80\x8B"), "\xE2\x80\x8B");  // Zero width space is none.
  EXPECT_EQ(trim(" \xC2\x85 "), "");
  EXPECT_EQ(trim("\xFF "), "\xFF");
}

TEST(LowerCaseTest, FollowsUnicodesFullMapping) {
  EXPECT_EQ(lower_case("ABC Stra\u00DFe \u00C4\u00D6 \u0416"),
            "abc stra\u00DFe \u00E4\u00F6 \u0436");
  EXPECT_EQ(lower_case("\u0130"), "i\u0307");
  EXPECT_EQ(lower_case("\u1E9E"), "\u00DF");
  EXPECT_EQ(lower_case("\U00010400"), "\U00010428");
}

TEST(LowerCaseTest, SigmaIsFinalAtTheEndOfAWordOnly) {
  EXPECT_EQ(lower_case("\u039F\u0394\u039F\u03A3"), "\u03BF\u03B4\u03BF\u03C2");
  EXPECT_EQ(lower_case("\u039F\u03A3\u039F"), "\u03BF\u03C3\u03BF");
  EXPECT_EQ(lower_case("\u03A3"), "\u03C3");
  EXPECT_EQ(lower_case("A.\u03A3. B"), "a.\u03C2. b");
  EXPECT_EQ(lower_case("A\u03A3.B"), "a\u03C3.b");
}

}  // namespace utf8_test
}  // namespace cohort::text
