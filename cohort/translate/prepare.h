// SPDX-License-Identifier: Apache-2.0
// What a run makes of its text before it trains: vocabularies and the token cache.
#pragma once
#include <filesystem>
#include <vector>

#include "cohort/comm/process_group.h"
#include "cohort/translate/run_folder.h"
#include "cohort/translate/token_cache.h"
#include "cohort/translate/training.h"

namespace cohort::translate {

/// Returns the vocabularies' files that `options` ask for, see vocab_files in run_folder.h.
std::vector<std::filesystem::path> vocab_files_of(const TrainingOptions& options);

/// Returns the sizes of the source and the target vocabulary: of one whose file exists its own, of
/// one that will be made what options.model says. Local; reads the files.
/// Errors: as vocab_files, and those of a file that is no vocabulary.
std::vector<int64_t> vocabulary_sizes(const TrainingOptions& options);

/// Makes the vocabularies that are missing (`rebuild`: all) on a sample of the text of
/// options.sentencepiece_max_lines pairs at most, or uses those that are there.
///
/// Collective; blocks while rank 0 works. The text is read once if a vocabulary is made, else not
/// at all. Rank 0 logs each that it makes before it begins, unless options.quiet.
/// Errors: ConfigError for a path in a folder that does not exist; as check_regular_files,
///         for_each_pair and make_tokenizers.
MadeTokenizers prepare_vocabularies(const TrainingOptions& options, bool rebuild,
                                    const comm::ProcessGroup& group);

/// Makes the token cache of the training text, or uses the one that is there.
///
/// Collective; blocks while one rank of each host works. The text is never held in memory. It is
/// read twice if the cache is made (checksum, tokens), and once more before that if there is one
/// that text may have changed since; not at all if the cache is used and the text's state is what
/// it was (see token_cache.h). Rank 0 logs how far it is every 30 s, unless options.quiet.
/// Errors: as cached_text.
TrainingText prepare_tokens(const TrainingOptions& options, const MadeTokenizers& vocabularies,
                            const comm::ProcessGroup& group);

}  // namespace cohort::translate
