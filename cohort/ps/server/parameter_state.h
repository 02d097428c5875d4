// The state of a server, as a deterministic state machine: a function of the records applied to it,
// in their order. The server (server.h) decides which records there are.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cohort/ps/job.h"
#include "cohort/ps/row_merger.h"
#include "cohort/ps/server/block_store.h"
#include "cohort/ps/server/update_log.h"
#include "cohort/ps/table/row_table.h"
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

struct TrainerState {
  uint64_t incarnation = 0;
  uint64_t last_sequence = 0;  ///< Of its pushes applied (kSync: accepted: the step).
  uint64_t clock = 0;          ///< Its pushes, from the slowest clock when it joined.
  bool is_member = true;       ///< Steps wait for it.
  uint64_t nonce = 0;          ///< Of its process's request to join.
  uint64_t joined_after = 0;   ///< The last step that was closed without it.
};

/// Tables and blocks of one server, its trainers, and the open steps.
///
/// Threads: one at a time. Local.
class ParameterState {
 public:
  /// `spill_folder`: for spilled rows (AtCap::kSpill); empty, or not there yet.
  /// `make_block`: where dense blocks live.
  ParameterState(int server, std::string spill_folder, BlockMaker make_block = make_host_block);
  ~ParameterState();
  ParameterState(ParameterState&&) noexcept;
  ParameterState& operator=(ParameterState&&) noexcept;

  int server() const { return server_; }
  const JobOptions* job() const { return job_ ? &*job_ : nullptr; }
  uint64_t fingerprint() const { return fingerprint_; }
  /// Whether the blocks have values (without blocks: from the start).
  bool is_initialised() const { return job_ && is_initialised_; }
  /// kSync: steps closed. kAsync: pushes applied.
  uint64_t steps() const { return steps_; }
  /// steps() when the job began: those of the checkpoint that it loaded.
  uint64_t steps_at_start() const { return steps_at_start_; }
  const std::map<uint32_t, TrainerState>& trainers() const { return trainers_; }
  const TrainerState* trainer(uint32_t id) const;
  /// Trainers that never joined, and members whose push the open step waits for; kAsync: the
  /// slowest.
  std::vector<uint32_t> missing_trainers() const;
  /// kSync: whether every member's push of step steps() + 1 is here. It stays open until a kClose
  /// record: another server may lack a push, or a restarted member may not know of its own.
  bool is_step_complete() const;
  /// By how many pushes `trainer` is ahead of the slowest member; 0 if it is not a member.
  uint64_t lead_of(uint32_t trainer) const;
  /// Bytes of pushes that wait for their step.
  int64_t pending_bytes() const { return pending_bytes_; }
  std::vector<TableStatistics> table_statistics() const;

  /// Checks a push or initial values against the job: sections, widths, ids of this server.
  /// Errors: c10::ValueError that says what does not fit.
  void check(const Message& message) const;

  /// Builds the tables and blocks of `job` on trial, and drops them.
  /// Errors: those of applying it.
  void check_job(const JobOptions& job) const;

  /// Changes the state. The record was checked before, or comes from the log.
  void apply(const Record& record);

  /// The values that `request` (kPull) asks for, as a message whose header says `steps()`.
  /// Errors: c10::ValueError as check, or that it would have more bytes than a message can.
  Buffer pull(const Message& request) const;
  /// How many bytes of weights the answer to a pull has.
  int64_t bytes_of_pull(const Message& request) const;

  /// Saving has two parts with the same `folder`, which is made. The first does what a forked child
  /// cannot: rows on disk, mostly hard links, and blocks on devices.
  void begin_save(const std::string& folder) const;
  /// The second saves what is in memory; it may run in a forked child.
  void save(const std::string& folder) const;
  /// Loads `folder` into a state to which no record was applied.
  /// Errors: ConfigError that names file and damage.
  void load(const std::string& folder);
  /// Fills a new job's tables and blocks with this server's share of a checkpoint of any number of
  /// servers, and continues its count of steps.
  /// Errors: ConfigError that names file and what is missing or damaged.
  void load_checkpoint(const std::string& checkpoint);

  /// A dense block's values, for export.
  struct BlockView {
    const BlockOptions* options;
    std::span<const float> weights;
    std::span<const float> state;
  };
  std::vector<BlockView> blocks() const;
  const std::vector<std::unique_ptr<RowTable>>& tables() const { return tables_; }

 private:
  using Pushes = std::map<uint32_t, std::shared_ptr<const Buffer>>;  // By trainer.

  void set_job(const std::string& json);
  std::string spill_path(size_t table) const;
  void load_tables(const std::string& folder, const JobOptions& stored_job);
  std::vector<SectionShape> shapes_of_answer(const Message& request) const;
  void set_initial(const Message& message);
  void join(const JoinRecord& record);
  void accept_push(const Record& record);
  void close_step(uint32_t time);
  bool all_joined() const;
  uint64_t slowest_clock() const;
  void apply_step(const Pushes& pushes, uint32_t time);
  int64_t schedule_step() const;

  int server_;
  std::string spill_folder_;
  BlockMaker make_block_;
  std::optional<JobOptions> job_;
  uint64_t fingerprint_ = 0;
  bool is_initialised_ = false;
  uint64_t steps_ = 0;
  uint64_t steps_at_start_ = 0;
  std::map<uint32_t, TrainerState> trainers_;
  std::map<uint32_t, std::unique_ptr<BlockStore>> blocks_;  // This server's, by number in the job.
  std::vector<std::unique_ptr<RowTable>> tables_;
  std::map<uint64_t, Pushes> pending_;  // By step: pushes of steps that are not closed.
  // What a step is summed in: kept for its memory alone.
  std::vector<float> sum_;
  RowMerger merged_rows_;
  int64_t pending_bytes_ = 0;
};

}  // namespace cohort::ps
