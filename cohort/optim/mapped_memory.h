// SPDX-License-Identifier: Apache-2.0
// Memory for tensors in a file, for what is used once a step and need not fit into memory.
#pragma once
#include <ATen/core/Tensor.h>
#include <cstdint>
#include <memory>
#include <string>

namespace cohort::optim {

/// A file's bytes as memory. The file has no name, so it is removed when the process ends, however
/// that happens; its blocks are reserved, so no write to it can fail on a full disk.
///
/// Owner:   its tensors, and this object.
/// Threads: one.
class MappedMemory {
 public:
  /// `folder`: on a disk rather than in memory (tmpfs), or nothing is gained. `bytes` > 0.
  /// Errors: ConfigError, one line, if the folder cannot hold such a file.
  MappedMemory(const std::string& folder, int64_t bytes);

  /// Takes the next bytes for a tensor like `like` that holds zeros. It begins at a multiple
  /// of 64 bytes.
  /// Errors: c10::Error if the memory is used up.
  at::Tensor zeros_like(const at::Tensor& like);

  /// Bytes of this memory that a tensor like `like` takes.
  static int64_t bytes_of(const at::Tensor& like);

 private:
  std::shared_ptr<char> memory_;
  int64_t bytes_ = 0;
  int64_t used_ = 0;
};

}  // namespace cohort::optim
