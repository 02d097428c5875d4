// The ranks of one job and their collectives on tensors, over c10d.
#pragma once
#include <ATen/core/Tensor.h>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cohort/comm/place.h"

namespace c10d {
class ProcessGroup;
class Store;
}  // namespace c10d

namespace cohort::comm {

struct GroupOptions {
  std::string backend = "gloo";                           ///< The engine: "gloo".
  std::chrono::milliseconds rendezvous_timeout{300'000};  ///< Until every rank has come.
  std::chrono::milliseconds timeout{600'000};             ///< Of every later operation.
};

enum class ReduceOp { kSum, kMax, kMin };

/// A process group: this rank's connection to its peers.
///
/// Owner: the program's outermost frame; everything below takes `ProcessGroup&`.
/// Threads: one caller at a time. A watching thread of its own answers when a peer asks who is
/// alive. Collective: the constructor, every operation and `close`; same order on every rank.
/// Errors: PeerError from any of them when a rank is lost or late; it names the lost ranks as far
/// as the
///         survivors can tell. The group is dead after it. c10::ValueError for bad arguments,
///         before anything is sent.
class ProcessGroup {
 public:
  /// Meets the other ranks of `place`. Blocks, at most `rendezvous_timeout`.
  /// One process is a group of size 1 and needs no network.
  /// Errors: ConfigError if the backend is unknown, or rank 0 cannot listen on the port.
  explicit ProcessGroup(const Place& place, const GroupOptions& options = {});
  /// Local: closes connections without a word. Call `close` first on the good path.
  ~ProcessGroup();
  ProcessGroup(const ProcessGroup&) = delete;
  ProcessGroup& operator=(const ProcessGroup&) = delete;

  int rank() const;
  int size() const;
  const Place& place() const;

  /// Replaces `tensor` by the sum (or other `op`) over ranks, in place, on every rank.
  /// Shapes: any, contiguous, same shape and dtype on every rank. Blocks until the result is there.
  /// Numerics: in the tensor's dtype. Cost: 2 (W-1)/W of the bytes sent per rank (ring).
  void all_reduce(at::Tensor& tensor, ReduceOp op = ReduceOp::kSum);
  /// Returns the sum of `value` over ranks.
  int64_t all_reduce_sum(int64_t value);
  /// Copies `tensor` from rank `root` to all, in place. Blocks.
  void broadcast(at::Tensor& tensor, int root = 0);
  /// Returns rank `root`'s text on every rank. Any length. Blocks.
  std::string broadcast_text(const std::string& text, int root = 0);
  /// Returns every rank's text, by rank, on every rank. Blocks.
  std::vector<std::string> all_gather_text(const std::string& text);
  /// Returns once every rank has come here. `name` stands in the error of one that waits in vain.
  /// `limit` replaces the group's timeout, for a wait while one rank does long work alone; it is not for groups
  /// whose ranks may differ in it.
  void barrier(const std::string& name, std::optional<std::chrono::milliseconds> limit = {});

  /// Runs `call`, which drives the engine itself, and turns what it throws for a lost peer into
  /// PeerError.
  void guard(const std::string& operation, const std::function<void()>& call);

  /// Says good-bye: a barrier that rank 0, the store's host, leaves last. No operation may follow.
  void close();

  c10d::ProcessGroup& engine();  ///< For code that drives c10d, like DistributedDataParallel.

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace cohort::comm
