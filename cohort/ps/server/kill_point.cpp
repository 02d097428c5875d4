// SPDX-License-Identifier: Apache-2.0
#include "cohort/ps/server/kill_point.h"

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <string>
#include <string_view>

namespace cohort::ps {

namespace {

struct KillPoint {
  std::string name;
  int64_t passes = 0;  // Left until it kills.
};

KillPoint from_environment() {
  const char* text = std::getenv("COHORT_PS_KILL_POINT");
  if (!text) return {};
  const std::string_view words = text;
  const size_t colon = words.rfind(':');
  if (colon == std::string_view::npos) return {};
  return {std::string(words.substr(0, colon)), std::atoll(text + colon + 1)};
}

}  // namespace

void kill_point(const char* name) {
  static KillPoint point = from_environment();
  if (point.passes > 0 && point.name == name && --point.passes == 0) ::raise(SIGKILL);
}

}  // namespace cohort::ps
