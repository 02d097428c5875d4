// SPDX-License-Identifier: Apache-2.0
// A server's state and what keeps it on disk: the update log and snapshots.
//
//   FOLDER/lock                    held while a server runs
//   FOLDER/server                  whose it is: "0 of 2"
//   FOLDER/incarnation             counts its starts
//   FOLDER/boot                    the run of the operating system that wrote the log
//   FOLDER/log/                    update_log.h
//   FOLDER/snapshot.<number>/      the state after record <number> (ParameterState::save)
//
// A forked child writes a snapshot: it sees the state of one moment while the server continues. A
// rename makes the snapshot valid; then the files that it replaces are removed.
#pragma once
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "cohort/base/fd.h"
#include "cohort/base/log.h"
#include "cohort/ps/server/forked_task.h"
#include "cohort/ps/server/parameter_state.h"
#include "cohort/ps/server/server.h"
#include "cohort/ps/server/update_log.h"

namespace cohort::ps {

/// Threads: one, also for the tasks' results.
class DurableState {
 public:
  /// Recovers. `synced`: called on another thread when what begin_sync() began has ended.
  /// Errors: as Server's constructor.
  DurableState(const ServerOptions& options, const Log& log, std::function<void()> synced = {});

  const ParameterState& state() const { return state_; }
  /// Of the server: greater with every start in this folder.
  uint64_t incarnation() const { return incarnation_; }

  /// Logs a record and applies it, a large push while its record is written. `message`: a push's,
  /// which was checked and is the payload.
  /// Errors: c10::Error if it cannot be logged: nothing has changed, unless is_broken().
  void change(RecordKind kind, std::span<const std::byte> payload,
              std::shared_ptr<const Buffer> message = nullptr);
  /// Begins `job`: with the checkpoint that the options name, or from nothing.
  /// Errors: as change; ConfigError that names what is missing or damaged in the checkpoint.
  void set_job(const JobOptions& job);
  /// Rolls back to `checkpoint`, one of all servers of the job, or to the job's beginning (""), as
  /// a new incarnation that no trainer has joined. The folder then holds that state or the one
  /// before.
  /// Errors: ConfigError that names what is missing or damaged: the state in memory is then
  ///         incomplete and must not be used; the folder holds the state before.
  void restore(const std::string& checkpoint);
  /// Under Durability::kSynced, where only what the disk has may be acknowledged: waits until the
  /// disk has the log.
  /// Errors: c10::Error if the disk has refused what was logged.
  void sync();
  /// Likewise: begins a sync, unless one that covers all records has begun. Does not block.
  /// Errors: likewise.
  void begin_sync();
  /// Number of the last record.
  uint64_t last_number() const { return last_number_; }
  /// That of the last one that may be acknowledged.
  uint64_t durable_number() const;

  /// Begins this server's part of save `nonce` in `folder` (saved_state.h; made, replaced if it is
  /// there). `done` gets "" or why there is none; nothing of it is left then.
  void begin_save(const std::string& folder, uint64_t nonce, std::function<void(std::string)> done);
  /// Checks the disk, and starts and finishes snapshots and checkpoints. Call it a few times a
  /// second.
  /// Errors: as change; c10::Error if the disk has refused what was logged.
  void poll();
  bool is_saving() const { return saving_ != nullptr; }
  /// Of what is being saved: bytes written so far.
  uint64_t saved_bytes() const { return saving_ ? saving_->written_bytes() : 0; }
  /// Why the last record could not be logged; "" if it could.
  const std::string& log_failure() const { return log_failure_; }
  /// Whether the server must end: a record was logged or applied but not both, so that the state in
  /// memory is invalid, or the disk failed to write the log.
  bool is_broken() const { return is_broken_ || (update_log_ && update_log_->is_broken()); }

 private:
  void lock();
  void check_kind() const;
  void check_owner() const;
  void note_job();
  void recover();
  PowerCut power_cut() const;
  ParameterState empty_state() const;
  void load_checkpoint(const std::string& checkpoint);
  void write_snapshot();
  uint64_t append(const Record& record);
  void begin_snapshot();
  void begin_task(const std::string& path, std::function<void(std::string)> done);
  void collapse_pages();
  uint32_t now();

  ServerOptions options_;
  const Log& log_;
  Fd lock_;
  uint64_t incarnation_ = 0;
  ParameterState state_;
  std::optional<UpdateLog> update_log_;
  uint64_t last_number_ = 0;  // Of the records applied.
  uint32_t last_time_ = 0;
  int64_t snapshot_at_bytes_ = 0;  // Of the log when the newest whole snapshot began.
  std::chrono::steady_clock::time_point next_snapshot_{};  // Not before, after one that failed.
  uint64_t sync_begun_ = 0;                                // Up to this record.
  uint64_t synced_at_start_ = 0;
  std::function<void()> on_synced_;
  bool is_broken_ = false;
  std::string log_failure_;
  std::unique_ptr<ForkedTask> saving_;
  std::jthread collapsing_;
};

}  // namespace cohort::ps
