// SPDX-License-Identifier: Apache-2.0
// Muon: momentum whose every update is made an orthogonal matrix.
#pragma once
#include <ATen/core/Tensor.h>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cohort/comm/process_group.h"
#include "cohort/parallel/sharding/sharding_engine.h"

namespace cohort {
struct TensorPart;
}

namespace cohort::parallel {

class TensorParallelLayout;

struct MuonOptions {
  double momentum = 0.95;
  bool nesterov = true;
  double weight_decay = 0;  ///< Decoupled: parameters shrink by learning_rate * weight_decay.
  int num_iterations = 5;   ///< Of Newton and Schulz.
  /// Of a tensor-parallel model, whose parts would be taken for whole matrices without it: the
  /// wrapper's ranks().tensor_parallel.
  std::shared_ptr<const TensorParallelLayout> tensor_parallel{};
};

/// Returns about U V^T of `matrix` = U S V^T: all singular values come to lie between 0.68
/// and 1.13, but those below some 1e-3 of the matrix's norm. 0 stays 0. `matrix`: [R, C], of a
/// floating-point type in which all is computed. Local.
/// Source: K. Jordan et al. 2024, https://kellerjordan.github.io/posts/muon: five iterations of
///         X <- a X + (b A + c A A) X with A = X X^T, (a, b, c) = (3.4445, -4.7750, 2.0315).
at::Tensor orthogonalize(const at::Tensor& matrix, int num_iterations = 5);

/// Muon for the matrices of a model, whole or sharded.
///
/// An update needs its whole matrix, so where ranks hold shards (FullyShardedDataParallel), each
/// matrix's momentum is gathered when it is used, one matrix at a time; momentum itself stays
/// sharded. Of DistributedDataParallel's parameters every rank has the whole. Where tensor
/// parallelism cuts a matrix, its parts are gathered along "tp", too.
///
///   std::vector<parallel::LocalShard> matrices, others;
///   for (const auto& shard : sharded.local_shards())
///     (shard.shape.size() == 2 ? matrices : others).push_back(shard);
///   // Hidden layers. All others, and as a rule embeddings and the head, belong to another
///   // optimizer.
///   parallel::Muon muon(matrices, mesh.group("dp"),
///                       {.tensor_parallel = sharded.ranks().tensor_parallel});
///   loss(sharded(batch)).backward();
///   muon.step(0.02);
///   muon.zero_grad();
///
/// Parameters of more dimensions are [shape[0], the rest]. Frozen ones are passed over.
///
/// Update: m <- beta m + (1 - beta) g;  u = (1 - beta) g + beta m (nesterov) or m;
///         p <- p - rate (weight_decay p + sqrt(max(1, R / C)) orthogonalize(u)).
/// Collective: constructor, and step where ranks hold shards or parts. Both block.
/// Memory:     4 bytes of momentum for each float32 element that this rank holds; while step runs,
///             one whole matrix and some four of its size.
/// Cost:       step sends 2 (W-1)/W of the bytes of all matrices that are sharded, as much among
///             the K ranks along "tp" of those that are cut, and every rank orthogonalizes every
///             matrix: some 10 num_iterations R C min(R, C) multiplications.
/// Numerics:   in the parameters' own type. Every rank computes the same update of a matrix.
/// Threads:    one.
/// Errors:     c10::ValueError: a parameter of fewer than two dimensions. PeerError: a rank is
///             lost.
/// Source:     as orthogonalize, muon.py (MIT license).
class Muon {
 public:
  /// `shards`: this rank's, of the same parameters on all ranks; `group`: the ranks that divide them,
  /// or hold them whole.
  /// Errors: c10::ValueError for parameters of one dimension, and for a group that does neither: of
  ///         replicas of shards, or of ranks with several parts of a tensor-parallel model.
  Muon(const std::vector<LocalShard>& shards, const comm::ProcessGroup& group,
       const MuonOptions& options = {}, CallSite site = CallSite::here());

  /// Updates every parameter from its gradient. One without a gradient keeps its value and
  /// momentum.
  void step(double learning_rate, CallSite site = CallSite::here());
  /// Forgets the gradients: they become undefined.
  void zero_grad();

  /// The state, to be saved or filled: "<parameter>.momentum", a tensor like each shard.
  std::vector<std::pair<std::string, at::Tensor>> state() const;

 private:
  struct Matrix {
    std::string name;
    int64_t rows = 0;
    int64_t columns = 0;
    int64_t begin = 0;
    int64_t end = 0;      // equal: this rank holds nothing of it
    at::Tensor tensor;    // undefined then
    at::Tensor momentum;  // like tensor
    at::ScalarType type = at::kFloat;
    at::Device device = at::kCPU;
    bool is_shared = false;           // on some rank less than the whole
    const TensorPart* cut = nullptr;  // all this is of this part
  };
  struct Listing;  // What ranks tell each other of their matrices.
  at::Tensor own_update(Matrix& matrix) const;
  at::Tensor orthogonal_update(const Matrix& matrix, const at::Tensor& own, CallSite site) const;
  static double scale_of(const Matrix& matrix);

  std::vector<Matrix> matrices_;  // the same names in the same order on all ranks
  comm::ProcessGroup group_;
  MuonOptions options_;
};

}  // namespace cohort::parallel
