// SPDX-License-Identifier: Apache-2.0
#include "tests/support/shell.h"

#include <array>
#include <cstdio>
#include <stdexcept>
#include <sys/wait.h>

#include "tests/support/environment.h"

namespace cohort::test {

std::string bin(const std::string& program) {
  return environment("COHORT_BIN") + "/" + program;
}

Ended shell(const std::string& command) {
  Ended ended;
  FILE* pipe = popen(("{ " + command + "; } 2>&1").c_str(), "r");
  if (pipe == nullptr) throw std::runtime_error("popen: " + command);
  std::array<char, 4096> buffer{};
  while (const size_t count = fread(buffer.data(), 1, buffer.size(), pipe))
    ended.output.append(buffer.data(), count);
  const int status = pclose(pipe);
  ended.code = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  return ended;
}

}  // namespace cohort::test
