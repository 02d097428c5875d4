// SPDX-License-Identifier: Apache-2.0
// A folder of a test's own, removed at its end.
#pragma once
#include <algorithm>
#include <filesystem>
#include <gtest/gtest.h>
#include <string>
#include <unistd.h>

namespace cohort::ps {

class ScratchFolder {
 public:
  ScratchFolder() {
    const auto* info = testing::UnitTest::GetInstance()->current_test_info();
    path_ = std::filesystem::path(testing::TempDir()) /
            ("ps_" + name_of(*info) + "_" + std::to_string(::getpid()) + "_" +
             std::to_string(count_++));
    std::filesystem::remove_all(path_);
    std::filesystem::create_directories(path_);
  }
  ~ScratchFolder() {
    std::error_code error;
    std::filesystem::remove_all(path_, error);
  }
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;

  std::string path(const std::string& name) const { return (path_ / name).string(); }

 private:
  static std::string name_of(const testing::TestInfo& info) {
    std::string name = std::string(info.test_suite_name()) + "_" + info.name();
    std::replace(name.begin(), name.end(), '/', '_');
    return name;
  }

  static inline int count_ = 0;
  std::filesystem::path path_;
};

}  // namespace cohort::ps
