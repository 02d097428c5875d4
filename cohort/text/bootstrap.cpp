// SPDX-License-Identifier: Apache-2.0
#include "cohort/text/bootstrap.h"

#include <algorithm>
#include <bit>
#include <c10/util/Exception.h>

namespace cohort::text {
namespace {

// numpy's SeedSequence: scatters a seed over a pool of four words, and draws words from that.
// Source: O'Neill, "Developing a seed_seq alternative", 2015.
class SeedSequence {
 public:
  explicit SeedSequence(uint64_t seed) {
    const std::array<uint32_t, 2> words{static_cast<uint32_t>(seed),
                                        static_cast<uint32_t>(seed >> 32)};
    uint32_t constant = 0x43b0d7e5;
    const auto hash = [&constant](uint32_t value) {
      value ^= constant;
      constant *= 0x931e8875;
      value *= constant;
      return value ^ (value >> 16);
    };
    for (size_t i = 0; i < pool_.size(); ++i) pool_[i] = hash(i < words.size() ? words[i] : 0);
    for (size_t from = 0; from < pool_.size(); ++from) {
      for (size_t to = 0; to < pool_.size(); ++to) {
        if (from == to) continue;
        const uint32_t mixed = 0xca01f9dd * pool_[to] - 0x4973f715 * hash(pool_[from]);
        pool_[to] = mixed ^ (mixed >> 16);
      }
    }
  }

  std::array<uint64_t, 4> words() const {
    std::array<uint64_t, 4> result{};
    uint32_t constant = 0x8b51f9dd;
    for (size_t i = 0; i < 2 * result.size(); ++i) {
      uint32_t value = pool_[i % pool_.size()] ^ constant;
      constant *= 0x58f38ded;
      value *= constant;
      value ^= value >> 16;
      result[i / 2] |= uint64_t{value} << (i % 2 * 32);
    }
    return result;
  }

 private:
  std::array<uint32_t, 4> pool_{};
};

}  // namespace

NumpyRandom::NumpyRandom(uint64_t seed) {
  const auto words = SeedSequence(seed).words();
  increment_ = ((Wide{words[2]} << 64 | words[3]) << 1) | 1;
  next_64();
  state_ += Wide{words[0]} << 64 | words[1];
  next_64();
}

uint64_t NumpyRandom::next_64() {
  constexpr Wide kMultiplier = Wide{2549297995355413924U} << 64 | 4865540595714422341U;
  state_ = state_ * kMultiplier + increment_;
  const auto high = static_cast<uint64_t>(state_ >> 64);
  return std::rotr(high ^ static_cast<uint64_t>(state_), static_cast<int>(high >> 58));
}

uint32_t NumpyRandom::next_32() {
  if (has_kept_) {
    has_kept_ = false;
    return kept_;
  }
  const uint64_t both = next_64();
  kept_ = static_cast<uint32_t>(both >> 32);
  has_kept_ = true;
  return static_cast<uint32_t>(both);
}

uint32_t NumpyRandom::below(uint32_t below) {
  if (below == 1) return 0;  // Draws nothing.
  uint64_t product = uint64_t{next_32()} * below;
  const uint32_t threshold = (0U - below) % below;
  while (static_cast<uint32_t>(product) < threshold) product = uint64_t{next_32()} * below;
  return static_cast<uint32_t>(product >> 32);
}

Confidence bootstrap(const std::vector<int64_t>& counts, size_t width,
                     const BootstrapOptions& options,
                     const std::function<double(std::span<const float>)>& score_of) {
  TORCH_CHECK_VALUE(width > 0 && !counts.empty() && counts.size() % width == 0,
                    "bootstrap: expected ", width, " counts of each sentence, got ", counts.size());
  TORCH_CHECK_VALUE(options.num_samples > 0, "bootstrap: expected samples, got ",
                    options.num_samples);
  const auto num_sentences = static_cast<uint32_t>(counts.size() / width);
  NumpyRandom random(options.seed);
  std::vector<double> scores;
  for (int sample = 0; sample < options.num_samples; ++sample) {
    std::vector<float> sums(width);
    for (uint32_t i = 0; i < num_sentences; ++i) {
      const int64_t* drawn = &counts[random.below(num_sentences) * width];
      for (size_t k = 0; k < width; ++k) sums[k] += static_cast<float>(drawn[k]);
    }
    scores.push_back(score_of(sums));
  }
  std::ranges::sort(scores);
  const size_t left_out = scores.size() / 40;
  long double sum = 0;
  for (const double score : scores) sum += score;
  return {.mean = static_cast<double>(sum / static_cast<long double>(scores.size())),
          .half_width = 0.5 * (scores[scores.size() - left_out - 1] - scores[left_out])};
}

}  // namespace cohort::text
