// SPDX-License-Identifier: Apache-2.0
#include "cohort/text/chrf.h"

#include <algorithm>
#include <c10/util/Exception.h>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cohort/text/lower_case.h"
#include "cohort/text/score_text.h"
#include "cohort/text/utf8.h"

namespace cohort::text {
namespace {

constexpr double kEps = 1e-16;

// A word's number, from 0 in the order of appearance.
using WordNumbers = std::unordered_map<std::u32string, char32_t>;

// What n-grams are taken from. Words are numbers so that both are strings to count().
struct Sequences {
  std::u32string letters;
  std::u32string words;
};

void check(const ChrfOptions& options) {
  TORCH_CHECK_VALUE(options.char_order >= 1 && options.char_order <= kMaxChrfCharOrder,
                    "chrF expected a character order of 1 to ", kMaxChrfCharOrder, ", got ",
                    options.char_order);
  TORCH_CHECK_VALUE(options.word_order >= 0 && options.word_order <= kMaxChrfWordOrder,
                    "chrF expected a word order of 0 to ", kMaxChrfWordOrder, ", got ",
                    options.word_order);
  TORCH_CHECK_VALUE(options.beta >= 0 && options.beta <= 1000,
                    "chrF expected a beta of 0 to 1000, got ", options.beta);
}

bool is_punctuation(char32_t c) {
  return (c >= '!' && c <= '/') || (c >= ':' && c <= '@') || (c >= '[' && c <= '`') ||
         (c >= '{' && c <= '~');
}

// Appends what stands between white space, cut once where punctuation ends or begins it.
void append_words(const std::u32string& piece, std::vector<std::u32string>& words) {
  if (piece.size() > 1 && is_punctuation(piece.back())) {
    words.push_back(piece.substr(0, piece.size() - 1));
    words.push_back(piece.substr(piece.size() - 1));
  } else if (piece.size() > 1 && is_punctuation(piece.front())) {
    words.push_back(piece.substr(0, 1));
    words.push_back(piece.substr(1));
  } else if (!piece.empty()) {
    words.push_back(piece);
  }
}

std::vector<std::u32string> words_of(const std::u32string& letters) {
  std::vector<std::u32string> words;
  auto start = letters.begin();
  while (start != letters.end()) {
    const auto end = std::find_if(start, letters.end(), is_space);
    append_words(std::u32string(start, end), words);
    start = std::find_if_not(end, letters.end(), is_space);
  }
  return words;
}

Sequences read(std::string_view segment, const ChrfOptions& options, WordNumbers& numbers) {
  Sequences result;
  result.letters = decode_utf8(options.lowercase ? lower_case(segment) : std::string(segment));
  if (options.word_order > 0) {
    for (std::u32string& word : words_of(result.letters)) {
      const auto next = static_cast<char32_t>(numbers.size());
      result.words.push_back(numbers.try_emplace(std::move(word), next).first->second);
    }
  }
  if (!options.whitespace) std::erase_if(result.letters, is_space);
  return result;
}

// Writes the three counts of the n-grams of order `n`.
void count(std::u32string_view hypothesis, std::u32string_view reference, size_t n,
           int64_t* counts) {
  if (reference.size() < n) return;
  std::unordered_map<std::u32string_view, int64_t> unmatched;
  for (size_t i = 0; i + n <= reference.size(); ++i) ++unmatched[reference.substr(i, n)];
  counts[1] = static_cast<int64_t>(reference.size() - n + 1);
  for (size_t i = 0; i + n <= hypothesis.size(); ++i) {
    ++counts[0];
    const auto found = unmatched.find(hypothesis.substr(i, n));
    if (found == unmatched.end() || found->second == 0) continue;
    --found->second;
    ++counts[2];
  }
}

// The score from 0 to 100, of three counts for each order. Of several references the best is chosen
// by it, so the order of the operations is sacreBLEU's: other rounding would choose another among
// near equals. sacreBLEU computes scores of drawn corpora in float32.
template <class Real>
Real f_score(const Real* counts, const ChrfOptions& options) {
  const int order = options.char_order + options.word_order;
  const Real factor = static_cast<Real>(options.beta) * static_cast<Real>(options.beta);
  Real sum = 0;
  Real precisions = 0;
  Real recalls = 0;
  int effective_order = 0;
  for (int i = 0; i < order; ++i, counts += 3) {
    const Real hypothesis = counts[0], reference = counts[1], matched = counts[2];
    const Real precision = hypothesis > 0 ? matched / hypothesis : static_cast<Real>(kEps);
    const Real recall = reference > 0 ? matched / reference : static_cast<Real>(kEps);
    const Real denominator = factor * precision + recall;
    sum +=
        denominator > 0 ? (1 + factor) * precision * recall / denominator : static_cast<Real>(kEps);
    if (hypothesis > 0 && reference > 0) {
      precisions += precision;
      recalls += recall;
      ++effective_order;
    }
  }
  if (options.eps_smoothing) return 100 * sum / static_cast<Real>(order);
  if (precisions + recalls == 0) return 0;
  const Real precision = precisions / static_cast<Real>(effective_order);
  const Real recall = recalls / static_cast<Real>(effective_order);
  return 100 * ((1 + factor) * precision * recall / (factor * precision + recall));
}

double f_score(const ChrfStats& stats, const ChrfOptions& options) {
  std::array<double, std::tuple_size_v<decltype(stats.counts)>> counts{};
  std::ranges::copy(stats.counts, counts.begin());
  return f_score(counts.data(), options);
}

// Volatile, for GCC 12 leaves the rounding out where it computes two of them at once.
double to_float32(double value) {
  const volatile auto rounded = static_cast<float>(value);
  return rounded;
}

ScoreText text_of(const ChrfScore& score, const std::string& signature, int width) {
  return {.name = score.name,
          .score = score.score,
          .confidence = score.confidence,
          .width = width,
          .signature = signature,
          .details = ""};
}

}  // namespace

ChrfStats& ChrfStats::operator+=(const ChrfStats& other) {
  for (size_t i = 0; i < counts.size(); ++i) counts[i] += other.counts[i];
  return *this;
}

ChrfStats chrf_statistics(std::string_view hypothesis, std::span<const std::string> references,
                          const ChrfOptions& options) {
  check(options);
  TORCH_CHECK_VALUE(!references.empty(), "chrF expected at least one reference, got none");
  WordNumbers numbers;
  const Sequences found = read(hypothesis, options, numbers);
  ChrfStats best;
  double best_score = -1;
  for (const std::string& reference : references) {
    const Sequences expected = read(reference, options, numbers);
    ChrfStats stats;
    int64_t* counts = stats.counts.data();
    for (int n = 1; n <= options.char_order; ++n, counts += 3) {
      count(found.letters, expected.letters, static_cast<size_t>(n), counts);
    }
    for (int n = 1; n <= options.word_order; ++n, counts += 3) {
      count(found.words, expected.words, static_cast<size_t>(n), counts);
    }
    const double score = f_score(stats, options);
    if (score > best_score) {
      best_score = score;
      best = stats;
    }
  }
  return best;
}

ChrfScore chrf_score(const ChrfStats& stats, const ChrfOptions& options) {
  check(options);
  return {.score = f_score(stats, options),
          .name = "chrF" + std::to_string(options.beta) +
                  std::string(static_cast<size_t>(options.word_order), '+')};
}

Confidence chrf_confidence(std::span<const ChrfStats> sentences, const ChrfOptions& options,
                           const BootstrapOptions& bootstrap) {
  check(options);
  std::vector<int64_t> all;
  for (const ChrfStats& stats : sentences)
    all.insert(all.end(), stats.counts.begin(), stats.counts.end());
  const Confidence found = text::bootstrap(
      all, ChrfStats().counts.size(), bootstrap,
      [&](std::span<const float> sums) { return double{f_score(sums.data(), options)}; });
  return {.mean = to_float32(found.mean), .half_width = to_float32(found.half_width)};
}

std::string signature(const ChrfOptions& options, int num_references,
                      const std::optional<BootstrapOptions>& bootstrap) {
  return "nrefs:" + std::to_string(num_references) + bootstrap_signature(bootstrap) +
         "|case:" + (options.lowercase ? "lc" : "mixed") +
         "|eff:" + (options.eps_smoothing ? "no" : "yes") +
         "|nc:" + std::to_string(options.char_order) + "|nw:" + std::to_string(options.word_order) +
         "|space:" + (options.whitespace ? "yes" : "no") + "|version:2.6.0";
}

std::string format_score(const ChrfScore& score, int width) {
  return score_number(text_of(score, "", width));
}

std::string format(const ChrfScore& score, const std::string& signature, int width) {
  return score_line(text_of(score, signature, width));
}

std::string format_json(const ChrfScore& score, const std::string& signature, int width) {
  return score_json(text_of(score, signature, width));
}

}  // namespace cohort::text
