// SPDX-License-Identifier: Apache-2.0
// Which loops this processor runs.
#include "cohort/base/instruction_set.h"

#include <algorithm>
#include <fstream>
#include <gtest/gtest.h>
#include <iterator>
#include <set>
#include <sstream>
#include <string>

namespace cohort {
namespace instruction_set_test {

// What Linux lets programs use.
std::set<std::string> flags() {
  std::ifstream file("/proc/cpuinfo");
  std::string line;
  while (std::getline(file, line) && !line.starts_with("flags")) {
  }
  std::istringstream words(line);
  return {std::istream_iterator<std::string>(words), {}};
}

TEST(InstructionSetTest, IsTheHighestLevelThatLinuxListsWhole) {
  const auto listed = flags();
  const auto has_all = [&](const std::set<std::string>& names) {
    return std::ranges::includes(listed, names);
  };
  InstructionSet expected = InstructionSet::kBaseline;
  if (has_all({"abm", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"})) {
    expected = InstructionSet::kAvx2;
    if (has_all({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}))
      expected = InstructionSet::kAvx512;
  }
  EXPECT_EQ(instruction_set(), expected);
}

}  // namespace instruction_set_test
}  // namespace cohort
