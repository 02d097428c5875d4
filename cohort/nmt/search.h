// SPDX-License-Identifier: Apache-2.0
// Search for the likeliest translations: beam search, of which greedy search is the beam of one; or
// sampling, which draws them at random.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "cohort/nmt/sampling.h"
#include "cohort/nmt/shortlist.h"
#include "cohort/nmt/transformer.h"

namespace cohort::nmt {

/// A translation's score is  log p / length^normalize - word_penalty * length,  where the length
/// counts the end id: without them short translations win, for every token costs probability.
struct SearchOptions {
  /// Unfinished translations kept per sentence, at least 1; in sampling: translations drawn.
  int64_t beam_size = 1;
  double normalize = 0;          ///< Exponent of the length; 0 compares log p itself.
  double word_penalty = 0;       ///< Per token; below 0 it lengthens.
  bool allow_unk = false;        ///< true: the id for unknown pieces may be chosen.
  double max_length_factor = 3;  ///< At most this times the source's tokens, plus 10 ...
  int64_t max_length = 256;      ///< ... and at most so many tokens, the end id not counted.
  int64_t min_length = 0;        ///< At least so many, as far as that and the candidates allow.
  /// false: nobody asks for the hypotheses' log_prob and score, which greedy search then leaves without meaning. It is a little
  /// faster.
  bool scores = true;
  SamplingOptions sampling;
  /// Unless null, a translation has only its sentence's candidates, and their probabilities add up to 1. On the CPU, for a whole
  /// model; not in sampling.
  std::shared_ptr<const Shortlist> shortlist{};
};

/// Throws ConfigError that names the flag if a value is out of range.
void validate(const SearchOptions& options);

struct Hypothesis {
  std::vector<int32_t> tokens;  ///< Without begin and end.
  double log_prob = 0;          ///< Natural logarithm, the end id's included.
  double score = 0;             ///< What hypotheses are ordered by.
};

/// The best translations of the batch's sentences. Each step extends every sentence's `beam_size`
/// likeliest beginnings by one token, with keys and values of the earlier ones kept; a sentence
/// leaves the batch once `beam_size` of its translations have ended. At the longest allowed length
/// the end id follows, whatever its probability. In sampling each translation draws its own tokens.
///
/// A sentence's translations do not depend on the batch it is in: not on the other sentences, their
/// order or their number. (On other devices than the CPU its scores may round otherwise.) In
/// sampling, `numbers` names the sentences: a sentence's random numbers depend on the seed and on its
/// own number, which is its row unless given.
///
/// Local for a whole model; for a tensor-parallel one collective: every shard makes the same call.
/// Puts the model in evaluation mode and back. No gradients.
/// Devices: the source tensors are on the CPU, the model anywhere. On another device a step copies
///          its tokens there and its candidates back, once each; in sampling, all scores.
/// Errors:  ConfigError for bad options, a shortlist of other vocabularies or one that the model cannot use among them; c10::ValueError for source tensors elsewhere; c10::Error if
///          the model's scores are not finite.
/// Returns: by row of `source_BS`, `beam_size` hypotheses, the greatest score first: fewer, but at least one, only if the
///          vocabulary or the sentence's candidates are too few.
std::vector<std::vector<Hypothesis>> search(Transformer& model, const at::Tensor& source_BS,
                                            const at::Tensor& source_lengths_B,
                                            const SearchOptions& options = {},
                                            std::span<const int64_t> numbers = {});

}  // namespace cohort::nmt
