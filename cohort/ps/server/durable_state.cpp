// SPDX-License-Identifier: Apache-2.0
#include "cohort/ps/server/durable_state.h"

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <ctime>
#include <fcntl.h>
#include <filesystem>
#include <fstream>
#include <pthread.h>
#include <sys/file.h>
#include <system_error>
#include <vector>

#include "cohort/base/atomic_file.h"
#include "cohort/base/error.h"
#include "cohort/base/system_error.h"
#include "cohort/ps/server/kill_point.h"
#include "cohort/ps/server/saved_state.h"
#include "cohort/ps/table/pages.h"

namespace cohort::ps {

namespace {

namespace fs = std::filesystem;
using std::chrono::steady_clock;

// After a snapshot that failed, most likely for want of room: the tries take a small part of the
// disk's time, and what they write is mostly not there.
constexpr std::chrono::seconds kMinPause{1};
constexpr int kPauseFactor = 10;

const std::string kSnapshot = "snapshot.";

fs::path snapshot_path(const std::string& folder, uint64_t number) {
  return fs::path(folder) / (kSnapshot + std::to_string(number));
}

// Numbers of the whole snapshots, ascending. Unfinished ones have another name.
std::vector<uint64_t> snapshots_of(const std::string& folder) {
  std::vector<uint64_t> numbers;
  for (const auto& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    uint64_t number = 0;
    if (std::sscanf(name.c_str(), "snapshot.%" SCNu64, &number) == 1 &&
        name == kSnapshot + std::to_string(number))
      numbers.push_back(number);
  }
  std::sort(numbers.begin(), numbers.end());
  return numbers;
}

fs::path unfinished_path(const fs::path& folder) {
  return folder.string() + ".unfinished";
}

// The half of saving that is not the child's.
void begin_saving(const ParameterState& state, const fs::path& folder) {
  make_folder(folder.parent_path().string());
  fs::remove_all(unfinished_path(folder));
  state.begin_save(unfinished_path(folder).string());
}

void sync(const fs::path& path) {
  const Fd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  TORCH_CHECK(file && ::fsync(file.get()) == 0, path.string(),
              ": cannot sync: ", system_reason(errno));
}

void sync_files(const fs::path& folder) {
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (entry.is_regular_file()) sync(entry.path());
  }
  sync(folder);
}

// Finishes `folder`, so that it is there whole or not at all.
void finish_saving(const ParameterState& state, const fs::path& folder) {
  const fs::path unfinished = unfinished_path(folder);
  state.save(unfinished.string());
  sync_files(unfinished);
  kill_point("snapshot written");
  if (fs::exists(folder)) {
    // At no moment there is none.
    TORCH_CHECK(
        ::renameat2(AT_FDCWD, unfinished.c_str(), AT_FDCWD, folder.c_str(), RENAME_EXCHANGE) == 0,
        folder.string(), ": cannot replace it: ", system_reason(errno));
  } else {
    fs::rename(unfinished, folder);
  }
  sync(folder.parent_path());
  fs::remove_all(unfinished);
}

fs::path boot_path(const std::string& folder) {
  return fs::path(folder) / "boot";
}

fs::path job_path(const std::string& folder) {
  return fs::path(folder) / "job.json";
}

// Names the present run of the operating system: another one may have lost what was not synced.
std::string boot_id() {
  std::string id;
  if (std::ifstream file("/proc/sys/kernel/random/boot_id"); file) std::getline(file, id);
  return id;
}

fs::path incarnation_path(const std::string& folder) {
  return fs::path(folder) / "incarnation";
}

uint64_t next_incarnation(const std::string& folder) {
  const std::string path = incarnation_path(folder).string();
  uint64_t incarnation = 0;
  if (std::ifstream file(path); file && !(file >> incarnation))
    throw ConfigError(path + ": expected a number");
  write_atomically(path, std::to_string(incarnation + 1) + "\n");
  return incarnation + 1;
}

}  // namespace

DurableState::DurableState(const ServerOptions& options, const Log& log,
                           std::function<void()> synced)
    : options_(options), log_(log), state_(empty_state()), on_synced_(std::move(synced)) {
  if (options_.folder.empty()) {
    TORCH_CHECK_VALUE(options_.durability == Durability::kApplied,
                      "server: without a folder there is no log");
    if (!options_.load.empty()) saved_folders(options_.load);
    incarnation_ = 1;
    return;
  }
  make_folder(options_.folder);
  check_kind();
  lock();
  check_owner();
  // Worth nothing without the state that it belonged to.
  fs::remove_all(fs::path(options_.folder) / "cold");
  incarnation_ = next_incarnation(options_.folder);
  if (!options_.load.empty())
    saved_folders(options_.load);  // Now rather than after the trainers came.
  recover();
}

void DurableState::set_job(const JobOptions& job) {
  const std::string json = job.to_json();
  change(RecordKind::kJob, std::as_bytes(std::span(json)));
  note_job();
  if (!options_.load.empty()) load_checkpoint(options_.load);
}

ParameterState DurableState::empty_state() const {
  const std::string spill_folder =
      options_.folder.empty() ? "" : (fs::path(options_.folder) / "cold").string();
  return {options_.server, spill_folder, options_.make_block, options_.table_threads};
}

// Tells a folder whose log is gone from a new one: the log is to outlive a power cut before it.
void DurableState::note_job() {
  if (options_.durability == Durability::kApplied || options_.folder.empty()) return;
  const fs::path path = job_path(options_.folder);
  if (fs::exists(path)) return;
  update_log_->sync();
  write_atomically(path.string(), state_.job()->to_json() + "\n");
}

void DurableState::load_checkpoint(const std::string& checkpoint) {
  state_.load_checkpoint(checkpoint);
  write_snapshot();
  log_.info("began with a checkpoint", {{"folder", checkpoint}, {"steps", state_.steps()}});
}

// Of the state behind the last record; it takes the place of one that has the same number.
void DurableState::write_snapshot() {
  if (options_.folder.empty()) return;
  // After a power cut the log must not be older than what stands on it.
  if (update_log_) update_log_->sync();
  const fs::path path = snapshot_path(options_.folder, last_number_);
  begin_saving(state_, path);
  finish_saving(state_, path);
}

void DurableState::restore(const std::string& checkpoint) {
  TORCH_CHECK_VALUE(state_.job(), "restore: this server has no job yet");
  TORCH_CHECK_VALUE(!saving_, "restore: a snapshot is being written");
  const std::string job = state_.job()->to_json();
  // Greater than any number that a process of a trainer has had here (RequestHandler::join).
  for (const auto& [id, trainer] : state_.members().trainers())
    incarnation_ = std::max(incarnation_, trainer.incarnation);
  ++incarnation_;
  if (!options_.folder.empty())
    write_atomically(incarnation_path(options_.folder).string(),
                     std::to_string(incarnation_) + "\n");
  collapsing_ = {};
  state_ = empty_state();
  if (!options_.folder.empty()) fs::remove_all(fs::path(options_.folder) / "cold");
  state_.apply({.kind = RecordKind::kJob, .payload = std::as_bytes(std::span(job))});
  if (checkpoint.empty()) {
    write_snapshot();
  } else {
    load_checkpoint(checkpoint);
  }
}

// A folder that is not a server's is left as it is.
void DurableState::check_kind() const {
  bool is_empty = true;
  for (const auto& entry : fs::directory_iterator(options_.folder)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with("server") || name == "lock") return;
    is_empty = false;
  }
  if (!is_empty) throw ConfigError(options_.folder + ": expected an empty folder, or a server's");
}

void DurableState::lock() {
  const std::string path = (fs::path(options_.folder) / "lock").string();
  lock_ = Fd(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666));
  if (!lock_) throw ConfigError(path + ": expected a writable file: " + system_reason(errno));
  if (::flock(lock_.get(), LOCK_EX | LOCK_NB) != 0)
    throw ConfigError(options_.folder + ": another server is running in this folder");
}

void DurableState::check_owner() const {
  const std::string path = (fs::path(options_.folder) / "server").string();
  const std::string own =
      std::to_string(options_.server) + " of " + std::to_string(options_.servers);
  std::string owner;
  if (std::ifstream file(path); file && std::getline(file, owner)) {
    if (owner != own)
      throw ConfigError(options_.folder + ": it is the folder of server " + owner +
                        ", this is server " + own);
  } else {
    write_atomically(path, own + "\n");
  }
  if (options_.durability == Durability::kApplied && fs::exists(fs::path(options_.folder) / "log"))
    throw ConfigError(options_.folder +
                      ": it has a log, which a server that acknowledges what is applied would "
                      "forget");
}

// Without a power cut the system's cache survives the server's process.
PowerCut DurableState::power_cut() const {
  std::string id;
  if (std::ifstream file(boot_path(options_.folder)); file) std::getline(file, id);
  return !id.empty() && id == boot_id() ? PowerCut::kImpossible : PowerCut::kPossible;
}

void DurableState::recover() {
  const auto started = steady_clock::now();
  const auto snapshots = snapshots_of(options_.folder);
  if (!snapshots.empty()) {
    state_.load(snapshot_path(options_.folder, snapshots.back()).string());
    last_number_ = snapshots.back();
  }
  // What a killed server left half-done.
  for (const auto& entry : fs::directory_iterator(options_.folder)) {
    if (entry.path().extension() == ".unfinished") fs::remove_all(entry.path());
  }
  uint64_t replayed = 0;
  if (options_.durability != Durability::kApplied) {
    update_log_.emplace((fs::path(options_.folder) / "log").string(), last_number_ + 1,
                        [&](const Record& record) {
                          state_.apply(record);
                          last_number_ = record.number;
                          last_time_ = record.time;
                          ++replayed;
                        },
                        power_cut(), on_synced_);
    if (!update_log_->cut_off_text().empty())
      log_.warn(
          "a power cut damaged the end of the log: it continues after its last complete record",
          {{"cut off", update_log_->cut_off_text()}, {"record", last_number_}});
    write_atomically(boot_path(options_.folder).string(), boot_id() + "\n");
  }
  // Pushes that an earlier start had logged but not synced are acknowledged when they are repeated.
  if (replayed > 0) sync();
  sync_begun_ = synced_at_start_ = last_number_;
  const fs::path job = job_path(options_.folder);
  if (!state_.job() && fs::exists(job))
    throw ConfigError(options_.folder + ": its log is gone: expected the job that " + job.string() +
                      " is of; an empty folder starts a new job");
  if (last_number_ == 0) return;
  note_job();
  if (!snapshots.empty() && !options_.load.empty())
    log_.info("the folder has a state: the checkpoint is not looked at",
              {{"folder", options_.folder}, {"checkpoint", options_.load}});
  if (snapshots.empty() && !options_.load.empty()) {
    // The record of the job is the first; a server that ended behind it has not loaded yet.
    if (last_number_ > 1)
      throw ConfigError(options_.folder + ": its job has continued without the checkpoint " +
                        options_.load + ": expected an empty folder");
    load_checkpoint(options_.load);
  }
  const std::chrono::duration<double> seconds = steady_clock::now() - started;
  log_.info("recovered", {{"snapshot", snapshots.empty() ? 0 : snapshots.back()},
                          {"records", replayed},
                          {"steps", state_.steps()},
                          {"seconds", seconds.count()}});
}

uint32_t DurableState::now() {
  last_time_ = std::max(last_time_, static_cast<uint32_t>(std::time(nullptr)));
  return last_time_;
}

void DurableState::change(RecordKind kind, std::span<const std::byte> payload,
                          std::shared_ptr<const Buffer> message) {
  Record record{.number = last_number_ + 1,
                .kind = kind,
                .time = now(),
                .payload = payload,
                .message = std::move(message)};
  kill_point("before the log");
  if (update_log_) {
    // A message's bytes were read when it was checked.
    if (record.message) record.checksum = crc32c_of_checked(payload);
    record.number = append(record);
  }
  kill_point("after the log");  // A large push may be on its way to it.
  is_broken_ = true;            // Unless it is applied, and written.
  state_.apply(record);
  if (update_log_) update_log_->finish_append();
  is_broken_ = false;
  last_number_ = record.number;
  kill_point("after applying");
}

uint64_t DurableState::append(const Record& record) {
  try {
    // A push of a step is only kept until the step is closed: there is nothing to do beside it.
    const bool applied_now = record.kind == RecordKind::kPush && state_.job()->mode != Mode::kSync;
    const uint64_t number = update_log_->begin_append(record, applied_now);
    log_failure_.clear();
    return number;
  } catch (const std::exception& error) {
    log_failure_ = one_line(error);
    throw;
  }
}

void DurableState::sync() {
  if (options_.durability != Durability::kSynced) return;
  update_log_->sync();
}

void DurableState::begin_sync() {
  if (options_.durability != Durability::kSynced) return;
  update_log_->check_disk();
  if (sync_begun_ == last_number_) return;
  sync_begun_ = last_number_;
  update_log_->sync_soon();
}

uint64_t DurableState::durable_number() const {
  if (options_.durability != Durability::kSynced) return last_number_;
  return std::max(synced_at_start_, update_log_->synced());
}

// A whole state on disk at `path`, or nothing of it.
void DurableState::begin_task(const std::string& path, std::function<void(std::string)> done) {
  const auto clear = [path] {
    std::error_code ignored;  // The next one tries again.
    fs::remove_all(unfinished_path(path), ignored);
  };
  try {
    begin_saving(state_, path);
    collapsing_ = {};  // It would copy what the child does not write. It begins again after it.
    saving_ =
        std::make_unique<ForkedTask>([this, path] { finish_saving(state_, path); },
                                     [clear, done = std::move(done), path](std::string reason) {
                                       // What it replaces is removed next.
                                       std::error_code ignored;
                                       if (reason.empty() && !fs::exists(path, ignored))
                                         reason = path + ": it was not written";
                                       if (!reason.empty()) clear();
                                       done(reason);
                                     });
  } catch (...) {
    clear();
    throw;
  }
}

void DurableState::begin_snapshot() {
  const auto began = steady_clock::now();
  const auto try_later = [this, began] {
    const auto now = steady_clock::now();
    next_snapshot_ =
        now + std::max<steady_clock::duration>(kMinPause, kPauseFactor * (now - began));
  };
  try {
    update_log_->begin_segment();
    const uint64_t number = last_number_;
    const int64_t log_bytes = update_log_->bytes();
    begin_task(snapshot_path(options_.folder, number).string(),
               [=, this](const std::string& reason) {
                 if (!reason.empty()) {
                   try_later();
                   log_.error("no snapshot", {{"record", number}, {"reason", reason}});
                   return;
                 }
                 kill_point("snapshot named");
                 snapshot_at_bytes_ = log_bytes;
                 update_log_->remove_before(number + 1);
                 for (const uint64_t older : snapshots_of(options_.folder)) {
                   if (older < number) fs::remove_all(snapshot_path(options_.folder, older));
                 }
                 log_.info("snapshot", {{"record", number}});
               });
  } catch (...) {
    try_later();
    throw;
  }
}

void DurableState::begin_save(const std::string& folder, uint64_t nonce,
                              std::function<void(std::string)> done) {
  TORCH_CHECK_VALUE(!saving_, "another snapshot is being written");
  begin_task(part_folder(folder, nonce, options_.server, options_.servers), std::move(done));
}

// The fork has left the tables in small pages, as far as they were written since.
void DurableState::collapse_pages() {
  std::vector<std::span<std::byte>> pieces;  // Of which the next fork waits for one.
  for (const auto& table : state_.shard().tables()) {
    for (std::span<std::byte> memory : table->huge_pages()) {
      constexpr size_t kPiece = 8 * kHugePage;
      for (memory = whole_huge_pages(memory); !memory.empty();) {
        pieces.push_back(memory.first(std::min(kPiece, memory.size())));
        memory = memory.subspan(pieces.back().size());
      }
    }
  }
  if (pieces.empty()) return;
  try {
    // Harmless if a table frees memory meanwhile: madvise then fails, or collapses other memory.
    collapsing_ = std::jthread([pieces = std::move(pieces)](const std::stop_token& stop) {
      for (size_t i = 0; i < pieces.size() && !stop.stop_requested(); ++i) collapse(pieces[i]);
    });
    ::pthread_setname_np(collapsing_.native_handle(), "ps-collapse");
  } catch (const std::system_error& error) {
    log_.warn("tables stay in small pages", {{"reason", one_line(error)}});
  }
}

void DurableState::poll() {
  if (update_log_) update_log_->check_disk();
  if (saving_ && saving_->poll()) {
    saving_.reset();
    collapse_pages();
  }
  if (update_log_ && !saving_ && options_.snapshot_log_bytes > 0 &&
      update_log_->bytes() - snapshot_at_bytes_ >= options_.snapshot_log_bytes &&
      steady_clock::now() >= next_snapshot_)
    begin_snapshot();
}

}  // namespace cohort::ps
