#include "cohort/launch/watch.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <signal.h>
#include <sstream>
#include <unistd.h>

namespace cohort::launch {
namespace {

using std::chrono::milliseconds;
using std::chrono::nanoseconds;

constexpr milliseconds kAnswerTime{1000};  // For a rank to write its stack.
constexpr int kStackLines = 40;

// The state letter of a process: R, S, D, T ... It stands after the name, which may hold anything.
char process_state(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  const size_t name_end = text.rfind(") ");
  return name_end == std::string::npos ? 'X' : text[name_end + 2];
}

// The process that keeps the page: the worker, or the program that a worker's script started. A
// page from elsewhere (another pid namespace) must not lead to a stranger.
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

using Row = std::array<std::string, 7>;

// Columns as wide as their widest entry; numbers to the right.
std::string aligned(const std::vector<Row>& rows) {
  std::array<size_t, std::tuple_size_v<Row>> widths{};
  for (const Row& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string text;
  for (const Row& row : rows) {
    std::string line = "   ";
    for (size_t i = 0; i < row.size(); ++i) {
      const bool to_right = i == 0 || i == 3 || i == 6;
      const std::string space(widths[i] - row[i].size(), ' ');
      line += " " + (to_right ? space + row[i] : row[i] + space) + " ";
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + "\n";
  }
  return text;
}

std::string indented(const std::string& path) {
  std::ifstream file(path);
  std::string text, line;
  for (int i = 0; i < kStackLines && std::getline(file, line); ++i) text += "    " + line + "\n";
  return text;
}

}  // namespace

Watch::Watch(const RunOptions& options, const std::string& log_dir)
    : options_(options), log_dir_(log_dir) {
  begin();
}

void Watch::begin() {
  begun_ns_ = steady_now_ns();
  table_at_ = Clock::now() + options_.watch_period;
  stopped_since_.clear();
  stall_.reset();
  reported_.reset();
}

milliseconds Watch::interval() const {
  milliseconds interval{1000};
  for (const milliseconds limit : {options_.watch_period, options_.stall_timeout}) {
    if (limit.count() > 0) interval = std::min(interval, limit / 10);
  }
  return stall_ ? milliseconds(20) : std::max(interval, milliseconds(20));
}

std::vector<Watch::Sight> Watch::see(std::span<const Worker> workers) const {
  std::vector<Sight> sights;
  for (const Worker& worker : workers) {
    Sight sight{&worker, TracePage::read(trace_file(log_dir_, worker.rank))};
    sight.pid = traced_process(worker, sight.record);
    sight.state = worker.running ? process_state(sight.pid) : 'X';
    sights.push_back(sight);
  }
  return sights;
}

// A stopped process waits for nobody, whatever its page says: the others wait for it.
bool Watch::Sight::waits() const {
  return worker->running && state != 'T' && record && record->state == TraceState::kWaiting;
}

bool Watch::Sight::waits_in(const TraceRecord& collective) const {
  return waits() && same_collective(*record, collective);
}

// Time in which the whole job was suspended does not count.
nanoseconds Watch::waited(const Sight& sight) const {
  return nanoseconds(sight.waits() ? steady_now_ns() - std::max(sight.record->since_ns, begun_ns_)
                                   : 0);
}

void Watch::note_stopped(const std::vector<Sight>& sights) {
  for (const Sight& sight : sights) {
    if (sight.state == 'T') {
      stopped_since_.emplace(sight.worker->rank, Clock::now());
    } else {
      stopped_since_.erase(sight.worker->rank);
    }
  }
}

std::optional<Watch::Stall> Watch::find_stall(const std::vector<Sight>& sights) const {
  const auto longest =
      std::max_element(sights.begin(), sights.end(),
                       [this](const Sight& a, const Sight& b) { return waited(a) < waited(b); });
  if (longest == sights.end() || waited(*longest) < options_.stall_timeout) return std::nullopt;
  Stall stall{*longest->record, {}, Clock::now() + kAnswerTime};
  for (const Sight& sight : sights) {
    if (!sight.waits_in(stall.where) && sight.record) stall.missing.push_back(sight.worker->rank);
  }
  return stall;
}

// Only to workers with a page: others may die of the signal.
void Watch::ask_for_stacks(const std::vector<Sight>& sights) const {
  for (const Sight& sight : sights) {
    const int rank = sight.worker->rank;
    if (!sight.worker->running || !contains(stall_->missing, rank)) continue;
    std::error_code ignored;
    std::filesystem::remove(stack_file(log_dir_, rank), ignored);
    if (sight.pid == sight.record->pid) ::kill(sight.pid, stack_signal());
  }
}

bool Watch::stacks_are_there(const std::vector<Sight>& sights) const {
  return std::all_of(sights.begin(), sights.end(), [this](const Sight& sight) {
    const int rank = sight.worker->rank;
    return !contains(stall_->missing, rank) || sight.state == 'X' || is_stopped(sight.state) ||
           std::filesystem::exists(stack_file(log_dir_, rank));
  });
}

Watch::Finding Watch::look(std::span<const Worker> workers) {
  Finding finding;
  const auto sights = see(workers);
  note_stopped(sights);
  if (options_.watch_period.count() > 0 && Clock::now() >= table_at_) {
    table_at_ = Clock::now() + options_.watch_period;
    finding.text = table(sights);
  }
  if (options_.stall_timeout.count() == 0) return finding;
  if (!stall_) {
    const auto found = find_stall(sights);
    if (found && !(reported_ && same_collective(*reported_, found->where))) {
      stall_ = found;
      ask_for_stacks(sights);
    } else if (found) {
      const Finding stopped = judge_stopped(found->missing);
      finding.failed_rank = stopped.failed_rank;
      finding.why = stopped.why;
    }
  }
  if (stall_ && (stacks_are_there(sights) || Clock::now() >= stall_->report_at)) {
    finding.text += report(sights);
    reported_ = stall_->where;
    stall_.reset();
  }
  return finding;
}

Watch::Finding Watch::judge_stopped(const std::vector<int>& missing) const {
  for (const auto& [rank, since] : stopped_since_) {
    const auto duration = Clock::now() - since;
    if (duration < options_.stall_timeout || !contains(missing, rank)) continue;
    return {"", rank,
            "was stopped (state T) for " + seconds(duration) + " while others waited in " +
                where(*reported_)};
  }
  return {};
}

std::string Watch::report(const std::vector<Sight>& sights) const {
  std::vector<int> waiting;
  for (const Sight& sight : sights) {
    if (sight.waits_in(stall_->where)) waiting.push_back(sight.worker->rank);
  }
  std::string text =
      options_.speaker + ": stalled: " + ranks(waiting) + " in " + where(stall_->where);
  if (!stall_->missing.empty()) {
    text += ", not there: " + ranks(stall_->missing);
  } else if (static_cast<int>(sights.size()) < stall_->where.world_size) {
    text += ", as all of this node: who has not come is on another node";
  } else {
    text += ", as all ranks: the operation itself does not end";
  }
  text += "\n" + table(sights);
  for (const Sight& sight : sights) {
    const int rank = sight.worker->rank;
    if (!contains(stall_->missing, rank)) continue;
    const std::string stack = sight.worker->running ? indented(stack_file(log_dir_, rank)) : "";
    const std::string name = options_.speaker + ": rank " + std::to_string(rank);
    if (!stack.empty()) {
      text += name + " is at\n" + stack;
    } else if (sight.state == 'T') {
      text += name + " is stopped (state T) and cannot say where it is\n";
    } else if (sight.state == 't') {
      text += name + " is held by a debugger (state t) and cannot say where it is\n";
    } else if (sight.state == 'D') {
      text += name + " is blocked in the kernel (state D) and cannot say where it is\n";
    } else if (sight.worker->running) {
      text += name + " did not say where it is\n";
    }
  }
  return text;
}

std::string Watch::table(std::span<const Worker> workers) const {
  return table(see(workers));
}

std::string Watch::table(const std::vector<Sight>& sights) const {
  std::vector<Row> rows{{"rank", "state", "last collective", "number", "tensor", "at", "since"}};
  for (const Sight& sight : sights) {
    Row row{std::to_string(sight.worker->rank), "no trace"};
    if (sight.record) {
      const TraceRecord& record = *sight.record;
      row[1] = record.state == TraceState::kWaiting ? "waiting" : "running";
      row[2] = record.operation.data();
      row[3] = std::to_string(record.sequence);
      row[4] = describe_tensor(record);
      row[5] = record.call_site.data();
      row[6] = seconds(nanoseconds(steady_now_ns() - record.since_ns));
    }
    if (sight.state == 'T') row[1] = "stopped (T)";
    if (sight.state == 't') row[1] = "traced (t)";
    if (sight.state == 'D') row[1] = "blocked (D)";
    if (!sight.worker->running) row[1] = "ended";
    rows.push_back(row);
  }
  return options_.speaker + ": where the ranks are\n" + aligned(rows);
}

}  // namespace cohort::launch
