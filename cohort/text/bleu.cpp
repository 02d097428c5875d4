// SPDX-License-Identifier: Apache-2.0
#include "cohort/text/bleu.h"

#include <algorithm>
#include <c10/util/Exception.h>
#include <cmath>
#include <cstdlib>
#include <map>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/text/bleu_tokenizer.h"
#include "cohort/text/score_text.h"
#include "cohort/text/utf8.h"

namespace cohort::text {
namespace {

// By BleuTokenizer.
constexpr std::array<const char*, 5> kTokenizers{"13a", "intl", "zh", "char", "none"};
// By BleuSmoothing.
constexpr std::array<const char*, 4> kSmoothings{"exp", "floor", "add-k", "none"};

// An n-gram as its tokens' numbers (from 1), zero behind the last.
using Ngram = std::array<int32_t, kBleuOrder>;
using NgramCounts = std::map<Ngram, int64_t>;
using TokenNumbers = std::unordered_map<std::string, int32_t>;

std::vector<int32_t> number_tokens(std::string_view segment, const BleuOptions& options,
                                   TokenNumbers& numbers) {
  std::vector<int32_t> result;
  for (std::string& token : bleu_tokens(segment, options)) {
    const auto next = static_cast<int32_t>(numbers.size() + 1);
    result.push_back(numbers.try_emplace(std::move(token), next).first->second);
  }
  return result;
}

NgramCounts count_ngrams(const std::vector<int32_t>& tokens) {
  NgramCounts counts;
  for (size_t start = 0; start < tokens.size(); ++start) {
    Ngram ngram = {};
    const size_t longest = std::min<size_t>(kBleuOrder, tokens.size() - start);
    for (size_t n = 0; n < longest; ++n) {
      ngram[n] = tokens[start + n];
      ++counts[ngram];
    }
  }
  return counts;
}

// Order of an n-gram, minus one.
size_t order_index(const Ngram& ngram) {
  return static_cast<size_t>(std::find(ngram.begin(), ngram.end(), 0) - ngram.begin()) - 1;
}

double smoothing_value(const BleuOptions& options) {
  return options.smoothing_value.value_or(options.smoothing == BleuSmoothing::kFloor ? 0.1 : 1.0);
}

// Of a corpus. sacreBLEU computes precisions of drawn corpora in float32.
template <class Real>
struct Counts {
  double sys_len = 0;
  double ref_len = 0;
  std::array<Real, kBleuOrder> correct{};
  std::array<Real, kBleuOrder> total{};
};

template <class Real>
double brevity_penalty(const Counts<Real>& counts) {
  if (counts.sys_len >= counts.ref_len) return 1;
  return counts.sys_len > 0 ? std::exp(1 - counts.ref_len / counts.sys_len) : 0;
}

template <class Real>
double score_of(const Counts<Real>& counts, const BleuOptions& options,
                std::array<double, kBleuOrder>& precisions) {
  if (counts.correct == std::array<Real, kBleuOrder>{}) return 0;
  constexpr Real kPercent = 100;
  Real zero_factor = 1;
  size_t order = kBleuOrder;
  for (size_t n = 0; n < kBleuOrder; ++n) {
    Real correct = counts.correct[n];
    Real total = counts.total[n];
    if (options.smoothing == BleuSmoothing::kAddK && n > 0) {
      correct += static_cast<Real>(smoothing_value(options));
      total += static_cast<Real>(smoothing_value(options));
    }
    if (total == 0) break;
    if (options.effective_order) order = n + 1;
    if (correct != 0) {
      precisions[n] = kPercent * correct / total;
    } else if (options.smoothing == BleuSmoothing::kExp) {
      zero_factor *= 2;
      precisions[n] = kPercent / (zero_factor * total);
    } else if (options.smoothing == BleuSmoothing::kFloor) {
      precisions[n] = static_cast<Real>(100 * smoothing_value(options)) / total;
    }
  }
  double log_sum = 0;
  for (size_t n = 0; n < order; ++n) {
    const double p = precisions[n];
    log_sum += p == 0 ? -9999999999.0 : std::log(p);
  }
  return brevity_penalty(counts) * std::exp(log_sum / static_cast<double>(order));
}

// What follows the score in sacreBLEU's line.
std::string details(const BleuScore& score) {
  std::string text;
  for (size_t n = 0; n < kBleuOrder; ++n) {
    text += (n == 0 ? "" : "/") + decimals(score.precisions[n], 1);
  }
  return text + " (BP = " + decimals(score.bp, 3) + " ratio = " + decimals(score.ratio, 3) +
         " hyp_len = " + std::to_string(score.sys_len) +
         " ref_len = " + std::to_string(score.ref_len) + ")";
}

ScoreText text_of(const BleuScore& score, const std::string& signature, int width) {
  return {.name = "BLEU",
          .score = score.score,
          .confidence = score.confidence,
          .width = width,
          .signature = signature,
          .details = details(score)};
}

}  // namespace

BleuTokenizer parse_bleu_tokenizer(const std::string& text) {
  const auto found = std::find(kTokenizers.begin(), kTokenizers.end(), text);
  if (found == kTokenizers.end())
    throw ConfigError("--tokenize " + text + ": expected 13a, intl, zh, char or none");
  return static_cast<BleuTokenizer>(found - kTokenizers.begin());
}

std::string to_string(BleuTokenizer tokenizer) {
  return kTokenizers[static_cast<size_t>(tokenizer)];
}

std::optional<std::string> tokenizer_warning(BleuTokenizer tokenizer,
                                             std::span<const std::string> references) {
  constexpr double kMuch = 0.25;
  if (tokenizer != BleuTokenizer::k13a || han_share(references) < kMuch) return std::nullopt;
  return "--tokenize 13a: the references are Chinese, whose words 13a does not separate: expected "
         "--tokenize zh";
}

BleuSmoothing parse_bleu_smoothing(const std::string& text) {
  const auto found = std::find(kSmoothings.begin(), kSmoothings.end(), text);
  if (found == kSmoothings.end())
    throw ConfigError("--smooth-method " + text + ": expected exp, floor, add-k or none");
  return static_cast<BleuSmoothing>(found - kSmoothings.begin());
}

std::string to_string(BleuSmoothing smoothing) {
  return kSmoothings[static_cast<size_t>(smoothing)];
}

BleuStats& BleuStats::operator+=(const BleuStats& other) {
  sys_len += other.sys_len;
  ref_len += other.ref_len;
  for (size_t n = 0; n < kBleuOrder; ++n) {
    correct[n] += other.correct[n];
    total[n] += other.total[n];
  }
  return *this;
}

BleuStats bleu_statistics(std::string_view hypothesis, std::span<const std::string> references,
                          const BleuOptions& options) {
  TORCH_CHECK_VALUE(!references.empty(), "BLEU expected at least one reference, got none");
  TokenNumbers numbers;
  const std::vector<int32_t> hypothesis_tokens = number_tokens(hypothesis, options, numbers);
  BleuStats stats;
  stats.sys_len = static_cast<int64_t>(hypothesis_tokens.size());
  NgramCounts most;  // For each n-gram, its count in the reference that has most of it.
  int64_t closest = INT64_MAX;
  for (const std::string& reference : references) {
    const std::vector<int32_t> tokens = number_tokens(reference, options, numbers);
    for (const auto& [ngram, count] : count_ngrams(tokens)) {
      int64_t& kept = most[ngram];
      kept = std::max(kept, count);
    }
    const auto length = static_cast<int64_t>(tokens.size());
    const int64_t distance = std::abs(stats.sys_len - length);
    if (distance < closest || (distance == closest && length < stats.ref_len)) {
      closest = distance;
      stats.ref_len = length;
    }
  }
  for (const auto& [ngram, count] : count_ngrams(hypothesis_tokens)) {
    const size_t n = order_index(ngram);
    stats.total[n] += count;
    const auto found = most.find(ngram);
    if (found != most.end()) stats.correct[n] += std::min(count, found->second);
  }
  return stats;
}

BleuScore bleu_score(const BleuStats& stats, const BleuOptions& options) {
  BleuScore result;
  result.sys_len = stats.sys_len;
  result.ref_len = stats.ref_len;
  Counts<double> counts{static_cast<double>(stats.sys_len), static_cast<double>(stats.ref_len)};
  std::ranges::copy(stats.correct, counts.correct.begin());
  std::ranges::copy(stats.total, counts.total.begin());
  result.ratio = stats.ref_len > 0 ? counts.sys_len / counts.ref_len : 0.0;
  result.bp = brevity_penalty(counts);
  result.score = score_of(counts, options, result.precisions);
  return result;
}

Confidence bleu_confidence(std::span<const BleuStats> sentences, const BleuOptions& options,
                           const BootstrapOptions& bootstrap) {
  constexpr size_t kWidth = 2 + 2 * kBleuOrder;
  std::vector<int64_t> all;
  for (const BleuStats& stats : sentences) {
    all.push_back(stats.sys_len);
    all.push_back(stats.ref_len);
    all.insert(all.end(), stats.correct.begin(), stats.correct.end());
    all.insert(all.end(), stats.total.begin(), stats.total.end());
  }
  return text::bootstrap(all, kWidth, bootstrap, [&](std::span<const float> sums) {
    Counts<float> counts{sums[0], sums[1]};
    std::copy_n(&sums[2], kBleuOrder, counts.correct.begin());
    std::copy_n(&sums[2 + kBleuOrder], kBleuOrder, counts.total.begin());
    std::array<double, kBleuOrder> precisions{};
    return score_of(counts, options, precisions);
  });
}

std::string signature(const BleuOptions& options, int num_references,
                      const std::optional<BootstrapOptions>& bootstrap) {
  std::string smoothing = to_string(options.smoothing);
  if (options.smoothing == BleuSmoothing::kFloor || options.smoothing == BleuSmoothing::kAddK) {
    smoothing += "[" + decimals(smoothing_value(options), 2) + "]";
  }
  return "nrefs:" + std::to_string(num_references) + bootstrap_signature(bootstrap) +
         "|case:" + (options.lowercase ? "lc" : "mixed") +
         "|eff:" + (options.effective_order ? "yes" : "no") +
         "|tok:" + to_string(options.tokenizer) + "|smooth:" + smoothing + "|version:2.6.0";
}

std::string format_score(const BleuScore& score, int width) {
  return score_number(text_of(score, "", width));
}

std::string format(const BleuScore& score, const std::string& signature, int width) {
  return score_line(text_of(score, signature, width));
}

std::string format_json(const BleuScore& score, const std::string& signature, int width) {
  return score_json(text_of(score, signature, width));
}

}  // namespace cohort::text
