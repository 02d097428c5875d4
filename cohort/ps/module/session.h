// SPDX-License-Identifier: Apache-2.0
// A libtorch program as a trainer of parameter servers: pull, forward, backward, push.
//
//   ps::Session session(ps::SessionOptions{.servers = ..., .trainer = 0, .trainers = 2});
//   ps::Embedding rows = session.embedding({.name = "ids", .width = 16});
//   session.add("net", *net);
//   session.start();
//   for (int64_t step = session.steps_before(); step < steps; ++step) {
//     const Batch batch = batch_of(step);
//     rows->prefetch(batch.ids);
//     session.pull();
//     loss(net->forward(rows->forward(batch.ids)), batch.labels).backward();
//     session.push();
//   }
//   session.finish();
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cohort/base/log.h"
#include "cohort/ps/client/client.h"
#include "cohort/ps/client/communicator.h"
#include "cohort/ps/module/embedding.h"
#include "cohort/ps/plan.h"

namespace torch::nn {
class Module;
}

namespace cohort::ps {

class Server;

/// How a trainer works with its servers.
enum class Training {
  kLocal,      ///< No servers: rows and parameters in this process, updated by the same rules.
  kSync,       ///< Each step waits for all trainers; equal to one process on all their batches.
  kAsync,      ///< Each push takes effect at once; no trainer waits.
  kHalfAsync,  ///< As kAsync, but a thread sends the pushes and sums those that wait.
  kGeo,        ///< Steps are local; every `geo_steps`, changes are added on the servers.
};

/// "local", "sync" ...
/// Errors: ConfigError that lists the names.
Training training_named(const std::string& name);

struct SessionOptions {
  Training training = Training::kSync;
  std::vector<std::string> servers;  ///< Endpoints; empty for kLocal.
  int trainer = 0;                   ///< This one of `trainers`; kLocal is of one.
  int trainers = 1;
  Reduce reduce = Reduce::kMean;  ///< kSync, kLocal: of the trainers' gradients. Else kMean.
  RuleOptions dense_rule{.rule = Rule::kAdam, .learning_rate = 1e-3f};
  WireDtype dense_wire_dtype = WireDtype::kFloat32;  ///< See JobOptions; tables have their own.
  bool error_if_nonfinite = true;                    ///< See JobOptions.
  std::string load;            ///< kLocal: a checkpoint to begin with, of any number of servers.
  int64_t max_staleness = -1;  ///< See JobOptions; -1 except for kAsync.
  int64_t batch_size = 0;      ///< Examples of this trainer in a step: see JobOptions.
  int64_t max_merge = 20;      ///< kHalfAsync: most pushes summed into one, >= 1.
  int64_t geo_steps = 100;     ///< kGeo: local steps between two synchronisations, >= 1.
  SplitMethod split_method = round_robin();
  bool slice_var_up = true;
  int64_t min_block_size = 8192;
  /// The ranks of a host are one trainer (`trainer` counts hosts then), of which rank 0 talks to
  /// the servers: hierarchical reduction. One rank: unused.
  HostRanks host;
  /// Security, timeouts, connections. Without a `link.on_wait` waits are warnings on stderr.
  ClientOptions client;
};

/// Reads role and endpoints from the environment (role.h) into `options`.
/// Errors: ConfigError if there is no such role, or this process is a server.
SessionOptions with_environment(SessionOptions options);

/// A trainer's side of a job. start(), start_pull(), pull(), push(), flush(), finish(), save() and
/// Embedding's forward() may block for servers and other trainers, with the timeouts of
/// ClientOptions::link.
///
/// Owner:   holds the parameters that were added (by handle) and the tables.
/// Threads: one.
/// Errors:  as Client's.
class Session {
 public:
  explicit Session(const SessionOptions& options);
  ~Session();

  /// A table of rows, and the module that looks them up. Before start().
  Embedding embedding(const TableOptions& table, const EmbeddingOptions& options = {});
  /// The module's parameters, by "<name>.<parameter>": float32, contiguous, on one device. Before
  /// start(). Those that need no gradient stay as they are, everywhere. Of parameters on another
  /// device than the CPU the session sends and receives copies in pinned memory.
  void add(const std::string& name, const torch::nn::Module& module);

  /// Joins the job. All trainers begin with trainer 0's values, unless the servers have some
  /// already.
  void start();

  /// Pulls the parameters and the prefetched rows (Embedding::prefetch). kSync: after all trainers'
  /// last step.
  void pull();
  /// Starts a pull that pull() completes, so that it overlaps with computation: parameters and rows
  /// keep their values until then. kSync: may be called after push() only.
  void start_pull();
  /// Sends the gradients of the parameters (undefined ones count 0) and of the rows that forward()
  /// looked up since the last push, and forgets them and the rows. Waits for the parameters' device
  /// once.
  void push();

  /// The step from which the program resumes, after start(): 0 in a new job. kSync: steps that were
  /// closed since the job began, with this trainer or without; kAsync: this trainer's own that all
  /// servers have. A program whose step s is a function of s then ends as if it had not been
  /// killed:
  ///
  ///   for (int64_t s = session.steps_before(); s < steps; ++s) ...
  ///
  /// 0 with the other kinds, whose pushes are no steps.
  /// Errors: c10::ValueError before start().
  int64_t steps_before() const;
  /// kSync: the job's steps that this trainer has pushed or need not push, with those of a
  /// checkpoint that the servers began with. Otherwise steps_before() and the pushes since start().
  int64_t step() const;
  /// Waits until all that was pushed is acknowledged.
  void flush();
  /// The same, and leaves: steps close without this trainer. The last call. A process that ends
  /// without it counts as lost. Does nothing before start(), or after one that could not join.
  void finish();
  /// A checkpoint of all servers, in a folder that they see (a relative path is from theirs). One
  /// trainer calls it, before finish(); kSync: it is of the state after step(), for which it waits.
  /// kLocal: of this process.
  /// Errors: also c10::DistError where it cannot be written.
  void save(const std::string& folder);
  const Plan& plan() const { return plan_; }
  /// Errors: c10::ValueError on ranks of a host that have none.
  Client& client();

 private:
  bool is_on_host() const;  // All parameters are.
  void make_plan();
  JobOptions job_options() const;
  std::unique_ptr<Communicator> make_communicator();
  void find_steps_before();  // Collective among the ranks of a host.
  // Pulls rows that were not prefetched.
  void fetch(uint32_t number, std::span<const uint64_t> ids, std::span<float> weights,
             bool prediction);

  SessionOptions options_;
  Log log_;
  Plan plan_;
  std::vector<std::shared_ptr<PrefetchedRows>> tables_;
  std::vector<std::string> names_;
  std::vector<at::Tensor> parameters_;  // Values on the host, without autograd.
  std::vector<at::Tensor> learning_;    // Where they are trained, with gradients; often the same.
  std::shared_ptr<Server> local_;
  std::unique_ptr<Client> client_;
  std::unique_ptr<Communicator> communicator_;
  std::function<void()> finish_pull_;
  std::optional<c10::Event> copied_;  // The last pull's values, to the device.
  int64_t steps_before_ = 0;
  int64_t first_step_ = 0;  // kSync: the client's at start().
  int64_t steps_ = 0;       // Since start().
};

}  // namespace cohort::ps
