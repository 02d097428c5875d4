// SPDX-License-Identifier: Apache-2.0
// How tensors move between the ranks of a host: by steps, a piece of each rank's at a time, or read
// where they are.
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
///
/// Messages of at least kLeastInPlace bytes whose tensors lie in the ranks' rooms (Rooms) are not
/// copied into slots: ranks read them in place, between two steps, with the same bits as result. In
/// a step before, the ranks exchange where their tensors lie; if one lies elsewhere, all ranks use
/// the slots. A rank whose call fails does not wait for ranks that still read or write its tensor.
/// Collective: every function, in the same order on all ranks; blocks until `begin`'s deadline.
/// Errors:     RankSignals'.
/// Threads:    one; `abort` any.
class SharedExchange {
 public:
  using Message = std::span<const std::byte>;
  /// Takes one step's pieces: their offset in what the ranks show or pass, their most bytes, and
  /// where each rank's piece lies, by rank.
  using Take =
      std::function<void(size_t offset, size_t bytes, const std::vector<const std::byte*>& pieces)>;
  /// The ranks' memory that all see, one behind the other; none: nothing is read in place.
  struct Rooms {
    std::byte* first = nullptr;
    size_t bytes_each = 0;
  };

  /// Bytes of memory that `world_size` ranks need.
  static size_t bytes_for(int world_size);
  /// `memory`: bytes_for() zeros. `names`, `spins`: RankSignals'. The first three outlive this object.
  SharedExchange(std::byte* memory, int rank, const std::vector<PeerProcess>& peers,
                 const std::vector<int>& names, Rooms rooms, bool spins);

  void begin(const SharedCall& call, RankSignals::Deadline deadline) {
    signals_.begin(call, deadline);
  }
  void abort() { signals_.abort(); }

  /// Shows `own` to all ranks. `most`: bytes of the longest that a rank shows. `take` writes to
  /// nothing that another rank shows, and reads no piece beyond its message's end.
  void show(Message own, size_t most, const Take& take);

  /// Passes messages[r] to rank r; none: this rank passes nothing. `most`: bytes of the longest
  /// that a rank passes to another. `take`: as of `show`, but may write to this rank's messages,
  /// behind what it has read: where it writes to one for another rank, `in_place` is false.
  void pass(const std::vector<Message>& messages, size_t most, const Take& take,
            bool in_place = true);

  /// Reduces `numel` elements of `bytes_each` at `data` over all ranks, in place.
  void all_reduce(const Reduction& reduction, std::byte* data, int64_t numel, int64_t bytes_each);
  /// Returns once all ranks have come.
  void barrier();
  /// Shorter ones, of all messages of a rank together, go by the slots.
  static constexpr size_t kLeastInPlace = size_t{128} << 10U;

 private:
  static constexpr uint32_t kSlots = 8;  // a divisor of 2^32

  int size() const { return static_cast<int>(pieces_.size()); }
  std::byte* slot(int rank, uint32_t step) const;
  /// Runs `num_steps` steps: put(n, slot), and take(n, step) once all ranks have put theirs down.
  void run_steps(size_t num_steps, const std::function<void(size_t, std::byte*)>& put,
                 const std::function<void(size_t, uint32_t)>& take);
  /// Learns where the ranks' data lie: false if one's lie where this rank cannot see them. `data`:
  /// null if this rank has none.
  bool find_places(const std::byte* data);
  void show_in_slots(Message own, size_t most, const Take& take);
  /// Returns once no rank reads or writes in place any more.
  /// Errors: also if a rank's call has failed: it may have changed its tensor while others read it.
  void end_in_place();
  void all_reduce_in_place(const Reduction& reduction, int64_t numel, int64_t bytes_each);
  void all_reduce_by_parts(const Reduction& reduction, std::byte* data, int64_t numel,
                           int64_t bytes_each);

  const int rank_;
  const size_t slot_bytes_;
  const size_t passed_bytes_;
  std::byte* const slots_;
  RankSignals signals_;
  const Rooms rooms_;
  std::vector<const std::byte*> pieces_;  // by rank
  std::vector<std::byte*> places_;        // by rank
};

}  // namespace cohort::comm
