// The inside of ProcessGroup, shared by process_group.cpp (its life) and collectives.cpp (its
// operations). Not installed.
#pragma once
#include <c10/util/intrusive_ptr.h>
#include <mutex>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <unordered_set>

#include "cohort/comm/collective_log.h"
#include "cohort/comm/failure_watch.h"
#include "cohort/comm/process_group.h"
#include "cohort/comm/rendezvous.h"

namespace cohort::comm {

/// What this process has once, whatever the number of sub-groups.
struct Job {
  Job(const RankInfo& p, const ProcessGroupOptions& o, const std::string& trace_file);

  RankInfo info;  // complete after the rendezvous
  const ProcessGroupOptions options;
  Rendezvous rendezvous;
  CollectiveLog log;
  bool dead = false;

  /// Ends all waiting in all groups' backends; any thread.
  void abort();
  /// Makes `abort` know a backend.
  void add_backend(const c10::intrusive_ptr<c10d::ProcessGroup>& backend);

 private:
  std::mutex mutex_;
  std::vector<c10::weak_intrusive_ptr<c10d::ProcessGroup>> backends_;  // guarded by mutex_
  bool aborted_ = false;                                              // guarded by mutex_

 public:
  std::unique_ptr<FailureWatch>
      watch;  // none in a group of one; last: its thread uses all the others
};

/// One operation as it is traced, compared and named in errors.
struct Call {
  std::string operation;  // "all_reduce(sum)"
  at::Tensor tensor{};    // whose dtype and shape are compared; undefined: the name only
  CallSite site;
  std::optional<std::chrono::milliseconds> limit{};  // instead of the group's timeout
};

struct ProcessGroup::Impl : std::enable_shared_from_this<ProcessGroup::Impl> {
  Impl(std::shared_ptr<Job> j, std::string group_id, std::string group_name,
       std::vector<int> global_ranks, int own_rank, const SubgroupOptions& own_options);

  /// Connects the backend through the group's own store: collective over the group's ranks; blocks,
  /// at most `limit`.
  void connect(c10::intrusive_ptr<c10d::Store> group_store, std::chrono::milliseconds limit);

  // What runs in `run`, `start` and `run_unmatched` is not recorded by autograd.

  /// Runs a collective that all ranks of the group call alike: comparison first, then `body`.
  void run(const Call& call, const std::function<void()>& body);
  /// Starts one. It is compared before when it is the first of its kind (operation, dtype, shape)
  /// here, otherwise by the next `run`: what every step repeats costs nothing. Until then its data
  /// match none of another history.
  Work start(const Call& call, const std::function<c10::intrusive_ptr<c10d::Work>()>& begin,
             std::function<void()> finish);
  /// Runs what only some ranks call, or what is not known here.
  void run_unmatched(const Call& call, const std::function<void()>& body);
  Work start_unmatched(const Call& call,
                       const std::function<c10::intrusive_ptr<c10d::Work>()>& begin,
                       std::function<void()> finish);
  /// Adds one to a counter in the store, which every rank of the group does.
  void count(const std::string& key);
  void wait_for_counter(const std::string& key);

  bool is_world() const { return id.empty(); }
  TraceRecord record(const Call& call) const;
  template <class Body>
  void guarded(const Call& call, bool matched, const Body& body);
  /// Calls are compared before they run.
  bool compares() const { return job->options.check_collectives && ranks.size() > 1; }
  void compare(const Call& call);
  /// Gives the next data a number made of `history`, where calls are compared at all.
  void number_data();
  Work begun(const Call& call, bool matched,
             const std::function<c10::intrusive_ptr<c10d::Work>()>& begin,
             std::function<void()> finish);
  void check_open() const;  // c10::ValueError once `close` has run
  [[noreturn]] void fail(const std::string& operation, int64_t start_ns, const std::string& cause,
                         bool disagreement);

  std::shared_ptr<Job> job;
  std::string id;          // different for each group of the job; empty: all ranks
  std::string name;        // for people; several groups may have one
  std::vector<int> ranks;  // global numbers, by this group's rank
  int rank;
  std::string backend_name;
  std::chrono::milliseconds timeout;            // of every operation
  c10::intrusive_ptr<c10d::Store> store;        // seen by this group only
  c10::intrusive_ptr<c10d::Store> users_store;  // the part of it that is the program's
  c10::intrusive_ptr<c10d::ProcessGroup> backend;
  int64_t sequence = 0;       // operations begun here, but send and recv
  int64_t num_matched = 0;    // of them, those that are compared
  uint64_t history = 0;       // a hash of all those
  uint32_t num_compared = 0;  // comparisons begun here
  bool closed = false;
  std::unordered_set<uint64_t> known;  // kinds that `start` has compared
  int num_subgroups = 0;
};

struct Work::State {
  std::shared_ptr<ProcessGroup::Impl> group;
  std::string operation;
  c10::intrusive_ptr<c10d::Work> work;
  std::function<void()> finish;  // what is left to do locally; may be empty
};

/// "float32"; torch's Python names.
std::string type_name(at::ScalarType type);

}  // namespace cohort::comm
