#include "cohort/nmt/greedy.h"

#include <cmath>
#include <torch/types.h>

namespace cohort::nmt {
namespace {

constexpr int64_t kBegin = 2;
constexpr int64_t kEnd = 3;

}  // namespace

std::vector<std::vector<int32_t>> greedy_search(Transformer& model, const at::Tensor& source_BS,
                                                const at::Tensor& source_lengths_B,
                                                const GreedyOptions& options) {
  const at::NoGradGuard no_grad;
  const bool was_training = model->is_training();
  model->eval();
  const int64_t batch = source_BS.size(0);
  std::vector<std::vector<int32_t>> results(static_cast<size_t>(batch));
  std::vector<int64_t> sentences(static_cast<size_t>(batch));  // row -> index into results
  std::vector<int64_t> limits(static_cast<size_t>(batch));
  for (int64_t b = 0; b < batch; ++b) {
    const auto i = static_cast<size_t>(b);
    sentences[i] = b;
    const double allowed =
        options.max_length_factor * static_cast<double>(source_lengths_B[b].item<int64_t>()) + 10;
    limits[i] = std::min(
        {options.max_length, static_cast<int64_t>(allowed), model->options().max_positions});
  }
  DecoderState state =
      model->begin_decoding(model->encode(source_BS, source_lengths_B), source_lengths_B);
  at::Tensor last = at::full({batch}, kBegin, at::kLong);
  while (!sentences.empty()) {
    last = model->decode_step(last, state).argmax(1);
    const int64_t* tokens = last.data_ptr<int64_t>();
    std::vector<int64_t> kept;
    for (size_t row = 0; row < sentences.size(); ++row) {
      auto& result = results[static_cast<size_t>(sentences[row])];
      if (tokens[row] == kEnd) continue;
      result.push_back(static_cast<int32_t>(tokens[row]));
      if (static_cast<int64_t>(result.size()) < limits[static_cast<size_t>(sentences[row])]) {
        kept.push_back(static_cast<int64_t>(row));
      }
    }
    if (kept.size() == sentences.size()) continue;
    std::vector<int64_t> remaining;
    for (int64_t row : kept) remaining.push_back(sentences[static_cast<size_t>(row)]);
    sentences = std::move(remaining);
    const at::Tensor rows = at::tensor(kept, at::kLong);
    state.select(rows);
    last = last.index_select(0, rows);
  }
  model->train(was_training);
  return results;
}

}  // namespace cohort::nmt
