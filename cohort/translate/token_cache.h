// SPDX-License-Identifier: Apache-2.0
// Training text as ids, in a file: tokenised once, then mapped into memory by every start.
//
// The file is safetensors, so other tools can read it: "ids" (int16 if both vocabularies have at
// most 32768 pieces, else int32; each pair's source, then its target, without marks), "lengths"
// int32 [N, 2] with end marks, "offsets" int64 [N] where a pair's ids begin, and in the metadata
// what it was made of and how many pairs came to what.
//
// What is trusted, and why:
// - The file: nothing in it. Every start reads all of it and compares SHA-256 sums of tensors and
//   metadata. SHA-256 is as fast as a disk here (1.7 GB/s on one core that has instructions for
//   it).
// - Vocabularies: nothing. Their SHA-256 is compared.
// - Text: that a file whose device, inode, size, time of change of content (mtime) and of status
//   (ctime) are all what they were has not been changed. The system sets ctime at every write and
//   nobody can set it back but by the clock; a change within the clock's tick after the file was
//   read is not trusted to show: text that was younger than 2 s when the cache was made is read
//   again by every start. Where one of the five differs, the text's SHA-256 decides, so copied or
//   touched text costs a pass of reading, not of tokenising.
#pragma once
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cohort/comm/process_group.h"
#include "cohort/text/tokenizer.h"
#include "cohort/translate/corpus.h"

namespace cohort::translate {

/// Which pairs are trained on.
struct LengthOptions {
  int64_t max_length = 0;        ///< Most tokens on a side, without the end mark; 0: no limit.
  bool max_length_crop = false;  ///< Longer sides are cut to it; otherwise the pair is dropped.
};

/// What became of the pairs of a text: each is in one of the last four.
struct PairCounts {
  int64_t read = 0;  ///< The sum of those below.
  int64_t kept = 0;  ///< Whole.
  int64_t cropped = 0;
  int64_t dropped_long = 0;
  int64_t dropped_empty = 0;  ///< A side was empty or only white space.
};

/// Calls `visit(name, count)` with each of `counts`' fields: the one list of them.
template <class Counts, class Visit>
void visit_counts(Counts& counts, Visit visit) {
  visit("read", counts.read);
  visit("kept", counts.kept);
  visit("cropped", counts.cropped);
  visit("dropped_long", counts.dropped_long);
  visit("dropped_empty", counts.dropped_empty);
}

/// What a cache is made of.
struct TokenCacheInputs {
  std::vector<std::filesystem::path> text;          ///< As for_each_pair takes them.
  std::vector<std::filesystem::path> vocabularies;  ///< Source and target.
  LengthOptions lengths;
};

/// The training text of a run.
struct TrainingText {
  Corpus corpus;
  PairCounts counts;
  std::string sha256;          ///< Of lengths and ids.
  std::string origin;          ///< "used" or "built", and why: for the log, one line.
  bool was_bad = false;        ///< A file was there that could not be used.
  std::filesystem::path file;  ///< The cache.
};

/// Returns where the cache is: in `cache_dir` under a name that depends on the inputs, so runs can
/// share the folder; without `cache_dir` in `model_dir`, as train-tokens.safetensors.
std::filesystem::path token_cache_file(const TokenCacheInputs& inputs, const std::string& cache_dir,
                                       const std::string& model_dir);

/// A cache that was looked at: its text, or why it cannot be used.
struct OpenedCache {
  std::optional<TrainingText> text;
  std::string why;  ///< Empty: there is no file.
};

/// Where the progress of a tokenisation is reported.
struct BuildNews {
  /// Called on the thread that builds with the pairs that are done; may be empty.
  std::function<void(int64_t num_pairs)> tell;
  std::chrono::milliseconds interval{30'000};  ///< Between two calls, and before the first.
};

/// Opens `file`, if it is whole and made of `inputs`. Text whose state has changed (see the top of
/// this file) is read once, for its checksum. Local.
/// Errors: ConfigError that names an input that cannot be read, or a text that is no regular file.
OpenedCache open_token_cache(const std::filesystem::path& file, const TokenCacheInputs& inputs);

/// Tokenises the text, which is read twice (checksum, tokens), and writes `file`, atomically.
///
/// Local; runs on all cores that the process may use.
/// Memory: that of a few thousand pairs. Disk: while it is written, twice the file's size.
/// Errors: ConfigError: as for_each_pair; a text is no regular file; every pair is too long; text
///         that changes meanwhile; the folder cannot be made, or not be written in. c10::Error that
///         names the file if it cannot be written (disk full ...); then neither it nor a temporary
///         file is left, and an earlier file stays as it was.
void build_token_cache(const std::filesystem::path& file, const TokenCacheInputs& inputs,
                       const text::Tokenizer& source, const text::Tokenizer& target,
                       const BuildNews& news = {});

/// Returns the text of the cache `file`, which the first rank of each host checks, and builds if
/// need be, while the others wait. `news` are told by that rank.
///
/// Collective; blocks. Errors: on every rank, those of opening and building on any (run_on_ranks);
///         ConfigError if hosts have different text.
TrainingText cached_text(const std::filesystem::path& file, const TokenCacheInputs& inputs,
                         const text::Tokenizer& source, const text::Tokenizer& target,
                         const comm::ProcessGroup& group, const BuildNews& news = {});

}  // namespace cohort::translate
