// SPDX-License-Identifier: Apache-2.0
#include "cohort/train/data_loader_sampler.h"

#include <algorithm>
#include <string>
#include <torch/serialize/archive.h>

#include "cohort/base/error.h"

namespace cohort::train {

struct DataLoaderSampler::State {
  int64_t num_examples;
  bool is_uneven;
  data::DistributedSampler sampler;
  int64_t whole_size = sampler.size();  // Of a pass from the beginning of an epoch.
  std::vector<int64_t> indices{};       // Of the pass that has begun.
  size_t taken = 0;    // On a rank with one index more; here at most indices.size().
  bool begun = false;  // A pass from the sampler's place.
};

DataLoaderSampler::DataLoaderSampler(const data::DistributedSamplerOptions& options)
    : state_(
          std::make_shared<State>(State{options.num_examples, options.tail == data::Tail::kUneven,
                                        data::DistributedSampler(options)})) {}

void DataLoaderSampler::set_epoch(int64_t epoch) {
  state_->sampler.set_epoch(epoch);
  state_->begun = false;
}

int64_t DataLoaderSampler::epoch() const {
  return state_->sampler.epoch();
}

void DataLoaderSampler::resume(int64_t consumed) {
  state_->sampler.resume(consumed);
  state_->begun = false;
}

int64_t DataLoaderSampler::consumed_after(int64_t taken) const {
  return state_->sampler.consumed_after(taken);
}

int64_t DataLoaderSampler::size() const {
  return state_->begun ? state_->whole_size : state_->sampler.size();
}

void DataLoaderSampler::reset(std::optional<size_t> new_size) {
  State& my = *state_;
  if (new_size && static_cast<int64_t>(*new_size) != my.num_examples) {
    throw ConfigError("DataLoaderSampler: expected a data set of " +
                      std::to_string(my.num_examples) + " examples, got " +
                      std::to_string(*new_size));
  }
  if (my.begun) my.sampler.resume(0);
  my.indices = my.sampler.indices();
  my.taken = 0;
  my.begun = true;
}

std::optional<std::vector<size_t>> DataLoaderSampler::next(size_t batch_size) {
  State& my = *state_;
  if (batch_size == 0) throw ConfigError("DataLoaderSampler: expected a batch size > 0, got 0");
  if (!my.begun) reset();
  const size_t most = my.indices.size() + (my.is_uneven ? 1 : 0);
  const auto here = [&] {
    return my.indices.begin() + static_cast<std::ptrdiff_t>(std::min(my.taken, my.indices.size()));
  };
  const auto first = here();
  my.taken += std::min(batch_size, most - my.taken);
  if (first == my.indices.end()) return std::nullopt;
  return std::vector<size_t>(first, here());
}

void DataLoaderSampler::save(torch::serialize::OutputArchive& archive) const {
  const int64_t taken = state_->begun ? static_cast<int64_t>(state_->taken) : 0;
  archive.write("epoch", c10::IValue(epoch()));
  archive.write("consumed", c10::IValue(consumed_after(taken)));
}

void DataLoaderSampler::load(torch::serialize::InputArchive& archive) {
  c10::IValue epoch;
  c10::IValue consumed;
  archive.read("epoch", epoch);
  archive.read("consumed", consumed);
  set_epoch(epoch.toInt());
  resume(consumed.toInt());
}

}  // namespace cohort::train
