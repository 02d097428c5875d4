// SPDX-License-Identifier: Apache-2.0
// What ctest tells a test through its environment.
#pragma once
#include <cstdlib>
#include <stdexcept>
#include <string>

namespace cohort::test {

/// Returns an environment variable that ctest sets for every test (COHORT_SOURCE, COHORT_BIN,
/// COHORT_TEST_PYTHON); throws std::runtime_error where the test was started without ctest.
inline std::string environment(const std::string& name) {
  const char* value = std::getenv(name.c_str());
  if (value == nullptr || *value == 0)
    throw std::runtime_error(name + " is not set: start the test by ctest -R NAME");
  return value;
}

}  // namespace cohort::test
