// SPDX-License-Identifier: Apache-2.0
// The main job: N ranks train one translator together.
#pragma once
#include <cstdint>
#include <optional>
#include <string>

#include "cohort/comm/process_group.h"
#include "cohort/translate/training_options.h"
#include "cohort/translate/valid_metric.h"

namespace cohort::translate {

struct TrainingResult {
  std::string stop_reason;  ///< Why the run ended, a sentence.
  bool was_asked_to =
      false;  ///< By a signal (StopRequest), before any goal of its own was reached.
  int64_t epochs = 0;
  int64_t updates = 0;
  std::optional<ValidScores> best;  ///< Of the weights in best/, once there are any.
};

/// Trains and validates; rank 0 writes the run's folder: config.json, source.spm, target.spm
/// (unless `vocabs` names them), history.jsonl, best/ (the checkpoint that the first metric calls
/// best), last/ (where training stands), checkpoints/<update>/ (if asked for) and result-dev.txt.
///
/// A run with last/ in its folder resumes: on the same number of ranks the result is bit-equal to a
/// run that was never stopped; on another, the epoch continues with the sentences that it has not
/// seen. With servers such a folder is refused: last/ then has no moments, which are the
/// servers'. SIGTERM, SIGINT and SIGHUP, to any rank, end the run after the update at hand with last/
/// written.
///
/// Collective; blocks until the run ends; every rank stops at the same update for the same reason.
/// The gradient of an update is that of the mean loss over all its target tokens on all ranks. With
/// ps-async every rank makes updates of its own and waits for the others only where all validate; a
/// signal or the time limit stops each at the update it is at.
/// Errors: ConfigError for bad input, and for a folder whose run has another model or other
///         training text; PeerError; c10::Error if the loss is no finite number, or the last save
///         fails.
TrainingResult train(const TrainingOptions& options, const comm::ProcessGroup& group);

}  // namespace cohort::translate
