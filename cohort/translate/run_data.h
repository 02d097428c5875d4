// SPDX-License-Identifier: Apache-2.0
// A run's text, as training and validation use it.
#pragma once
#include <string>

#include "cohort/comm/process_group.h"
#include "cohort/text/parallel_text.h"
#include "cohort/translate/corpus.h"
#include "cohort/translate/run_checkpoints.h"
#include "cohort/translate/run_folder.h"
#include "cohort/translate/token_cache.h"
#include "cohort/translate/training.h"

namespace cohort::translate {

struct RunData {
  Tokenizers tokenizers;
  FreshFiles fresh;  ///< Vocabularies that were made, on rank 0.
  TrainingText train;
  Corpus valid;
  text::ParallelText valid_text;
  std::string valid_sha256;
  double seconds = 0;  ///< That it took to get here.
};

/// Text to validate on, and the checksums of its files in their order as they were read.
struct ValidText {
  text::ParallelText pairs;
  std::string sha256;
};

/// Local.
/// Errors: ConfigError, as text::read_parallel_text.
ValidText read_valid_text(const TrainingOptions& options);

/// Makes or loads vocabularies and tokens.
///
/// Collective; blocks. Errors: ConfigError for everything that is wrong with the text, a validation
///         sentence that the model cannot hold among it; as prepare_vocabularies, prepare_tokens.
RunData prepare_data(const TrainingOptions& options, ValidText valid_text, Start start,
                     const comm::ProcessGroup& group);

/// Puts the run's vocabularies into its folder: it can be moved, and later runs find them. Local,
/// for rank 0.
void keep_vocabularies(const TrainingOptions& options, FreshFiles& fresh);

}  // namespace cohort::translate
