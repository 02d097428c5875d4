// SPDX-License-Identifier: Apache-2.0
// The state of a server, as a deterministic state machine: a function of the records applied to it,
// in their order. The server (server.h) decides which records there are.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "cohort/ps/server/membership.h"
#include "cohort/ps/server/open_steps.h"
#include "cohort/ps/server/shard.h"
#include "cohort/ps/server/update_log.h"
#include "cohort/ps/wire/message.h"

namespace cohort::ps {

/// Payload of kJoin: the trainer's new incarnation. Messages of older ones are rejected from now
/// on.
struct JoinRecord {
  uint32_t trainer = 0;
  uint32_t reserved = 0;
  uint64_t incarnation = 0;
  uint64_t nonce = 0;  ///< Of the request.
};

/// Payload of kLeave: steps no longer wait for this trainer.
struct LeaveRecord {
  uint32_t trainer = 0;
  uint32_t reserved = 0;
};

/// Tables and blocks of one server, its trainers, and the open steps.
///
/// Threads: one caller at a time. It owns the threads that share work on its tables (TableThreads).
/// Local.
class ParameterState {
 public:
  /// `spill_folder`: of rows on disk (AtCap::kSpill); made when a job has such tables, so it must
  /// not be there yet. Empty: such jobs are refused.
  /// `make_block`: where dense blocks live. `table_threads`: ServerOptions::table_threads.
  /// Errors: as TableThreads' constructor.
  ParameterState(int server, std::string spill_folder, BlockMaker make_block = make_host_block,
                 int table_threads = 1)
      : shard_(server, std::move(spill_folder), std::move(make_block), table_threads) {}

  const Shard& shard() const { return shard_; }
  const Membership& members() const { return members_; }
  const JobOptions* job() const { return shard_.job(); }
  const TrainerState* trainer(uint32_t id) const { return members_.find(id); }
  /// Whether the blocks have values (without blocks: from the start).
  bool is_initialised() const { return job() && is_initialised_; }
  /// kSync: steps closed. kAsync: pushes applied.
  uint64_t steps() const { return steps_; }
  /// steps() when the job began: those of the checkpoint that it loaded.
  uint64_t steps_at_start() const { return steps_at_start_; }
  /// Trainers that never joined, and members whose push the open step waits for; kAsync: the
  /// slowest.
  std::vector<uint32_t> missing_trainers() const;
  /// kSync: whether every member's push of step steps() + 1 is here. The step stays open until a
  /// kClose record: another server may lack a push, or a member that was restarted may not know
  /// that its push is here.
  bool is_step_complete() const;
  /// Bytes of pushes that wait for their step.
  int64_t pending_bytes() const { return open_steps_.bytes(); }

  /// Changes the state. The record was checked before, or comes from the log.
  void apply(const Record& record);

  /// The values that `request` (kPull), which was checked, asks for: a message whose header says
  /// steps(), in memory that `make` gives.
  Buffer pull(const Message& request, const BufferMaker& make = nullptr) const;

  /// Saving has two parts, both with the same `folder`. The first makes it and does what a forked
  /// child cannot: it saves rows that are on disk, mostly as hard links, and copies blocks from
  /// devices.
  void begin_save(const std::string& folder) const;
  /// The second part, which may run in a forked child, saves what is in memory.
  void save(const std::string& folder) const;
  /// Loads `folder` into a state to which no record was applied.
  /// Errors: ConfigError that names file and damage.
  void load(const std::string& folder);
  /// Fills a new job's tables and blocks with this server's share of a checkpoint of any number of
  /// servers, and continues its count of steps.
  /// Errors: ConfigError that names file and what is missing or damaged.
  void load_checkpoint(const std::string& checkpoint);

 private:
  void note_job();
  void accept_push(const Record& record);
  void close_step(uint32_t time);
  int64_t schedule_step() const;
  std::string progress() const;
  void set_progress(const std::string& text);

  Shard shard_;
  Membership members_;
  OpenSteps open_steps_;
  bool is_initialised_ = false;
  uint64_t steps_ = 0;
  uint64_t steps_at_start_ = 0;
};

}  // namespace cohort::ps
