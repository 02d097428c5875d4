// SPDX-License-Identifier: Apache-2.0
// The files of a saved state: a server's snapshots, and checkpoints of all servers of a job.
//
//   state.records    records in the form of the update log: the job, progress, blocks, open pushes
//   table.<n>        rows of the n-th table (table_file.h)
//   cold.<n>/        its rows on disk (SpillStore::checkpoint)
// A checkpoint of a job's servers, which a job with any number of them can begin with:
//
//   FOLDER/checkpoint                        the name of the save that loads: "save-<16 digits>"
//   FOLDER/save-<nonce>/server-<i>-of-<n>/   server i's files
// Each save has a folder of its own, and `checkpoint` names it when all parts are there: a load
// reads the parts of one save only. Then the others are removed.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "cohort/ps/job.h"
#include "cohort/ps/server/update_log.h"

namespace cohort::ps {

// Records that only saved states have, beside those of the log.
constexpr auto kProgress = static_cast<RecordKind>(101);  // JSON: steps, trainers.
constexpr auto kBlock = static_cast<RecordKind>(102);     // Of Shard::block_records.

/// The files above of a saved state in `folder`.
std::string records_path(const std::string& folder);
std::string saved_table_path(const std::string& folder, size_t number);
std::string saved_spill_path(const std::string& folder, size_t number);

/// The payload of a record of text.
std::string text_of(const Record& record);
/// The steps of a kProgress record.
uint64_t steps_of(const Record& progress);

/// Where server `server` puts its part of save `nonce`.
std::string part_folder(const std::string& folder, uint64_t nonce, int server, int servers);

/// Whether save `nonce` is the one that loads.
bool is_finished(const std::string& folder, uint64_t nonce);

/// The nonce of the save that loads; 0: there is none.
uint64_t finished_save(const std::string& folder);

/// Names save `nonce` as what `folder` holds, and removes the saves before it. Again: nothing.
/// Errors: ConfigError that names the part that is not there, those of a sync job that are not of
/// one step, or what cannot be removed.
void finish_checkpoint(const std::string& folder, uint64_t nonce);

/// The folders of a checkpoint's parts, in the order of servers.
/// Errors: ConfigError that names `folder`, or the save and the server whose part is not there.
std::vector<std::string> saved_folders(const std::string& folder);

/// The job of a saved state.
/// Errors: ConfigError that names the file.
JobOptions saved_job(const std::string& folder);

}  // namespace cohort::ps
