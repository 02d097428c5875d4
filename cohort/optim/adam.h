// SPDX-License-Identifier: Apache-2.0
// Adam through ATen's fused kernel: one pass over parameter, gradient and both moments.
#pragma once
#include <ATen/core/Tensor.h>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace torch::nn {
class Module;
}

namespace cohort::optim {

struct AdamOptions {
  double beta1 = 0.9;
  double beta2 = 0.98;
  double eps = 1e-9;
  /// Moments are in an unnamed file in this folder, mapped into memory; the file is removed with the
  /// optimizer, and the kernel keeps in memory what fits. Empty: in memory.
  std::string state_folder;
};

/// Sum of squares of each parameter's gradient, 0 for an undefined one, and for a tensor that is
/// listed before. The host waits for each of the gradients' devices once, however many there are.
/// Local.
std::vector<double> gradient_norms_squared(const std::vector<at::Tensor>& parameters);

/// Their sum.
/// Errors: c10::ValueError if no leaf among them requires a gradient, as in a list of gradients.
double gradient_norm_squared(const std::vector<at::Tensor>& parameters);

/// Name and tensor of every parameter, in the order of registration, as Adam takes them; a shared
/// one once, under its first name. Frozen ones are included, but not in named_parameters() of the
/// parallel models: the moments of an Adam made from one list do not fit an Adam made from the other.
std::vector<std::pair<std::string, at::Tensor>> named_parameters(const torch::nn::Module& model);

/// Adam without weight decay.
///
/// Owner: holds the parameters and, beside them, 8 bytes per float32 parameter of moments.
/// Threads: one. Local. A parameter whose gradient is undefined keeps its value and moments. Moments are corrected by
/// the number of all steps. PyTorch counts each parameter's own, so the first update of one that joins late is here
/// (1 - beta1) / sqrt(1 - beta2) times as large.
/// Source: Kingma and Ba 2015, arXiv:1412.6980, algorithm 1.
class Adam {
 public:
  /// `parameters`: name and tensor; contiguous, float32 or float64, and one type and device for
  /// all. With a state_folder: on the CPU.
  /// Errors: c10::ValueError for a tensor that is listed twice, not contiguous, or on another device
  ///         than the first (with a state_folder: than the CPU). ConfigError if the folder has no
  ///         room for the moments.
  explicit Adam(std::vector<std::pair<std::string, at::Tensor>> parameters,
                const AdamOptions& options = {});

  /// Updates every parameter from its gradient times `gradient_factor` (clipping without a separate
  /// pass); a factor other than 1 also overwrites the gradients with the scaled ones. Does not wait
  /// for the parameters' device.
  /// Errors: c10::ValueError for a gradient that is not contiguous or of another shape.
  void step(double learning_rate, double gradient_factor = 1);

  /// Makes the gradients undefined. The next backward then writes each one once, into its bucket;
  /// zeros would have to be written, read and added to.
  void zero_grad();

  int64_t num_steps() const { return num_steps_; }
  /// The state, to be saved or filled: "<parameter>.exp_avg", "<parameter>.exp_avg_sq".
  std::vector<std::pair<std::string, at::Tensor>> state() const;
  void set_num_steps(int64_t num_steps) { num_steps_ = num_steps; }
  const std::vector<at::Tensor>& parameters() const { return parameters_; }

 private:
  AdamOptions options_;
  std::vector<std::string> names_;
  std::vector<at::Tensor> parameters_;
  std::vector<at::Tensor> exp_avgs_;
  std::vector<at::Tensor> exp_avg_sqs_;
  int64_t num_steps_ = 0;
};

}  // namespace cohort::optim
