// SPDX-License-Identifier: Apache-2.0
// Made-up batches for tests of model and training: uneven lengths, the same on every rank.
#pragma once
#include <random>
#include <torch/types.h>
#include <vector>

#include "cohort/nmt/transformer.h"

namespace cohort::test {

inline constexpr int64_t kVocabulary = 40;

inline nmt::TransformerOptions tiny_options() {
  return {.dim_vocab_source = kVocabulary,
          .dim_vocab_target = kVocabulary,
          .dim_emb = 16,
          .heads = 2,
          .enc_depth = 2,
          .dec_depth = 2,
          .dim_ffn = 32,
          .max_positions = 64,
          .dropout = 0};
}

struct Sentence {
  std::vector<int64_t> source, target;
};

inline std::vector<Sentence> make_sentences(int count, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<Sentence> sentences(static_cast<size_t>(count));
  for (auto& s : sentences) {
    s.source.resize(1 + random() % 9);
    s.target.resize(1 + random() % 9);
    for (auto* side : {&s.source, &s.target}) {
      for (auto& token : *side) token = 4 + static_cast<int64_t>(random() % (kVocabulary - 4));
    }
  }
  return sentences;
}

inline nmt::Batch make_test_batch(const std::vector<Sentence>& sentences) {
  size_t source_width = 0;
  size_t target_width = 0;
  for (const auto& s : sentences) {
    source_width = std::max(source_width, s.source.size() + 1);
    target_width = std::max(target_width, s.target.size() + 1);
  }
  const auto rows = static_cast<int64_t>(sentences.size());
  nmt::Batch batch;
  batch.source_BS = at::zeros({rows, static_cast<int64_t>(source_width)}, at::kLong);
  batch.input_BT = at::zeros({rows, static_cast<int64_t>(target_width)}, at::kLong);
  batch.labels_BT = at::zeros_like(batch.input_BT);
  batch.source_lengths_B = at::zeros({rows}, at::kLong);
  batch.target_lengths_B = at::zeros({rows}, at::kLong);
  for (int64_t b = 0; b < rows; ++b) {
    const auto& s = sentences[static_cast<size_t>(b)];
    for (size_t i = 0; i < s.source.size(); ++i)
      batch.source_BS[b][static_cast<int64_t>(i)] = s.source[i];
    batch.source_BS[b][static_cast<int64_t>(s.source.size())] = 3;
    batch.input_BT[b][0] = 2;
    for (size_t i = 0; i < s.target.size(); ++i) {
      batch.input_BT[b][static_cast<int64_t>(i) + 1] = s.target[i];
      batch.labels_BT[b][static_cast<int64_t>(i)] = s.target[i];
    }
    batch.labels_BT[b][static_cast<int64_t>(s.target.size())] = 3;
    batch.source_lengths_B[b] = static_cast<int64_t>(s.source.size()) + 1;
    batch.target_lengths_B[b] = static_cast<int64_t>(s.target.size()) + 1;
    batch.num_target_tokens += static_cast<int64_t>(s.target.size()) + 1;
  }
  return batch;
}

}  // namespace cohort::test
