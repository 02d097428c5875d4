// SPDX-License-Identifier: Apache-2.0
#include "cohort/ps/client/distinct_ids.h"

namespace cohort::ps {

void DistinctIds::assign(std::span<const int64_t> ids, const int64_t* padding) {
  numbers_.reset(ids.size());
  positions_.resize(ids.size());
  for (size_t i = 0; i < ids.size(); ++i) {
    positions_[i] = padding && ids[i] == *padding
                        ? -1
                        : static_cast<int32_t>(numbers_.number_of(static_cast<uint64_t>(ids[i])));
  }
}

}  // namespace cohort::ps
