// Parallel text as token ids, and its batches as tensors.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "cohort/data/token_batches.h"
#include "cohort/nmt/transformer.h"
#include "cohort/text/parallel_text.h"
#include "cohort/text/tokenizer.h"

namespace cohort::translate {

/// Source and target sentences as ids, without begin and end marks; equal counts.
struct Corpus {
  std::vector<std::vector<int32_t>> source;
  std::vector<std::vector<int32_t>> target;
  int64_t num_dropped_long = 0;  ///< Pairs left out because a side had more than max_length tokens.

  int64_t size() const { return static_cast<int64_t>(source.size()); }
  /// Lengths as the model sees them: with the end mark, on both sides.
  std::vector<data::PairLength> lengths() const;
};

/// Tokenises all pairs; drops those with a side longer than `max_length` tokens (0: none).
Corpus tokenize(const text::ParallelText& pairs, const text::Tokenizer& source,
                const text::Tokenizer& target, int64_t max_length);

/// Puts the sentences `indices` of `corpus` into one padded batch, in that order.
nmt::Batch make_batch(const Corpus& corpus, std::span<const int64_t> indices);

}  // namespace cohort::translate
