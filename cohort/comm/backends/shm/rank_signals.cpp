// SPDX-License-Identifier: Apache-2.0
#include "cohort/comm/backends/shm/rank_signals.h"

#include <c10/util/Exception.h>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/headeronly/core/ScalarType.h>

#include "cohort/comm/backends/shm/futex.h"
#include "cohort/comm/numbered_backend.h"

namespace cohort::comm {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr std::chrono::microseconds kSpin{20};

void pause_core() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

bool has_reached(uint32_t step, uint32_t wanted) {
  return static_cast<int32_t>(step - wanted) >= 0;
}

std::string text_of_call(const SharedCall& call) {
  std::string text = c10d::opTypeToString(static_cast<c10d::OpType>(call.operation));
  if (call.numel >= 0) text += " of " + std::to_string(call.numel);
  if (call.dtype >= 0)
    text += std::string(" x ") + c10::toString(static_cast<c10::ScalarType>(call.dtype));
  if (call.shape != 0) text += ", shapes " + std::to_string(call.shape);
  if (call.root >= 0) text += ", root " + std::to_string(call.root);
  if (call.reduce_op >= 0) text += ", reduction " + std::to_string(call.reduce_op);
  return text + ", number " + std::to_string(call.number);
}

[[noreturn]] void fail_step(const std::string& what) {
  C10_THROW_ERROR(DistBackendError, "shm: " + what);
}

}  // namespace

RankSignals::RankSignals(RankLine* lines, int rank, const std::vector<PeerProcess>& peers,
                         const std::vector<int>& names, bool spins)
    : lines_(lines), rank_(rank), peers_(peers), names_(names), spins_(spins) {}

RankSignals::~RankSignals() {
  lines_[rank_].left.store(1);
  wake_sleepers(lines_[rank_].step, lines_[rank_].sleepers);
}

void RankSignals::begin(const SharedCall& call, Deadline deadline) {
  check_aborted();
  lines_[rank_].calls[num_calls_++ % 2] = call;
  deadline_ = deadline;
  begun_ = Clock::now();
  compares_ = true;
}

uint32_t RankSignals::arrive() {
  RankLine& line = lines_[rank_];
  line.step.store(++step_);
  wake_sleepers(line.step, line.sleepers);
  return step_;
}

void RankSignals::wait(uint32_t step) {
  for (int peer = 0; peer < std::ssize(peers_); ++peer) {
    if (peer == rank_) continue;
    if (!has_reached(lines_[peer].step.load(std::memory_order_acquire), step)) wait_for(peer, step);
    if (compares_) compare_with(peer);
  }
  compares_ = false;
}

void RankSignals::wait_for(int peer, uint32_t step) {
  RankLine& line = lines_[peer];
  if (spins_) {
    const auto end = Clock::now() + kSpin;
    do {
      for (int turn = 0; turn < 64; ++turn) {
        if (has_reached(line.step.load(std::memory_order_acquire), step)) return;
        pause_core();
      }
    } while (Clock::now() < end);
  }
  while (true) {
    const uint32_t seen = line.step.load(std::memory_order_acquire);
    if (has_reached(seen, step)) return;
    const std::string problem = problem_of(peer);
    // A peer that arrives, and then ends or leaves, has arrived.
    if (!problem.empty() && !has_reached(line.step.load(std::memory_order_acquire), step))
      fail_step(problem);
    sleep_until_changed(line.step, line.sleepers, seen);
  }
}

std::string RankSignals::name_of(int peer) const {
  return "rank " + std::to_string(names_[static_cast<size_t>(peer)]);
}

// Why there is nothing to wait for; empty: a rank may still come.
std::string RankSignals::problem_of(int waited_for) const {
  for (int peer = 0; peer < std::ssize(peers_); ++peer) {
    if (peers_[static_cast<size_t>(peer)].has_ended()) return name_of(peer) + " has ended";
  }
  if (lines_[waited_for].left.load() != 0) return name_of(waited_for) + " has left the group";
  if (const std::string aborted = aborted_text(); !aborted.empty()) return aborted;
  if (Clock::now() <= deadline_) return {};
  const auto waited = std::chrono::duration_cast<milliseconds>(Clock::now() - begun_);
  return name_of(waited_for) + " has not come within " + std::to_string(waited.count()) + " ms";
}

std::string RankSignals::aborted_text() const {
  for (int peer = 0; peer < std::ssize(peers_); ++peer) {
    if (lines_[peer].aborted.load(std::memory_order_acquire) != 0)
      return "the operation was aborted" + (peer == rank_ ? "" : " by " + name_of(peer));
  }
  return {};
}

// What was read before is not newer than what is looked at here.
void RankSignals::check_aborted() const {
  std::atomic_thread_fence(std::memory_order_acquire);
  if (const std::string aborted = aborted_text(); !aborted.empty()) fail_step(aborted);
}

// Before this rank arrives at the call after the next, no peer has more than one call to be read.
void RankSignals::compare_with(int peer) const {
  const uint32_t parity = (num_calls_ - 1) % 2;
  const SharedCall& own = lines_[rank_].calls[parity];
  const SharedCall& other = lines_[peer].calls[parity];
  if (own == other) return;
  throw CallMismatch({__func__, __FILE__, __LINE__},
                     "shm: the ranks' calls differ: " + name_of(peer) + " calls " +
                         text_of_call(other) + ", this rank " + text_of_call(own));
}

void RankSignals::abort() {
  lines_[rank_].aborted.store(1);
  for (int peer = 0; peer < std::ssize(peers_); ++peer)
    wake_sleepers(lines_[peer].step, lines_[peer].sleepers);
}

}  // namespace cohort::comm
