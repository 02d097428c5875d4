// How many sentences of each length make a batch that fits into memory, found by trial.
#pragma once
#include <cstdint>
#include <vector>

#include "cohort/comm/process_group.h"
#include "cohort/nmt/transformer.h"

namespace cohort::translate {

struct BatchFitOptions {
  int64_t workspace_bytes = 0;  ///< For a batch's forward and backward pass, on one rank.
  int64_t longest = 0;          ///< Tokens of the longest sentence, with its end mark; > 0.
  int64_t most_rows = 0;        ///< More rows than this are never asked for; > 0.
  /// The ranks that compute one `model`, each a shard of it (tensor_parallel_context.h): they try
  /// the same batches, which must fit on all of them. Null: the model is whole.
  comm::ProcessGroup together;
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
/// gradients, and finds the largest batches within the workspace: for the longest sentences, for
/// half as long ones and for the shortest by trial with batches that grow until what is sure to fit
/// is nine tenths of what may fit, between them by the straight line through the bytes a row takes,
/// which is above the true curve. The largest batch of the longest sentences is run, so memory that
/// is not there is missed now and not in the third epoch.
///
/// Collective; blocks for the time of about three large updates. All ranks get the same `rows`: the
/// least of what fits on any. `model` is in training mode and without gradients, before and after;
/// its parameters stay. Not counted: what lies outside of libtorch's allocators (tensor_memory.h).
/// Errors: ConfigError that names --workspace and what it must be, if one pair does not fit.
BatchFit fit_batches(nmt::Transformer& model, const BatchFitOptions& options,
                     const comm::ProcessGroup& group);

/// Returns the bytes that one batch of `rows` pairs, `width` tokens on either side, takes so.
/// Local.
int64_t batch_bytes(nmt::Transformer& model, int64_t rows, int64_t width);

}  // namespace cohort::translate
