// SPDX-License-Identifier: Apache-2.0
#include "cohort/base/block_writer.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

namespace cohort {
namespace {

constexpr size_t kBlock = size_t{4} << 20;

}  // namespace

void BlockWriter::Free::operator()(std::byte* block) const {
  std::free(block);
}

BlockWriter::BlockWriter(FileWriter& file)
    : file_(file),
      block_(static_cast<std::byte*>(std::aligned_alloc(FileWriter::kDirectUnit, kBlock))) {
  if (!block_) throw std::bad_alloc();
}

void BlockWriter::write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const size_t count = std::min(bytes.size(), kBlock - filled_);
    std::memcpy(block_.get() + filled_, bytes.data(), count);
    filled_ += count;
    bytes = bytes.subspan(count);
    if (filled_ < kBlock) continue;
    file_.write_direct({block_.get(), kBlock});
    filled_ = 0;
  }
}

void BlockWriter::finish() {
  if (filled_ > 0) file_.write({block_.get(), filled_});
  filled_ = 0;
}

}  // namespace cohort
