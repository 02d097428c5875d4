// SPDX-License-Identifier: Apache-2.0
#include "cohort/ps/table/row_slabs.h"

#include <algorithm>
#include <c10/util/Exception.h>

namespace cohort::ps {

uint32_t RowSlabs::allocate() {
  if (free_ != kNone) {
    const uint32_t place = free_;
    free_ = static_cast<uint32_t>(at(place)->id);
    return place;
  }
  TORCH_CHECK(end_ < kMaxRows, "a thread of a server holds at most ", kMaxRows,
              " rows of a table in memory: use more servers");
  if (end_ % kSlabRows == 0) {
    // The first rows of a table in small pages: many tables stay small.
    slabs_.emplace_back(kSlabRows * stride_, slabs_.empty() ? kHugePage : 0);
  }
  const uint64_t bytes = uint64_t{end_} * stride_;
  if (bytes < kHugePage && bytes + stride_ >= kHugePage) slabs_[0].make_huge();
  return end_++;
}

void RowSlabs::free(uint32_t place) {
  Row* row = at(place);
  row->pushes = 0;
  row->id = free_;
  free_ = place;
}

std::vector<std::span<std::byte>> RowSlabs::huge_pages() const {
  std::vector<std::span<std::byte>> all;
  size_t used = uint64_t{end_} * stride_;
  for (const Pages& slab : slabs_) {
    const size_t written = std::min(used, slab.bytes());
    if (written >= kHugePage) all.emplace_back(slab.data(), written);
    used -= written;
  }
  return all;
}

int64_t RowSlabs::bytes() const {
  const uint64_t used = uint64_t{end_} * stride_;
  const uint64_t unit = used <= kHugePage ? 4096 : kHugePage;
  return static_cast<int64_t>((used + unit - 1) / unit * unit);
}

}  // namespace cohort::ps
