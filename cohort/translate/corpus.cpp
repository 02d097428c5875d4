// SPDX-License-Identifier: Apache-2.0
#include "cohort/translate/corpus.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <torch/types.h>

#include "cohort/base/error.h"

namespace cohort::translate {
namespace {

// What a corpus of its own memory views.
struct Owned {
  std::vector<data::PairLength> lengths;
  std::vector<int64_t> offsets;
  std::vector<int32_t> ids;
};

// The elements of a tensor in the file, which aligns them.
template <class T>
std::span<const T> elements(const SafetensorsFile& file, const char* name) {
  const auto bytes = file.at(name).bytes;
  return {reinterpret_cast<const T*>(bytes.data()), bytes.size() / sizeof(T)};
}

template <class Id>
std::vector<int32_t> copied(std::span<const std::byte> ids, int64_t begin, int64_t count) {
  const auto* first = reinterpret_cast<const Id*>(ids.data()) + begin;
  return {first, first + count};
}

}  // namespace

Corpus::Corpus(const std::vector<std::vector<int32_t>>& source,
               const std::vector<std::vector<int32_t>>& target) {
  TORCH_CHECK_VALUE(source.size() == target.size(), "corpus: ", source.size(), " sources and ",
                    target.size(), " targets: expected as many");
  auto owned = std::make_shared<Owned>();
  for (size_t i = 0; i < source.size(); ++i) {
    owned->lengths.push_back(
        {static_cast<int32_t>(source[i].size()) + 1, static_cast<int32_t>(target[i].size()) + 1});
    owned->offsets.push_back(std::ssize(owned->ids));
    for (const auto* side : {&source[i], &target[i]})
      owned->ids.insert(owned->ids.end(), side->begin(), side->end());
  }
  lengths_ = owned->lengths;
  offsets_ = owned->offsets;
  ids_ = std::as_bytes(std::span(owned->ids));
  owner_ = std::move(owned);
}

Corpus::Corpus(std::shared_ptr<const SafetensorsFile> file)
    : lengths_(elements<data::PairLength>(*file, "lengths")),
      offsets_(elements<int64_t>(*file, "offsets")),
      ids_(file->at("ids").bytes),
      id_size_(item_size(file->at("ids").dtype)) {
  const auto is = [&](const char* name, std::initializer_list<DType> types) {
    return std::ranges::find(types, file->at(name).dtype) != types.end();
  };
  if (!is("lengths", {DType::kI32}) || !is("offsets", {DType::kI64}) ||
      !is("ids", {DType::kI16, DType::kI32}) || lengths_.size() != offsets_.size()) {
    throw ConfigError("expected lengths, offsets and ids of sentence pairs");
  }
  const auto num_ids = static_cast<int64_t>(ids_.size() / id_size_);
  for (size_t i = 0; i < lengths_.size(); ++i) {
    const auto [source, target] = lengths_[i];
    const int64_t count = int64_t{source} + target - 2;  // Without end marks.
    if (source < 1 || target < 1 || offsets_[i] < 0 || offsets_[i] > num_ids - count)
      throw ConfigError("pair " + std::to_string(i) + " lies outside of the " +
                        std::to_string(num_ids) + " ids");
  }
  owner_ = std::move(file);
}

std::vector<int32_t> Corpus::ids(int64_t begin, int64_t count) const {
  return id_size_ == sizeof(int16_t) ? copied<int16_t>(ids_, begin, count)
                                     : copied<int32_t>(ids_, begin, count);
}

std::vector<int32_t> Corpus::source(int64_t pair) const {
  const auto i = static_cast<size_t>(pair);
  return ids(offsets_[i], lengths_[i].source - 1);
}

std::vector<int32_t> Corpus::target(int64_t pair) const {
  const auto i = static_cast<size_t>(pair);
  return ids(offsets_[i] + lengths_[i].source - 1, lengths_[i].target - 1);
}

Corpus tokenize(const text::ParallelText& pairs, const text::Tokenizer& source,
                const text::Tokenizer& target) {
  std::vector<std::vector<int32_t>> sources;
  std::vector<std::vector<int32_t>> targets;
  for (size_t i = 0; i < pairs.source.size(); ++i) {
    sources.push_back(source.encode(pairs.source[i]));
    targets.push_back(target.encode(pairs.target[i]));
  }
  return {sources, targets};
}

void check_lengths(const std::string& flag, const Corpus& corpus, int64_t max_positions) {
  for (int64_t i = 0; i < corpus.size(); ++i) {
    const auto [source, target] = corpus.lengths()[static_cast<size_t>(i)];
    const int64_t tokens = std::max(source, target);
    if (tokens > max_positions) {
      throw ConfigError(flag + ": pair " + std::to_string(i + 1) + " has " +
                        std::to_string(tokens) + " tokens: expected at most " +
                        std::to_string(max_positions));
    }
  }
}

nmt::Batch make_batch(const Corpus& corpus, std::span<const int32_t> indices) {
  const auto rows = std::ssize(indices);
  int64_t source_width = 1;
  int64_t target_width = 1;
  for (const int32_t i : indices) {
    const auto [source, target] = corpus.lengths()[static_cast<size_t>(i)];
    source_width = std::max<int64_t>(source_width, source);
    target_width = std::max<int64_t>(target_width, target);
  }
  nmt::Batch batch;
  batch.source_BS = at::full({rows, source_width}, text::kPadId, at::kLong);
  batch.input_BT = at::full({rows, target_width}, text::kPadId, at::kLong);
  batch.labels_BT = at::full({rows, target_width}, text::kPadId, at::kLong);
  batch.source_lengths_B = at::empty({rows}, at::kLong);
  batch.target_lengths_B = at::empty({rows}, at::kLong);
  for (int64_t row = 0; row < rows; ++row) {
    const int32_t pair = indices[static_cast<size_t>(row)];
    const auto source = corpus.source(pair);
    const auto target = corpus.target(pair);
    int64_t* s = batch.source_BS.data_ptr<int64_t>() + row * source_width;
    int64_t* input = batch.input_BT.data_ptr<int64_t>() + row * target_width;
    int64_t* labels = batch.labels_BT.data_ptr<int64_t>() + row * target_width;
    *std::copy(source.begin(), source.end(), s) = text::kEosId;
    input[0] = text::kBosId;
    std::copy(target.begin(), target.end(), input + 1);
    *std::copy(target.begin(), target.end(), labels) = text::kEosId;
    batch.source_lengths_B.data_ptr<int64_t>()[row] = std::ssize(source) + 1;
    batch.target_lengths_B.data_ptr<int64_t>()[row] = std::ssize(target) + 1;
    batch.num_target_tokens += std::ssize(target) + 1;
  }
  return batch;
}

nmt::Batch pinned(const nmt::Batch& batch) {
  return {.source_BS = batch.source_BS.pin_memory(),
          .source_lengths_B = batch.source_lengths_B.pin_memory(),
          .input_BT = batch.input_BT.pin_memory(),
          .labels_BT = batch.labels_BT.pin_memory(),
          .target_lengths_B = batch.target_lengths_B.pin_memory(),
          .num_target_tokens = batch.num_target_tokens,
          .label_rows_N = batch.label_rows().pin_memory()};
}

}  // namespace cohort::translate
