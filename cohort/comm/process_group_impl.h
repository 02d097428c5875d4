// SPDX-License-Identifier: Apache-2.0
// The inside of ProcessGroup, shared by process_group.cpp (its life) and collectives.cpp and
// messages.cpp (its operations). Not installed.
#pragma once
#include <c10/util/intrusive_ptr.h>
#include <functional>
#include <map>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <unistd.h>
#include <utility>

#include "cohort/comm/backend.h"
#include "cohort/comm/call_matcher.h"
#include "cohort/comm/job.h"
#include "cohort/comm/numbered_backend.h"
#include "cohort/comm/process_group.h"

namespace cohort::comm {

/// When ranks compare what they call: before its data move, once they have waited for long, never.
enum class Compared { kBeforeData, kWhenStuck, kNever };

/// One operation as it is traced, compared and reported in errors.
struct Call {
  std::string operation;  ///< "all_reduce(sum)".
  at::Tensor tensor{};    ///< Whose dtype and shape are compared; undefined: the name only.
  CallSite site;
  std::optional<std::chrono::milliseconds> limit{};  ///< Instead of the group's timeout.
  Compared compared = Compared::kBeforeData;
  bool moves_data = true;  ///< false: the comparison is all that ranks exchange.
  /// Where the data are, if `tensor` is undefined.
  c10::DeviceType device = c10::DeviceType::CPU;
};

/// One operation, ready to begin. `begin` uses the backend that it was made for.
struct Operation {
  Call call;
  /// Returns nothing if there is nothing to wait for. `async_op`: c10d's asyncOp, false if the
  /// caller waits at once.
  std::function<BackendWork(bool async_op)> begin;
  std::function<void()> finish{};  ///< What is left to do locally; may be empty.
};

/// A group: its ranks, and their connections in c10d's process group.
struct ProcessGroup::Impl : std::enable_shared_from_this<ProcessGroup::Impl> {
  Impl(std::shared_ptr<Job> j, std::string group_id, std::string group_name,
       std::vector<int> global_ranks, int own_rank, const SubgroupOptions& own_options);
  /// In a child that only forks it keeps what it has: memory and threads are the parent's.
  ~Impl();
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  /// Connects the backends through the group's own store. Collective over the group's ranks;
  /// blocks, at most `limit`.
  void connect(c10::intrusive_ptr<c10d::Store> group_store, std::chrono::milliseconds limit);

  /// The c10d group for the backend of `plugin`; of a device's, and of more than one rank, a
  /// DeviceGroup, which the watch then looks at.
  c10::intrusive_ptr<c10d::ProcessGroup> make_group(const BackendPlugin& plugin);

  /// Waits for the devices of the group's backends and ends these, before the group goes.
  void end_devices() const;

  /// Runs or starts an operation, which autograd does not record. Ranks compare a matched one
  /// before its data move, as docs/comm.md says.
  void run(const Operation& operation);
  Work start(const Operation& operation);
  /// Runs `body` while the log and the trace show `call`. What a backend throws for a lost peer
  /// becomes PeerError.
  void guarded(const Call& call, const std::function<void()>& body);

  /// Begins the operation of the guarded call, and has the watch look at it if it is a device's.
  BackendWork begin(const Operation& operation, bool async_op) const;
  /// Signs of life for the ranks of a device's backend: each follows the next one.
  void follow_next() const;

  void match(const Call& call, bool blocking);
  void meet(const Call& call);
  void compare(const Call& call);
  /// Whether all_to_all compares its splits first; shm does so itself.
  bool compares_splits() const { return matcher.is_on() && backend_name != "shm"; }
  bool is_world() const { return id.empty(); }
  int size() const { return static_cast<int>(ranks.size()); }
  std::vector<std::string> hosts() const;   // by rank of this group
  std::vector<std::string> memory() const;  // BackendRequest's
  std::string cpu_backend() const;          // that "auto" means for CPU tensors
  TraceRecord record(const Call& call) const;
  void check_open() const;  // c10::ValueError once `close` has run
  [[noreturn]] void fail(const std::string& operation, int64_t start_ns, const std::string& cause,
                         bool disagreement);
  /// Adds this rank to those that have reached a point of `close`, which `wait_for_all` waits for.
  void arrive(const std::string& point) const;
  void wait_for_all(const std::string& point) const;

  const pid_t process = getpid();
  std::shared_ptr<Job> job;
  std::string id;          // different for each group of the job; empty: all ranks
  std::string name;        // for users; several groups may have one
  std::vector<int> ranks;  // global numbers, by this group's rank
  int rank;
  std::string asked_backend;          // "auto", or a name
  std::string backend_name;           // what it means; known once connected
  std::chrono::milliseconds timeout;  // of every operation
  CallMatcher matcher;
  NumberedBackend* numbered = nullptr;    // of CPU tensors, which c10d_group owns; none: it counts
  c10::intrusive_ptr<c10d::Store> store;  // seen by this group only
  c10::intrusive_ptr<c10d::Store> users_store;  // the part of it that is the program's
  c10::intrusive_ptr<c10d::ProcessGroup> c10d_group;
  DeviceGroup* device_group = nullptr;  // which c10d_group is where its backend is a device's
  MatchedCall present;                  // the guarded call, with its number; 0: it has none
  int64_t sequence = 0;                 // operations begun here, but send and recv
  std::map<std::pair<int, int>, int64_t> num_sent;      // messages by peer and tag
  std::map<std::pair<int, int>, int64_t> num_received;  // the same
  bool closed = false;
  int num_subgroups = 0;
};

struct Work::State {
  std::shared_ptr<ProcessGroup::Impl> group;
  std::string operation;
  BackendWork work;
  std::function<void()> finish;  // may be empty
};

/// "float32"; torch's Python names.
std::string type_name(at::ScalarType type);

/// "all_reduce(sum) of float32[2, 3]"; without the shape of a sparse tensor, which may differ. What
/// must be equal on all ranks, in full: a trace record cuts it.
std::string call_text(const std::string& operation, const at::Tensor& tensor);

}  // namespace cohort::comm
