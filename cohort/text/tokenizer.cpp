// SPDX-License-Identifier: Apache-2.0
#include "cohort/text/tokenizer.h"

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <optional>
#include <sstream>
#include <utility>

#include "cohort/base/atomic_file.h"
#include "cohort/base/error.h"
#include "cohort/text/sentencepiece_bridge.h"
#include "cohort/text/text_file.h"
#include "cohort/text/utf8.h"

namespace cohort::text {
namespace {

// Returns whether a model's bytes hold all three of its parts: pieces, trainer's and normalizer's
// options. A file cut at a border between them would parse, and encode differently.
bool is_whole_model(std::string_view bytes) {
  size_t offset = 0;
  const auto read_varint = [&]() {
    uint64_t value = 0;
    for (int shift = 0; offset < bytes.size() && shift < 64; shift += 7) {
      const auto byte = static_cast<unsigned char>(bytes[offset++]);
      value |= static_cast<uint64_t>(byte & 0x7F) << shift;
      if ((byte & 0x80) == 0) break;
    }
    return value;
  };
  bool seen[4] = {};
  while (offset < bytes.size()) {
    const uint64_t tag = read_varint();
    const uint64_t length = read_varint();
    if ((tag & 7) != 2 || length > bytes.size() - offset) return false;
    if (tag >> 3 < std::size(seen)) seen[tag >> 3] = true;
    offset += length;
  }
  return seen[1] && seen[2] && seen[3];
}

void check(const TokenizerOptions& options) {
  if (options.vocab_size < 5) {
    throw ConfigError("vocab_size is " + std::to_string(options.vocab_size) +
                      ": expected at least 5 (four special pieces and one letter)");
  }
  if (!(options.character_coverage >= 0.98 && options.character_coverage <= 1.0)) {
    throw ConfigError("character_coverage is " + std::to_string(options.character_coverage) +
                      ": expected a number in [0.98, 1]");
  }
  if (options.num_threads < 1 || options.num_threads > 1024) {
    throw ConfigError("num_threads is " + std::to_string(options.num_threads) +
                      ": expected a number in [1, 1024]");
  }
}

// Returns the integer that follows `mark` in `text`.
std::optional<int64_t> number_after(const std::string& text, const std::string& mark) {
  const size_t at = text.find(mark);
  if (at == std::string::npos) return std::nullopt;
  return std::strtoll(text.c_str() + at + mark.size(), nullptr, 10);
}

[[noreturn]] void throw_training_error(const TokenizerOptions& options, const std::string& error) {
  const std::string asked = "vocab_size " + std::to_string(options.vocab_size);
  if (const auto most = number_after(error, "set it to a value <= ")) {
    throw ConfigError(asked + " is more than the text allows: expected at most " +
                      std::to_string(*most));
  }
  if (const auto least = number_after(error, std::to_string(options.vocab_size) + " vs ")) {
    throw ConfigError(asked + " is less than the text's letters need: expected at least " +
                      std::to_string(*least) + ", or a lower character_coverage");
  }
  throw ConfigError("tokenizer training with " + asked + ": " + error);
}

}  // namespace

Tokenizer::Tokenizer(const std::filesystem::path& model_file) {
  const std::string bytes = read_file(model_file);
  std::string error;
  std::shared_ptr<const bridge::PieceModel> model = bridge::PieceModel::load(bytes, error);
  if (!model || !is_whole_model(bytes)) {
    throw ConfigError(model_file.string() + ": expected a whole SentencePiece model, found " +
                      std::to_string(bytes.size()) + " bytes that are none");
  }
  if (model->pad_id() != kPadId || model->unk_id() != kUnkId || model->bos_id() != kBosId ||
      model->eos_id() != kEosId) {
    std::ostringstream message;
    message << model_file.string()
            << ": expected pad 0, unk 1, bos 2, eos 3 (spm_train --pad_id=0 "
               "--unk_id=1 --bos_id=2 --eos_id=3), found pad "
            << model->pad_id() << ", unk " << model->unk_id() << ", bos " << model->bos_id()
            << ", eos " << model->eos_id();
    throw ConfigError(message.str());
  }
  model_ = std::move(model);
}

int32_t Tokenizer::num_pieces() const {
  return model_->num_pieces();
}

std::vector<int32_t> Tokenizer::encode(std::string_view text) const {
  return model_->encode(text);
}

std::string Tokenizer::decode(std::span<const int32_t> ids) const {
  for (const int32_t id : ids) {
    TORCH_CHECK_VALUE(id >= 0 && id < num_pieces(), "piece id expected in [0, ", num_pieces(),
                      "), found ", id);
  }
  std::string text = model_->decode(ids);
  std::ranges::replace_if(
      text, [](char c) { return c == '\n' || c == '\r'; }, ' ');
  return text;
}

std::string Tokenizer::piece(int32_t id) const {
  TORCH_CHECK_VALUE(id >= 0 && id < num_pieces(), "piece id expected in [0, ", num_pieces(),
                    "), found ", id);
  return model_->piece(id);
}

void train_tokenizer(std::span<const std::string> sentences,
                     const std::filesystem::path& model_file, const TokenizerOptions& options) {
  check(options);
  const auto has_text = [](const std::string& sentence) { return !trim(sentence).empty(); };
  if (std::none_of(sentences.begin(), sentences.end(), has_text)) {
    throw ConfigError(model_file.string() + ": no text to train the tokenizer on");
  }
  std::ostringstream coverage;
  coverage.precision(17);
  coverage << options.character_coverage;
  const bridge::TrainerFlag flags[] = {
      {"vocab_size", std::to_string(options.vocab_size)},
      {"character_coverage", coverage.str()},
      {"model_type", options.model == TokenizerModel::kBpe ? "bpe" : "unigram"},
      {"normalization_rule_name",
       options.normalization == Normalization::kIdentity ? "identity" : "nmt_nfkc"},
      {"num_threads", std::to_string(options.num_threads)},
      {"max_sentence_length", "1073741824"},
      {"pad_id", std::to_string(kPadId)},
      {"unk_id", std::to_string(kUnkId)},
      {"bos_id", std::to_string(kBosId)},
      {"eos_id", std::to_string(kEosId)},
  };
  std::string error;
  const std::string bytes = bridge::train(sentences, flags, error);
  if (bytes.empty()) throw_training_error(options, error);
  write_atomically(model_file.string(), std::string_view(bytes));
}

}  // namespace cohort::text
