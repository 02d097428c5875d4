// SPDX-License-Identifier: Apache-2.0
#include "cohort/nmt/sampling.h"

#include <algorithm>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <cmath>
#include <vector>

#include "cohort/base/error.h"

namespace cohort::nmt {
namespace {

// The likeliest tokens first, as many as together reach `share` of `total`, which counts them by
// weight. How many these are is not known before: twice as many are asked for until it is enough.
template <class Weight>
std::vector<Candidate> nucleus(const LogProbs& log_probs, int64_t row, double total, double share,
                               std::span<const int64_t> banned, Weight weight) {
  for (int64_t count = 128;; count *= 2) {
    auto candidates = log_probs.greatest(row, count, banned);
    double reached = 0;
    for (size_t i = 0; i < candidates.size(); ++i) {
      reached += weight(candidates[i]);
      if (reached < share * total) continue;
      candidates.resize(i + 1);
      return candidates;
    }
    if (std::ssize(candidates) < count) return candidates;  // all there are
  }
}

}  // namespace

void validate(const SamplingOptions& options) {
  const auto check = [](bool good, const char* flag, auto value, const char* expected) {
    if (!good) throw ConfigError(c10::str(flag, " ", value, ": expected ", expected));
  };
  check(options.topk >= 0, "--sampling-topk", options.topk, "at least 0");
  check(options.topp > 0 && options.topp <= 1, "--sampling-topp", options.topp,
        "a share above 0, at most 1");
  check(std::isfinite(options.temperature) && options.temperature > 0, "--temperature",
        options.temperature, "a number above 0");
}

double sampling_number(uint64_t seed, int64_t sentence, int64_t sample, int64_t position) {
  uint64_t bits = seed;
  for (const int64_t part : {sentence, sample, position})
    bits = splitmix64_finalizer(bits + 0x9e3779b97f4a7c15ULL * (static_cast<uint64_t>(part) + 1));
  return static_cast<double>(bits >> 11) * 0x1.0p-53;
}

// A float. With it all but the likeliest tokens have a weight of 0 already.
constexpr double kGreatestExponent = 1e30;

Candidate draw(const LogProbs& log_probs, int64_t row, const SamplingOptions& options,
               std::span<const int64_t> banned, double number) {
  const double exponent = std::min(1 / options.temperature, kGreatestExponent);
  if (options.topk == 0 && options.topp == 1) return log_probs.draw(row, exponent, banned, number);
  const Candidate likeliest = log_probs.likeliest(row, banned);
  // Relative to the likeliest one's, so that a low temperature leaves it in float64's range.
  const auto weight = [&](const Candidate& c) {
    return std::exp((c.log_prob - likeliest.log_prob) / options.temperature);
  };
  const auto total = [&](const std::vector<Candidate>& candidates) {
    double sum = 0;
    for (const Candidate& c : candidates) sum += weight(c);
    return sum;
  };
  std::vector<Candidate> candidates;
  if (options.topk > 0) candidates = log_probs.greatest(row, options.topk, banned);
  double sum =
      options.topk > 0 ? total(candidates) : log_probs.sum_of_weights(row, exponent, banned);
  if (options.topp < 1) {
    candidates = nucleus(log_probs, row, sum, options.topp, banned, weight);
    sum = total(candidates);
  }
  double left = number * sum;
  for (const Candidate& c : candidates) {
    left -= weight(c);
    if (left < 0) return c;
  }
  return candidates.back();  // Rounding has left a last trace.
}

}  // namespace cohort::nmt
