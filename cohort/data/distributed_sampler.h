// Splits an epoch of examples between ranks. Knows nothing of text or networks.
#pragma once
#include <cstdint>
#include <vector>

namespace cohort::data {

/// What happens to the examples left when world_size does not divide num_examples.
enum class Tail {
  kPad,       ///< Repeat the start of the epoch: all ranks get ceil(N/W). PyTorch's default.
  kDropLast,  ///< Leave the rest of the epoch's order out: all ranks get floor(N/W).
  kUneven,    ///< No example twice, none left out; sizes differ by one. For evaluation.
};

struct DistributedSamplerOptions {
  int64_t num_examples = 0;  ///< N, size of the data set, > 0.
  int rank = 0;              ///< In [0, world_size).
  int world_size = 1;        ///< W, number of ranks that share the epoch.
  uint64_t seed = 0;         ///< Same on all ranks.
  bool shuffle = true;       ///< false: the epoch's order is 0, 1, ... N-1.
  Tail tail = Tail::kPad;
};

/// Gives each rank its share of one epoch: places rank, rank + W, rank + 2W ... of its order.
///
/// Local:   no communication; ranks agree because they shuffle with the same (seed, epoch). The
///          order is the same on every machine.
/// Threads: set_epoch() is not to run beside other calls.
class DistributedSampler {
 public:
  /// Errors: ConfigError if num_examples is not positive, rank or world_size is out of range, or
  ///         kDropLast would leave every rank without examples (num_examples < world_size).
  explicit DistributedSampler(const DistributedSamplerOptions& options);

  /// Chooses the epoch (>= 0; first: 0). Call it on all ranks before indices(), or every epoch has
  /// the same order. Errors: ConfigError if negative.
  void set_epoch(int64_t epoch);
  int64_t epoch() const { return epoch_; }

  /// Returns this rank's examples of the current epoch, in order. Cost: O(N) time and memory.
  std::vector<int64_t> indices() const;

  /// Returns how many examples indices() has; the same in every epoch.
  int64_t size() const;

 private:
  DistributedSamplerOptions options_;
  int64_t epoch_ = 0;
};

}  // namespace cohort::data
