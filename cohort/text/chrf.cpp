#include "cohort/text/chrf.h"

#include <algorithm>
#include <c10/util/Exception.h>
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
                    "chrF expected a character order of 1 to ", kMaxChrfCharOrder, ", found ",
                    options.char_order);
  TORCH_CHECK_VALUE(options.word_order >= 0 && options.word_order <= kMaxChrfWordOrder,
                    "chrF expected a word order of 0 to ", kMaxChrfWordOrder, ", found ",
                    options.word_order);
  TORCH_CHECK_VALUE(options.beta >= 0 && options.beta <= 1000,
                    "chrF expected a beta of 0 to 1000, found ", options.beta);
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

// The score from 0 to 100. Of several references the best is chosen by it, so the order of the
// operations is sacreBLEU's: other rounding would choose another among near equals.
double f_score(const ChrfStats& stats, const ChrfOptions& options) {
  const int order = options.char_order + options.word_order;
  const double factor = static_cast<double>(options.beta) * options.beta;
  double sum = 0;
  double precisions = 0;
  double recalls = 0;
  int effective_order = 0;
  for (int i = 0; i < order; ++i) {
    const int64_t* counts = &stats.counts[3 * static_cast<size_t>(i)];
    const auto hypothesis = static_cast<double>(counts[0]);
    const auto reference = static_cast<double>(counts[1]);
    const auto matched = static_cast<double>(counts[2]);
    const double precision = hypothesis > 0 ? matched / hypothesis : kEps;
    const double recall = reference > 0 ? matched / reference : kEps;
    const double denominator = factor * precision + recall;
    sum += denominator > 0 ? (1 + factor) * precision * recall / denominator : kEps;
    if (hypothesis > 0 && reference > 0) {
      precisions += precision;
      recalls += recall;
      ++effective_order;
    }
  }
  if (options.eps_smoothing) return 100 * sum / order;
  if (precisions + recalls == 0) return 0;
  const double precision = precisions / effective_order;
  const double recall = recalls / effective_order;
  return 100 * ((1 + factor) * precision * recall / (factor * precision + recall));
}

}  // namespace

ChrfStats& ChrfStats::operator+=(const ChrfStats& other) {
  for (size_t i = 0; i < counts.size(); ++i) counts[i] += other.counts[i];
  return *this;
}

ChrfStats chrf_statistics(std::string_view hypothesis, std::span<const std::string> references,
                          const ChrfOptions& options) {
  check(options);
  TORCH_CHECK_VALUE(!references.empty(), "chrF expected at least one reference, found none");
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

std::string signature(const ChrfOptions& options, int num_references) {
  return "nrefs:" + std::to_string(num_references) +
         "|case:" + (options.lowercase ? "lc" : "mixed") +
         "|eff:" + (options.eps_smoothing ? "no" : "yes") +
         "|nc:" + std::to_string(options.char_order) + "|nw:" + std::to_string(options.word_order) +
         "|space:" + (options.whitespace ? "yes" : "no") + "|version:2.6.0";
}

std::string format_score(const ChrfScore& score, int width) {
  return decimals(score.score, width);
}

std::string format(const ChrfScore& score, const std::string& signature, int width) {
  return score.name + "|" + signature + " = " + format_score(score, width);
}

std::string format_json(const ChrfScore& score, const std::string& signature, int width) {
  return score_json({.name = score.name,
                     .score = format_score(score, width),
                     .signature = signature,
                     .details = ""});
}

}  // namespace cohort::text
