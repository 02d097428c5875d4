#include "cohort/ps/client/distinct_ids.h"

#include <algorithm>
#include <bit>

#include "cohort/ps/id_hash.h"

namespace cohort::ps {

void DistinctIds::assign(std::span<const int64_t> ids, const int64_t* padding) {
  ids_.clear();
  positions_.resize(ids.size());
  const size_t mask = std::bit_ceil(std::max<size_t>(16, 2 * ids.size())) - 1;
  places_.assign(mask + 1, 0);
  for (size_t i = 0; i < ids.size(); ++i) {
    if (padding && ids[i] == *padding) {
      positions_[i] = -1;
      continue;
    }
    const auto id = static_cast<uint64_t>(ids[i]);
    size_t place = splitmix64_finalizer(id) & mask;
    while (places_[place] != 0 && ids_[static_cast<size_t>(places_[place] - 1)] != id)
      place = (place + 1) & mask;
    if (places_[place] == 0) {
      ids_.push_back(id);
      places_[place] = static_cast<int32_t>(ids_.size());
    }
    positions_[i] = places_[place] - 1;
  }
}

}  // namespace cohort::ps
