// SPDX-License-Identifier: Apache-2.0
// What a rank is doing at this moment, in a page of memory that its launcher reads: no torch, no
// locks, no syscalls.
//
// The launcher names a file in COHORT_TRACE_FILE; the worker maps it and keeps one record in it up
// to date. It stays readable after the worker's death. docs/comm.md describes the
// record.
#pragma once
#include <array>
#include <atomic>
#include <csignal>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>

#include "cohort/base/call_site.h"

namespace cohort {

/// Name of the variable that holds the file's path.
inline constexpr const char* kTraceFileVariable = "COHORT_TRACE_FILE";

/// A worker with a trace file answers this signal by writing its main thread's stack to `<trace
/// file>.stack`. (SIGRTMIN is a function of the C library, hence this one.)
inline int stack_signal() {
  return SIGRTMIN + 4;
}

enum class TraceState : int32_t {
  kRunning = 1,  ///< Outside of collectives: computing, reading, writing.
  kWaiting = 2,  ///< Inside the collective that the record names.
};

/// One rank's last collective. Texts end in a zero and are cut to their field.
struct TraceRecord {
  int64_t pid = 0;
  int32_t rank = -1;       ///< In the whole job; -1 until the rank knows it.
  int32_t world_size = 0;  ///< Of the whole job.
  int64_t sequence = 0;    ///< Number of the collective in its group, from 1; 0: none yet.
  int64_t since_ns =
      0;  ///< Steady clock (CLOCK_MONOTONIC, one for all processes of a host) when `state` began.
  TraceState state = TraceState::kRunning;
  int32_t num_dims = -1;  ///< Of the tensor; -1: the operation has none. More than 8 are cut.
  std::array<int64_t, 8> dims{};
  std::array<char, 32> group{};      ///< "world", or the sub-group's name.
  std::array<char, 64> operation{};  ///< "all_reduce(sum)", "barrier \"end\""; empty: none yet.
  std::array<char, 16> dtype{};      ///< "float32"; empty: the operation has no tensor.
  std::array<char, 64> call_site{};  ///< "training.cpp:112".
};

/// Copies `text` into a field of TraceRecord, cut to fit.
template <size_t N>
void set_field(std::array<char, N>& field, std::string_view text) {
  const size_t count = text.copy(field.data(), N - 1);
  field[count] = '\0';
}

/// Writes "<file's name>:<line>" into a record's call site.
void set_call_site(TraceRecord& record, const CallSite& site);

/// "all_reduce(sum) of float32[4, 8] at training.cpp:112"; "nothing yet" for an empty record.
std::string describe(const TraceRecord& record);

/// "float32[4, 8]"; empty if the operation has no tensor.
std::string describe_tensor(const TraceRecord& record);

/// Steady clock in nanoseconds, as TraceRecord::since_ns counts it.
int64_t steady_now_ns();

/// One record in shared memory. A reader in any process sees whole records only (a sequence lock).
///
/// Owner:   maps the file until destruction; the file stays.
/// Threads: any may write; writers take turns. Cost of a write: tens of nanoseconds
///          (bench/trace_cost.cpp).
class TracePage {
 public:
  /// `path` empty: in this process's memory only. Otherwise the file is made, or taken over.
  /// Errors: ConfigError that names the file if it cannot be made.
  explicit TracePage(const std::string& path = "");
  ~TracePage();
  TracePage(const TracePage&) = delete;
  TracePage& operator=(const TracePage&) = delete;

  void write(const TraceRecord& record);
  /// The last record written.
  TraceRecord record() const;

  /// Reads another process's page. Nothing if the file is missing, cut short, no trace page of this
  /// version, or its writer stopped for ever in the middle of a write. Never throws, never blocks;
  /// takes a few microseconds.
  static std::optional<TraceRecord> read(const std::string& path) noexcept;

 private:
  struct Layout;

  mutable std::mutex mutex_;  // between threads of this process
  Layout* layout_;
  bool mapped_;
};

}  // namespace cohort
