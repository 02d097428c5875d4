// SPDX-License-Identifier: Apache-2.0
// How the ranks of a host wait for each other: counters in shared memory.
#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "cohort/comm/peer_process.h"

namespace cohort::comm {

/// What ranks must call alike, by value. Two that differ end each other's call.
struct SharedCall {
  uint32_t number = 0;     ///< NumberedBackend's.
  int32_t operation = 0;   ///< c10d::OpType.
  int32_t dtype = -1;      ///< at::ScalarType; -1: may differ.
  int32_t reduce_op = -1;  ///< c10d::ReduceOp; -1: none.
  int32_t root = -1;       ///< -1: none.
  uint32_t shape = 0;      ///< A hash of what else must be equal; 0: nothing.
  int64_t numel = -1;      ///< -1: may differ.
  bool operator==(const SharedCall&) const = default;
};

/// A rank's own part of the shared memory: only that rank writes it, but `sleepers`.
struct alignas(128) RankLine {
  std::atomic<uint32_t> step;      ///< Steps this rank has taken; modulo 2^32. Sleepers' futex.
  std::atomic<uint32_t> sleepers;  ///< Peers that sleep until `step` changes.
  std::atomic<uint32_t> left;      ///< 1: this rank takes no more steps.
  std::atomic<uint32_t> aborted;   ///< 1: this rank has ended what all wait for.
  SharedCall calls[2];             ///< What this rank calls: calls n and n + 1.
  uint64_t place;                  ///< Where its tensor lies (RankSignals::set_place).
};

/// Steps that all ranks take together: a rank `arrive`s at step n once what others read of it
/// there is in the memory, and `wait`s before it reads what is theirs.
///
/// Waiting may spin for some microseconds, then sleeps on a futex.
/// Threads: one; `abort` any.
class RankSignals {
 public:
  /// `lines`: one for each rank, zeros at first. `names`: what errors call the ranks, by rank. All
  /// three outlive this object. `spins`: for ranks that have a core each.
  RankSignals(RankLine* lines, int rank, const std::vector<PeerProcess>& peers,
              const std::vector<int>& names, bool spins);
  /// Peers that still wait for this rank end with an error.
  ~RankSignals();
  RankSignals(const RankSignals&) = delete;
  RankSignals& operator=(const RankSignals&) = delete;

  using Deadline = std::chrono::steady_clock::time_point;

  /// Begins a call, which all ranks begin alike: its steps must be over by `deadline`.
  /// Errors: c10::DistBackendError after an `abort`.
  void begin(const SharedCall& call, Deadline deadline);
  /// Takes the next step and returns its number.
  uint32_t arrive();
  /// Returns once all ranks have arrived at `step`.
  /// Errors: CallMismatch: a peer calls something else. c10::DistBackendError: it has ended or left;
  ///         the deadline; `abort`, of any rank.
  void wait(uint32_t step);
  /// Throws if a rank has aborted. Call it after `wait`, when you have read what peers may change:
  /// even if all ranks have arrived at a step, a peer's call may have failed since the step before.
  /// Errors: c10::DistBackendError after an `abort`, of any rank.
  void check_aborted() const;
  /// Says, before `arrive`, where this rank's tensor lies. It holds until all ranks have arrived at
  /// the step after that one.
  void set_place(uint64_t place) { lines_[rank_].place = place; }
  /// What `peer` has said, after `wait`.
  uint64_t place_of(int peer) const { return lines_[peer].place; }
  /// Number of ranks.
  size_t size() const { return peers_.size(); }
  /// The step that `arrive` takes next.
  uint32_t next_step() const { return step_ + 1; }

  /// Ends what all ranks wait for, now and later.
  /// Threads: any.
  void abort();

 private:
  void wait_for(int peer, uint32_t step);
  std::string name_of(int peer) const;
  std::string problem_of(int waited_for) const;
  std::string aborted_text() const;
  void compare_with(int peer) const;

  RankLine* const lines_;
  const int rank_;
  const std::vector<PeerProcess>& peers_;  // by rank
  const std::vector<int>& names_;
  const bool spins_;
  uint32_t step_ = 0;
  uint32_t num_calls_ = 0;
  bool compares_ = false;  // at the next wait
  Deadline deadline_{};
  std::chrono::steady_clock::time_point begun_{};
};

}  // namespace cohort::comm
