// SPDX-License-Identifier: Apache-2.0
// The client of Cohort's own store.
#pragma once
#include <ATen/core/ivalue.h>
#include <chrono>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "cohort/base/fd.h"
#include "cohort/comm/store_protocol.h"

namespace cohort::comm {

using Deadline = std::chrono::steady_clock::time_point;

/// A store that has answered once has this long to answer again, however late it is.
inline constexpr std::chrono::milliseconds kAnswerTime{1000};

/// Where a store is, and what a client proves to it.
struct StoreAddress {
  std::string host;
  int port = 0;
  std::string secret;  ///< As StoreServerOptions::secret.
};

/// Held by find_store while it connects: a search by port for the connection that c10d makes must
/// not find one of these.
std::mutex& connecting();

/// Connects to a port of rank 0's host; tries again until `talk` finds there what it looks for.
///
/// `talk`: speaks first over the new connection, at most until the deadline; returns why it is
/// not there, or nothing.
/// Errors: ConfigError if the host does not resolve; what `talk` throws; c10::DistNetworkError if
///         it is not there before `deadline`.
Fd find_store(const std::string& host, int port, Deadline deadline,
              const std::function<std::string(const Fd& connection)>& talk);

/// A connection to a StoreServer, as c10d's users expect it.
///
/// Owner:   shared.
/// Threads: any; one call at a time, the others wait for it, also where it waits for keys. Every
///          call ends within the store's timeout (`wait`: within its own; 0: never), or at most
///          `silence` later; what came too late for one call is not taken for the answer to
///          another.
/// Errors:  c10::DistStoreError: keys that did not come in time, a value that is no number (`add`).
///          c10::DistNetworkError: the server is gone or silent; then the connection is dead.
///          c10::ValueError: a key above 4 KiB, a message above 256 MiB. Nothing was sent. There
///          are no queues, and no list of keys. Nothing is written to stderr.
class StoreClient final : public c10d::Store {
 public:
  /// Waits for a server that starts later, at most until `deadline`. `silence`: how long a wait that
  /// is over, or interrupted, waits for the server to confirm that; then the server is lost.
  /// Errors: ConfigError if the host does not resolve, if something else than a store of Cohort's
  ///         answers, or one with another secret; c10::DistNetworkError if nothing answers in time.
  StoreClient(StoreAddress address, Deadline deadline, std::chrono::milliseconds timeout,
              std::chrono::milliseconds silence = kAnswerTime);

  /// Another connection to the same server.
  c10::intrusive_ptr<c10d::Store> clone() override;
  using c10d::Store::compareSet;
  using c10d::Store::set;
  void set(const std::string& key, const std::vector<uint8_t>& value) override;
  /// Where nothing is stored and something was expected, the answer is what was expected.
  std::vector<uint8_t> compareSet(const std::string& key, const std::vector<uint8_t>& expected,
                                  const std::vector<uint8_t>& desired) override;
  std::vector<uint8_t> get(const std::string& key) override;
  int64_t add(const std::string& key, int64_t value) override;
  bool deleteKey(const std::string& key) override;
  bool check(const std::vector<std::string>& keys) override;
  int64_t getNumKeys() override;
  void wait(const std::vector<std::string>& keys) override;
  void wait(const std::vector<std::string>& keys,
            const std::chrono::milliseconds& timeout) override;
  void append(const std::string& key, const std::vector<uint8_t>& value) override;
  std::vector<std::vector<uint8_t>> multiGet(const std::vector<std::string>& keys) override;
  void multiSet(const std::vector<std::string>& keys,
                const std::vector<std::vector<uint8_t>>& values) override;
  bool hasExtendedApi() const override { return true; }

  /// Ends the connection for good: calls that wait, and later ones, throw. From any thread.
  void shut_down() const;
  /// Ends the wait for keys that is under way, or else the next one, as if its time were over. From
  /// any thread.
  void interrupt() const;

 private:
  using Bytes = std::vector<uint8_t>;
  using Fields = std::vector<std::string_view>;
  struct Answer {
    StoreWord kind = StoreWord::kDone;
    std::vector<Bytes> fields;
  };
  static std::vector<Bytes>& fields_of(Answer& answer);
  Bytes ask(StoreWord word, const Fields& fields);
  std::vector<Bytes> wait_for(StoreWord word, const std::vector<std::string>& keys,
                              std::chrono::milliseconds limit);
  void send(const std::string& frame, Deadline deadline);
  std::optional<Answer> receive(Deadline deadline, bool until_interrupted = false);
  std::optional<Answer> cancel();
  [[noreturn]] void lose(const std::string& how) const;

  const StoreAddress address_;
  const std::chrono::milliseconds silence_;
  const Fd connection_;
  const Fd interrupted_;  // Readable: see `interrupt`.
  std::mutex mutex_;
  std::string in_;  // Guarded by mutex_.
};

}  // namespace cohort::comm
