// A launcher's part in a job of several nodes, on a thread of its own.
#pragma once
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "cohort/base/fd.h"
#include "cohort/launch/coordinator.h"
#include "cohort/launch/endpoint.h"
#include "cohort/launch/member.h"
#include "cohort/launch/options.h"

namespace cohort::launch {

/// The Member of this node, and on the endpoint's host the Coordinator. Their thread keeps up the
/// heartbeat while the launcher waits for a disk or a process.
///
/// Threads: made, used and destroyed by one thread, whose signal mask the other has: the launcher
/// blocks its signals first. No call blocks but the constructor (name service) and finish().
class Meeting {
 public:
  /// Errors: ConfigError that names --rdzv-endpoint. What goes wrong later is an order that ends
  /// the job.
  explicit Meeting(const RunOptions& options);
  /// Leaves the job, if that was not done.
  ~Meeting();
  Meeting(const Meeting&) = delete;
  Meeting& operator=(const Meeting&) = delete;

  /// Whether the coordinator is here.
  bool hosts() const { return hosts_; }
  /// See Member.
  void join(int store_port);
  void tell_done(int code);
  void tell_failed(const Verdict& verdict, const std::string& why);
  std::optional<Order> next();
  /// Readable while next() has an order.
  int fd() const { return news_.get(); }
  /// Leaves the job; where the coordinator is, ends it for all and waits up to two seconds until
  /// they know.
  void finish(int code, const std::string& why);

 private:
  void post(std::function<void()> task);
  void live();
  void turn();
  void give(std::vector<Order> orders);

  std::optional<Coordinator> coordinator_;  // Its thread's alone, like member_.
  const bool hosts_;
  Member member_;
  bool over_ = false;  // Likewise.
  Fd wake_;
  Fd news_;
  std::mutex mutex_;
  std::vector<std::function<void()>> tasks_;  // Guarded by mutex_, like orders_.
  std::deque<Order> orders_;
  std::thread thread_;
};

}  // namespace cohort::launch
