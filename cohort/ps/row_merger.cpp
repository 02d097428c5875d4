#include "cohort/ps/row_merger.h"

#include <algorithm>
#include <bit>

#include "cohort/ps/id_hash.h"

namespace cohort::ps {

void RowMerger::begin(int64_t width, size_t expected) {
  width_ = static_cast<size_t>(width);
  ids_.clear();
  sums_.clear();
  ids_.reserve(expected);
  sums_.reserve(expected * width_);
  places_.assign(std::bit_ceil(std::max<size_t>(16, 2 * expected)), 0);
}

void RowMerger::grow(size_t places) {
  places_.assign(places, 0);
  for (size_t row = 0; row < ids_.size(); ++row) {
    size_t place = splitmix64_finalizer(ids_[row]) & (places - 1);
    while (places_[place] != 0) place = (place + 1) & (places - 1);
    places_[place] = static_cast<uint32_t>(row + 1);
  }
}

size_t RowMerger::row_of(uint64_t id) {
  size_t place = splitmix64_finalizer(id) & (places_.size() - 1);
  while (places_[place] != 0) {
    const size_t row = places_[place] - 1;
    if (ids_[row] == id) return row;
    place = (place + 1) & (places_.size() - 1);
  }
  const size_t row = ids_.size();
  places_[place] = static_cast<uint32_t>(row + 1);
  ids_.push_back(id);
  if (2 * ids_.size() > places_.size()) grow(2 * places_.size());
  return row;
}

void RowMerger::add(std::span<const uint64_t> ids, std::span<const float> gradients) {
  const float* gradient = gradients.data();
  for (const uint64_t id : ids) {
    const size_t row = row_of(id);
    if (row * width_ == sums_.size()) {
      sums_.insert(sums_.end(), gradient, gradient + width_);
    } else {
      float* sum = sums_.data() + row * width_;
      for (size_t i = 0; i < width_; ++i) sum[i] += gradient[i];
    }
    gradient += width_;
  }
}

void RowMerger::divide(float divisor) {
  for (float& sum : sums_) sum /= divisor;
}

}  // namespace cohort::ps
