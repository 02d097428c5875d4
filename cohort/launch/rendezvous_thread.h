// SPDX-License-Identifier: Apache-2.0
// The thread of a launcher that talks to the other launchers of a multi-node job.
#pragma once
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "cohort/base/fd.h"
#include "cohort/launch/endpoint.h"
#include "cohort/launch/options.h"
#include "cohort/launch/rendezvous_client.h"
#include "cohort/launch/rendezvous_server.h"

namespace cohort::launch {

/// Runs the RendezvousClient of this node and, on the endpoint's host, the RendezvousServer on a
/// thread of its own, which keeps sending heartbeats while the launcher waits for a disk or a
/// process.
///
/// Threads: made, used and destroyed by one thread, whose signal mask the other has: the launcher
/// blocks its signals first. No call blocks but the constructor (name service) and finish().
class RendezvousThread {
 public:
  /// Errors: ConfigError that names --rdzv-endpoint. Later errors arrive as a directive that ends
  /// the job.
  explicit RendezvousThread(const RunOptions& options);
  /// Leaves the job unless finish() was called.
  ~RendezvousThread();
  RendezvousThread(const RendezvousThread&) = delete;
  RendezvousThread& operator=(const RendezvousThread&) = delete;

  /// Whether this node hosts the rendezvous server.
  bool hosts() const { return hosts_; }
  /// See RendezvousClient.
  void join(int store_port);
  void send_done(int code);
  void send_failed(const JobOutcome& job, const std::string& why);
  std::optional<Directive> next();
  /// Readable while next() has a directive.
  int fd() const { return ready_.get(); }
  /// Leaves the job; on the rendezvous server's node, ends it for all nodes and waits up to two
  /// seconds until they know.
  void finish(int code, const std::string& why);

 private:
  void post(std::function<void()> task);
  void run();
  void poll();
  void deliver(std::vector<Directive> directives);

  std::optional<RendezvousServer> server_;  // Used by thread_ alone, like client_.
  const bool hosts_;
  const int poll_ms_;  // The longest wait for a message.
  RendezvousClient client_;
  bool over_ = false;  // Likewise.
  Fd wake_;
  Fd ready_;
  std::mutex mutex_;
  std::vector<std::function<void()>> tasks_;  // Guarded by mutex_, like directives_.
  std::deque<Directive> directives_;
  std::thread thread_;
};

}  // namespace cohort::launch
