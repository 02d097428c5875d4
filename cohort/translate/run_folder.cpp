// SPDX-License-Identifier: Apache-2.0
#include "cohort/translate/run_folder.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <functional>
#include <random>
#include <span>

#include "cohort/base/checksum.h"
#include "cohort/base/error.h"
#include "cohort/text/utf8.h"
#include "cohort/translate/run_on_ranks.h"

namespace cohort::translate {
namespace {

namespace fs = std::filesystem;

// Training SentencePiece on tens of millions of sentences takes hours, on rank 0 alone.
constexpr std::chrono::hours kVocabularyLimit{12};

// SentencePiece's advice: 0.9995 for languages with as many characters as Chinese has, 1 for
// others. Some quotations in a text do not make it one.
double character_coverage(const std::vector<std::string>& sentences) {
  constexpr double kSome = 0.01;
  return text::han_share(sentences) >= kSome ? 0.9995 : 1.0;
}

void check_size(const text::Tokenizer& tokenizer, const fs::path& file, int64_t expected) {
  if (tokenizer.num_pieces() != expected) {
    throw ConfigError(file.string() + " has " + std::to_string(tokenizer.num_pieces()) +
                      " pieces: expected " + std::to_string(expected) + " (--dim-vocabs)");
  }
}

bool same_content(const fs::path& a, const fs::path& b) {
  return fs::exists(a) && fs::exists(b) && sha256_of_file(a) == sha256_of_file(b);
}

// One list of fields, for both directions.
template <class Options, class Visit>
void visit_sizes(Options& model, Visit visit) {
  visit("dim_vocab_source", model.dim_vocab_source);
  visit("dim_vocab_target", model.dim_vocab_target);
  visit("dim_emb", model.dim_emb);
  visit("heads", model.heads);
  visit("enc_depth", model.enc_depth);
  visit("dec_depth", model.dec_depth);
  visit("dim_ffn", model.dim_ffn);
  visit("max_positions", model.max_positions);
  visit("dropout", model.dropout);
  visit("label_smoothing", model.label_smoothing);
  visit("tied_embeddings", model.tied_embeddings);
  visit("tied_embeddings_all", model.tied_embeddings_all);
  visit("norm", model.norm);
  visit("ffn_activation", model.ffn_activation);
}

// Manifests of before a field was thought of describe models with its default.
bool is_later_field(std::string_view name) {
  return name == "tied_embeddings_all" || name == "norm" || name == "ffn_activation";
}

void read_entry(const std::string& entry, nmt::Norm& value) {
  value = nmt::parse_norm(entry);
}
void read_entry(const std::string& entry, nmt::Activation& value) {
  value = nmt::parse_activation(entry);
}
void read_entry(const std::string& entry, double& value) {
  value = std::stod(entry);
}
template <class Integer>
void read_entry(const std::string& entry, Integer& value) {
  value = static_cast<Integer>(std::stoll(entry));
}

std::string metadata_key(const char* field) {
  std::string name = "model.";
  return name.append(field);
}

}  // namespace

std::vector<fs::path> vocab_files(const std::string& model_dir, const std::vector<fs::path>& vocabs,
                                  Dictionary dictionary) {
  if (!vocabs.empty() && vocabs.size() != 2) {
    throw ConfigError("--vocabs: expected two files, source and target, got " +
                      std::to_string(vocabs.size()));
  }
  const fs::path folder = model_dir;
  const bool joined = dictionary == Dictionary::kJoined;
  if (vocabs.empty())
    return {folder / "source.spm", folder / (joined ? "source.spm" : "target.spm")};
  if (joined && vocabs[0] != vocabs[1]) {
    throw ConfigError("--joined-dictionary with --vocabs " + vocabs[0].string() + " " +
                      vocabs[1].string() + ": expected the same file twice");
  }
  return vocabs;
}

FreshFiles::~FreshFiles() {
  std::error_code ignored;
  for (const fs::path& file : files_) fs::remove(beside(file), ignored);
}

fs::path FreshFiles::beside(const fs::path& file) const {
  return file.string() + suffix_;
}

fs::path FreshFiles::now(const fs::path& file) const {
  return std::ranges::find(files_, file) == files_.end() ? file : beside(file);
}

void FreshFiles::keep() {
  for (const fs::path& file : files_) fs::rename(beside(file), file);
  files_.clear();
}

MadeTokenizers make_tokenizers(const std::vector<fs::path>& files, const text::ParallelText& text,
                               const nmt::TransformerOptions& model, bool rebuild,
                               const comm::ProcessGroup& group) {
  const bool joined = files[0] == files[1];
  if (joined && model.dim_vocab_source != model.dim_vocab_target) {
    throw ConfigError("--dim-vocabs " + std::to_string(model.dim_vocab_source) + " " +
                      std::to_string(model.dim_vocab_target) +
                      ": expected the same number twice, for one vocabulary serves both sides");
  }
  if (model.tied_embeddings_all && !joined && (rebuild || !same_content(files[0], files[1]))) {
    throw ConfigError(
        "--tied-embeddings-all: expected one vocabulary for both sides (--joined-dictionary, or "
        "the same file twice in --vocabs)");
  }
  const auto is_made = [&](size_t side) { return rebuild || !fs::exists(files[side]); };
  const std::vector<bool> made{is_made(0), is_made(1)};
  group.barrier("which vocabularies are there");
  FreshFiles fresh(group.broadcast_object(std::to_string(std::random_device()())));
  const auto make = [&](size_t side, const char* name, const std::vector<std::string>& sentences,
                        int64_t pieces) {
    if (!made[side]) return;
    fresh.add(files[side]);
    try {
      text::train_tokenizer(sentences, fresh.beside(files[side]),
                            {.vocab_size = static_cast<int32_t>(pieces),
                             .character_coverage = character_coverage(sentences)});
    } catch (const ConfigError& error) {
      throw ConfigError(std::string(name) + " vocabulary: " + one_line(error) + " (--dim-vocabs)");
    }
  };
  run_on_ranks(group, "vocabularies", group.rank() == 0, kVocabularyLimit, [&] {
    if (joined) {
      auto both = text.source;
      both.insert(both.end(), text.target.begin(), text.target.end());
      make(0, "joined", both, model.dim_vocab_source);
    } else {
      make(0, "source", text.source, model.dim_vocab_source);
      make(1, "target", text.target, model.dim_vocab_target);
    }
  });
  std::vector<fs::path> now;
  for (size_t side = 0; side < 2; ++side)
    now.push_back(made[side] ? fresh.beside(files[side]) : files[side]);
  return {load_tokenizers(now, model), std::move(fresh), now};
}

train::Metadata vocabulary_metadata(const std::string& model_dir) {
  return {{"vocabulary.source_sha256", sha256_of_file(model_dir + "/source.spm")},
          {"vocabulary.target_sha256", sha256_of_file(model_dir + "/target.spm")}};
}

void check_vocabularies(const train::Metadata& metadata, const std::vector<fs::path>& files) {
  for (const auto& [side, name] :
       {std::pair{size_t{0}, "vocabulary.source_sha256"}, {1, "vocabulary.target_sha256"}}) {
    const auto found = metadata.find(name);
    if (found == metadata.end() || found->second == sha256_of_file(files[side])) continue;
    throw ConfigError(files[side].string() + " is not the " + (side == 0 ? "source" : "target") +
                      " vocabulary that the model was trained with");
  }
}

Tokenizers load_tokenizers(const std::vector<fs::path>& files,
                           const nmt::TransformerOptions& model) {
  Tokenizers tokenizers{text::Tokenizer(files[0]), text::Tokenizer(files[1])};
  check_size(tokenizers.source, files[0], model.dim_vocab_source);
  check_size(tokenizers.target, files[1], model.dim_vocab_target);
  return tokenizers;
}

std::string kept_folder(const std::string& model_dir, int64_t update) {
  return model_dir + "/checkpoints/" + std::to_string(update);
}

std::vector<int64_t> kept_updates(const std::string& model_dir) {
  std::vector<int64_t> updates;
  std::error_code none;
  for (const auto& entry : fs::directory_iterator(model_dir + "/checkpoints", none)) {
    const std::string name = entry.path().filename().string();
    int64_t update = 0;
    const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), update);
    const bool number = error == std::errc() && end == name.data() + name.size();
    if (number && fs::exists(entry.path() / "manifest.json")) updates.push_back(update);
  }
  std::ranges::sort(updates);
  return updates;
}

train::Metadata metadata_of(const nmt::TransformerOptions& model) {
  train::Metadata metadata;
  visit_sizes(model, [&](const char* name, auto value) {
    using std::to_string;
    metadata[metadata_key(name)] = to_string(value);
  });
  return metadata;
}

nmt::TransformerOptions model_of(const train::Metadata& metadata) {
  nmt::TransformerOptions model;
  visit_sizes(model, [&](const char* name, auto& value) {
    const auto found = metadata.find(metadata_key(name));
    if (found == metadata.end() && is_later_field(name)) return;
    if (found == metadata.end())
      throw ConfigError(std::string("manifest.json has no metadata entry ") + metadata_key(name));
    try {
      read_entry(found->second, value);
    } catch (const std::logic_error&) {
      throw ConfigError(std::string("manifest.json: model.") + name + " = " + found->second +
                        ": expected a number");
    }
  });
  nmt::validate(model);
  return model;
}

bool has_int8_weights(const train::Metadata& metadata) {
  const auto found = metadata.find("precision");
  return found != metadata.end() && found->second == nmt::to_string(nmt::Precision::kInt8);
}

}  // namespace cohort::translate
