// SPDX-License-Identifier: Apache-2.0
#include "cohort/base/tensor_part.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "cohort/base/error.h"

namespace cohort {
namespace {

template <class Iterator>
int64_t product(Iterator begin, Iterator end) {
  return std::reduce(begin, end, int64_t{1}, std::multiplies<>());
}

}  // namespace

ElementRange cut_of(int64_t size, int64_t index, int64_t count) {
  return {size * index / count, size * (index + 1) / count};
}

bool TensorPart::is_whole() const {
  return part_shape() == shape;
}

std::vector<int64_t> TensorPart::part_shape() const {
  std::vector<int64_t> result = shape;
  int64_t& length = result.at(static_cast<size_t>(dim));
  length = 0;
  for (const ElementRange& piece : pieces) length += piece.end - piece.begin;
  return result;
}

std::vector<PartRun> TensorPart::runs(ElementRange elements) const {
  const std::vector<int64_t> own = part_shape();
  const int64_t count = product(own.begin(), own.end());
  TORCH_CHECK_VALUE(0 <= elements.begin && elements.begin <= elements.end && elements.end <= count,
                    "part of a tensor: expected elements within ", count, ", got ", elements.begin,
                    " to ", elements.end);
  const int64_t outer = product(shape.begin(), shape.begin() + dim);
  const int64_t inner = product(shape.begin() + dim + 1, shape.end());
  const int64_t length = shape.at(static_cast<size_t>(dim));
  std::vector<PartRun> result;
  int64_t first = 0;  // of the piece in the part
  for (int64_t o = 0; o < outer; ++o) {
    for (const ElementRange& piece : pieces) {
      const int64_t size = (piece.end - piece.begin) * inner;
      const int64_t begin = std::max(elements.begin, first);
      const int64_t end = std::min(elements.end, first + size);
      const int64_t shift = (o * length + piece.begin) * inner - first;
      first += size;
      if (begin >= end) continue;
      if (!result.empty() && result.back().whole.end == begin + shift) {
        result.back().whole.end = end + shift;
      } else {
        result.push_back({begin, {begin + shift, end + shift}});
      }
    }
  }
  return result;
}

}  // namespace cohort
