// SPDX-License-Identifier: Apache-2.0
// The table that a search's shortlist is made of: learnt from training text, read as text, kept in a file.
//
// The file is safetensors: "offsets" int64 [source pieces + 1], "targets" int32 and "probabilities" float32, each source piece's
// one after the other, the likeliest first; "frequent" int32, target pieces, the most frequent first. In the metadata "format" is
// "cohort shortlist 1"; "vocabulary.source_sha256" and "vocabulary.target_sha256" are of the vocabularies' files;
// "target_pieces" is how many there are; "best" how many targets of a source piece were kept at most; and summed_file.h tells the
// sums.
#pragma once
#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "cohort/nmt/shortlist.h"
#include "cohort/text/tokenizer.h"
#include "cohort/translate/corpus.h"

namespace cohort::translate {

struct LexicalOptions {
  int64_t rounds = 5;           ///< Of expectation maximisation, at least 1.
  int64_t best = 200;           ///< Targets kept of each source piece.
  int64_t workspace_mib = 512;  ///< Memory for counts of pairs of pieces, at least 1.
  /// Called after each round with its number, from 1, and the mean of log p (natural) of a target piece before it, of those that
  /// have pairs left.
  std::function<void(int64_t round, double log_prob)> on_round;
};

/// Learns p(target piece | source piece) from all pairs of `corpus`, by IBM model 1. The source's end id stands for the empty word.
/// `frequent` are the target pieces that occur.
///
/// Pairs of pieces that do not fit into the memory are given up in the first round: whenever it is full, the half of them with the
/// smallest counts.
/// The same corpus gives the same table. Local; one thread.
/// Source: Brown et al. 1993, Computational Linguistics 19(2), section 4.1.
nmt::LexicalTable learn_lexical_table(const Corpus& corpus, int64_t source_pieces,
                                      int64_t target_pieces, const LexicalOptions& options = {});

/// What a text gives, and how many of its lines have a piece that the vocabularies lack: they are left out.
struct LexicalText {
  nmt::LexicalTable table;
  int64_t num_unknown = 0;
};

/// Reads lines "target source probability", as Marian's extract-lex writes them, pieces by their spelling; the source NULL is the
/// empty word, lines with the target NULL are left out. `frequent` are all pieces but the special ones, in the vocabulary's order.
/// Errors: ConfigError that names file and line: cannot be read, not three fields, no probability in [0, 1]; no line has known
///         pieces.
LexicalText read_lexical_text(const std::filesystem::path& path, const text::Tokenizer& source,
                              const text::Tokenizer& target, int64_t best);

/// Writes `table` to `path`, atomically. `vocabularies`: source and target.
/// Errors: ConfigError if the folder is not writable; c10::Error: writing failed.
void write_lexical_table(const std::filesystem::path& path, const nmt::LexicalTable& table,
                         const std::vector<std::filesystem::path>& vocabularies);

/// Reads it back.
/// Errors: ConfigError that names the file: cannot be read, is damaged, or was made for other vocabularies.
nmt::LexicalTable read_lexical_table(const std::filesystem::path& path,
                                     const std::vector<std::filesystem::path>& vocabularies);

}  // namespace cohort::translate
