// SPDX-License-Identifier: Apache-2.0
// Parallel text as token ids, and its batches as tensors.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "cohort/base/safetensors.h"
#include "cohort/data/token_batches.h"
#include "cohort/nmt/transformer.h"
#include "cohort/text/parallel_text.h"
#include "cohort/text/tokenizer.h"

namespace cohort::translate {

/// Sentence pairs as ids, without begin and end marks: a view of a mapped file, or of memory of its
/// own.
///
/// Copies share what is viewed.
/// Threads: const calls from any thread.
class Corpus {
 public:
  Corpus() = default;
  /// Equal counts.
  Corpus(const std::vector<std::vector<int32_t>>& source,
         const std::vector<std::vector<int32_t>>& target);
  /// A token cache's file (token_cache.h): "lengths" int32 [N, 2], with end marks; "offsets" int64
  /// [N], where a pair's ids begin; "ids" int16 or int32, each pair's source and target.
  /// Errors: ConfigError if a tensor is missing, or they do not fit together.
  explicit Corpus(std::shared_ptr<const SafetensorsFile> file);

  int64_t size() const { return std::ssize(lengths_); }
  /// Lengths as the model sees them: with the end mark, on both sides.
  std::span<const data::PairLength> lengths() const { return lengths_; }
  /// Precondition: 0 <= pair < size().
  std::vector<int32_t> source(int64_t pair) const;
  std::vector<int32_t> target(int64_t pair) const;

 private:
  std::vector<int32_t> ids(int64_t begin, int64_t count) const;

  std::shared_ptr<const void> owner_;
  std::span<const data::PairLength> lengths_;
  std::span<const int64_t> offsets_;
  std::span<const std::byte> ids_;
  size_t id_size_ = sizeof(int32_t);
};

/// Tokenises all pairs.
Corpus tokenize(const text::ParallelText& pairs, const text::Tokenizer& source,
                const text::Tokenizer& target);

/// Errors: ConfigError that begins with `flag` and names the first pair that has more than
/// `max_positions` tokens on a side: evaluation keeps every pair.
void check_lengths(const std::string& flag, const Corpus& corpus, int64_t max_positions);

/// Puts the pairs `indices` of `corpus` into one padded batch, in that order.
nmt::Batch make_batch(const Corpus& corpus, std::span<const int32_t> indices);

/// Returns a batch of the CPU in pinned memory, with label_rows_N: Batch::to does not wait then.
/// Threads: any.
nmt::Batch pinned(const nmt::Batch& batch);

}  // namespace cohort::translate
