// SPDX-License-Identifier: Apache-2.0
// Rows of a table as a libtorch module.
#pragma once
#include <ATen/core/Tensor.h>
#include <cstdint>
#include <memory>
#include <optional>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

namespace cohort::ps {

enum class Pooling { kNone, kSum, kMean };

struct EmbeddingOptions {
  Pooling pooling = Pooling::kNone;
  /// Its rows are zeros, are not counted by kMean and get no gradient.
  std::optional<int64_t> padding_id;
  c10::Device device = c10::kCPU;  ///< Where forward's results are; rows stay on the host.
};

class PrefetchedRows;

/// Looks up rows by 64-bit id. Each distinct id of a batch is sent once; backward sums the
/// gradients of an id, and Session::push sends them.
///
/// Made by Session::embedding. In evaluation (eval()) rows that are not there are zeros and none is
/// made, and a backward gives them no gradient. It is a module of its own: eval() and train() of the
/// model do not reach it.
/// Threads: one.
class EmbeddingImpl : public torch::nn::Module {
 public:
  EmbeddingImpl(std::shared_ptr<PrefetchedRows> rows, int64_t width,
                const EmbeddingOptions& options);

  /// Prefetches the rows of the next forward: the next Session::pull receives them. They are valid
  /// until the push or pull after it. `ids_N...`: int64, any shape, on the CPU.
  void prefetch(const at::Tensor& ids);

  /// Rows of `ids` [N...], int64 on the CPU -> float32 [N..., width] on the options' device; with
  /// pooling over the last dimension of ids -> [N..., width] without it. The copy to a device
  /// does not wait for it, backward's copy of the gradient to the host does. Rows that were not
  /// prefetched for this step are pulled now, which blocks; so are those of predictions. Among
  /// the ranks of a host (SessionOptions::host) that is collective.
  at::Tensor forward(const at::Tensor& ids);

  int64_t width() const { return width_; }

 private:
  std::shared_ptr<PrefetchedRows> rows_;
  int64_t width_;
  EmbeddingOptions options_;
};
TORCH_MODULE(Embedding);

}  // namespace cohort::ps
