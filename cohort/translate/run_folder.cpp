#include "cohort/translate/run_folder.h"

#include <chrono>
#include <functional>
#include <span>

#include "cohort/base/error.h"

namespace cohort::translate {
namespace {

namespace fs = std::filesystem;

// Training SentencePiece on tens of millions of sentences takes hours, on rank 0 alone.
constexpr std::chrono::hours kVocabularyLimit{12};

bool has_chinese(const std::vector<std::string>& sentences) {
  // U+4E00 to U+9FFF are three bytes, the first of them E4 to E9.
  for (const std::string& sentence : sentences) {
    for (const char c : sentence) {
      const auto byte = static_cast<unsigned char>(c);
      if (byte >= 0xE4 && byte <= 0xE9) return true;
    }
  }
  return false;
}

void check_size(const text::Tokenizer& tokenizer, const fs::path& file, int64_t expected) {
  if (tokenizer.num_pieces() != expected) {
    throw ConfigError(file.string() + " has " + std::to_string(tokenizer.num_pieces()) +
                      " pieces: the model has " + std::to_string(expected));
  }
}

// One list of fields, for both directions.
template <class Options, class Visit>
void visit_fields(Options& model, Visit visit) {
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
}

}  // namespace

std::vector<fs::path> vocab_files(const std::string& model_dir,
                                  const std::vector<fs::path>& vocabs) {
  if (vocabs.size() == 2) return vocabs;
  if (!vocabs.empty()) {
    throw ConfigError("--vocabs: expected two files, source and target, got " +
                      std::to_string(vocabs.size()));
  }
  return {fs::path(model_dir) / "source.spm", fs::path(model_dir) / "target.spm"};
}

Tokenizers make_tokenizers(const std::vector<fs::path>& files, const text::ParallelText& text,
                           const nmt::TransformerOptions& model, bool anew,
                           comm::ProcessGroup& group) {
  if (files[0] == files[1] && !fs::exists(files[0])) {
    throw ConfigError("--vocabs: " + files[0].string() +
                      " stands for both sides and does not exist: expected two files, or one that "
                      "was trained on both languages");
  }
  // Both or none: a file that is left alone would be taken for the next run's.
  std::vector<fs::path> fresh;
  const auto make = [&](const fs::path& file, const std::vector<std::string>& sentences,
                        int64_t pieces) {
    if (fs::exists(file) && !anew) return;
    const fs::path beside = file.string() + ".new";
    text::train_tokenizer(sentences, beside,
                          {.vocab_size = static_cast<int32_t>(pieces),
                           .character_coverage = has_chinese(sentences) ? 0.9995 : 1.0});
    fresh.push_back(file);
  };
  const auto name = [&](const char* side, const auto& body) {
    try {
      body();
    } catch (const ConfigError& error) {
      for (const fs::path& file : fresh) fs::remove(file.string() + ".new");
      throw ConfigError(std::string(side) + " vocabulary: " + one_line(error));
    }
  };
  if (group.rank() == 0) {
    name("source", [&] { make(files[0], text.source, model.dim_vocab_source); });
    name("target", [&] { make(files[1], text.target, model.dim_vocab_target); });
    for (const fs::path& file : fresh) fs::rename(file.string() + ".new", file);
  }
  group.barrier("vocabularies", kVocabularyLimit);
  return load_tokenizers(files, model);
}

Tokenizers load_tokenizers(const std::vector<fs::path>& files,
                           const nmt::TransformerOptions& model) {
  Tokenizers tokenizers{text::Tokenizer(files[0]), text::Tokenizer(files[1])};
  check_size(tokenizers.source, files[0], model.dim_vocab_source);
  check_size(tokenizers.target, files[1], model.dim_vocab_target);
  return tokenizers;
}

namespace {

std::string fact_name(const char* field) {
  std::string name = "model.";
  return name.append(field);
}

}  // namespace

train::Facts facts_of(const nmt::TransformerOptions& model) {
  train::Facts facts;
  visit_fields(
      model, [&](const char* name, auto value) { facts[fact_name(name)] = std::to_string(value); });
  return facts;
}

nmt::TransformerOptions model_of(const train::Facts& facts) {
  nmt::TransformerOptions model;
  visit_fields(model, [&]<class T>(const char* name, T& value) {
    const auto found = facts.find(fact_name(name));
    if (found == facts.end())
      throw ConfigError(std::string("manifest.json has no fact ") + fact_name(name));
    try {
      if constexpr (std::is_same_v<T, double>) {
        value = std::stod(found->second);
      } else {
        value = std::stoll(found->second);
      }
    } catch (const std::logic_error&) {
      throw ConfigError(std::string("manifest.json: model.") + name + " = " + found->second +
                        ": expected a number");
    }
  });
  nmt::validate(model);
  return model;
}

}  // namespace cohort::translate
