// The files of a run: where they are, and what a checkpoint's manifest says of the model.
#pragma once
#include <filesystem>
#include <string>
#include <vector>

#include "cohort/comm/process_group.h"
#include "cohort/nmt/options.h"
#include "cohort/text/parallel_text.h"
#include "cohort/text/tokenizer.h"
#include "cohort/train/checkpoint.h"

namespace cohort::translate {

struct Tokenizers {
  text::Tokenizer source;
  text::Tokenizer target;
};

/// Returns the two model files of a run: `vocabs`, or source.spm and target.spm in `model_dir`.
/// Errors: ConfigError if `vocabs` has neither no nor two entries.
std::vector<std::filesystem::path> vocab_files(const std::string& model_dir,
                                               const std::vector<std::filesystem::path>& vocabs);

/// Loads both tokenizers.
/// Errors: ConfigError that names a file that is damaged, or has another number of pieces than
/// `model`.
Tokenizers load_tokenizers(const std::vector<std::filesystem::path>& files,
                           const nmt::TransformerOptions& model);

/// Loads both tokenizers; rank 0 first trains one whose file is absent (`anew`: both), on its side
/// of `text`, with character coverage 0.9995 for Chinese and full for the rest. If one cannot be
/// trained, no file changes.
/// Collective; blocks while rank 0 trains.
/// Errors: ConfigError that names the side; if a file that was there has another number of pieces
/// than the model asks for; if one file that does not exist stands for both sides.
Tokenizers make_tokenizers(const std::vector<std::filesystem::path>& files,
                           const text::ParallelText& text, const nmt::TransformerOptions& model,
                           bool anew, comm::ProcessGroup& group);

/// What best/manifest.json says of the model, and back.
train::Facts facts_of(const nmt::TransformerOptions& model);
/// Errors: ConfigError that names the fact that is missing or no number.
nmt::TransformerOptions model_of(const train::Facts& facts);

}  // namespace cohort::translate
