// SPDX-License-Identifier: Apache-2.0
// A trace of some training steps, for chrome://tracing and Perfetto.
#pragma once
#include <ATen/record_function.h>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

namespace cohort {

/// A named range on this thread's track of the trace. It takes nanoseconds while no Profiler
/// records.
class ProfileScope {
 public:
  /// `label` must outlive this.
  explicit ProfileScope(std::string_view label) {
    if (record_.isActive()) record_.before(label);
  }

 private:
  at::RecordFunction record_{at::RecordScope::USER_SCOPE};
};

struct ProfilerOptions {
  /// Trace file, JSON. Rank r > 0 writes "NAME.rank-r.EXT". Empty: nothing is recorded.
  std::string file;
  /// Steps that are left out, counted from 0: the first ones allocate memory and warm up.
  int64_t skip_steps = 10;
  int64_t num_steps = 5;  ///< Steps that are recorded, > 0.
};

/// Records a few steps of a training loop, as torch.profiler does with a schedule:
///
///   Profiler profiler({.file = "trace.json"}, group.rank(), group.size());
///   for (...) { profiler.step(); ... }
///   profiler.finish();
///
/// The trace has the operators and scopes of the calling thread, its CPU backward included, each
/// step as "ProfilerStep#N", the kernels and copies of CUDA devices, and what the backend of the
/// process group did on tracks of its own, called "communication", with the bytes of this rank's
/// tensors beside each operation.
///
/// Local.
/// Threads: one, the training loop's. One at a time in a process.
class Profiler {
 public:
  /// Errors: c10::ValueError for numbers of steps out of range; ConfigError that names a folder
  ///         that cannot be written.
  Profiler(ProfilerOptions options, int rank, int world_size);
  /// Stops recording; what was not written is lost.
  ~Profiler();
  Profiler(const Profiler&) = delete;
  Profiler& operator=(const Profiler&) = delete;

  /// Begins the next step and ends the one before. Writes the file when the last one is recorded.
  /// Errors: c10::ValueError if something else records already; ConfigError or c10::Error that
  /// names the file if it cannot be written.
  void step();
  /// Ends the last step, and writes what was recorded of fewer steps than asked for. A second call
  /// does nothing.
  /// Errors: as step; ConfigError if the loop ended before a step was recorded.
  void finish();

 private:
  void start();
  void write();

  enum class State { kWaiting, kRecording, kWritten };
  const ProfilerOptions options_;
  const int rank_, world_size_;
  State state_ = State::kWaiting;
  int64_t next_step_ = 0;
  std::string label_;                    // of scope_
  std::unique_ptr<ProfileScope> scope_;  // the step that is recorded
};

}  // namespace cohort
