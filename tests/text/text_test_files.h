// SPDX-License-Identifier: Apache-2.0
// A folder for a test's files, and the Python that the oracle runs in.
#pragma once
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>

namespace cohort::text {

/// A new, empty folder, removed with all that is in it.
class TestFolder {
 public:
  TestFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "cohort-text-XXXXXX").string();
    if (!::mkdtemp(name.data())) throw std::runtime_error("mkdtemp " + name);
    path_ = name;
  }
  ~TestFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TestFolder(const TestFolder&) = delete;
  TestFolder& operator=(const TestFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }

  /// Writes a file and returns its path.
  std::filesystem::path write(const std::string& name, std::string_view content) const {
    std::ofstream(path_ / name, std::ios::binary) << content;
    return path_ / name;
  }

 private:
  std::filesystem::path path_;
};

/// Runs a shell command; returns what it wrote to standard output, throws if it did not succeed.
inline std::string run_command(const std::string& command) {
  FILE* pipe = ::popen(command.c_str(), "r");
  if (!pipe) throw std::runtime_error("popen: " + command);
  std::string output;
  char buffer[4096];
  size_t size = 0;
  while ((size = std::fread(buffer, 1, sizeof buffer, pipe)) > 0) output.append(buffer, size);
  if (::pclose(pipe) != 0) throw std::runtime_error("not successful: " + command);
  return output;
}

}  // namespace cohort::text
