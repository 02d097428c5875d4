// SPDX-License-Identifier: Apache-2.0
// Reads sentence pairs from the three forms in which parallel text comes.
#pragma once
#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "cohort/text/text_file.h"

namespace cohort::text {

/// Sentence pairs: source[i] and target[i] belong together; equal lengths.
struct ParallelText {
  std::vector<std::string> source;
  std::vector<std::string> target;
  int64_t num_dropped_empty = 0;  ///< Pairs left out because a side was empty or only white space.
};

/// Takes one pair, whose strings it may move from.
using TakePair = std::function<void(std::string& source, std::string& target)>;

/// Calls `take` with each sentence pair, in the files' order, without changing a sentence; pairs
/// with a side that is empty or only white space are left out. Returns how many were.
///
/// Two files: source lines and target lines. One file: by its extension, ".tsv" with
/// source<TAB>target lines, or ".json" with [["source", "target"], ...]. Lines as LineReader gives
/// them: CRLF, a byte order mark and a missing last line end are fine.
/// Each file is read once, from its start to its end.
/// Memory: one pair's, however long the files, or the lines of JSON, are.
/// Errors: ConfigError, one line that names the file, and the line (from 1) or item (from 0), found
///         while or after pairs before it were taken: cannot be read; not valid UTF-8; line counts
///         differ (both counts, both files); not exactly one tab; not JSON of this form; not one or
///         two files; a name in ".gz"; no pair left.
int64_t for_each_pair(std::span<const std::filesystem::path> paths, const TakePair& take);

/// Refuses what cannot be read twice, a pipe say, before anything is read of it.
/// Errors: ConfigError that names the first of `paths` that is missing or no regular file.
void check_regular_files(std::span<const std::filesystem::path> paths);

/// Returns all pairs of for_each_pair.
/// Errors: as that.
ParallelText read_parallel_text(std::span<const std::filesystem::path> paths);

/// Returns `most` of the pairs at most, each as likely as any other, the same ones for the same
/// text; all of them, in order, if there are no more.
/// Memory: that of what is returned.
/// Errors: as for_each_pair.
ParallelText sample_parallel_text(std::span<const std::filesystem::path> paths, int64_t most);

}  // namespace cohort::text
