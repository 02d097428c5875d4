// SPDX-License-Identifier: Apache-2.0
// How likely a model finds given translations.
#pragma once
#include <cstdint>
#include <vector>

#include "cohort/nmt/transformer.h"
#include "cohort/translate/corpus.h"

namespace cohort::translate {

/// Log p (natural) of each token of each target sentence of `corpus` and, last, of its end mark,
/// given the source sentence and the tokens before. By sentence, in the corpus's order.
///
/// The sum of a sentence is what nmt::search calls log_prob, and the mean of all is the negative of
/// evaluate()'s loss, but for the rounding of the compute type.
/// Local. The model is in evaluation mode meanwhile. Batches have at most `mini_batch_words` tokens
/// with padding.
std::vector<std::vector<double>> token_log_probs(nmt::Transformer& model, const Corpus& corpus,
                                                 int64_t mini_batch_words);

}  // namespace cohort::translate
