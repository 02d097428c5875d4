// SPDX-License-Identifier: Apache-2.0
// How sure a score is: the confidence interval that sacreBLEU 2.6.0 finds by drawing sentences
// again, with the same draws to the last bit.
//
// Koehn 2004, Statistical Significance Tests for Machine Translation Evaluation, section 3.
#pragma once
#include <array>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

namespace cohort::text {

struct BootstrapOptions {
  int num_samples = 1000;  ///< Drawn corpora, each of as many sentences as there are; > 0.
  uint64_t seed = 12345;   ///< sacreBLEU's default.
};

/// Of a score: the mean over the drawn corpora, and half of the range in which 95 % of them are.
struct Confidence {
  double mean = 0;
  double half_width = 0;
};

/// Returns sacreBLEU's short form of a signature (bleu.h, chrf.h): "#:1|c:mixed|e:no|tok:13a ...".
std::string short_signature(const std::string& signature);

/// Draws corpora from sentences with replacement and scores each by `score_of` the sums of its
/// sentences' counts. `counts` are those of all sentences, each of `width` numbers; a sum is added
/// up in float32, as sacreBLEU's are. Local.
/// Cost:   num_samples times the number of sentences.
/// Errors: c10::ValueError if `counts` are no whole number of sentences, or none.
Confidence bootstrap(const std::vector<int64_t>& counts, size_t width,
                     const BootstrapOptions& options,
                     const std::function<double(std::span<const float>)>& score_of);

/// The random numbers of numpy's default_rng(seed).integers(0, below): PCG64, seeded through
/// SeedSequence, cut to a range by Lemire's method on 32 bits.
/// Source: O'Neill 2014, HMC-CS-2014-0905 (XSL-RR 128/64); Lemire 2019, arXiv:1805.10941.
class NumpyRandom {
 public:
  explicit NumpyRandom(uint64_t seed);
  /// Returns a number in [0, below); 0 < below < 2^32.
  uint32_t below(uint32_t below);

 private:
  __extension__ using Wide = unsigned __int128;

  uint64_t next_64();
  uint32_t next_32();

  Wide state_ = 0;
  Wide increment_ = 0;
  uint32_t kept_ = 0;  // the upper half of the last 64 bits
  bool has_kept_ = false;
};

}  // namespace cohort::text
