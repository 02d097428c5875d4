// SPDX-License-Identifier: Apache-2.0
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

/// Whether each side has a vocabulary of its own, or one serves both.
enum class Dictionary { kTwo, kJoined };

/// Returns the two model files of a run: `vocabs`, or source.spm and target.spm in `model_dir`. Of
/// a joined vocabulary both are the same path (and a run's target.spm is a copy).
/// Errors: ConfigError if `vocabs` has neither no nor two entries, or two that differ for kJoined.
std::vector<std::filesystem::path> vocab_files(const std::string& model_dir,
                                               const std::vector<std::filesystem::path>& vocabs,
                                               Dictionary dictionary = Dictionary::kTwo);

/// Loads both tokenizers.
/// Errors: ConfigError that names a file that is damaged, or has another number of pieces than
/// `model`.
Tokenizers load_tokenizers(const std::vector<std::filesystem::path>& files,
                           const nmt::TransformerOptions& model);

/// Vocabularies that were made for a run which may still be refused: "<file>.new-<id>" until `keep`.
/// Other runs may make the same ones.
class FreshFiles {
 public:
  /// `id`: of this run, the same on all ranks.
  explicit FreshFiles(const std::string& id) : suffix_(".new-" + id) {}
  FreshFiles(FreshFiles&&) = default;
  FreshFiles& operator=(FreshFiles&&) = delete;
  ~FreshFiles();  ///< Removes those that were not kept.

  std::filesystem::path beside(const std::filesystem::path& file) const;
  void add(const std::filesystem::path& file) { files_.push_back(file); }
  /// Where `file` is now: beside its place, or in it.
  std::filesystem::path now(const std::filesystem::path& file) const;
  void keep();  ///< Puts them into their places.

 private:
  std::string suffix_;
  std::vector<std::filesystem::path> files_;
};

struct MadeTokenizers {
  Tokenizers tokenizers;
  FreshFiles fresh;                          ///< On rank 0.
  std::vector<std::filesystem::path> files;  ///< Where they are until `fresh` is kept.
};

/// Loads both tokenizers; rank 0 first trains one whose file is absent (`rebuild`: both), on its
/// side of `text`, with character coverage 0.9995 where 1 % or more of the characters are Chinese, else
/// full. One file that stands for both sides is trained on both. Collective; blocks while rank 0
/// trains.
/// Errors: ConfigError that names the side; if a file that was there has another number of pieces
///         than the model asks for; if the model needs one vocabulary for both sides and there are
///         two.
MadeTokenizers make_tokenizers(const std::vector<std::filesystem::path>& files,
                               const text::ParallelText& text, const nmt::TransformerOptions& model,
                               bool rebuild, const comm::ProcessGroup& group);

/// What a manifest says of the vocabularies in `model_dir`, so that a model is never used with
/// others.
train::Metadata vocabulary_metadata(const std::string& model_dir);
/// Errors: ConfigError that names a file of `files` with which the model of `metadata` was not
/// trained.
void check_vocabularies(const train::Metadata& metadata,
                        const std::vector<std::filesystem::path>& files);

/// Where the weights of one update are kept: checkpoints/<update>.
std::string kept_folder(const std::string& model_dir, int64_t update);
/// The updates whose weights are kept, ascending; folders that were cut short are left out.
std::vector<int64_t> kept_updates(const std::string& model_dir);

/// What best/manifest.json says of the model, and back. Metadata that older manifests lack (norm,
/// ffn_activation, tied_embeddings_all) have their defaults.
train::Metadata metadata_of(const nmt::TransformerOptions& model);
/// Errors: ConfigError that names the metadata entry that is missing or cannot be.
nmt::TransformerOptions model_of(const train::Metadata& metadata);
/// Whether the model is an int8 one (`cohort nmt quantize`), which inference alone takes.
bool has_int8_weights(const train::Metadata& metadata);

}  // namespace cohort::translate
