// Reads sentence pairs from the three forms in which parallel text comes.
#pragma once
#include <cstdint>
#include <filesystem>
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

/// Reads sentence pairs, in the files' order, without changing a sentence.
///
/// Two files: source lines and target lines. One file: by its extension, ".tsv" with
/// source<TAB>target lines, or ".json" with [["source", "target"], ...]. Lines as split_lines reads
/// them: CRLF, a byte order mark and a missing last line end are fine.
/// Errors: ConfigError, one line that names the file, and the line (from 1) or item (from 0):
///         cannot be read; not valid UTF-8; line counts differ (both counts, both files); not
///         exactly one tab; not JSON of this form; not one or two files; no pair left.
ParallelText read_parallel_text(std::span<const std::filesystem::path> paths);

}  // namespace cohort::text
