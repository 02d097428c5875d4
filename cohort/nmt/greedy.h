// Greedy search: at each step the likeliest next token.
#pragma once
#include <cstdint>
#include <vector>

#include "cohort/nmt/transformer.h"

namespace cohort::nmt {

struct GreedyOptions {
  double max_length_factor = 3;  ///< At most this times the source's tokens, plus 10 ...
  int64_t max_length = 256;      ///< ... and at most this many target tokens.
};

/// Translates the batch's sentences; keys and values are kept between steps, and finished sentences
/// leave.
///
/// Local. Puts the model in evaluation mode and back. No gradients.
/// Returns: target ids without begin and end, by row of `source_BS`.
std::vector<std::vector<int32_t>> greedy_search(Transformer& model, const at::Tensor& source_BS,
                                                const at::Tensor& source_lengths_B,
                                                const GreedyOptions& options = {});

}  // namespace cohort::nmt
