// SPDX-License-Identifier: Apache-2.0
// How many sentences of each length make a batch that fits into memory, found by trial.
#pragma once
#include <cstdint>
#include <vector>

#include "cohort/comm/process_group.h"
#include "cohort/nmt/transformer.h"
#include "cohort/parallel/strategy.h"

namespace cohort::translate {

struct BatchFitOptions {
  int64_t workspace_bytes = 0;  ///< For a batch's forward and backward pass, on one rank.
  int64_t longest = 0;          ///< Tokens of the longest sentence, with its end mark; > 0.
  int64_t most_rows = 0;        ///< More rows than this are never asked for; > 0.
  /// The ranks that `model`'s forward and backward are collective over, because each has a part of
  /// it (tensor_parallel_context.h, or `sharded`): they try the same batches, which must fit on all
  /// of them.
  /// Empty: the model is whole.
  comm::ProcessGroup tensor_group;
  /// What shards the parameters of `model`, so that only its forward and backward work. Null:
  /// nothing does.
  parallel::ParallelModel<nmt::Transformer>* sharded = nullptr;
};

struct BatchFit {
  /// A width that was tried, and the most rows of it that fit, but for a tenth, on every rank.
  struct Trial {
    int64_t width = 0;
    int64_t rows = 0;
    int64_t peak_bytes = 0;  ///< Of this rank's most rows, at most; of the longest: measured.
    int64_t rows_run = 0;    ///< Of all batches that were run for it on this rank.
  };
  std::vector<int64_t> rows;  ///< data::BatchOptions::fit_rows.
  std::vector<Trial> trials;  ///< By width, the longest last.
};

/// Measures the tensors that forward and backward of `model` hold at most beyond parameters and
/// gradients (of a sharded model: beyond this rank's shards of them, so that what it gathers and
/// reduces counts), and finds the largest batches within the workspace: for the longest sentences, for
/// half as long ones and for the shortest by trial with batches that grow until what is sure to fit
/// is nine tenths of what may fit, between them by the straight line through the bytes a row takes,
/// which is above the true curve. The largest batch of the longest sentences is run, so memory that
/// is not there is missed now and not in the third epoch.
///
/// Collective; blocks for the time of about three large updates. All ranks get the same `rows`: the
/// least of what fits on any. `model` is in training mode and without gradients, before and after;
/// its parameters stay. Where they lie is where memory is counted. Not counted: what lies outside of
/// libtorch's allocators (tensor_memory.h), and on a card what they keep for later.
/// Errors: ConfigError that names --workspace and what it must be, if one pair does not fit.
BatchFit fit_batches(nmt::Transformer& model, const BatchFitOptions& options,
                     const comm::ProcessGroup& group);

/// Returns the bytes that one batch of `rows` pairs, `width` tokens on either side, takes so, on
/// the rank of `options.tensor_group` where it takes most. Collective over that; local without.
int64_t batch_bytes(nmt::Transformer& model, int64_t rows, int64_t width,
                    const BatchFitOptions& options = {});

}  // namespace cohort::translate
