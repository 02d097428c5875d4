// SPDX-License-Identifier: Apache-2.0
// How a trainer communicates with the servers: at every step, merged by a thread, or every N steps.
// The names are Paddle's; the direct communicator serves local, sync and async.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "cohort/ps/client/client.h"

namespace cohort::ps {

/// How a trainer's pulls and pushes reach the servers, by its training mode.
///
/// Threads: one.
class Communicator {
 public:
  virtual ~Communicator() = default;

  /// Starts a pull of rows and parameters (Client::pull).
  /// Returns: a function that completes it; call it once, it blocks. For a prediction every
  ///          communicator takes the servers' rows, and zeros for missing ones.
  virtual std::function<void()> pull(std::vector<PullRows> rows,
                                     std::vector<std::span<float>> parameters,
                                     bool is_prediction = false) = 0;
  /// Pushes a step's gradients (Client::push).
  virtual void push(std::vector<PushRows> rows, std::vector<std::span<const float>> parameters) = 0;
  /// Blocks until the servers have acknowledged every push.
  virtual void flush() = 0;
};

/// Sends every step to the servers unchanged: kLocal, kSync, kAsync.
std::unique_ptr<Communicator> make_direct_communicator(Client& client);

/// A thread sends the pushes; it sums those that wait, at most `max_merge`, into one. `push` blocks
/// while `max_merge` others wait. The destructor drops waiting pushes and abandons one that is
/// being sent: call `flush` first.
std::unique_ptr<Communicator> make_half_async_communicator(Client& client, int64_t max_merge);

/// Local replicas of what this trainer uses, updated by these rules. Every `steps` pushes the
/// changes since the last synchronisation, divided by the number of trainers, are added on the
/// servers (whose rules are kAdd), and the servers' values replace the replicas.
/// Memory: the rows used since the last synchronisation, and the optimizer's state of every row
///         that this trainer ever pushed. That state is stored nowhere else: a restarted trainer
///         begins with a new one.
struct GeoOptions {
  RuleOptions dense_rule;
  std::vector<RuleOptions> table_rules;  ///< By number of the table.
  int64_t steps = 100;
  int trainers = 1;
};
std::unique_ptr<Communicator> make_geo_communicator(Client& client, const GeoOptions& options);

/// The ranks of one host, which act as one trainer: hierarchical reduction. The caller provides the
/// collectives, usually those of a process group.
struct HostRanks {
  int rank = 0;  ///< In [0, size).
  int size = 1;
  bool mean = true;  ///< Their gradients are averaged; else summed.
  /// Collective. Returns every rank's bytes, in the order of ranks, on rank 0; elsewhere nothing.
  std::function<std::vector<std::vector<std::byte>>(const std::vector<std::byte>& own)> gather;
  /// Collective. Rank 0's bytes become all ranks'.
  std::function<void(std::vector<std::byte>& bytes)> broadcast;
};

/// The ranks of a host reduce first, then rank 0 sends: every id and every parameter is sent once
/// per host. `push`, and the function that `pull` returns, are collective among the ranks, with the
/// same tables and `is_prediction`. `servers`: the communicator of rank 0; nullptr elsewhere.
std::unique_ptr<Communicator> make_host_communicator(const JobOptions& job, const HostRanks& host,
                                                     std::unique_ptr<Communicator> servers);

}  // namespace cohort::ps
