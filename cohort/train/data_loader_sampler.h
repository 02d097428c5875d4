// SPDX-License-Identifier: Apache-2.0
// The distributed sampler of libtorch's own data loaders.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <torch/data/samplers/base.h>
#include <vector>

#include "cohort/data/distributed_sampler.h"

namespace cohort::train {

/// A data::DistributedSampler that torch::data::make_data_loader takes.
///
///     train::DataLoaderSampler sampler({.num_examples = num_examples,
///                                       .rank = group.rank(), .world_size = group.size()});
///     auto loader = torch::data::make_data_loader(std::move(dataset), sampler, batch_size);
///     for (int64_t epoch = 0; epoch < num_epochs; ++epoch) {
///       sampler.set_epoch(epoch);
///       for (const auto& batch : *loader) ...
///     }
///
/// Gives out the indices of data::DistributedSampler::indices(), in their order, in batches of the
/// loader's size. Which examples a rank gets, and what drops or repeats the last ones, is as there;
/// DataLoaderOptions::drop_last drops a rank's last batch if it is smaller than the others.
///
/// Copies: share one position. A loader keeps a copy, so the sampler that you keep controls it.
/// Local:   no communication.
/// Threads: as a data loader, one.
class DataLoaderSampler final : public torch::data::samplers::Sampler<> {
 public:
  /// Errors: ConfigError as data::DistributedSampler.
  explicit DataLoaderSampler(const data::DistributedSamplerOptions& options);

  /// As data::DistributedSampler. Call them between passes, before the loader's begin(): within a
  /// pass the next call of next() would start at the new place.
  void set_epoch(int64_t epoch);
  int64_t epoch() const;
  void resume(int64_t consumed);

  /// Returns what to hand to resume() after every rank has trained on its first `taken` examples
  /// since the loader's begin(). A loader with workers has fetched more than that.
  int64_t consumed_after(int64_t taken) const;

  /// Returns how many examples this rank gets from the next begin() on.
  int64_t size() const;

  /// Starts at the place of set_epoch(), resume() or load(); without a new one, at the beginning of
  /// the same epoch. A loader calls it in begin().
  /// Errors: ConfigError: `new_size`, where given, is not num_examples.
  void reset(std::optional<size_t> new_size = std::nullopt) override;

  /// Returns at most `batch_size` further indices; nothing at the end of this rank's share.
  /// Errors: ConfigError: `batch_size` is 0.
  std::optional<std::vector<size_t>> next(size_t batch_size) override;

  /// Writes the epoch, and how much of it all ranks have consumed after as many calls of next() as
  /// here: a rank of any number of ranks can load it. A loader with workers calls next() ahead of
  /// training: store epoch() and consumed_after() yourself there.
  void save(torch::serialize::OutputArchive& archive) const override;

  /// set_epoch() and resume() with what save() wrote.
  void load(torch::serialize::InputArchive& archive) override;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace cohort::train
