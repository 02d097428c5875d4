// SPDX-License-Identifier: Apache-2.0
#include "cohort/data/distributed_sampler.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>

#include "cohort/base/error.h"
#include "cohort/data/random.h"
#include "cohort/data/weighted_draw.h"

namespace cohort::data {
namespace {

// Keeps the random padding apart from the stream that shuffles the same epoch.
constexpr uint64_t kPaddingStream = 0x70616464696e6700;

void require(bool holds, const std::string& message) {
  if (!holds) throw ConfigError("DistributedSampler: " + message);
}

void check_weights(const DistributedSamplerOptions& options, int64_t epoch_size) {
  const auto& weights = options.weights;
  if (weights.empty()) return;
  require(static_cast<int64_t>(weights.size()) == options.num_examples,
          "expected one weight for each of " + std::to_string(options.num_examples) +
              " examples, got " + std::to_string(weights.size()));
  require(options.shuffle, "weights draw at random, expected shuffle = true");
  for (size_t i = 0; i < weights.size(); ++i) {
    require(weights[i] >= 0 && std::isfinite(weights[i]), "expected finite weights >= 0, got " +
                                                              std::to_string(weights[i]) +
                                                              " for example " + std::to_string(i));
  }
  const auto positive =
      std::count_if(weights.begin(), weights.end(), [](double w) { return w > 0; });
  const int64_t needed = options.draw == Draw::kWithoutReplacement ? epoch_size : 1;
  require(positive >= needed, "expected at least " + std::to_string(needed) +
                                  " weights above 0, got " + std::to_string(positive));
}

}  // namespace

DistributedSampler::DistributedSampler(const DistributedSamplerOptions& options)
    : options_(options) {
  require(options.num_examples > 0,
          "expected num_examples > 0, got " + std::to_string(options.num_examples));
  require(options.world_size > 0,
          "expected world_size > 0, got " + std::to_string(options.world_size));
  require(options.rank >= 0 && options.rank < options.world_size,
          "expected rank in [0, " + std::to_string(options.world_size) + "), got " +
              std::to_string(options.rank));
  require(options.epoch_size >= 0,
          "expected epoch_size >= 0, got " + std::to_string(options.epoch_size));
  require(options.tail != Tail::kDropLast || epoch_size() >= options.world_size,
          "expected num_examples >= world_size when the tail is dropped, got " +
              std::to_string(epoch_size()) + " examples for " + std::to_string(options.world_size) +
              " ranks");
  check_weights(options, epoch_size());
}

void DistributedSampler::set_epoch(int64_t epoch) {
  require(epoch >= 0, "expected epoch >= 0, got " + std::to_string(epoch));
  epoch_ = epoch;
  consumed_ = 0;
}

void DistributedSampler::resume(int64_t consumed) {
  require(consumed >= 0, "expected consumed >= 0, got " + std::to_string(consumed));
  consumed_ = std::min(consumed, epoch_size());
}

int64_t DistributedSampler::consumed_after(int64_t taken) const {
  return std::min(consumed_ + taken * options_.world_size, epoch_size());
}

int64_t DistributedSampler::epoch_size() const {
  return options_.epoch_size > 0 ? options_.epoch_size : options_.num_examples;
}

int64_t DistributedSampler::size() const {
  const int64_t left = epoch_size() - consumed_;
  const int64_t w = options_.world_size;
  switch (options_.tail) {
    case Tail::kPad:
    case Tail::kPadRandom:
      return left / w + (left % w != 0);
    case Tail::kDropLast:
      return left / w;
    case Tail::kUneven:
      break;
  }
  return left / w + (options_.rank < left % w);
}

// Position p of epoch e is position e E + p of an endless row of shuffles, each of all examples.
std::vector<int64_t> DistributedSampler::epoch_order() const {
  const int64_t n = options_.num_examples;
  const int64_t e = epoch_size();
  if (!options_.weights.empty()) {
    SplitMix64 random(options_.seed, static_cast<uint64_t>(epoch_));
    return options_.draw == Draw::kWithReplacement
               ? draw_with_replacement(options_.weights, e, random)
               : draw_without_replacement(options_.weights, e, random);
  }
  std::vector<int64_t> order;
  order.reserve(static_cast<size_t>(e));
  std::vector<int64_t> pass(static_cast<size_t>(n));
  for (int64_t position = epoch_ * e; static_cast<int64_t>(order.size()) < e;) {
    std::iota(pass.begin(), pass.end(), 0);
    if (options_.shuffle) {
      SplitMix64 random(options_.seed, static_cast<uint64_t>(position / n));
      shuffle(std::span(pass), random);
    }
    const int64_t first = position % n;
    const int64_t count = std::min(n - first, e - static_cast<int64_t>(order.size()));
    order.insert(order.end(), pass.begin() + first, pass.begin() + first + count);
    position += count;
  }
  return order;
}

// Fewer positions than ranks are past the end: the k-th takes the k-th draw, on whichever rank it is.
std::vector<int64_t> DistributedSampler::padding() const {
  SplitMix64 random(options_.seed, static_cast<uint64_t>(epoch_) ^ kPaddingStream);
  if (!options_.weights.empty())
    return draw_with_replacement(options_.weights, options_.world_size, random);
  std::vector<int64_t> drawn(static_cast<size_t>(options_.world_size));
  for (int64_t& index : drawn)
    index = static_cast<int64_t>(random.below(static_cast<uint64_t>(options_.num_examples)));
  return drawn;
}

std::vector<int64_t> DistributedSampler::indices() const {
  const std::vector<int64_t> order = epoch_order();
  const auto e = static_cast<int64_t>(order.size());
  std::vector<int64_t> share(static_cast<size_t>(size()));
  int64_t position = consumed_ + options_.rank;
  for (int64_t& index : share) {
    if (position < e || options_.tail == Tail::kPad) {
      index = order[static_cast<size_t>(position % e)];
    } else {
      index = padding()[static_cast<size_t>(position - e)];
    }
    position += options_.world_size;
  }
  return share;
}

std::vector<std::vector<int64_t>> cut_batches(std::span<const int64_t> indices, int64_t batch_size,
                                              LastBatch last) {
  if (batch_size <= 0) {
    throw ConfigError("cut_batches: expected batch_size > 0, got " + std::to_string(batch_size));
  }
  const auto step = static_cast<size_t>(batch_size);
  std::vector<std::vector<int64_t>> batches;
  for (size_t begin = 0; begin < indices.size(); begin += step) {
    const auto batch = indices.subspan(begin, std::min(step, indices.size() - begin));
    if (batch.size() < step && last == LastBatch::kDrop) break;
    batches.emplace_back(batch.begin(), batch.end());
  }
  return batches;
}

}  // namespace cohort::data
