// The store that rank 0 serves: keys and values in memory, for who has the job's secret.
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
  std::string secret;  ///< The job's; empty: whoever reaches the port takes part.
  std::chrono::milliseconds handshake_limit{10'000};  ///< Then a stranger is sent away.
  /// A client that takes nothing of an answer for so long is sent away.
  std::chrono::milliseconds answer_limit{60'000};
  size_t most_strangers = 256;  ///< At a time: who has waited longest goes first.
};

/// Serves StoreClients on a thread of its own, from the constructor to the destructor.
///
/// A stranger, which has not proven yet that it has the secret, is told a random number and nothing
/// else. No peer holds up another: nothing blocks, and of each at most one message and one answer
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
  int patience() const;
  bool may_accept() const;
  void accept_strangers();
  void sort_peers();
  void attend(Peer& peer);
  void hear_stranger(Peer& peer);
  void hear_member(Peer& peer);
  void obey(Peer& peer, const StoreMessage& request);
  std::string apply(const StoreMessage& request);
  void answer_if_there(Peer& peer);
  void answer_waiting();
  static void answer(Peer& peer, StoreWord kind, const std::vector<std::string_view>& fields);
  static void send(Peer& peer);

  const Fd listener_;
  const StoreServerOptions options_;
  const Fd wake_;  // Readable: the end.
  std::map<std::string, std::string, std::less<>> values_;
  std::list<Peer> strangers_;  // The oldest first.
  std::list<Peer> members_;
  Clock::time_point accept_at_;  // Out of descriptors: not before.
  std::jthread thread_;
};

}  // namespace cohort::comm
