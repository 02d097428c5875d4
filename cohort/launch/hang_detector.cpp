// SPDX-License-Identifier: Apache-2.0
#include "cohort/launch/hang_detector.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <signal.h>
#include <string_view>
#include <unistd.h>

#include "cohort/base/columns.h"
#include "cohort/base/process_stat.h"

namespace cohort::launch {
namespace {

using std::chrono::milliseconds;
using std::chrono::nanoseconds;

constexpr milliseconds kStackTimeout{1000};  // For a rank to write its stack.
constexpr int kStackLines = 40;

// R, S, D, T ... 'X': ended.
char process_state(pid_t pid) {
  const std::string state = process_stat(pid, 3);
  return state.empty() ? 'X' : state[0];
}

// The process that keeps the page: the worker, or the program that a worker's script started. A
// page from elsewhere (another pid namespace) must not select an unrelated process.
pid_t traced_process(const Worker& worker, const std::optional<TraceRecord>& record) {
  const pid_t pid = record ? static_cast<pid_t>(record->pid) : 0;
  return pid > 0 && ::getsid(pid) == worker.pid ? pid : worker.pid;
}

// Such a process runs no handler: SIGSTOP or its like stopped it (T), or a debugger holds it (t).
bool is_stopped(char state) {
  return state == 'T' || state == 't';
}

bool same_collective(const TraceRecord& a, const TraceRecord& b) {
  return a.sequence == b.sequence && a.group == b.group && a.operation == b.operation;
}

// A collective of a sub-group needs its members only, and which those are no record says.
bool needs_all_ranks(const TraceRecord& collective) {
  return std::string_view(collective.group.data()) == "world";
}

bool contains(const std::vector<int>& numbers, int number) {
  return std::find(numbers.begin(), numbers.end(), number) != numbers.end();
}

std::string seconds(nanoseconds duration) {
  return std::to_string(std::chrono::duration_cast<std::chrono::seconds>(duration).count()) + " s";
}

std::string where(const TraceRecord& record) {
  return std::string(record.operation.data()) + " #" + std::to_string(record.sequence);
}

std::string ranks(const std::vector<int>& numbers) {
  std::string text = numbers.size() == 1 ? "rank" : "ranks";
  for (const int number : numbers) text += " " + std::to_string(number);
  return text;
}

std::string indented(const std::string& path) {
  std::ifstream file(path);
  std::string text, line;
  for (int i = 0; i < kStackLines && std::getline(file, line); ++i) text += "    " + line + "\n";
  return text;
}

}  // namespace

HangDetector::HangDetector(const RunOptions& options, const std::string& log_dir)
    : options_(options), log_dir_(log_dir) {
  reset();
}

void HangDetector::reset() {
  begun_ns_ = steady_now_ns();
  table_at_ = Clock::now() + options_.watch_period;
  stopped_since_.clear();
  stall_.reset();
  reported_.reset();
}

milliseconds HangDetector::interval() const {
  milliseconds interval{1000};
  for (const milliseconds limit : {options_.watch_period, options_.stall_timeout}) {
    if (limit.count() > 0) interval = std::min(interval, limit / 10);
  }
  return stall_ ? milliseconds(20) : std::max(interval, milliseconds(20));
}

std::vector<HangDetector::Snapshot> HangDetector::take_snapshots(
    std::span<const Worker> workers) const {
  std::vector<Snapshot> snapshots;
  for (const Worker& worker : workers) {
    Snapshot snapshot{&worker, TracePage::read(trace_file(log_dir_, worker.rank))};
    snapshot.pid = traced_process(worker, snapshot.record);
    snapshot.state = worker.running ? process_state(snapshot.pid) : 'X';
    snapshots.push_back(snapshot);
  }
  return snapshots;
}

// A stopped process is not waiting, whatever its page says: the others wait for it.
bool HangDetector::Snapshot::waits() const {
  return worker->running && state != 'T' && record && record->state == TraceState::kWaiting;
}

bool HangDetector::Snapshot::waits_in(const TraceRecord& collective) const {
  return waits() && same_collective(*record, collective);
}

// Time in which the whole job was suspended does not count.
nanoseconds HangDetector::waited(const Snapshot& snapshot) const {
  return nanoseconds(
      snapshot.waits() ? steady_now_ns() - std::max(snapshot.record->since_ns, begun_ns_) : 0);
}

void HangDetector::note_stopped(const std::vector<Snapshot>& snapshots) {
  for (const Snapshot& snapshot : snapshots) {
    if (snapshot.state == 'T') {
      stopped_since_.emplace(snapshot.worker->rank, Clock::now());
    } else {
      stopped_since_.erase(snapshot.worker->rank);
    }
  }
}

std::optional<HangDetector::Stall> HangDetector::find_stall(
    const std::vector<Snapshot>& snapshots) const {
  const auto longest = std::max_element(
      snapshots.begin(), snapshots.end(),
      [this](const Snapshot& a, const Snapshot& b) { return waited(a) < waited(b); });
  if (longest == snapshots.end() || waited(*longest) < options_.stall_timeout) return std::nullopt;
  Stall stall{*longest->record, {}, Clock::now() + kStackTimeout};
  for (const Snapshot& snapshot : snapshots) {
    if (!snapshot.waits_in(stall.where) && snapshot.record)
      stall.missing.push_back(snapshot.worker->rank);
  }
  return stall;
}

// Only to workers with a page: others may die of the signal.
void HangDetector::request_stacks(const std::vector<Snapshot>& snapshots) const {
  for (const Snapshot& snapshot : snapshots) {
    const int rank = snapshot.worker->rank;
    if (!snapshot.worker->running || !contains(stall_->missing, rank)) continue;
    std::error_code ignored;
    std::filesystem::remove(stack_file(log_dir_, rank), ignored);
    if (snapshot.pid == snapshot.record->pid) ::kill(snapshot.pid, stack_signal());
  }
}

bool HangDetector::stacks_are_complete(const std::vector<Snapshot>& snapshots) const {
  return std::all_of(snapshots.begin(), snapshots.end(), [this](const Snapshot& snapshot) {
    const int rank = snapshot.worker->rank;
    return !contains(stall_->missing, rank) || snapshot.state == 'X' ||
           is_stopped(snapshot.state) || std::filesystem::exists(stack_file(log_dir_, rank));
  });
}

HangDetector::Finding HangDetector::check(std::span<const Worker> workers) {
  Finding finding;
  const auto snapshots = take_snapshots(workers);
  note_stopped(snapshots);
  if (options_.watch_period.count() > 0 && Clock::now() >= table_at_) {
    table_at_ = Clock::now() + options_.watch_period;
    finding.text = table(snapshots);
  }
  if (options_.stall_timeout.count() == 0) return finding;
  if (!stall_) {
    const auto found = find_stall(snapshots);
    if (found && !(reported_ && same_collective(*reported_, found->where))) {
      stall_ = found;
      request_stacks(snapshots);
    } else if (found && needs_all_ranks(found->where)) {
      const Finding stopped = find_stopped(found->missing);
      finding.failed_rank = stopped.failed_rank;
      finding.why = stopped.why;
    }
  }
  if (stall_ && (stacks_are_complete(snapshots) || Clock::now() >= stall_->report_at)) {
    finding.text += report(snapshots);
    reported_ = stall_->where;
    stall_.reset();
  }
  return finding;
}

HangDetector::Finding HangDetector::find_stopped(const std::vector<int>& missing) const {
  for (const auto& [rank, since] : stopped_since_) {
    const auto duration = Clock::now() - since;
    if (duration < options_.stall_timeout || !contains(missing, rank)) continue;
    return {"", rank,
            "was stopped (state T) for " + seconds(duration) + " while others waited in " +
                where(*reported_)};
  }
  return {};
}

std::string HangDetector::report(const std::vector<Snapshot>& snapshots) const {
  std::vector<int> waiting;
  for (const Snapshot& snapshot : snapshots) {
    if (snapshot.waits_in(stall_->where)) waiting.push_back(snapshot.worker->rank);
  }
  std::string text =
      options_.program_name + ": stalled: " + ranks(waiting) + " in " + where(stall_->where);
  const bool of_all = needs_all_ranks(stall_->where);
  if (!of_all) text += std::string(" of group \"") + stall_->where.group.data() + "\"";
  if (!stall_->missing.empty() && of_all) {
    text += ", missing: " + ranks(stall_->missing);
  } else if (!stall_->missing.empty()) {
    text += ", not in it: " + ranks(stall_->missing) + " (missing if a member of the group)";
  } else if (static_cast<int>(snapshots.size()) < stall_->where.world_size) {
    text += ", like all ranks of this node: the missing ranks are on other nodes";
    if (!of_all) text += ", if the group has any there";
  } else {
    text += ", like all ranks: the operation itself does not complete";
  }
  text += "\n" + table(snapshots);
  for (const Snapshot& snapshot : snapshots) {
    const int rank = snapshot.worker->rank;
    if (!contains(stall_->missing, rank)) continue;
    const std::string stack = snapshot.worker->running ? indented(stack_file(log_dir_, rank)) : "";
    const std::string name = options_.program_name + ": rank " + std::to_string(rank);
    if (!stack.empty()) {
      text += name + " is at\n" + stack;
    } else if (snapshot.state == 'T') {
      text += name + " is stopped (state T) and cannot report its stack\n";
    } else if (snapshot.state == 't') {
      text += name + " is held by a debugger (state t) and cannot report its stack\n";
    } else if (snapshot.state == 'D') {
      text += name + " is blocked in the kernel (state D) and cannot report its stack\n";
    } else if (snapshot.worker->running) {
      text += name + " did not report its stack\n";
    }
  }
  return text;
}

std::string HangDetector::table(std::span<const Worker> workers) const {
  return table(take_snapshots(workers));
}

std::string HangDetector::table(const std::vector<Snapshot>& snapshots) const {
  std::vector<Row> rows{{"rank", "state", "last collective", "number", "tensor", "at", "since"}};
  for (const Snapshot& snapshot : snapshots) {
    Row row{std::to_string(snapshot.worker->rank), "no trace", "", "", "", "", ""};
    if (snapshot.record) {
      const TraceRecord& record = *snapshot.record;
      row[1] = record.state == TraceState::kWaiting ? "waiting" : "running";
      row[2] = record.operation.data();
      row[3] = std::to_string(record.sequence);
      row[4] = describe_tensor(record);
      row[5] = record.call_site.data();
      row[6] = seconds(nanoseconds(steady_now_ns() - record.since_ns));
    }
    if (snapshot.state == 'T') row[1] = "stopped (T)";
    if (snapshot.state == 't') row[1] = "traced (t)";
    if (snapshot.state == 'D') row[1] = "blocked (D)";
    if (!snapshot.worker->running) row[1] = "ended";
    rows.push_back(row);
  }
  return options_.program_name + ": state of the ranks\n" + align_columns(rows, "    ", {0, 3, 6});
}

}  // namespace cohort::launch
