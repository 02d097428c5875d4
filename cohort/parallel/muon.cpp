// SPDX-License-Identifier: Apache-2.0
#include "cohort/parallel/muon.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <algorithm>
#include <c10/util/Exception.h>
#include <c10/util/accumulate.h>
#include <cmath>
#include <map>
#include <sstream>

namespace cohort::parallel {

at::Tensor orthogonalize(const at::Tensor& matrix, int num_iterations) {
  constexpr double a = 3.4445;
  constexpr double b = -4.7750;
  constexpr double c = 2.0315;
  const at::NoGradGuard no_grad;
  const bool tall = matrix.size(0) > matrix.size(1);
  at::Tensor x = tall ? matrix.t() : matrix;
  x = x / (x.norm() + 1e-7);
  for (int i = 0; i < num_iterations; ++i) {
    const at::Tensor square = at::mm(x, x.t());
    x = at::addmm(x, at::addmm(square, square, square, b, c), x, a);
  }
  return tall ? x.t() : x;
}

Muon::Muon(const std::vector<LocalShard>& shards, const comm::ProcessGroup& group,
           const MuonOptions& options, CallSite site)
    : group_(group), options_(options) {
  std::map<std::string, Matrix> own;
  std::ostringstream listed;
  for (const LocalShard& shard : shards) {
    if (!shard.tensor.requires_grad()) continue;
    TORCH_CHECK_VALUE(shard.shape.size() >= 2,
                      "Muon: expected parameters of two dimensions or more, got ", shard.name,
                      " of shape ", at::IntArrayRef(shard.shape));
    Matrix matrix{.name = shard.name,
                  .rows = shard.shape[0],
                  .columns = c10::multiply_integers(shard.shape.begin() + 1, shard.shape.end()),
                  .begin = shard.begin,
                  .end = shard.end,
                  .tensor = shard.tensor,
                  .momentum = at::zeros_like(shard.tensor.detach()),
                  .type = shard.tensor.scalar_type()};
    listed << matrix.rows << ' ' << matrix.columns << ' ' << static_cast<int>(matrix.type) << ' '
           << matrix.end - matrix.begin << ' ' << matrix.name << '\n';
    device_ = shard.tensor.device();
    own.emplace(shard.name, std::move(matrix));
  }
  // A rank may hold nothing of a matrix, and takes part in its gathering.
  std::map<std::string, int> num_whole;
  for (const std::string& text : group_.all_gather_object(listed.str(), site)) {
    std::istringstream lines(text);
    Matrix other;
    int type = 0;
    int64_t held = 0;
    while (lines >> other.rows >> other.columns >> type >> held && lines.ignore() &&
           std::getline(lines, other.name)) {
      other.type = static_cast<at::ScalarType>(type);
      num_whole[other.name] += held == other.rows * other.columns;
      own.emplace(other.name, other);
    }
  }
  for (auto& [name, matrix] : own) {
    matrix.is_shared = num_whole.at(name) < group_.size();
    matrices_.push_back(std::move(matrix));
  }
}

// This rank's part of what is to be orthogonalized; undefined if it has none.
at::Tensor Muon::own_update(Matrix& matrix) const {
  if (!matrix.tensor.defined() || !matrix.tensor.grad().defined()) return {};
  const at::Tensor& gradient = matrix.tensor.grad();
  matrix.momentum.lerp_(gradient, 1 - options_.momentum);
  return options_.nesterov ? gradient.lerp(matrix.momentum, options_.momentum) : matrix.momentum;
}

void Muon::step(double learning_rate, CallSite site) {
  const at::NoGradGuard no_grad;
  for (Matrix& matrix : matrices_) {
    const at::Tensor own = own_update(matrix);
    at::Tensor whole = own;
    if (matrix.is_shared) {
      whole =
          at::zeros({matrix.rows * matrix.columns}, at::TensorOptions(device_).dtype(matrix.type));
      if (own.defined()) whole.narrow(0, matrix.begin, own.numel()).copy_(own);
      group_.all_reduce(whole, comm::ReduceOp::kSum, site);
    }
    if (!own.defined()) continue;
    const double scale = std::sqrt(
        std::max(1.0, static_cast<double>(matrix.rows) / static_cast<double>(matrix.columns)));
    const at::Tensor update =
        orthogonalize(whole.reshape({matrix.rows, matrix.columns}), options_.num_iterations)
            .reshape({-1})
            .narrow(0, matrix.begin, matrix.end - matrix.begin);
    matrix.tensor.mul_(1 - learning_rate * options_.weight_decay)
        .sub_(update.view_as(matrix.tensor), learning_rate * scale);
  }
}

void Muon::zero_grad() {
  for (Matrix& matrix : matrices_) {
    if (matrix.tensor.defined()) matrix.tensor.mutable_grad().reset();
  }
}

std::vector<std::pair<std::string, at::Tensor>> Muon::state() const {
  std::vector<std::pair<std::string, at::Tensor>> state;
  for (const Matrix& matrix : matrices_) {
    if (matrix.momentum.defined()) state.emplace_back(matrix.name + ".momentum", matrix.momentum);
  }
  return state;
}

}  // namespace cohort::parallel
