// SPDX-License-Identifier: Apache-2.0
// DeepFM: a linear model, a factorization machine and a deep network that share one table of rows.
#pragma once
#include <cstdint>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <utility>
#include <vector>

namespace ctr {

/// The network's first product has rows of whole cache lines: 13 numbers, then 3 zeros.
inline constexpr int64_t kNumbersWidth = 16;

struct DeepFmOptions {
  int64_t slots = 26;
  int64_t width = 16;  ///< Of a row: its id's weight in the linear model, then width - 1 factors.
  std::vector<int64_t> hidden = {400, 400, 400};
  /// Type of the hidden layers' products in training: at::kFloat or at::kBFloat16. Parameters, the
  /// output layer and evaluation stay in float32.
  at::ScalarType product_dtype = at::kFloat;
};

/// From numbers [B, kNumbersWidth] and rows [B, slots, width] to logits [B].
///
/// logit = sum of the ids' weights + products of factors, over all pairs of slots + linear(numbers)
///         + deep(numbers, rows).
/// Parameters are drawn from torch's global generator, as libtorch does.
/// Source: Guo et al. 2017, arXiv:1703.04247, equations 1 to 4.
class DeepFmImpl : public torch::nn::Module {
 public:
  explicit DeepFmImpl(const DeepFmOptions& options = {});
  at::Tensor forward(const at::Tensor& numbers_BN, const at::Tensor& rows_BSD);

 private:
  const at::ScalarType product_dtype_;
  std::vector<torch::nn::Linear> layers_;
  torch::nn::Linear output_{nullptr};
  torch::nn::Linear wide_{nullptr};
};
TORCH_MODULE(DeepFm);

/// The network's input [B, N + S D], numbers beside rows, and the factorization machine's value
/// [B]: sum_s w_s + 1/2 sum_f ((sum_s v_sf)^2 - sum_s v_sf^2), where a row is w, v_1, ... v_(D -
/// 1). Float32, on one device; on the CPU one pass forward and one back. Numbers get no gradient.
std::pair<at::Tensor, at::Tensor> factorize(const at::Tensor& numbers_BN,
                                            const at::Tensor& rows_BSD);

}  // namespace ctr
