// SPDX-License-Identifier: Apache-2.0
// PowerSGD: gradients travel as products of two thin matrices.
#pragma once
#include <ATen/core/Tensor.h>
#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "cohort/parallel/comm_hook.h"

namespace cohort::parallel {

/// Options of PowerSgdState, with PyTorch's names.
struct PowerSgdOptions {
  int64_t matrix_approximation_rank =
      1;  ///< Columns of the two factors, >= 1. More: closer, and more bytes.
  /// Backward passes that send whole gradients first, >= 0; at least 2 with error feedback or warm
  /// start, whose memory goes by bucket, since rebuild_buckets may cut the buckets again after the
  /// first pass.
  int64_t start_power_sgd_iter = 1000;
  double min_compression_rate =
      2;  ///< An n x m gradient is compressed if (n + m) * rank * this < n * m.
  bool use_error_feedback = true;  ///< What compression loses is added to the next gradient.
  bool warm_start = true;          ///< Start each power iteration from the last one's factor.
  uint64_t random_seed = 0;        ///< Of the first factors; the same on every rank.
};

/// What PowerSGD remembers from step to step: the second factors, and this rank's error.
///
/// Owner:   a shared_ptr, held by the hook and the code that saves it.
/// Threads: one; not while a backward runs.
class PowerSgdState : public std::enable_shared_from_this<PowerSgdState> {
 public:
  /// Errors: c10::ValueError if an option is out of range.
  explicit PowerSgdState(const PowerSgdOptions& options);
  ~PowerSgdState();

  /// Returns copies of everything that the next step needs: "iteration" [1] int64 and, per
  /// compressed bucket i, "numel.i" [1] int64, "factor.i" flat, the same on all ranks, and with
  /// error feedback "error.i" flat, this rank's own. Local: every rank saves its own.
  std::map<std::string, at::Tensor> state_dict() const;

  /// Takes over what state_dict returned on the same rank of a run with the same options, world
  /// size and bucket layout.
  /// Errors: c10::ValueError if an entry is missing; a later hook call if a bucket's size differs.
  void load_state_dict(const std::map<std::string, at::Tensor>& state);

  int64_t iteration() const;  ///< Backward passes so far.
  /// Gradient elements of buckets of which some gradient was compressed, and elements sent for them
  /// (buckets that are sent whole count in neither): their quotient is the compression rate.
  int64_t num_elements_before() const;
  int64_t num_elements_after() const;

 private:
  friend CommHook power_sgd_hook(std::shared_ptr<PowerSgdState> state);
  struct Impl;
  TensorFuture compress(const comm::ProcessGroup& group, const Bucket& bucket);
  std::unique_ptr<Impl> impl_;
};

/// Returns the hook that sends each gradient as the product of its two rank-r factors.
///
/// A gradient of shape [n, ...] is a matrix M [n, m], in the order of its memory. With Q [m, r]
/// from the last step: P = orthogonal basis of the mean over ranks of M Q; Q = mean over ranks of
/// transpose(M) P; the result is P transpose(Q). Small gradients and vectors travel whole, with Q.
///
/// Collective: two all-reduces per bucket, of P [n, r] each, then of Q [m, r] each with the whole
///             gradients. The call waits for the first and leaves the second under way: so all
///             collectives start in the order of the calls, from the calling thread, and match
///             between ranks whatever the timing of replies.
/// Numerics:   messages are sent and summed in the gradient's dtype, after each rank multiplied by
///             1 / W; a 16-bit gradient's factors are computed in float32 between them. Bases come
///             from a Householder QR, which needs no epsilon and survives a zero gradient. The
///             error is M - P transpose(own Q): what this rank's part lost. Its mean over ranks is
///             that of the paper's, but the difference between ranks does not pile up in it. A step
///             with a NaN or infinity, or whose messages overflow, yields some on all ranks and
///             leaves the memory as it was. Ranks on unlike processors may differ in the last bits
///             of P, hence of the parameters.
/// Memory:     the error, as large as the compressed gradients; the factors, (n + m) r.
/// Errors:     PeerError from the backward; c10::ValueError for a sparse bucket, or one of another
///             size than before.
/// Source:     Vogels et al. 2019, arXiv:1905.13727, algorithms 1 and 2.
CommHook power_sgd_hook(std::shared_ptr<PowerSgdState> state);

}  // namespace cohort::parallel
