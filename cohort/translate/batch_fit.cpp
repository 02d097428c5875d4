// SPDX-License-Identifier: Apache-2.0
#include "cohort/translate/batch_fit.h"

#include <algorithm>
#include <set>
#include <string>
#include <torch/types.h>

#include "cohort/base/error.h"
#include "cohort/data/token_batches.h"
#include "cohort/text/tokenizer.h"
#include "cohort/translate/tensor_memory.h"

namespace cohort::translate {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

nmt::Batch full_batch(int64_t rows, int64_t width, at::Device device) {
  const at::Tensor ids = at::full({rows, width}, text::kEosId, at::kLong);
  const at::Tensor lengths = at::full({rows}, width, at::kLong);
  const nmt::Batch batch{.source_BS = ids,
                         .source_lengths_B = lengths,
                         .input_BT = ids,
                         .labels_BT = ids,
                         .target_lengths_B = lengths,
                         .num_target_tokens = rows * width};
  return device.is_cpu() ? batch : batch.to(device);
}

// Gives what is trained gradients, as an update finds them, for as long as this lives.
class WithGradients {
 public:
  WithGradients(nmt::Transformer& model, const BatchFitOptions& options) {
    if (options.sharded == nullptr) {
      trained_ = model->parameters();
    } else {
      trained_ = options.sharded->parameters();
    }
    for (at::Tensor& tensor : trained_) tensor.mutable_grad() = at::zeros_like(tensor);
  }
  ~WithGradients() {
    for (at::Tensor& tensor : trained_) tensor.mutable_grad().reset();
  }
  WithGradients(const WithGradients&) = delete;
  WithGradients& operator=(const WithGradients&) = delete;

 private:
  std::vector<at::Tensor> trained_;
};

int64_t run_batch(nmt::Transformer& model, int64_t rows, int64_t width,
                  const BatchFitOptions& options) {
  const at::Device device = model->parameters().front().device();
  const nmt::Batch batch = full_batch(rows, width, device);
  const auto step = [&] {
    const auto loss = options.sharded ? std::get<0>((*options.sharded)(batch))
                                      : std::get<0>(model->forward(batch));
    loss.backward();
  };
  const int64_t bytes = peak_tensor_bytes(step, device.type());
  if (!options.tensor_group) return bytes;
  at::Tensor most = at::tensor({bytes}, at::kLong);
  options.tensor_group.all_reduce(most, comm::ReduceOp::kMax);
  return most.item<int64_t>();
}

// The largest batch within the workspace, but for a tenth; of no rows if not even one fits.
//
// The peak is the largest of several moments', each of which holds something and so much a row: a
// line over rows. Hence a row's share of the peak never rises with rows, and what fits by the share
// of a smaller batch is sure to fit; and the line through two batches ends below the true peak, so
// no more than it allows can fit. Trials grow until both say nearly the same.
BatchFit::Trial most_rows(nmt::Transformer& model, int64_t width, const BatchFitOptions& options) {
  const int64_t workspace = options.workspace_bytes;
  int64_t rows = 1;
  int64_t bytes = run_batch(model, rows, width, options);
  BatchFit::Trial found{.width = width, .rows = 0, .peak_bytes = bytes, .rows_run = 1};
  if (bytes > workspace) return found;
  int64_t possible = options.most_rows;
  while (true) {
    found.rows =
        std::clamp(workspace * rows / std::max<int64_t>(bytes, 1), rows, options.most_rows);
    found.peak_bytes = bytes * found.rows / rows;
    if (found.rows == rows || 10 * found.rows >= 9 * possible) return found;
    // Four times as many at once at most, and half of what is possible if that may be enough.
    const int64_t half = 2 * rows < possible ? (possible + 1) / 2 : possible;
    const int64_t next = std::max(rows + 1, std::min({found.rows, 4 * rows, half}));
    const int64_t next_bytes = run_batch(model, next, width, options);
    found.rows_run += next;
    const int64_t more = next_bytes - bytes;
    if (more > 0 && next_bytes <= workspace) {
      const double room = static_cast<double>(workspace - next_bytes) / static_cast<double>(more);
      possible =
          std::min(possible, next + static_cast<int64_t>(room * static_cast<double>(next - rows)));
    }
    if (next_bytes > workspace) return found;  // A step in the line: what was sure before stays.
    rows = next;
    bytes = next_bytes;
  }
}

// Runs what was found, so that memory that is not there is missed now.
void confirm(nmt::Transformer& model, BatchFit::Trial& found, const BatchFitOptions& options) {
  while (found.rows > 0) {
    found.rows_run += found.rows;
    found.peak_bytes = run_batch(model, found.rows, found.width, options);
    if (found.peak_bytes <= options.workspace_bytes) return;
    found.rows = std::min(found.rows - 1, found.rows * 9 / 10);
  }
}

}  // namespace

int64_t batch_bytes(nmt::Transformer& model, int64_t rows, int64_t width,
                    const BatchFitOptions& options) {
  const WithGradients gradients(model, options);
  return run_batch(model, rows, width, options);
}

BatchFit fit_batches(nmt::Transformer& model, const BatchFitOptions& options,
                     const comm::ProcessGroup& group) {
  const int64_t buckets = (options.longest + data::kFitStep - 1) / data::kFitStep;
  const auto width_of = [&](int64_t bucket) {
    return std::min((bucket + 1) * data::kFitStep, model->options().max_positions);
  };
  BatchFit fit;
  std::vector<int64_t> needed;
  {
    const WithGradients gradients(model, options);
    // A sharded model learns in its first pass what to gather ahead.
    if (options.sharded != nullptr) run_batch(model, 1, width_of(0), options);
    for (const int64_t bucket : std::set<int64_t>{0, (buckets - 1) / 2, buckets - 1}) {
      BatchFit::Trial trial = most_rows(model, width_of(bucket), options);
      if (bucket == buckets - 1) confirm(model, trial, options);
      needed.push_back(trial.rows == 0 ? trial.peak_bytes : 0);
      fit.trials.push_back(trial);
    }
  }
  at::Tensor least = at::empty({std::ssize(fit.trials)}, at::kLong);
  for (size_t i = 0; i < fit.trials.size(); ++i) least.data_ptr<int64_t>()[i] = fit.trials[i].rows;
  group.all_reduce(least, comm::ReduceOp::kMin);
  at::Tensor most = at::tensor(needed, at::kLong);
  group.all_reduce(most, comm::ReduceOp::kMax);
  for (size_t i = 0; i < fit.trials.size(); ++i) {
    fit.trials[i].rows = least.data_ptr<int64_t>()[i];
    if (fit.trials[i].rows > 0) continue;
    const int64_t bytes = most.data_ptr<int64_t>()[i];
    throw ConfigError(
        "--workspace " + std::to_string(options.workspace_bytes / kMiB) + ": one pair of " +
        std::to_string(fit.trials[i].width) + " tokens needs more: expected at least " +
        std::to_string((bytes + kMiB - 1) / kMiB) + " (MiB), or a lower --max-length");
  }
  // A row's bytes at a width between two trials'.
  const auto row_bytes = [&](int64_t width) {
    const auto bytes_of = [&](const BatchFit::Trial& trial) {
      return static_cast<double>(options.workspace_bytes) / static_cast<double>(trial.rows);
    };
    const auto above = std::ranges::find_if(
        fit.trials, [&](const BatchFit::Trial& trial) { return trial.width >= width; });
    if (above->width == width || above == fit.trials.begin()) return bytes_of(*above);
    const auto below = above - 1;
    const double share = static_cast<double>(width - below->width) /
                         static_cast<double>(above->width - below->width);
    return bytes_of(*below) + share * (bytes_of(*above) - bytes_of(*below));
  };
  for (int64_t bucket = 0; bucket < buckets; ++bucket) {
    const auto rows = static_cast<int64_t>(static_cast<double>(options.workspace_bytes) /
                                           row_bytes(width_of(bucket)));
    fit.rows.push_back(
        std::max<int64_t>(1, fit.rows.empty() ? rows : std::min(rows, fit.rows.back())));
  }
  return fit;
}

}  // namespace cohort::translate
