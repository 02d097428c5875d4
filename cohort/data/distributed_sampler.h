// SPDX-License-Identifier: Apache-2.0
// Splits an epoch of examples between ranks. Knows nothing of text, images or networks.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

namespace cohort::data {

/// What happens to the examples left when world_size does not divide the epoch.
enum class Tail {
  kPad,        ///< Repeat the start of the epoch: all ranks get ceil(E/W). PyTorch's default.
  kPadRandom,  ///< Fill up with examples drawn at random from (seed, epoch): all get ceil(E/W).
  kDropLast,   ///< Leave the rest of the epoch's order out: all ranks get floor(E/W).
  kUneven,     ///< No example twice, none left out; sizes differ by one. For evaluation.
};

/// How examples with weights are drawn.
enum class Draw {
  kWithReplacement,     ///< Each position of the epoch alone: example i with probability w_i / sum.
  kWithoutReplacement,  ///< One by one, among those left, in proportion to their weights.
};

struct DistributedSamplerOptions {
  int64_t num_examples = 0;  ///< N, size of the data set, > 0.
  int rank = 0;              ///< In [0, world_size).
  int world_size = 1;        ///< W, number of ranks that share the epoch.
  uint64_t seed = 0;         ///< Same on all ranks.
  bool shuffle = true;       ///< false: the epoch's order is 0, 1, ... N-1.
  Tail tail = Tail::kPad;
  /// E, examples of an epoch over all ranks; 0: num_examples. For a fixed number of batches, give
  /// batches x global batch. Without weights, each epoch continues where the last one ended, and
  /// every example comes once before any comes again: if W divides E, or with kUneven. Otherwise
  /// padding repeats positions, and kDropLast leaves some out of every epoch.
  int64_t epoch_size = 0;
  /// One weight an example, >= 0 and finite; empty: all alike. Same on all ranks.
  std::vector<double> weights{};
  Draw draw = Draw::kWithReplacement;  ///< Only with weights.
};

/// Gives each rank its share of one epoch: positions rank, rank + W, rank + 2W ... of its order.
///
/// The order depends on seed and epoch alone, not on the number of ranks. After each rank has
/// taken k examples, the first k W positions of the order are used up; that number and the epoch
/// are all that a checkpoint needs. resume() deals the remaining positions to the current ranks,
/// however many those are, so that an epoch begun by 3 ranks and ended by 2 holds each example
/// once.
///
/// Local:   no communication; ranks agree because they draw from the same (seed, epoch). The order
///          is the same on every machine (weighted draws: with the same C library's logarithm).
/// Threads: set_epoch() and resume() are not to run beside other calls.
class DistributedSampler {
 public:
  /// Errors: ConfigError if num_examples is not positive, rank or world_size is out of range,
  ///         epoch_size is negative, kDropLast would leave every rank without examples
  ///         (epoch_size < world_size), or weights are negative, too many or few, without shuffle,
  ///         or without replacement and with fewer than epoch_size above 0.
  explicit DistributedSampler(const DistributedSamplerOptions& options);

  /// Chooses the epoch (>= 0; first: 0) and starts at its beginning. Call it on all ranks before
  /// indices(), or every epoch has the same order.
  /// Errors: ConfigError if negative.
  void set_epoch(int64_t epoch);
  int64_t epoch() const { return epoch_; }

  /// Leaves out the first `consumed` positions of the epoch's order: those that all ranks together
  /// took before a stop. Beyond the epoch's end (the padding) nothing remains.
  /// Errors: ConfigError if negative.
  void resume(int64_t consumed);
  int64_t consumed() const { return consumed_; }

  /// Returns what to hand to resume() after every rank has taken its first `taken` indices().
  int64_t consumed_after(int64_t taken) const;

  /// Returns this rank's examples of the rest of the current epoch, in order.
  /// Cost: O(N + E) time and memory; weights without replacement: O(N log N).
  std::vector<int64_t> indices() const;

  /// Returns how many examples indices() has. Except with kUneven, all ranks have equally many, also
  /// after resume().
  int64_t size() const;

 private:
  int64_t epoch_size() const;
  std::vector<int64_t> epoch_order() const;
  std::vector<int64_t> padding() const;

  DistributedSamplerOptions options_;
  int64_t epoch_ = 0;
  int64_t consumed_ = 0;
};

/// What happens to the examples after the last whole batch.
enum class LastBatch { kKeep, kDrop };

/// Cuts `indices` into batches of `batch_size` > 0, in order. Of a rank's indices() it makes the
/// rank's batches; the steps of all ranks together then hold world_size x batch_size
/// neighbours of the epoch's order.
/// Errors: ConfigError if batch_size is not positive.
std::vector<std::vector<int64_t>> cut_batches(std::span<const int64_t> indices, int64_t batch_size,
                                              LastBatch last = LastBatch::kKeep);

}  // namespace cohort::data
