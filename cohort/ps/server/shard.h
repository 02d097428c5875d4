// SPDX-License-Identifier: Apache-2.0
// One server's part of a job: its tables and its blocks of dense parameters.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "cohort/ps/job.h"
#include "cohort/ps/row_merger.h"
#include "cohort/ps/server/block_store.h"
#include "cohort/ps/server/declared_job.h"
#include "cohort/ps/server/update_log.h"
#include "cohort/ps/table/row_table.h"
#include "cohort/ps/wire/message.h"

namespace cohort::ps {

/// A dense block's values.
struct BlockView {
  const BlockOptions* options;
  std::span<const float> weights;
  std::span<const float> state;
};

/// Deterministic: a function of the job and the pushes, in their order.
///
/// Threads: one at a time. Local.
class Shard {
 public:
  /// As ParameterState's.
  Shard(int server, std::string spill_folder, BlockMaker make_block, int table_threads = 1);
  ~Shard();
  Shard(Shard&&) noexcept;
  Shard& operator=(Shard&&) noexcept;

  int server() const { return server_; }
  /// nullptr: none yet.
  const std::shared_ptr<const DeclaredJob>& declared_job() const { return job_; }
  const JobOptions* job() const { return job_ ? &job_->options() : nullptr; }
  /// Builds the tables and blocks of a job. Once.
  void set_job(JobOptions options);
  /// Errors: those of set_job, which changes nothing here.
  void check_job(const JobOptions& job) const;

  bool has_blocks() const { return !blocks_.empty(); }
  std::vector<BlockView> blocks() const;
  const std::vector<std::unique_ptr<RowTable>>& tables() const { return tables_; }
  std::vector<TableStatistics> table_statistics() const;

  void set_initial(const Message& message);
  /// Applies one push. `step`: of the schedule, from 1; `time`: seconds since 1970.
  void push(const Message& message, int64_t step, uint32_t time);
  /// Applies the sum or mean (JobOptions::reduce) of a step's pushes, which are summed in this
  /// order.
  void push_sum(std::span<const Message> messages, int64_t step, uint32_t time);
  void evict(uint32_t time);

  /// The values that `request`, which was checked, asks for, as a message with this header.
  Buffer pull(const Message& request, const Header& header,
              const BufferMaker& make = nullptr) const;

  /// Saving (saved_state.h); the first as ParameterState::begin_save.
  void begin_save(const std::string& folder) const;
  std::vector<std::vector<std::byte>> block_records() const;
  void save_tables(const std::string& folder) const;

  /// Loading of what these saved, in this order.
  /// Errors: ConfigError that names file and damage.
  void load_job(const std::string& folder, JobOptions job);
  void load_block(const std::string& path, const Record& record);
  void load_tables(const std::string& folder);

  /// Fills a new job's tables and blocks with this server's share of a checkpoint of any number of
  /// servers.
  /// Returns: the checkpoint's steps.
  /// Errors:  ConfigError that names file and what is missing or damaged.
  uint64_t load_checkpoint(const std::string& checkpoint);

 private:
  std::string spill_path(size_t table) const;
  void load_own_rows(const std::string& folder, const JobOptions& stored_job);

  int server_;
  std::string spill_folder_;
  BlockMaker make_block_;
  std::shared_ptr<TableThreads> threads_;
  std::shared_ptr<const DeclaredJob> job_;
  std::map<uint32_t, std::unique_ptr<BlockStore>> blocks_;  // By number in the job.
  std::vector<std::unique_ptr<RowTable>> tables_;
  // What a step is summed in: kept for its memory alone.
  std::vector<float> sum_;
  RowMerger merged_rows_;
  std::vector<float> widened_;  // Values of another type than float32.
};

}  // namespace cohort::ps
