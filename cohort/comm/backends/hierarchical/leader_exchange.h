// SPDX-License-Identifier: Apache-2.0
// What the leaders of hosts send each other over Gloo.
#pragma once
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "cohort/comm/backends/shm/reduce.h"

namespace cohort::comm {

/// The messages of one leader, in one operation after another.
///
/// Messages between two leaders arrive in the order in which they were sent, and only in operations
/// that both leaders begin with the same tag. None is sent of an empty span.
/// Threads: one; `abort` any.
/// Errors:  what c10d and Gloo throw, from `wait`.
class LeaderExchange {
 public:
  using Deadline = std::chrono::steady_clock::time_point;
  /// Messages under way. Their memory must outlive it.
  using Batch = std::vector<c10::intrusive_ptr<c10d::Work>>;

  /// `gloo`: among the leaders.
  explicit LeaderExchange(c10::intrusive_ptr<c10d::Backend> gloo) : gloo_(std::move(gloo)) {}
  int rank() const { return gloo_->getRank(); }
  int size() const { return gloo_->getSize(); }
  void abort() { gloo_->abort(); }

  /// Begins an operation. `tag`: in [0, 2^31).
  void begin(int tag, Deadline deadline) {
    tag_ = tag;
    deadline_ = deadline;
  }
  void send(Batch& batch, std::span<const std::byte> bytes, int to);
  void receive(Batch& batch, std::span<std::byte> bytes, int from);
  /// Returns once all messages are there, or are sent and their memory may change.
  void wait(Batch& batch);

 private:
  const c10::intrusive_ptr<c10d::Backend> gloo_;
  int tag_ = 0;
  Deadline deadline_{};
};

/// Reduces the leaders' pieces of a tensor, one after another, two of them under way at a time.
///
/// Each leader gets the others' terms of its part of a piece, reduces them in the order of leaders,
/// and sends the result to all, or to one. Of a small piece every leader reduces all.
/// Collective over the leaders: for every piece `send_terms`, `reduce`, `finish`, in this order;
///             `send_terms` of the next piece may come before `reduce` of the last, and that may come
///             before `finish` of the one before.
/// Cost:       2 (L-1)/L of a piece's bytes sent by each of L leaders; (L-1) times a small one's.
class LeaderReduction {
 public:
  using Bytes = std::span<std::byte>;
  /// `to`: the leader who gets the result; -1: all. `scratch`: for two pieces; it grows.
  LeaderReduction(LeaderExchange& leaders, const Reduction& reduction, size_t bytes_each, int to,
                  std::vector<std::byte>& scratch)
      : leaders_(leaders),
        reduction_(reduction),
        bytes_each_(bytes_each),
        to_(to),
        scratch_(scratch) {}

  /// `most`: bytes of the longest piece.
  void reserve(size_t most);
  /// Begins with piece `n`, whole elements, which belongs to this object until `finish`.
  void send_terms(size_t n, Bytes piece);
  void reduce(size_t n);
  /// The result is where the piece was, on all leaders or on one.
  void finish(size_t n);

 private:
  struct Piece {
    Bytes bytes;
    LeaderExchange::Batch terms{}, results{};
  };
  bool is_small(Bytes piece) const;
  Bytes part_of(Bytes piece, int leader) const;
  Bytes scratch_for(size_t n, int leader, size_t bytes) const;

  LeaderExchange& leaders_;
  const Reduction reduction_;
  const size_t bytes_each_;
  const int to_;
  std::vector<std::byte>& scratch_;
  std::array<Piece, 3> pieces_;
};

}  // namespace cohort::comm
