// SPDX-License-Identifier: Apache-2.0
// One update of a translator's parameters, which all ranks of a run make together.
#pragma once
#include <ATen/core/Tensor.h>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cohort/comm/process_group.h"
#include "cohort/nmt/transformer.h"
#include "cohort/optim/adam.h"
#include "cohort/optim/exponential_average.h"
#include "cohort/optim/noam.h"
#include "cohort/parallel/mesh.h"
#include "cohort/parallel/strategy.h"
#include "cohort/parallel/tensor_parallel_layout.h"
#include "cohort/ps/module/session.h"
#include "cohort/train/checkpoint.h"
#include "cohort/translate/batch_upload.h"
#include "cohort/translate/tensor_parallel_context.h"

namespace cohort::translate {

using parallel::Replicated;

struct UpdaterOptions {
  /// parallel::init_strategy_mesh of the updater's group and `strategy`. With an axis "tp" the model
  /// is partitioned among the ranks along it (tensor_parallel_context.h). Empty: the updater makes
  /// one, for a model that is whole on each rank.
  parallel::DeviceMesh mesh;
  parallel::Strategy strategy = parallel::Strategy::kDdp;
  /// First values of a model on the meta device, which the strategy shards: ShardingOptions::fill.
  std::function<void(const std::string& name, at::Tensor& parameter)> fill;
  bool cpu_offload = false;             ///< ShardingOptions::cpu_offload; not with kDdp.
  bool gradient_checkpointing = false;  ///< See set_up_layers.
  optim::AdamOptions adam;
  optim::NoamSchedule schedule;
  double clip_norm = 1;              ///< Largest global gradient norm; 0: no clipping.
  double exponential_smoothing = 0;  ///< Weight of the newest parameters in the average; 0: none.
  uint64_t seed = 1;                 ///< Of dropout.
  /// Parameter servers, which hold the moments and run Adam under the schedule (dense_rule is
  /// filled in): kSync or kAsync, each rank a trainer, `strategy` kDdp, no axis "tp". `client.restore`:
  /// what they go back to, and their weights with them.
  std::optional<ps::SessionOptions> servers;
};

/// Whether there are servers, and they are kAsync: no rank waits for another then.
bool is_async(const std::optional<ps::SessionOptions>& servers);

/// Where a number that is not finite came from.
struct BadNumber {
  int rank = -1;       ///< The first whose own loss or gradient it was; -1: nobody's but the sum's.
  int64_t batch = -1;  ///< Of that rank's batches, the first.
  std::string parameter;  ///< The first that backward came to with such a gradient.
};

/// What one rank knows of an update. With kAsync servers an update is this rank's alone: all of it
/// is its own, and so is num_tokens.
struct UpdateReport {
  double nll_sum = 0;      ///< Of this rank's target tokens, without smoothing; natural logarithm.
  int64_t own_tokens = 0;  ///< This rank's target tokens.
  int64_t num_tokens = 0;  ///< All ranks' target tokens.
  /// Global, before clipping; the same on all ranks. kSync servers: the root mean square over ranks
  /// of their own gradients' norms.
  double gradient_norm = 0;
  bool skipped = false;  ///< A loss or the norm is not finite: nothing was updated, anywhere.
  BadNumber bad;         ///< If skipped: where that came from; the same on all ranks.
  /// Of this rank's own work: without waiting for other ranks. On a device: of the whole update.
  double compute_seconds = 0;
};

/// Updates a translator by Adam under the Noam schedule.
///
/// The gradient of an update is that of the mean loss over all its target tokens, on all ranks and
/// in all batches: how the sentences are spread over ranks and batches changes nothing but the
/// order of summation and the elements that dropout takes. Those hang on the batch's number in the
/// update, i * size + rank for batch i of a rank of data_axes(mesh).group(): two ranks with a batch
/// each compute what one does with two. The gradient's global norm is clipped, and the average
/// takes the new parameters in.
///
/// With servers no gradient travels between ranks. kSync: the same, but for clipping: each rank's
/// gradient, of its own share of the mean, is clipped by its own norm, and so their mean has at
/// most clip_norm, too. kAsync: each rank's gradient, of the mean loss over its own tokens and
/// clipped by its own norm, is an update at once, at the rate divided by the number of ranks; no
/// rank waits for another, and the ranks' parameters differ between two `wait_for_updates`.
///
/// Owner:   holds the model.
/// Devices: the model is where the group computes (ProcessGroup::device()); one on the meta device
///          comes to lie there. Batches are on the host, best in pinned memory (corpus.h: pinned).
/// Threads: one.
/// Errors:  PeerError from constructor and `update` when a rank is lost.
class Updater {
 public:
  /// Collective; blocks: verifies that the ranks' models agree, then copies rank 0's to all.
  Updater(nmt::Transformer model, const comm::ProcessGroup& group, const UpdaterOptions& options);
  ~Updater();
  Updater(const Updater&) = delete;
  Updater& operator=(const Updater&) = delete;

  /// Makes one update from this rank's `batches`: one or more; ranks may have different numbers.
  /// `num_tokens`: all ranks' target tokens; without it, ranks exchange that number first.
  ///
  /// Collective; blocks until every rank has computed. Where one rank's loss or gradient is no
  /// finite number, no rank updates anything, `num_updates` stays, and all compute once more to
  /// find out whose it was.
  /// Cost: one all-reduce of the gradients, however many batches there are. The
  /// host waits for the device once, for the norm; nothing but the batches is copied to it.
  ///
  /// kAsync: local; blocks for the servers alone. Where this rank's loss or gradient is no finite
  /// number, it pushes nothing; `num_updates` counts the update all the same, so that every rank
  /// comes to update N after as many calls.
  UpdateReport update(const std::vector<nmt::Batch>& batches,
                      std::optional<int64_t> num_tokens = std::nullopt);
  /// Waits until all ranks hold the same parameters, until the next update. Collective; blocks
  /// until every rank has come, after as many updates as it likes with kAsync. Without servers
  /// there is nothing to do.
  void wait_for_updates();
  /// Writes a checkpoint of the servers, if there are any, to `folder`, which they see: of the
  /// state after num_updates(); kAsync: of what they hold meanwhile. kSync: collective. Blocks.
  /// Errors: as Client::save, on all ranks that call it.
  void save_servers(const std::string& folder);
  /// Leaves the servers, if there are any: no update may follow. Blocks.
  void finish();

  /// This rank's shards of a checkpoint's parts: "weights", "optimizer" unless servers have it, and
  /// "average" if there is one. They share memory with this; after filling them, call
  /// `set_num_updates`. To save them, kOnce: those of all writers then cover everything once.
  train::ShardedParts parts(Replicated replicated = Replicated::kEverywhere);
  /// The ranks that write checkpoints, if this is one of them; else empty. Rank 0 of all is their
  /// first.
  const comm::ProcessGroup& checkpoint_writers() const { return parallel_.checkpoint_writers(); }
  /// Whether ranks hold different shards: then every rank reads a checkpoint, else any one.
  bool is_sharded() const { return parallel_.is_sharded(); }
  void set_num_updates(int64_t num_updates);

  int64_t num_updates() const { return num_updates_; }
  /// Of the last update. kAsync: not yet divided by the number of ranks, and as if all had made as
  /// many updates; the servers count those of all.
  double learning_rate() const;
  /// The smoothed parameters; null without exponential_smoothing.
  optim::ExponentialAverage* average() { return average_.get(); }
  parallel::ParallelModel<nmt::Transformer>& model() { return parallel_; }

 private:
  at::Tensor accumulate_gradients(const std::vector<nmt::Batch>& batches, double weight);
  const comm::ProcessGroup& everyone() { return mesh_.world(); }
  std::vector<std::string> found_by_all(const std::string& own);
  void start_session();
  double root_mean_square(double norm);
  void apply(double gradient_factor);
  void forget_gradients();
  void watch_gradients();
  BadNumber find_bad_number(const std::vector<nmt::Batch>& batches, double weight);
  std::string first_bad_sum();

  UpdaterOptions options_;
  parallel::DeviceMesh mesh_;
  comm::ProcessGroup group_;  // along the data axes: each rank has batches of its own
  nmt::Transformer model_;
  parallel::ParallelModel<nmt::Transformer> parallel_;
  BatchUpload upload_;
  std::vector<at::Tensor> trained_;  // what is updated: parameters, or shards of them
  std::optional<optim::Adam> adam_;  // one of the two
  std::optional<ps::Session> session_;
  int64_t num_updates_ = 0;
  std::unique_ptr<optim::ExponentialAverage> average_;
  std::vector<std::pair<at::Tensor, unsigned>> hooks_;   // to be taken off again
  std::chrono::steady_clock::time_point last_gradient_;  // when backward had computed it
  int64_t batch_ = 0;                                    // that is being computed
};

}  // namespace cohort::translate
