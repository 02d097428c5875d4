// SPDX-License-Identifier: Apache-2.0
#include "cohort/train/check_same.h"

#include "cohort/base/error.h"

namespace cohort::train {

void check_same_on_ranks(const comm::ProcessGroup& group, const std::string& what,
                         const std::string& noun, const std::string& checksum) {
  const auto all = group.all_gather_object(checksum);
  for (size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank] != all[0])
      throw ConfigError(what + ": expected the same " + noun + " on all ranks, ranks 0 and " +
                        std::to_string(rank) + " differ");
  }
}

}  // namespace cohort::train
