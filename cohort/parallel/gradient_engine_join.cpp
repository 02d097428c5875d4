// SPDX-License-Identifier: Apache-2.0
// Steps of DistributedDataParallel while ranks run out of batches (join.h).
#include <ATen/ops/zeros.h>

#include "cohort/parallel/gradient_engine_impl.h"

namespace cohort::parallel {

Round GradientEngine::Impl::notify_join_context(bool active, bool synchronizing) {
  const auto width = static_cast<int64_t>(group.size());
  at::Tensor news = at::zeros({width + 1}, at::kLong);
  auto* values = news.data_ptr<int64_t>();
  values[group.rank()] = active;
  values[width] = synchronizing;
  group.all_reduce(news);
  Round round{.num_synchronizing = values[width]};
  for (int rank = group.size() - 1; rank >= 0; --rank) {
    if (values[rank] == 0) continue;
    ++round.num_active;
    round.first_active = rank;
  }
  const bool complete = round.num_active == group.size();
  // From here on every rank comes to the same result.
  if (round.num_active > 0) {
    last_round = round;
    TORCH_CHECK(!join->throw_on_early_termination || complete,
                "join: ", group.size() - round.num_active, " of ", group.size(),
                " ranks have no batches left");
    TORCH_CHECK_VALUE(round.num_synchronizing == 0 || round.num_synchronizing == round.num_active,
                      "join: expected all ranks within no_sync or none, got ",
                      round.num_synchronizing, " of ", round.num_active,
                      " outside (validation counts as within)");
    TORCH_CHECK_VALUE(complete || !options.static_graph || num_prepared > 0,
                      "join: expected a batch on every rank in the first step of a static graph");
  }
  return round;
}

void GradientEngine::Impl::shadow_collectives(const Round& round) {
  const bool synchronizes = round.num_synchronizing > 0;
  if (synchronizes) {
    group.translate_errors("join", [&] { reducer->rebuild_buckets(); });
    choose_divisor(round);
  }
  if (will_copy_buffers()) broadcast_tensors(buffers, group, round.first_active);
  buffers_differ = synchronizes;
  if (!synchronizes) return;
  group.run_collective(kReduction, [&] { reducer->shadow_collectives(); });
  ++num_prepared;
}

void GradientEngine::begin_join(const JoinOptions& options) {
  Impl& my = *impl_;
  TORCH_CHECK_VALUE(!my.join, "join: expected no join within a join");
  TORCH_CHECK_VALUE(!my.delayed && !my.options.skip_all_reduce_unused_params,
                    "join: expected neither delay_all_reduce_named_params nor "
                    "skip_all_reduce_unused_params");
  my.logger->set_uneven_input_join();
  my.join = options;
  my.last_round.reset();
}

void GradientEngine::finish_join() {
  Impl& my = *impl_;
  const auto notify = [&] {
    return my.notify_join_context(/*active=*/false, /*synchronizing=*/false);
  };
  for (Round round = notify(); round.num_active > 0; round = notify()) my.shadow_collectives(round);
  if (my.last_round)
    broadcast_model(my.model, my.group, my.last_round->first_active, my.options.ignored);
}

void GradientEngine::end_join() noexcept {
  impl_->join.reset();
}

}  // namespace cohort::parallel
