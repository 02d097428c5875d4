// SPDX-License-Identifier: Apache-2.0
// Words to piece ids and back: training and use of a SentencePiece model.
#pragma once
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::text {

namespace bridge {
class PieceModel;
}

/// Ids of the four special pieces, the same in every model.
inline constexpr int32_t kPadId = 0;
inline constexpr int32_t kUnkId = 1;
inline constexpr int32_t kBosId = 2;
inline constexpr int32_t kEosId = 3;

enum class TokenizerModel { kBpe, kUnigram };

/// What happens to letters before they become pieces.
enum class Normalization {
  kIdentity,  ///< Kept as they are: decoding gives back the text (but for runs of spaces).
  kNmtNfkc,   ///< SentencePiece's default. Changes full-width Chinese punctuation to ASCII.
};

struct TokenizerOptions {
  int32_t vocab_size = 32000;          ///< Number of pieces, the four special ones included.
  double character_coverage = 0.9995;  ///< Share of the letters that get a piece, in [0.98, 1].
  TokenizerModel model = TokenizerModel::kBpe;
  Normalization normalization = Normalization::kIdentity;
  int num_threads = 4;  ///< In [1, 1024]; recorded in the file, so not taken from the machine.
};

/// A loaded model.
/// Threads: const calls from any thread. Copies share the model.
class Tokenizer {
 public:
  /// Loads `model_file`, as train_tokenizer or SentencePiece itself wrote it.
  /// Errors: ConfigError that names the file if it cannot be read, is no whole SentencePiece model,
  ///         or its special ids are not pad 0, unk 1, bos 2, eos 3.
  explicit Tokenizer(const std::filesystem::path& model_file);

  /// Number of pieces; ids are below it.
  int32_t num_pieces() const;

  /// Returns the ids of `text`, without begin and end. Bytes that are not UTF-8 become U+FFFD.
  std::vector<int32_t> encode(std::string_view text) const;

  /// Returns the text of `ids`, one line: a line end that byte pieces spell gives a space. Special
  /// pieces but unk, which shows as U+2047, give nothing.
  /// Errors: c10::ValueError if an id is not in [0, num_pieces()).
  std::string decode(std::span<const int32_t> ids) const;

  /// Returns the piece's spelling, U+2581 for a space.
  /// Errors: c10::ValueError if `id` is not in [0, num_pieces()).
  std::string piece(int32_t id) const;

 private:
  std::shared_ptr<const bridge::PieceModel> model_;
};

/// Trains a model on `sentences` and writes it to `model_file`; prints nothing.
///
/// Every sentence is used, whatever its length. Equal sentences and options give equal bytes. The
/// file appears whole or not at all (temporary name in the same folder, then rename).
/// Errors: ConfigError if there is no text, an option is out of range, vocab_size is more than the
///         text allows or less than its letters need (both numbers named), or the file cannot be
///         written.
void train_tokenizer(std::span<const std::string> sentences,
                     const std::filesystem::path& model_file, const TokenizerOptions& options = {});

}  // namespace cohort::text
