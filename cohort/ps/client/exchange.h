// How a trainer's steps meet the servers: at once, merged by a thread, or every so many.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "cohort/ps/client/client.h"

namespace cohort::ps {

/// Threads: one.
class Exchange {
 public:
  virtual ~Exchange() = default;

  /// Begins to bring rows and parameters (Client::pull). Returns: what finishes it, once; blocks.
  /// A prediction's are the servers' rows, whatever the exchange, and zeros where they have none.
  virtual std::function<void()> pull(std::vector<PullRows> rows,
                                     std::vector<std::span<float>> parameters,
                                     bool is_prediction = false) = 0;
  /// Hands over a step's gradients (Client::push).
  virtual void push(std::vector<PushRows> rows, std::vector<std::span<const float>> parameters) = 0;
  /// Blocks until the servers have acknowledged all that was handed over.
  virtual void flush() = 0;
};

/// Every step goes to the servers as it is: kLocal, kSync, kAsync.
std::unique_ptr<Exchange> make_direct_exchange(Client& client);

/// Pushes go from a thread of their own; those that wait, at most `max_merge`, are summed into one.
/// `push` blocks while as many more wait. Its end drops what waits, and gives a push up that is
/// under way: `flush` comes first.
std::unique_ptr<Exchange> make_merging_exchange(Client& client, int64_t max_merge);

/// Local replicas of what this trainer uses, updated by these rules. Every `steps` pushes the
/// changes since the last exchange, divided by the number of trainers, are added up on the servers
/// (whose rules are kAdd), and their values taken over. Memory: the rows used since the last
/// exchange; of every row that this trainer ever pushed the optimizer's state, which is nowhere
/// else: a trainer that is started again begins with new states.
struct GeoOptions {
  RuleOptions dense_rule;
  std::vector<RuleOptions> table_rules;  ///< By number of the table.
  int64_t steps = 100;
  int trainers = 1;
};
std::unique_ptr<Exchange> make_geo_exchange(Client& client, const GeoOptions& options);

/// The ranks of one host that are one trainer together: hierarchical reduction. How they reach each
/// other is the caller's: a process group, usually.
struct HostRanks {
  int rank = 0;  ///< In [0, size).
  int size = 1;
  bool mean = true;  ///< Their gradients are averaged; else summed.
  /// Collective. Returns every rank's bytes, in the order of ranks, on rank 0; elsewhere nothing.
  std::function<std::vector<std::vector<std::byte>>(const std::vector<std::byte>& own)> gather;
  /// Collective. Rank 0's bytes become all ranks'.
  std::function<void(std::vector<std::byte>& bytes)> broadcast;
};

/// Ranks of a host reduce first, then rank 0 sends: every id and every parameter travels once a
/// host. All that `pull` returns and `push` are collective among them, with the same tables and
/// kind of pull. `servers`: rank 0's; nullptr elsewhere.
std::unique_ptr<Exchange> make_host_exchange(const JobOptions& job, const HostRanks& host,
                                             std::unique_ptr<Exchange> servers);

}  // namespace cohort::ps
