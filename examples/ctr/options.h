// SPDX-License-Identifier: Apache-2.0
// What `ctr` is asked to do.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cohort/comm/profiler.h"
#include "cohort/ps/rpc/security.h"

#include "examples/ctr/table_limits.h"

namespace ctr {

struct Options {
  std::string data = "ctr-data";   ///< Folder with train.tsv and test.tsv.
  std::vector<std::string> train;  ///< Files to train on, instead of the folder's.
  std::vector<std::string> test;   ///< Likewise to evaluate on.
  int64_t rows = 500'000;          ///< Made up, where the folder has none ...
  bool makes_data = false;         ///< ... and they may be; otherwise that is an error.
  std::string mode;                ///< "local", "sync", ...; empty: sync with servers, else local.
  int64_t epochs = 1;
  int64_t batch_size = 512;            ///< Examples of a step, of each trainer.
  int64_t max_steps = 0;               ///< Of an epoch; 0: all.
  double learning_rate = 1e-3;         ///< Of the network, by Adam.
  double row_learning_rate = 0.005;    ///< Of rows, by row-wise Adagrad.
  int64_t max_staleness = -1;          ///< Async: steps ahead of the slowest trainer; -1: any.
  std::optional<int64_t> max_merge;    ///< Half-async: pushes summed into one.
  std::optional<int64_t> geo_steps;    ///< Geo: local steps between synchronisations.
  std::string precision = "float32";   ///< Of the hidden layers' products in training.
  std::string wire_dtype = "float32";  ///< Of weights and gradients between trainers and servers.
  bool error_if_nonfinite = true;      ///< A gradient with a NaN or an infinity ends the training.
  uint64_t seed = 1;                   ///< Of parameters, rows and made-up data.
  bool skip_damaged = false;           ///< Leave malformed lines out, and count them.
  int64_t print_freq = 200;            ///< Steps between progress lines.
  std::string load;                    ///< A checkpoint's folder to begin with; empty: none.
  std::string save;                    ///< Gets a checkpoint after each epoch; empty: none.
  TableLimits table;                   ///< What each server holds of the rows.
  cohort::ProfilerOptions profile;     ///< A trace of some steps of this trainer.
  /// Of the connections to servers.
  cohort::ps::SecurityOptions security;
};

}  // namespace ctr
