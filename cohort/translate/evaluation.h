// SPDX-License-Identifier: Apache-2.0
// Distributed evaluation: every sentence once, on some rank; sums over ranks equal one process's.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "cohort/comm/process_group.h"
#include "cohort/nmt/search.h"
#include "cohort/nmt/transformer.h"
#include "cohort/text/bleu.h"
#include "cohort/text/chrf.h"
#include "cohort/text/tokenizer.h"
#include "cohort/translate/corpus.h"

namespace cohort::translate {

struct EvaluationOptions {
  int64_t mini_batch = 0;           ///< translate_all: most sentences of a batch; 0: no limit.
  int64_t mini_batch_words = 2048;  ///< Tokens of a batch, padding included.
  int64_t threads = 1;  ///< translate_all: how many batches at a time, each on a thread.
  nmt::SearchOptions search;
  int64_t first_number = 0;  ///< translate_all: number of the first source, for its random numbers.
  text::BleuOptions bleu;
  text::ChrfOptions chrf;
  bool translate = true;  ///< false: only the loss.
  /// evaluate: called after each of this rank's batches, with how many are done and how many there
  /// are.
  std::function<void(int64_t done, int64_t total)> on_batch;
};

struct Evaluation {
  double loss = 0;  ///< Mean of -log p over target tokens, without smoothing, natural logarithm.
  text::BleuScore bleu;
  text::ChrfScore chrf;
  std::vector<std::string> translations;  ///< On rank 0, in the corpus's order; empty elsewhere.
  /// This rank's time to compute the loss and to translate, without waiting for other ranks. Another
  /// device than the CPU may still compute the loss when the host translates, which waits for it.
  double loss_seconds = 0;
  double translate_seconds = 0;
};

/// Loss, BLEU and chrF of `model` on `corpus`, whose raw target text is `references`.
///
/// Collective; blocks. Every rank gets the same loss and scores. The model may be on any device; its
/// losses are read back once.
/// Errors: ConfigError on all ranks if they have different texts; PeerError.
Evaluation evaluate(nmt::Transformer& model, const Corpus& corpus,
                    const std::vector<std::string>& references, const text::Tokenizer& target,
                    const comm::ProcessGroup& group, const EvaluationOptions& options);

/// One of a sentence's translations.
struct Translation {
  std::string text;
  double log_prob = 0;  ///< Natural logarithm.
  double score = 0;     ///< By which they are ordered; see nmt::SearchOptions.
};

/// Translations of `sources` (ids without end mark), in order, each sentence's best first; an empty
/// source has one, the empty line. Local. With several `threads` the model must be on the CPU and in evaluation
/// mode; how many threads each of them uses besides is libtorch's setting.
std::vector<std::vector<Translation>> translate_all(
    nmt::Transformer& model, const std::vector<std::vector<int32_t>>& sources,
    const text::Tokenizer& target, const EvaluationOptions& options);

}  // namespace cohort::translate
