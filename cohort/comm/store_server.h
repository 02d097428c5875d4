// SPDX-License-Identifier: Apache-2.0
// The store that rank 0 serves: keys and values in memory, for clients with the job's secret.
#pragma once
#include <chrono>
#include <list>
#include <map>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "cohort/base/fd.h"
#include "cohort/comm/store_protocol.h"

namespace cohort::comm {

struct StoreServerOptions {
  std::string secret;  ///< The job's; empty: any client that reaches the port takes part.
  std::chrono::milliseconds handshake_limit{10'000};  ///< Then a newcomer is disconnected.
  /// A client that reads nothing of an answer for this time is disconnected.
  std::chrono::milliseconds answer_limit{60'000};
  size_t max_newcomers = 256;  ///< At a time: beyond, the oldest is disconnected.
};

/// Serves StoreClients on a thread of its own, from the constructor to the destructor.
///
/// A newcomer, which has not proven yet that it has the secret, gets a random number and nothing
/// else. No peer delays another: nothing blocks, and of each at most one message and one answer
/// are kept. Programs that this process starts inherit none of its sockets.
/// Threads: made and destroyed by one thread.
class StoreServer {
 public:
  /// `listener`: a listening TCP socket; becomes non-blocking and close-on-exec.
  /// Errors: std::system_error if the system gives no more descriptors.
  StoreServer(Fd listener, StoreServerOptions options);
  /// Closes all connections.
  ~StoreServer();
  StoreServer(const StoreServer&) = delete;
  StoreServer& operator=(const StoreServer&) = delete;

 private:
  using Clock = std::chrono::steady_clock;
  struct Peer {
    Fd fd;
    Clock::time_point since;  // When it came, or took a part of an answer.
    std::string nonce;        // What was sent to it.
    std::string in;
    std::string out;
    size_t num_sent = 0;                 // Bytes at the front of `out`.
    StoreWord waits = StoreWord::kDone;  // kGet or kWait: until all of `awaited` are there.
    std::vector<std::string> awaited;
    bool proven = false;
    bool open = true;
  };

  void serve();
  bool turn();
  int poll_timeout() const;
  bool may_accept() const;
  void accept_newcomers();
  void sort_peers();
  void serve_peer(Peer& peer);
  void authenticate(Peer& peer);
  void read_requests(Peer& peer);
  void handle(Peer& peer, const StoreMessage& request);
  std::string apply(const StoreMessage& request);
  void answer_if_there(Peer& peer);
  void answer_waiting();
  static void answer(Peer& peer, StoreWord kind, const std::vector<std::string_view>& fields);
  static void send(Peer& peer);

  const Fd listener_;
  const StoreServerOptions options_;
  const Fd wake_;  // Readable: the end.
  std::map<std::string, std::string, std::less<>> values_;
  std::list<Peer> newcomers_;  // The oldest first.
  std::list<Peer> clients_;
  Clock::time_point accept_at_;  // Out of descriptors: not before.
  std::jthread thread_;
};

}  // namespace cohort::comm
