#include "cohort/data/distributed_sampler.h"

#include <numeric>
#include <string>

#include "cohort/base/error.h"
#include "cohort/data/random.h"

namespace cohort::data {

DistributedSampler::DistributedSampler(const DistributedSamplerOptions& options)
    : options_(options) {
  const auto require = [](bool holds, const std::string& message) {
    if (!holds) throw ConfigError("DistributedSampler: " + message);
  };
  const int64_t n = options.num_examples;
  require(n > 0, "expected num_examples > 0, found " + std::to_string(n));
  require(options.world_size > 0,
          "expected world_size > 0, found " + std::to_string(options.world_size));
  require(options.rank >= 0 && options.rank < options.world_size,
          "expected rank in [0, " + std::to_string(options.world_size) + "), found " +
              std::to_string(options.rank));
  require(options.tail != Tail::kDropLast || n >= options.world_size,
          "expected num_examples >= world_size when the tail is dropped, found " +
              std::to_string(n) + " examples for " + std::to_string(options.world_size) + " ranks");
}

void DistributedSampler::set_epoch(int64_t epoch) {
  if (epoch < 0) {
    throw ConfigError("DistributedSampler: expected epoch >= 0, found " + std::to_string(epoch));
  }
  epoch_ = epoch;
}

int64_t DistributedSampler::size() const {
  const int64_t n = options_.num_examples;
  const int64_t w = options_.world_size;
  switch (options_.tail) {
    case Tail::kPad:
      return n / w + (n % w != 0);
    case Tail::kDropLast:
      return n / w;
    case Tail::kUneven:
      break;
  }
  return n / w + (options_.rank < n % w);
}

std::vector<int64_t> DistributedSampler::indices() const {
  std::vector<int64_t> order(static_cast<size_t>(options_.num_examples));
  std::iota(order.begin(), order.end(), 0);
  if (options_.shuffle) {
    SplitMix64 random(options_.seed, static_cast<uint64_t>(epoch_));
    shuffle(std::span(order), random);
  }
  std::vector<int64_t> share(static_cast<size_t>(size()));
  size_t place = static_cast<size_t>(options_.rank);
  for (int64_t& index : share) {
    index = order[place % order.size()];
    place += static_cast<size_t>(options_.world_size);
  }
  return share;
}

}  // namespace cohort::data
