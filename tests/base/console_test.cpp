// SPDX-License-Identifier: Apache-2.0
#include "cohort/base/console.h"

#include <gtest/gtest.h>
#include <string>

namespace cohort {
namespace console_test {

// What `speak` prints on a rank.
template <typename Speak>
std::string printed_on(int rank, const Speak& speak) {
  std::FILE* file = std::tmpfile();
  speak(Console(rank, file));
  std::string text(static_cast<size_t>(std::ftell(file)), '\0');
  std::rewind(file);
  EXPECT_EQ(std::fread(text.data(), 1, text.size(), file), text.size());
  std::fclose(file);
  return text;
}

TEST(ConsoleTest, PrintIsOfRank0Alone) {
  const auto speak = [](const Console& console) { console.print("%d of %s\n", 7, "nine"); };
  EXPECT_EQ(printed_on(0, speak), "7 of nine\n");
  EXPECT_EQ(printed_on(1, speak), "");
}

TEST(ConsoleTest, ForcePrintNamesTheRankOnEachLine) {
  const auto speak = [](const Console& console) { console.force_print("one\ntwo %d\n", 2); };
  EXPECT_EQ(printed_on(0, speak), "[rank 0] one\n[rank 0] two 2\n");
  EXPECT_EQ(printed_on(3, speak), "[rank 3] one\n[rank 3] two 2\n");
}

}  // namespace console_test
}  // namespace cohort
