// SPDX-License-Identifier: Apache-2.0
#include "cohort/ps/row_merger.h"

namespace cohort::ps {

void RowMerger::begin(int64_t width, size_t expected) {
  width_ = static_cast<size_t>(width);
  numbers_.reset(expected);
  sums_.clear();
  sums_.reserve(expected * width_);
}

void RowMerger::add(std::span<const uint64_t> ids, std::span<const float> gradients) {
  const float* gradient = gradients.data();
  for (const uint64_t id : ids) {
    const size_t row = numbers_.number_of(id);
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
