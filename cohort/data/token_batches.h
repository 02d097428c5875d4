// Plans batches of sentence pairs of similar length, so that little of a batch is padding, and
// splits them between ranks so that all ranks take the same number of steps.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

namespace cohort::data {

/// Lengths in tokens of one sentence pair, with whatever end marks the model adds.
struct PairLength {
  int32_t source = 0;
  int32_t target = 0;
};

struct BatchOptions {
  int64_t mini_batch = 0;        ///< Most sentences in a rank's batch; 0: no such limit.
  int64_t mini_batch_words = 0;  ///< Most tokens of a rank's batch, padding included, on the side
                                 ///< that has more: rows x max(longest source, longest target);
                                 ///< 0: no such limit.
  int64_t maxi_batch = 100;      ///< Sort by length inside windows of about so many batches.
  uint64_t seed = 0;             ///< Same on all ranks.
  int rank = 0;                  ///< In [0, world_size).
  int world_size = 1;
  bool shuffle = true;  ///< false: windows follow the order of the corpus, batches that of length.

  bool operator==(const BatchOptions&) const = default;
};

/// Whether both plan the same batches; the ranks that ask may differ.
bool same_plan(const BatchOptions& a, const BatchOptions& b);

/// One rank's batches of one epoch. The counts are those of all ranks together.
struct BatchPlan {
  std::vector<std::vector<int64_t>> batches{};  ///< Sentence numbers of this rank, step by step.
  int64_t num_sentences = 0;                    ///< Sentences in batches.
  int64_t num_dropped = 0;     ///< Left out: fewer than world_size sentences remained.
  int64_t source_tokens = 0;   ///< Without padding.
  int64_t target_tokens = 0;   ///< Without padding.
  double padding_share = 0.0;  ///< Padding / (padding + tokens), both sides; in [0, 1).
};

/// Plans this rank's batches of `epoch` (>= 0).
///
/// All ranks shuffle the corpus alike, sort each window by (target, source) length, cut the order
/// into batches within the limits, and take batch `rank` of each run of world_size neighbours:
/// the ranks of a step hold similar lengths. Then the order of the steps is shuffled. Windows are
/// sorted upwards and downwards by turns, so that neighbours across a border are alike too.
///
/// All ranks get the same number of batches, and every sentence is in exactly one batch of one
/// rank. The last step's batches are halved until each rank has one; only if fewer than
/// world_size sentences remain for it are they left out, and counted in `num_dropped`.
/// A sentence longer than mini_batch_words is a batch of its own.
///
/// Local:   no communication; equal arguments give equal results on every machine.
/// Cost:    O(N log N) time, O(N) memory.
/// Errors:  ConfigError: neither limit is set, an option is out of range, fewer sentences than
///          ranks, a negative length.
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
/// in its order: a run that was stopped goes on as if it had not been. With others, on another
/// number of ranks say, the sentences that nobody has trained on are planned anew; fewer than
/// world_size of them are left out, and counted in `num_dropped`.
///
/// Local. Errors: as plan_batches(), and ConfigError if a part has more batches than its plan.
BatchPlan plan_rest(std::span<const PairLength> lengths, const BatchOptions& options, int64_t epoch,
                    std::span<const EpochPart> done);

/// Plans batches for evaluation: each sentence in exactly one batch of one rank, longest first.
/// The limit is that of BatchOptions::mini_batch_words, > 0. The number of batches differs by one
/// at most between ranks, and may be 0.
/// Errors: as plan_batches(), but few or no sentences are no error.
BatchPlan plan_eval_batches(std::span<const PairLength> lengths, int64_t mini_batch_words, int rank,
                            int world_size);

}  // namespace cohort::data
