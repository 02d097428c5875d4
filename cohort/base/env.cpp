// SPDX-License-Identifier: Apache-2.0
#include "cohort/base/env.h"

#include <charconv>
#include <cstdlib>

#include "cohort/base/error.h"

namespace cohort {

std::optional<std::string> env_string(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr || *value == '\0') return std::nullopt;
  return std::string(value);
}

std::optional<int64_t> env_int(const char* name, int64_t min, int64_t max) {
  const auto text = env_string(name);
  if (!text) return std::nullopt;
  int64_t value = 0;
  const char* end = text->data() + text->size();
  const auto [stop, error] = std::from_chars(text->data(), end, value);
  if (error != std::errc() || stop != end || value < min || value > max) {
    throw ConfigError(std::string(name) + "=" + *text + ": expected an integer in [" +
                      std::to_string(min) + ", " + std::to_string(max) + "]");
  }
  return value;
}

}  // namespace cohort
