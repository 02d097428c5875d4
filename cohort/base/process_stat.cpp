// SPDX-License-Identifier: Apache-2.0
#include "cohort/base/process_stat.h"

#include <algorithm>
#include <fstream>
#include <sstream>

namespace cohort {

std::string process_stat(pid_t pid, int number) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  // The second field, a name in parentheses, may hold anything.
  std::istringstream fields(text.substr(std::min(text.size(), text.rfind(')') + 1)));
  std::string field;
  for (int i = 3; i <= number; ++i) fields >> field;
  return fields ? field : "";
}

}  // namespace cohort
