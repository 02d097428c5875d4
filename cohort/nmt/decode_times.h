// SPDX-License-Identifier: Apache-2.0
// Where the time of a search goes.
#pragma once
#include <array>
#include <chrono>

namespace cohort::nmt {

enum class DecodeSection {
  kSearch,      ///< Log-sums, the greatest scores, reordering: what is in no other section.
  kEncoder,     ///< With the keys and values of its states for the decoder.
  kDecoder,     ///< Embeddings, norms, activations, sums.
  kProducts,    ///< The decoder's products with its weights.
  kAttention,   ///< The decoder's.
  kVocabulary,  ///< The product with the vocabulary.
};
inline constexpr size_t kDecodeSections = 6;

/// Adds up the time of the searches of its thread while it lives, by section. There is one at a time on a thread, which makes it, ends
/// it and asks it.
class DecodeTimes {
 public:
  DecodeTimes();
  ~DecodeTimes();
  DecodeTimes(const DecodeTimes&) = delete;
  DecodeTimes& operator=(const DecodeTimes&) = delete;
  /// Seconds up to now.
  std::array<double, kDecodeSections> seconds();

 private:
  friend class DecodeScope;
  // Ends the present section and begins `next`; returns which ended.
  DecodeSection change(DecodeSection next);

  std::array<double, kDecodeSections> seconds_{};
  DecodeSection section_ = DecodeSection::kSearch;
  std::chrono::steady_clock::time_point since_ = std::chrono::steady_clock::now();
};

/// What its thread does while it lives is of `section`, unless the encoder or the product with the vocabulary is at work. Costs nothing without DecodeTimes.
class DecodeScope {
 public:
  explicit DecodeScope(DecodeSection section);
  ~DecodeScope();
  DecodeScope(const DecodeScope&) = delete;
  DecodeScope& operator=(const DecodeScope&) = delete;

 private:
  DecodeTimes* times_;
  DecodeSection before_ = DecodeSection::kSearch;
};

}  // namespace cohort::nmt
