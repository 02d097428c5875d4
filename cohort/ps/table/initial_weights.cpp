// SPDX-License-Identifier: Apache-2.0
#include "cohort/ps/table/initial_weights.h"

#include <algorithm>
#include <cmath>
#include <string_view>

#include "cohort/ps/id_hash.h"

namespace cohort::ps {
namespace {

constexpr uint64_t kGolden = 0x9e3779b97f4a7c15;  // SplitMix64 steps by it.

uint64_t hash_of(std::string_view text) {
  uint64_t hash = text.size();
  for (const char c : text)
    hash = splitmix64_finalizer(hash * kGolden + static_cast<unsigned char>(c) + 1);
  return hash;
}

// ln x for x in (0, 1), to 1e-15: by the series of artanh around 1.
double logarithm(double x) {
  int exponent = 0;
  double m = std::frexp(x, &exponent);  // Exact.
  if (m < 0.70710678118654752) {
    m *= 2;
    --exponent;
  }
  const double s = (m - 1) / (m + 1);
  double sum = 0;
  for (int power = 21; power >= 1; power -= 2) sum = sum * s * s + 1.0 / power;
  return 2 * s * sum + exponent * 0.69314718055994531;
}

// The x below which a standard normal number lies with probability `p` in (0, 1), to 1e-7.
// Source: Wichura 1988, algorithm AS 241, PPND7.
double normal_quantile(double p) {
  const double q = p - 0.5;
  if (std::abs(q) <= 0.425) {
    const double r = 0.180625 - q * q;
    return q * (((59.109374720 * r + 159.29113202) * r + 50.434271938) * r + 3.3871327179) /
           (((67.187563600 * r + 78.757757664) * r + 17.895169469) * r + 1.0);
  }
  double r = std::sqrt(-logarithm(q < 0 ? p : 1 - p));
  double x = 0;
  if (r <= 5) {
    r -= 1.6;
    x = (((0.17023821103 * r + 1.3067284816) * r + 2.7568153900) * r + 1.4234372777) /
        ((0.12021132975 * r + 0.73700164250) * r + 1.0);
  } else {
    r -= 5;
    x = (((0.017337203997 * r + 0.42868294337) * r + 3.0812263860) * r + 6.6579051150) /
        ((0.012258202635 * r + 0.24197894225) * r + 1.0);
  }
  return q < 0 ? -x : x;
}

}  // namespace

double uniform_of(uint64_t seed, uint64_t id, uint64_t number) {
  const uint64_t bits = splitmix64_finalizer(splitmix64_finalizer(seed + kGolden) ^
                                             splitmix64_finalizer(id + number * kGolden));
  return static_cast<double>(bits >> 11) * 0x1p-53;
}

InitialWeights::InitialWeights(const TableOptions& options)
    : initializer_(options.initializer),
      key_(splitmix64_finalizer(options.seed + kGolden) ^ hash_of(options.name)) {}

void InitialWeights::fill(uint64_t id, std::span<float> weights) const {
  if (initializer_.kind == Initializer::Kind::kZeros) {
    std::fill(weights.begin(), weights.end(), 0.0F);
    return;
  }
  const uint64_t row = splitmix64_finalizer(key_ ^ splitmix64_finalizer(id));
  for (size_t i = 0; i < weights.size(); ++i) {
    // SplitMix64 from `row` on, of which each number serves two weights.
    const uint64_t bits = splitmix64_finalizer(row + (i / 2 + 1) * kGolden);
    const auto number = static_cast<uint32_t>(i % 2 == 0 ? bits : bits >> 32) >> 8;  // 24 bits
    if (initializer_.kind == Initializer::Kind::kUniform) {
      const float unit = static_cast<float>(number) * 0x1p-23F - 1;  // Exact, in [-1, 1).
      weights[i] = unit * initializer_.scale;
    } else {
      const double p = (static_cast<double>(number) + 0.5) * 0x1p-24;
      weights[i] = static_cast<float>(normal_quantile(p)) * initializer_.scale;
    }
  }
}

}  // namespace cohort::ps
