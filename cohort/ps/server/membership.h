// SPDX-License-Identifier: Apache-2.0
// The trainers of a job: which of them steps wait for, and how far each is.
#pragma once
#include <cstdint>
#include <map>
#include <vector>

namespace cohort::ps {

struct TrainerState {
  uint64_t incarnation = 0;
  uint64_t last_sequence = 0;  ///< Of its pushes applied (kSync: accepted: the step).
  uint64_t clock = 0;          ///< Its pushes, from the slowest clock when it joined.
  bool is_member = true;       ///< Steps wait for it.
  uint64_t nonce = 0;          ///< Of its process's request to join.
  uint64_t joined_after = 0;   ///< The last step that was closed without it.
};

/// Threads: one at a time. Local.
class Membership {
 public:
  /// A step needs `trainers` trainers, numbered from 0, to have joined.
  void set_expected(int trainers) { expected_ = static_cast<uint32_t>(trainers); }

  const std::map<uint32_t, TrainerState>& trainers() const { return trainers_; }
  const TrainerState* find(uint32_t id) const;

  /// A process of trainer `id` joins as `incarnation`, after step `closed`.
  void join(uint32_t id, uint64_t incarnation, uint64_t nonce, uint64_t closed, bool is_sync);
  void leave(uint32_t id) { trainers_.at(id).is_member = false; }
  void push(uint32_t id, uint64_t sequence);
  void restore(uint32_t id, const TrainerState& state) { trainers_[id] = state; }

  /// Whether every expected trainer has joined, and every member has pushed `step`.
  bool have_pushed(uint64_t step) const;
  /// Trainers that never joined, and members that have not pushed `step`.
  std::vector<uint32_t> missing(uint64_t step) const;
  /// Trainers that never joined, and members whose clock is the slowest.
  std::vector<uint32_t> slowest() const;
  /// By how many pushes a trainer is ahead of the slowest member; 0 if it is not a member.
  uint64_t lead_of(uint32_t id) const;

 private:
  std::vector<uint32_t> absent() const;
  uint64_t slowest_clock() const;

  uint32_t expected_ = 0;
  std::map<uint32_t, TrainerState> trainers_;
};

}  // namespace cohort::ps
