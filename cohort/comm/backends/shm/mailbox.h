// SPDX-License-Identifier: Apache-2.0
// Messages between two ranks of a host, with tags.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "cohort/comm/peer_process.h"

namespace cohort::comm {

/// A rank's messages to and from its peers, over a ring of shared memory for each pair of ranks.
///
/// Messages of one sender and tag arrive in the order in which they were sent. A message is sent
/// once it is in the ring or in the receiver's memory; while it waits for one message of a sender,
/// the receiver keeps others of that sender that come before, in memory of any size.
/// Failures: a message of another length than expected fails alone. Any other failure ends all
///           messages of this rank, those under way and those that follow.
/// Threads:  any. The functions return at once; a thread of its own moves the bytes.
class Mailbox {
 public:
  static constexpr int kAnyRank = -1;
  /// Bytes of memory that `world_size` ranks need.
  static size_t bytes_for(int world_size);
  /// `memory`: bytes_for() zeros. Both outlive this object.
  /// `on_failure` is called once, on the mailbox's thread, when it fails.
  Mailbox(std::byte* memory, int rank, const std::vector<PeerProcess>& peers,
          std::function<void()> on_failure);
  /// Messages that are under way end with an error.
  ~Mailbox();
  Mailbox(const Mailbox&) = delete;
  Mailbox& operator=(const Mailbox&) = delete;

  /// Called once, on the mailbox's thread, when a message is over: with its sender, or why it
  /// failed.
  using Done = std::function<void(int sender, std::exception_ptr error)>;
  /// What the memory holds belongs to the mailbox until `done`.
  void send(std::span<const std::byte> data, int to, int tag, Done done);
  /// `from`: a rank or kAnyRank. A message of another length ends with c10::DistBackendError. One
  /// that has not begun to arrive when `is_wanted` gives false is left for the next receive.
  void receive(std::span<std::byte> data, int from, int tag, std::function<bool()> is_wanted,
               Done done);
  /// Ends what is under way and what follows with an error.
  void fail(const std::string& why);

 private:
  struct Bell;
  struct Ring;
  struct Outgoing {
    std::span<const std::byte> data;
    int tag;
    Done done;
    bool has_header = false;  // in the ring
  };
  struct Wanted {
    std::span<std::byte> data;
    int from;
    int tag;
    std::function<bool()> is_wanted;
    Done done;
  };
  // One that arrives: in the memory of the receive that wants it, or kept until one does.
  struct Incoming {
    int tag = 0;
    size_t bytes = 0;
    size_t received = 0;
    std::optional<Wanted> wanted;
    std::vector<std::byte> kept;
    bool is_whole() const { return received == bytes; }
  };
  struct Ended {
    Done done;
    int sender;
    std::exception_ptr error;
  };

  Bell& bell(int rank) const;
  Ring& ring(int from, int to) const;
  void post(const std::function<void()>& add);
  void run();
  bool has_failure();
  bool move(std::vector<Ended>& ended);
  bool move_out(int peer, std::vector<Ended>& ended);
  bool move_in(int peer, std::vector<Ended>& ended);
  bool read_header(int peer);
  size_t receive_some(Ring& from, Incoming& message) const;
  bool is_idle() const;
  void finish(int peer, Incoming& message, std::vector<Ended>& ended);
  bool wants(int peer) const;
  std::optional<Wanted> take_wanted(int peer, int tag);
  std::string lost_peer(std::vector<Ended>& ended);
  void end_all(std::vector<Ended>& ended);
  bool is_gone(int peer) const;

  std::byte* const memory_;
  const int rank_;
  const std::vector<PeerProcess>& peers_;
  const size_t ring_bytes_;
  const std::function<void()> on_failure_;
  std::mutex mutex_;
  std::vector<std::deque<Outgoing>> outgoing_;  // by receiver
  std::vector<std::deque<Incoming>> incoming_;  // by sender; the last one may be arriving
  std::deque<Wanted> wanted_;
  bool ending_ = false;
  std::string failure_;  // empty: none
  std::thread thread_;   // begun by the first message
};

}  // namespace cohort::comm
