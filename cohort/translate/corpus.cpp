#include "cohort/translate/corpus.h"

#include <algorithm>
#include <torch/types.h>

namespace cohort::translate {

std::vector<data::PairLength> Corpus::lengths() const {
  std::vector<data::PairLength> lengths(source.size());
  for (size_t i = 0; i < lengths.size(); ++i) {
    lengths[i] = {static_cast<int32_t>(source[i].size()) + 1,
                  static_cast<int32_t>(target[i].size()) + 1};
  }
  return lengths;
}

Corpus tokenize(const text::ParallelText& pairs, const text::Tokenizer& source,
                const text::Tokenizer& target, int64_t max_length) {
  Corpus corpus;
  for (size_t i = 0; i < pairs.source.size(); ++i) {
    auto s = source.encode(pairs.source[i]);
    auto t = target.encode(pairs.target[i]);
    if (max_length > 0 && static_cast<int64_t>(std::max(s.size(), t.size())) > max_length) {
      ++corpus.num_dropped_long;
      continue;
    }
    corpus.source.push_back(std::move(s));
    corpus.target.push_back(std::move(t));
  }
  return corpus;
}

nmt::Batch make_batch(const Corpus& corpus, std::span<const int64_t> indices) {
  const auto rows = static_cast<int64_t>(indices.size());
  int64_t source_width = 1;
  int64_t target_width = 1;
  for (int64_t i : indices) {
    source_width = std::max(source_width,
                            static_cast<int64_t>(corpus.source[static_cast<size_t>(i)].size()) + 1);
    target_width = std::max(target_width,
                            static_cast<int64_t>(corpus.target[static_cast<size_t>(i)].size()) + 1);
  }
  nmt::Batch batch;
  batch.source_BS = at::full({rows, source_width}, text::kPadId, at::kLong);
  batch.input_BT = at::full({rows, target_width}, text::kPadId, at::kLong);
  batch.labels_BT = at::full({rows, target_width}, text::kPadId, at::kLong);
  batch.source_lengths_B = at::empty({rows}, at::kLong);
  batch.target_lengths_B = at::empty({rows}, at::kLong);
  for (int64_t row = 0; row < rows; ++row) {
    const auto& source = corpus.source[static_cast<size_t>(indices[static_cast<size_t>(row)])];
    const auto& target = corpus.target[static_cast<size_t>(indices[static_cast<size_t>(row)])];
    int64_t* s = batch.source_BS.data_ptr<int64_t>() + row * source_width;
    int64_t* input = batch.input_BT.data_ptr<int64_t>() + row * target_width;
    int64_t* labels = batch.labels_BT.data_ptr<int64_t>() + row * target_width;
    *std::copy(source.begin(), source.end(), s) = text::kEosId;
    input[0] = text::kBosId;
    std::copy(target.begin(), target.end(), input + 1);
    *std::copy(target.begin(), target.end(), labels) = text::kEosId;
    batch.source_lengths_B.data_ptr<int64_t>()[row] = static_cast<int64_t>(source.size()) + 1;
    batch.target_lengths_B.data_ptr<int64_t>()[row] = static_cast<int64_t>(target.size()) + 1;
    batch.num_target_tokens += static_cast<int64_t>(target.size()) + 1;
  }
  return batch;
}

}  // namespace cohort::translate
