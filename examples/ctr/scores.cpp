// SPDX-License-Identifier: Apache-2.0
#include "examples/ctr/scores.h"

#include <algorithm>
#include <c10/util/Exception.h>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>

namespace ctr {
namespace {

// -log p for a click with this score; for another example with the score's negative.
double loss_of(double score) {
  return score > 0 ? std::log1p(std::exp(-score)) : std::log1p(std::exp(score)) - score;
}

double probability_of(double score) {
  return 1 / (1 + std::exp(-score));
}

// Twice the number of pairs that are in order: an integer. Both are sorted.
unsigned __int128 twice_ordered_pairs(const std::vector<float>& clicks,
                                      const std::vector<float>& others) {
  unsigned __int128 twice = 0;
  size_t below = 0;      // Others below this click's score ...
  size_t not_above = 0;  // ... and those not above it.
  for (const float click : clicks) {
    while (below < others.size() && others[below] < click) ++below;
    not_above = std::max(not_above, below);
    while (not_above < others.size() && others[not_above] <= click) ++not_above;
    twice += below + not_above;
  }
  return twice;
}

}  // namespace

void ScoreSet::add(std::span<const float> scores, std::span<const float> labels) {
  TORCH_CHECK_VALUE(scores.size() == labels.size(), "expected a label for each score, got ",
                    scores.size(), " scores and ", labels.size(), " labels");
  for (size_t i = 0; i < scores.size(); ++i) {
    TORCH_CHECK_VALUE(!std::isnan(scores[i]), "expected scores that are numbers, got NaN");
    (labels[i] > 0 ? clicks_ : others_).push_back(scores[i]);
  }
}

void ScoreSet::merge(const ScoreSet& other) {
  clicks_.insert(clicks_.end(), other.clicks_.begin(), other.clicks_.end());
  others_.insert(others_.end(), other.others_.begin(), other.others_.end());
}

Metrics ScoreSet::metrics() {
  std::sort(clicks_.begin(), clicks_.end());
  std::sort(others_.begin(), others_.end());
  Metrics metrics;
  metrics.clicks = static_cast<int64_t>(clicks_.size());
  metrics.count = metrics.clicks + static_cast<int64_t>(others_.size());
  const double pairs = static_cast<double>(clicks_.size()) * static_cast<double>(others_.size());
  metrics.auc = static_cast<double>(twice_ordered_pairs(clicks_, others_)) / (2 * pairs);
  double loss = 0;
  double probability = 0;
  for (const float score : clicks_) {
    loss += loss_of(score);
    probability += probability_of(score);
  }
  for (const float score : others_) {
    loss += loss_of(-score);
    probability += probability_of(score);
  }
  metrics.log_loss = loss / static_cast<double>(metrics.count);
  metrics.mean_prediction = probability / static_cast<double>(metrics.count);
  return metrics;
}

std::string auc_text(const Metrics& metrics) {
  if (metrics.count == 0) return "undefined (there are no examples)";
  if (std::isnan(metrics.auc)) return "undefined (the labels are all the same)";
  char text[32];
  std::snprintf(text, sizeof(text), "%.5f", metrics.auc);
  return text;
}

// The number of clicks, then all scores.
std::string ScoreSet::to_bytes() const {
  const uint64_t clicks = clicks_.size();
  std::string bytes(sizeof(clicks) + (clicks_.size() + others_.size()) * sizeof(float), '\0');
  char* at = bytes.data();
  std::memcpy(at, &clicks, sizeof(clicks));
  at += sizeof(clicks);
  for (const auto* scores : {&clicks_, &others_}) {
    if (scores->empty()) continue;
    std::memcpy(at, scores->data(), scores->size() * sizeof(float));
    at += scores->size() * sizeof(float);
  }
  return bytes;
}

ScoreSet ScoreSet::from_bytes(const std::string& bytes) {
  uint64_t clicks = 0;
  TORCH_CHECK_VALUE(bytes.size() >= sizeof(clicks) && bytes.size() % sizeof(float) == 0,
                    "expected the bytes of scores, got ", bytes.size(), " bytes");
  std::memcpy(&clicks, bytes.data(), sizeof(clicks));
  const uint64_t count = (bytes.size() - sizeof(clicks)) / sizeof(float);
  TORCH_CHECK_VALUE(clicks <= count, "expected the bytes of scores, got ", clicks, " clicks among ",
                    count);
  std::vector<float> scores(count);
  if (count > 0) std::memcpy(scores.data(), bytes.data() + sizeof(clicks), count * sizeof(float));
  const auto middle = scores.begin() + static_cast<int64_t>(clicks);
  ScoreSet set;
  set.clicks_.assign(scores.begin(), middle);
  set.others_.assign(middle, scores.end());
  return set;
}

}  // namespace ctr
