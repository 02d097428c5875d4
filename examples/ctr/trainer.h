// SPDX-License-Identifier: Apache-2.0
// Trains, evaluates and predicts: one trainer of a job, with servers or alone.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cohort/base/console.h"
#include "cohort/comm/process_group.h"
#include "cohort/ps/module/session.h"

#include "examples/ctr/example_reader.h"
#include "examples/ctr/model.h"
#include "examples/ctr/options.h"
#include "examples/ctr/scores.h"

namespace ctr {

/// Results of an epoch of training on this trainer.
struct EpochReport {
  int64_t steps = 0;
  int64_t examples = 0;
  int64_t damaged = 0;  ///< Lines left out.
  double loss = 0;      ///< Sum over the examples as they were met, before their step.
  double seconds = 0;
  double cpu_us = 0;  ///< Of this process, in all.
};

/// Owner:      `group`, whose ranks are the trainers, and `options` must outlive it. A group of one
///             process beside other trainers: none waits for another but through the servers, and
///             the first trainer that is there evaluates and saves.
/// Threads:    one.
/// Collective: constructor, train() and evaluate(). Rank 0 alone prints.
/// Errors:     ConfigError for flags, files and examples, of which too few are refused on every
///             rank; PeerError and c10::DistError when a trainer or a server is lost.
class Trainer {
 public:
  Trainer(const Options& options, const cohort::comm::ProcessGroup& group);

  /// Trains options.epochs, with a checkpoint and scores over the test files after each.
  /// Errors: also ConfigError, on all trainers, if the servers resumed a job with more steps than
  ///         these epochs have.
  void train();
  /// Scores the test files, each example once, whatever the number of trainers; on rank 0,
  /// elsewhere nothing. No row is made.
  std::optional<Metrics> evaluate();
  /// The same, printed.
  void print_evaluation();
  /// Writes p(click) of each line of `input`, with labels or without, a line each, to `output`. For
  /// one process.
  /// Errors: ConfigError for more, and if `output` is `input`; Interrupted.
  void predict(const std::string& input, const std::string& output);
  /// Leaves the servers.
  void finish();

 private:
  struct Tensors {
    at::Tensor labels_B, numbers_BN, ids_BS;
  };

  /// A trainer's share of the examples: one of several that the trainers have, or that ranks have.
  struct Share {
    int number = 0;
    int count = 1;
  };

  cohort::ps::SessionOptions session_options();
  void go_back(cohort::ps::SessionOptions& session);
  static Share share_of(const cohort::ps::SessionOptions& session);
  bool is_ungrouped() const;
  bool is_first();
  int64_t first_epoch(int64_t num_steps) const;
  void start();
  void save(int64_t epoch);
  ReaderOptions reader_options(const std::vector<std::string>& files, const Share& share) const;
  void ensure_data();
  void check_output() const;
  void check_input() const;
  void check_learned(EpochReport sums) const;
  int64_t agreed_steps() const;
  void check_steps_before(int64_t num_steps);
  EpochReport train_epoch(int64_t epoch, int64_t done, int64_t num_steps);
  void tell_damaged(int64_t lines, const char* where) const;
  void wait_for_updates();
  std::optional<Tensors> next_tensors(ExampleReader& reader, Batch& batch) const;
  double learn(const Tensors& tensors);
  at::Tensor logits_of(const Tensors& tensors);

  const Options& options_;
  cohort::comm::ProcessGroup group_;
  cohort::Console console_{group_.rank()};
  cohort::ps::Training training_;
  int64_t epochs_before_ = 0;  ///< In the checkpoint that a trainer started again goes back to.
  cohort::ps::SessionOptions session_options_;
  Share share_;
  bool is_started_ = false;
  std::vector<std::string> train_files_;
  std::vector<std::string> test_files_;
  cohort::ps::Session session_;
  cohort::ps::Embedding rows_;
  DeepFm network_;
  cohort::Profiler profiler_{options_.profile, share_.number, share_.count};
};

}  // namespace ctr
