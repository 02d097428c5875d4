// SPDX-License-Identifier: Apache-2.0
// A folder that all ranks of a test know.
#pragma once
#include <cstdlib>
#include <memory>
#include <string>

#include "cohort/base/env.h"

#include "tests/base/temporary_folder.h"

namespace cohort::test {

/// Made by the test's own process, before it starts ranks.
class SharedFolder {
 public:
  SharedFolder() {
    if (const auto known = env_string(kName)) {
      path_ = *known;
    } else {
      own_ = std::make_unique<TemporaryFolder>();
      path_ = own_->path().string();
      ::setenv(kName, path_.c_str(), 1);
    }
  }
  ~SharedFolder() {
    if (own_) ::unsetenv(kName);
  }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  /// Whether this process is no rank: what the ranks find is prepared there.
  bool is_parent() const { return own_ != nullptr; }

 private:
  static constexpr const char* kName = "COHORT_TEST_FOLDER";
  std::unique_ptr<TemporaryFolder> own_;
  std::string path_;
};

}  // namespace cohort::test
