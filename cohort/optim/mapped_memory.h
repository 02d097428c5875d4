// Memory for tensors in a file: for what is touched once a step and need not fit into memory.
#pragma once
#include <ATen/core/Tensor.h>
#include <cstdint>
#include <memory>
#include <string>

namespace cohort::optim {

/// A file's bytes as memory. The file has no name, so it goes when the process does, however that
/// ends; its blocks are reserved, so no write into it meets a full disk.
///
/// Owner:   its tensors, and this object.
/// Threads: one.
class MappedMemory {
 public:
  /// `folder`: on a disk rather than in memory (tmpfs), or nothing is won. `bytes` > 0.
  /// Errors: ConfigError, one line, if the folder cannot hold such a file.
  MappedMemory(const std::string& folder, int64_t bytes);

  /// Takes the next bytes for a tensor like `like` that holds zeros. Its place begins at a multiple
  /// of 64 bytes.
  /// Errors: c10::Error if so much is not left.
  at::Tensor zeros_like(const at::Tensor& like);

  /// Bytes that a tensor like `like` takes of it.
  static int64_t bytes_of(const at::Tensor& like);

 private:
  std::shared_ptr<char> memory_;
  int64_t bytes_ = 0;
  int64_t used_ = 0;
};

}  // namespace cohort::optim
