// SPDX-License-Identifier: Apache-2.0
#include "cohort/translate/scoring.h"

namespace cohort::translate {

std::vector<std::vector<double>> token_log_probs(nmt::Transformer& model, const Corpus& corpus,
                                                 int64_t mini_batch_words) {
  const nmt::InEvaluation evaluating(*model);
  const auto plan = data::plan_eval_batches(corpus.lengths(), mini_batch_words, 0, 1);
  std::vector<std::vector<double>> result(static_cast<size_t>(corpus.size()));
  for (const auto& indices : plan.batches) {
    const nmt::Batch batch = make_batch(corpus, indices);
    const at::Tensor log_probs = model->log_probabilities(batch.to(model->device())).cpu();
    const double* next = log_probs.const_data_ptr<double>();
    const int64_t* lengths = batch.target_lengths_B.const_data_ptr<int64_t>();
    for (size_t row = 0; row < indices.size(); next += lengths[row], ++row)
      result[static_cast<size_t>(indices[row])].assign(next, next + lengths[row]);
  }
  return result;
}

}  // namespace cohort::translate
