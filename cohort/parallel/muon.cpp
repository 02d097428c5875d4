// SPDX-License-Identifier: Apache-2.0
#include "cohort/parallel/muon.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <algorithm>
#include <c10/util/Exception.h>
#include <c10/util/accumulate.h>
#include <cmath>
#include <map>
#include <sstream>

#include "cohort/base/tensor_part.h"
#include "cohort/parallel/tensor_parallel_layout.h"

namespace cohort::parallel {
namespace {

// Calls call(elements of the part's dimension, the same of the whole's) for each piece.
template <class Call>
void for_each_piece(const TensorPart& part, const Call& call) {
  int64_t first = 0;
  for (const auto& [begin, end] : part.pieces) {
    call(ElementRange{first, first + end - begin}, ElementRange{begin, end});
    first += end - begin;
  }
}

at::Tensor narrowed(const at::Tensor& tensor, int64_t dim, ElementRange range) {
  return tensor.narrow(dim, range.begin, range.end - range.begin);
}

// The whole tensor of the ranks' parts.
at::Tensor gather_parts(const at::Tensor& part, const TensorPart& place,
                        const comm::ProcessGroup& group, CallSite site) {
  const at::Tensor own = part.reshape(place.part_shape());
  const at::Tensor whole = at::zeros(place.shape, own.options());
  for_each_piece(place, [&](ElementRange in_part, ElementRange in_whole) {
    narrowed(whole, place.dim, in_whole).copy_(narrowed(own, place.dim, in_part));
  });
  return group.all_reduce(whole, comm::ReduceOp::kSum, site);
}

at::Tensor take_part(const at::Tensor& whole, const TensorPart& place) {
  const at::Tensor part = at::empty(place.part_shape(), whole.options());
  for_each_piece(place, [&](ElementRange in_part, ElementRange in_whole) {
    narrowed(part, place.dim, in_part).copy_(narrowed(whole, place.dim, in_whole));
  });
  return part;
}

}  // namespace

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

struct Muon::Listing {
  static std::string of(const std::map<std::string, Matrix>& matrices) {
    std::ostringstream text;
    for (const auto& [name, matrix] : matrices)
      text << matrix.rows << ' ' << matrix.columns << ' ' << static_cast<int>(matrix.type) << ' '
           << matrix.device.is_cpu() << ' ' << matrix.end - matrix.begin << ' ' << name << '\n';
    return text.str();
  }
  // Calls call(matrix, held) for each matrix that a rank of `group` has listed.
  template <class Call>
  static void exchange(const std::string& own, const comm::ProcessGroup& group, CallSite site,
                       const Call& call) {
    for (const std::string& text : group.all_gather_object(own, site)) {
      std::istringstream lines(text);
      Matrix other;
      int type = 0;
      bool on_cpu = true;
      int64_t held = 0;
      while (lines >> other.rows >> other.columns >> type >> on_cpu >> held && lines.ignore() &&
             std::getline(lines, other.name)) {
        other.type = static_cast<at::ScalarType>(type);
        other.device = on_cpu ? at::kCPU : group.device();
        call(other, held);
      }
    }
  }
};

Muon::Muon(const std::vector<LocalShard>& shards, const comm::ProcessGroup& group,
           const MuonOptions& options, CallSite site)
    : group_(group), options_(options) {
  std::map<std::string, Matrix> own;
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
                  .type = shard.tensor.scalar_type(),
                  .device = shard.tensor.device()};
    own.emplace(shard.name, std::move(matrix));
  }
  // A rank may hold nothing of a matrix, and takes part in its gathering.
  struct Holders {
    int whole = 0;
    int64_t elements = 0;
  };
  std::map<std::string, Holders> holders;
  const auto add_other = [&](const Matrix& other, int64_t held) {
    holders[other.name].whole += held == other.rows * other.columns;
    holders[other.name].elements += held;
    own.emplace(other.name, other);
  };
  Listing::exchange(Listing::of(own), group_, site, add_other);
  if (options_.tensor_parallel) {
    // Sharded ranks list nothing of an empty part, whose other parts they gather nevertheless.
    const auto add_empty = [&](Matrix other, int64_t) {
      const TensorPart* part = options_.tensor_parallel->part_of(other.name);
      if (part == nullptr || own.contains(other.name)) return;
      const std::vector<int64_t> shape = part->part_shape();
      other.rows = shape[0];
      other.columns = c10::multiply_integers(shape.begin() + 1, shape.end());
      own.emplace(other.name, other);
    };
    Listing::exchange(Listing::of(own), options_.tensor_parallel->group(), site, add_empty);
  }
  for (auto& [name, matrix] : own) {
    const auto [whole, elements] = holders[name];
    matrix.is_shared = matrix.rows * matrix.columns > 0 && whole < group_.size();
    TORCH_CHECK_VALUE(!matrix.is_shared || elements == matrix.rows * matrix.columns,
                      "Muon: expected a group whose ranks divide the ",
                      matrix.rows * matrix.columns, " elements of ", name,
                      ", such as mesh.group(\"dp\"), got one that holds ", elements);
    if (options_.tensor_parallel) matrix.cut = options_.tensor_parallel->part_of(name);
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

// This rank's elements of the orthogonalized update; undefined if it has none.
at::Tensor Muon::orthogonal_update(const Matrix& matrix, const at::Tensor& own,
                                   CallSite site) const {
  // Of a cut matrix other ranks along "tp" may have elements.
  if (matrix.rows * matrix.columns == 0 && matrix.cut == nullptr) return own;
  at::Tensor whole = own;
  if (matrix.is_shared || (matrix.cut != nullptr && !own.defined())) {
    whole = at::zeros({matrix.rows * matrix.columns},
                      at::TensorOptions(matrix.device).dtype(matrix.type));
    if (own.defined()) whole.narrow(0, matrix.begin, own.numel()).copy_(own);
    if (matrix.is_shared) group_.all_reduce(whole, comm::ReduceOp::kSum, site);
  }
  // All ranks along "tp" do it: their shards of a matrix need not be the same.
  if (matrix.cut != nullptr)
    whole = gather_parts(whole, *matrix.cut, options_.tensor_parallel->group(), site);
  if (!own.defined()) return {};
  const int64_t rows = matrix.cut == nullptr ? matrix.rows : matrix.cut->shape[0];
  at::Tensor update = orthogonalize(whole.reshape({rows, -1}), options_.num_iterations);
  if (matrix.cut != nullptr) update = take_part(update.reshape(matrix.cut->shape), *matrix.cut);
  return update.reshape({-1}).narrow(0, matrix.begin, matrix.end - matrix.begin);
}

// sqrt(max(1, R / C))
double Muon::scale_of(const Matrix& matrix) {
  auto rows = static_cast<double>(matrix.rows), columns = static_cast<double>(matrix.columns);
  if (matrix.cut != nullptr) {
    rows = static_cast<double>(matrix.cut->shape[0]);
    columns = static_cast<double>(c10::multiply_integers(matrix.cut->shape)) / rows;
  }
  return std::sqrt(std::max(1.0, rows / columns));
}

void Muon::step(double learning_rate, CallSite site) {
  const at::NoGradGuard no_grad;
  for (Matrix& matrix : matrices_) {
    const at::Tensor update = orthogonal_update(matrix, own_update(matrix), site);
    if (!update.defined()) continue;
    matrix.tensor.mul_(1 - learning_rate * options_.weight_decay)
        .sub_(update.view_as(matrix.tensor), learning_rate * scale_of(matrix));
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
