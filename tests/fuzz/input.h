// SPDX-License-Identifier: Apache-2.0
// What the fuzz targets share: an input as a file, and an input taken apart into pieces.
#pragma once
#include <algorithm>
#include <c10/util/Exception.h>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <span>
#include <string>
#include <string_view>
#include <sys/mman.h>
#include <unistd.h>

#include "cohort/base/fd.h"

namespace cohort::fuzz {

/// A file in memory that has a path: what readers of files are given.
class MemoryFile {
 public:
  MemoryFile() : fd_(::memfd_create("fuzz", MFD_CLOEXEC)) {
    TORCH_CHECK(fd_, "memfd_create failed");
  }
  std::string path() const { return "/proc/self/fd/" + std::to_string(fd_.get()); }
  /// Replaces the content.
  void write(std::string_view bytes) {
    TORCH_CHECK(::ftruncate(fd_.get(), 0) == 0, "ftruncate failed");
    const auto written = ::pwrite(fd_.get(), bytes.data(), bytes.size(), 0);
    TORCH_CHECK(written == static_cast<ssize_t>(bytes.size()), "pwrite failed");
  }

 private:
  Fd fd_;
};

/// A folder for files whose names matter, removed with all that is in it.
class Folder {
 public:
  Folder() {
    std::string name = (std::filesystem::temp_directory_path() / "cohort-fuzz-XXXXXX").string();
    TORCH_CHECK(::mkdtemp(name.data()) != nullptr, "mkdtemp failed");
    path_ = name;
  }
  ~Folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  const std::filesystem::path& path() const { return path_; }
  /// Writes a file and returns its path.
  std::filesystem::path write(const char* name, std::string_view content) const {
    std::ofstream(path_ / name, std::ios::binary) << content;
    return path_ / name;
  }

 private:
  std::filesystem::path path_;
};

/// Takes an input apart from its front; what is missing is zeros.
class Pieces {
 public:
  Pieces(const uint8_t* data, size_t size) : left_(data, size) {}

  bool empty() const { return left_.empty(); }
  template <class Number>
  Number number() {
    Number number{};
    const auto taken = take(sizeof(number));
    if (!taken.empty()) std::memcpy(&number, taken.data(), taken.size());
    return number;
  }
  /// At most `size` bytes.
  std::span<const uint8_t> take(size_t size) {
    const auto taken = left_.first(std::min(size, left_.size()));
    left_ = left_.subspan(taken.size());
    return taken;
  }
  /// At most 65535 bytes, whose number stands before them.
  std::span<const uint8_t> counted() { return take(number<uint16_t>()); }

 private:
  std::span<const uint8_t> left_;
};

inline std::string text_of(std::span<const uint8_t> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

/// Reads every byte, so that a sanitizer sees what a view points to.
inline void touch(std::span<const std::byte> bytes) {
  std::byte all{};
  for (const std::byte byte : bytes) all |= byte;
  [[maybe_unused]] volatile std::byte kept = all;
}

}  // namespace cohort::fuzz
