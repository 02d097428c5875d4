// SPDX-License-Identifier: Apache-2.0
// The scores of every next token of a batch, as the search computes them.
#pragma once
#include <torch/types.h>
#include <vector>

#include "cohort/nmt/transformer.h"

namespace cohort::test {

/// Returns [B, T, V]: the scores behind each of the batch's input tokens. The model is in
/// evaluation mode.
inline at::Tensor logits_of(nmt::Transformer& model, const at::Tensor& source_BS,
                            const at::Tensor& source_lengths_B, const at::Tensor& input_BT) {
  const at::NoGradGuard no_grad;
  auto state = model->begin_decoding(model->encode(source_BS, source_lengths_B), source_lengths_B);
  std::vector<at::Tensor> steps;
  for (int64_t t = 0; t < input_BT.size(1); ++t)
    steps.push_back(model->decode_step(input_BT.select(1, t), state));
  return at::stack(steps, 1);
}

}  // namespace cohort::test
