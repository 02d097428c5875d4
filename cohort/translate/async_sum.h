// SPDX-License-Identifier: Apache-2.0
// Sums of a few numbers over ranks that do not wait for each other.
#pragma once
#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "cohort/comm/process_group.h"

namespace cohort::translate {

/// Sums numbers over ranks in rounds that run in the background.
///
/// A round ends when every rank has joined it, so the slowest rank sets the rate of rounds, but no
/// rank waits for one except in `synchronize`. All ranks see the same rounds in the same order.
///
/// Threads: one.
/// Blocks:  the constructor and `synchronize`; the destructor until a round that was joined has
///          ended or failed.
/// Errors:  PeerError from all of them if a rank is lost, or later than the group's timeout.
class AsyncSum {
 public:
  /// Returns what this rank adds to the next round: `count` numbers.
  using Give = std::function<std::vector<double>()>;
  /// Takes what this rank gave to a round that has ended, and the sums over ranks.
  using Take = std::function<void(const std::vector<double>& own, const std::vector<double>& sums)>;

  /// Collective. `give` and `take` are called from `poll` and `synchronize`.
  AsyncSum(const comm::ProcessGroup& group, size_t count, Give give, Take take);
  ~AsyncSum();
  AsyncSum(const AsyncSum&) = delete;
  AsyncSum& operator=(const AsyncSum&) = delete;

  /// Takes the round under way if it has ended, and joins the next one. Local.
  void poll();
  /// Returns when all ranks are in `synchronize` and what they gave before has been taken.
  /// Collective. Rounds continue meanwhile: ranks that still `poll` hear from this one, and a wait
  /// is as long as the slowest rank takes from one `poll` to the next.
  void synchronize();

 private:
  struct Round;
  void join(bool is_synchronizing);
  bool finish();  // whether all ranks were in `synchronize`

  const size_t count_;
  const Give give_;
  const Take take_;
  const comm::ProcessGroup group_;  // of its own, for its rounds come at any time
  std::unique_ptr<Round> round_;    // under way
};

}  // namespace cohort::translate
