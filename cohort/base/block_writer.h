// SPDX-License-Identifier: Apache-2.0
// Writes large files without the page cache.
#pragma once
#include <cstddef>
#include <memory>
#include <span>

#include "cohort/base/atomic_file.h"

namespace cohort {

/// Collects bytes and writes them to a file in blocks of 4 MiB, which go from there to the disk:
/// the page cache would take a copy of them all, which costs the CPU more than anything else here,
/// and drive out what is read more often. Where a file system wants it otherwise, it gets what it
/// wants.
///
/// Memory:  one block.
/// Owner:   `file` must outlive this.
/// Threads: one.
/// Errors:  FileWriter's.
class BlockWriter {
 public:
  explicit BlockWriter(FileWriter& file);

  void write(std::span<const std::byte> bytes);
  /// Writes what is left. The last call.
  void finish();

 private:
  struct Free {
    void operator()(std::byte* block) const;
  };

  FileWriter& file_;
  std::unique_ptr<std::byte, Free> block_;
  size_t filled_ = 0;
};

}  // namespace cohort
