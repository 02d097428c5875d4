// SPDX-License-Identifier: Apache-2.0
// How tensors move between the ranks of a host: by steps, a piece of each rank's at a time.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "cohort/comm/backends/shm/rank_signals.h"
#include "cohort/comm/backends/shm/reduce.h"

namespace cohort::comm {

/// The slots of shared memory in which a rank puts what the others read, a ring of kSlots for each
/// rank, and its signals.
///
/// Step s uses every rank's slot s mod kSlots. A rank puts step s + 1 down before it reads step s,
/// so that peers seldom wait for each other.
/// Collective: every function, in the same order on all ranks; blocks until `begin`'s deadline.
/// Errors:     RankSignals'.
/// Threads:    one; `abort` any.
class SharedExchange {
 public:
  using Message = std::span<const std::byte>;
  /// Takes one step's pieces: their offset in what the ranks show or pass, and where each rank's
  /// piece lies, by rank.
  using Take = std::function<void(size_t offset, const std::vector<const std::byte*>& pieces)>;

  /// Bytes of memory that `world_size` ranks need.
  static size_t bytes_for(int world_size);
  /// `memory`: bytes_for() zeros. `names`: RankSignals'. All three outlive this object.
  SharedExchange(std::byte* memory, int rank, const std::vector<PeerProcess>& peers,
                 const std::vector<int>& names);

  void begin(const SharedCall& call, RankSignals::Deadline deadline) {
    signals_.begin(call, deadline);
  }
  void abort() { signals_.abort(); }

  /// Shows `own` to all ranks. `most`: bytes of the longest that a rank shows. A piece's length is
  /// the caller's to know: what is left of the message at the offset, at most piece_bytes().
  void show(Message own, size_t most, const Take& take);
  size_t piece_bytes() const { return slot_bytes_; }

  /// Passes messages[r] to rank r; none: this rank passes nothing. `most`: bytes of the longest
  /// that a rank passes to another. Pieces are of at most passed_piece_bytes().
  void pass(const std::vector<Message>& messages, size_t most, const Take& take);
  size_t passed_piece_bytes() const { return passed_bytes_; }

  /// Reduces `numel` elements of `bytes_each` at `data` over all ranks, in place.
  void all_reduce(const Reduction& reduction, std::byte* data, int64_t numel, int64_t bytes_each);
  /// Returns once all ranks have come.
  void barrier();

 private:
  static constexpr uint32_t kSlots = 8;  // a divisor of 2^32

  int size() const { return static_cast<int>(pieces_.size()); }
  std::byte* slot(int rank, uint32_t step) const;
  /// Runs `num_steps` steps: put(n, slot), and take(n, step) once all ranks have put theirs down.
  void run_steps(size_t num_steps, const std::function<void(size_t, std::byte*)>& put,
                 const std::function<void(size_t, uint32_t)>& take);
  void all_reduce_by_parts(const Reduction& reduction, std::byte* data, int64_t numel,
                           int64_t bytes_each);

  const int rank_;
  const size_t slot_bytes_;
  const size_t passed_bytes_;
  std::byte* const slots_;
  RankSignals signals_;
  std::vector<const std::byte*> pieces_;  // by rank
};

}  // namespace cohort::comm
