// SPDX-License-Identifier: Apache-2.0
// Plans batches of sentence pairs of similar length, so that little of a batch is padding, and
// splits them between ranks so that all ranks take the same number of steps.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace cohort::data {

/// Lengths in tokens of one sentence pair, with whatever end marks the model adds.
struct PairLength {
  int32_t source = 0;
  int32_t target = 0;
};

/// BatchOptions::fit_rows speaks of widths up to 10, up to 20, ...
inline constexpr int64_t kFitStep = 10;

struct BatchOptions {
  int64_t mini_batch = 0;           ///< Most sentences in a rank's batch; 0: no such limit.
  int64_t mini_batch_words = 0;     ///< Most target tokens of a rank's batch, end marks and padding
                                    ///< included: rows x longest target; 0: no such limit.
  std::vector<int64_t> fit_rows{};  ///< Most rows of a batch whose longest sentence, on either
                                    ///< side, has up to (index + 1) * kFitStep tokens; each >= 1
                                    ///< and never rising; empty: no such limit.
  int64_t maxi_batch = 1000;        ///< Sort by length inside windows of about this many batches.
  int64_t optimizer_delay = 1;      ///< Batches that a rank takes for one update of the parameters.
  uint64_t seed = 0;                ///< Same on all ranks.
  int rank = 0;                     ///< In [0, world_size).
  int world_size = 1;
  bool shuffle = true;  ///< false: windows follow the order of the corpus, batches that of cost.

  bool operator==(const BatchOptions&) const = default;
};

/// Whether both plan the same batches; the ranks that ask may differ.
bool same_plan(const BatchOptions& a, const BatchOptions& b);

/// Lists of sentence numbers, cut out of one order of all sentences: 4 bytes a sentence, 16 a list.
class Batches {
 public:
  using Range = std::pair<int64_t, int64_t>;  ///< [begin, end) in the order.

  Batches() = default;
  Batches(std::vector<int32_t> order, std::vector<Range> ranges)
      : order_(std::move(order)), ranges_(std::move(ranges)) {}

  size_t size() const { return ranges_.size(); }
  size_t size_bytes() const {
    return order_.capacity() * sizeof(int32_t) + ranges_.capacity() * sizeof(Range);
  }
  std::span<const int32_t> operator[](size_t batch) const {
    const auto [begin, end] = ranges_[batch];
    return std::span(order_).subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin));
  }

  class Iterator {
   public:
    Iterator(const Batches& batches, size_t at) : batches_(&batches), at_(at) {}
    std::span<const int32_t> operator*() const { return (*batches_)[at_]; }
    Iterator& operator++() {
      ++at_;
      return *this;
    }
    bool operator==(const Iterator& other) const { return at_ == other.at_; }

   private:
    const Batches* batches_;
    size_t at_;
  };
  Iterator begin() const { return {*this, 0}; }
  Iterator end() const { return {*this, size()}; }

 private:
  std::vector<int32_t> order_;
  std::vector<Range> ranges_;
};

/// One rank's batches of one epoch. The counts are those of all ranks together.
struct BatchPlan {
  Batches batches{};          ///< Sentence numbers of this rank, step by step.
  int64_t num_sentences = 0;  ///< Sentences in batches.
  int64_t num_dropped = 0;    ///< Left out: too few remained for the batches of an update.
  int64_t source_tokens = 0;  ///< Without padding.
  int64_t target_tokens = 0;  ///< Without padding.
  /// Of the batches that ranks take as number i of `batches`: target tokens without padding.
  std::vector<int64_t> step_target_tokens{};
  double padding_share = 0.0;  ///< Padding / (padding + tokens), both sides; in [0, 1).
};

/// Plans this rank's batches of `epoch` (>= 0).
///
/// All ranks shuffle the corpus alike, sort each window by target, then source length, cut the
/// order into batches within the limits, sort the batches by cost (rows x (longest source + longest
/// target)), and deal out each run of world_size * optimizer_delay neighbours, an update: its
/// ranks have equal work, and what it trains on depends on that product alone: two ranks, or one
/// with twice the delay, make the same updates. Then the order of the updates is shuffled; in epoch
/// 0 the dearest is swapped with the first and the one with the longest sentence, if that is
/// another, with the second, so that running out of memory shows at once. Windows are sorted
/// in ascending and descending order in turn, so that neighbours across a border are alike.
///
/// All ranks get the same number of batches, a multiple of optimizer_delay, and every sentence is
/// in exactly one batch of one rank. The last update's batches are halved until there are enough;
/// only if fewer sentences remain for it than it has batches are they left out, and counted in
/// `num_dropped`.
/// A sentence with more target tokens than mini_batch_words is a batch of its own.
///
/// Local:   no communication; equal arguments give equal results on every machine.
/// Cost:    O(N log N) time; memory: 4 bytes a sentence and 16 a batch (56 a batch while planning).
/// Errors:  ConfigError: no limit is set, an option is out of range, fewer sentences than an update
///          has batches, a negative length or one beyond fit_rows, more than 2^31 - 1 sentences.
BatchPlan plan_batches(std::span<const PairLength> lengths, const BatchOptions& options,
                       int64_t epoch);

/// A part of an epoch that has been trained: each of `options.world_size` ranks took its first
/// `num_batches` batches.
struct EpochPart {
  BatchOptions options;
  int64_t num_batches = 0;
};

/// Plans what is left of `epoch` after the parts `done`, each planned on what the one before left.
///
/// With the options of the last part (but for the rank) the plan is the rest of that part's plan,
/// in its order: a stopped run resumes as if it had not been stopped. With others, on another
/// number of ranks say, the sentences not trained on yet are planned again; too few of them
/// for an update are left out, and counted in `num_dropped`.
///
/// Local.
/// Errors: as plan_batches(), and ConfigError if a part has more batches than its plan.
BatchPlan plan_rest(std::span<const PairLength> lengths, const BatchOptions& options, int64_t epoch,
                    std::span<const EpochPart> done);

/// Plans batches for evaluation: each sentence in exactly one batch of one rank, longest target
/// first. A sentence of more than `max_tokens` is a batch of its own; every other
/// batch has at most `max_tokens` (> 0) on the side that has more, padding included: rows x
/// max(longest source, longest target). The number of batches differs by one
/// at most between ranks, and may be 0.
/// Errors: as plan_batches(), but few or no sentences are no error.
BatchPlan plan_eval_batches(std::span<const PairLength> lengths, int64_t max_tokens, int rank,
                            int world_size);

}  // namespace cohort::data
