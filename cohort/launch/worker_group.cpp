// SPDX-License-Identifier: Apache-2.0
#include "cohort/launch/worker_group.h"

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <utility>

#include "cohort/base/program.h"
#include "cohort/launch/cores.h"
#include "cohort/launch/environment.h"
#include "cohort/launch/session.h"
#include "cohort/launch/worker.h"

namespace cohort::launch {
namespace {

constexpr std::chrono::milliseconds kTermToKill{3000};
constexpr std::chrono::milliseconds kDrainTime{1000};  // For the last bytes of killed workers.
constexpr int kLastReads = 64;                         // More than a pipe holds.
const char* const kStillRunning = "still running after the grace period";

}  // namespace

WorkerGroup::WorkerGroup(const RoundContext& context, const NodeInfo& node)
    : context_(context), node_(node) {}

// The delegation makes the object whole, so that its destructor runs if a later worker cannot
// start.
WorkerGroup::WorkerGroup(const RoundContext& context, const NodeInfo& node, Fd store)
    : WorkerGroup(context, node) {
  const int num_workers = context_.options.nproc_per_node;
  cores_ = bound_cores(context_.options);
  num_threads_ = cores_.empty() ? std::max(1, static_cast<int>(usable_cores().size()) / num_workers)
                                : threads_each(cores_);
  for (int local_rank = 0; local_rank < num_workers; ++local_rank) {
    workers_.push_back({.rank = node_.base_rank + local_rank, .local_rank = local_rank});
    start(workers_.back(), workers_.back().rank == 0 ? store.get() : -1);
    store.reset();  // Rank 0 has it now; the others must not.
  }
}

WorkerGroup::~WorkerGroup() {
  kill_workers();
}

Terminal& WorkerGroup::terminal(int which) const {
  return which == kStdout ? context_.out : context_.err;
}

Channel WorkerGroup::make_channel(int rank, int local_rank, int which) const {
  const bool shown = context_.options.shown_streams(rank, local_rank) & which;
  const bool as_terminal = shown && context_.options.tee == Tee::kRank0 && terminal(which).is_tty();
  return as_terminal ? make_pseudo_terminal(terminal(which).fd()) : make_pipe();
}

Stream WorkerGroup::make_stream(const Worker& worker, int which, Channel& channel) const {
  Stream::Options options;
  options.log_path =
      log_file(context_.log_dir, worker.rank, which == kStdout ? "stdout" : "stderr");
  options.append = node_.round > 1 || worker.restarts > 0;
  if (!worker.streams.empty())
    options.log_begin = worker.streams[which == kStdout ? 0 : 1].log_end();
  const std::string name = "[rank " + std::to_string(worker.rank) + "] ";
  if (context_.options.shown_streams(worker.rank, worker.local_rank) & which) {
    options.terminal = &terminal(which);
    if (context_.options.tee != Tee::kRank0) options.prefix = name;
  } else if (context_.options.tee == Tee::kRank0 && worker.rank != 0) {
    // What this rank prints by force.
    options.terminal = &terminal(which);
    options.line_start = name;
  }
  return Stream(std::move(channel.launcher), context_.logs, std::move(options));
}

void WorkerGroup::start(Worker& worker, int store_fd) {
  Channel out = make_channel(worker.rank, worker.local_rank, kStdout);
  Channel err = make_channel(worker.rank, worker.local_rank, kStderr);
  std::vector<Stream> streams;
  streams.push_back(make_stream(worker, kStdout, out));
  streams.push_back(make_stream(worker, kStderr, err));
  worker.streams = std::move(streams);
  for (const auto& left_over :
       {error_file(context_.log_dir, worker.rank), trace_file(context_.log_dir, worker.rank),
        stack_file(context_.log_dir, worker.rank)}) {
    std::filesystem::remove(left_over);
  }
  const WorkerInfo info{.local_rank = worker.local_rank,
                        .restarts = worker.restarts,
                        .log_dir = context_.log_dir,
                        .store_fd = store_fd,
                        .num_threads = num_threads_,
                        .servers = context_.servers,
                        .job_secret = context_.job_secret};
  worker.pid = start_process(
      {.program = context_.program,
       .command = context_.options.command,
       .environment = worker_environment(own_environment(), context_.options, node_, info),
       .stdout_fd = out.worker.get(),
       .stderr_fd = err.worker.get(),
       .inherited_fd = info.store_fd,
       .cores =
           cores_.empty() ? std::vector<int>{} : cores_[static_cast<size_t>(worker.local_rank)],
       .function = context_.function,
       .local_rank = worker.local_rank},
      context_.reaper, context_.signals);
  worker.running = true;
}

bool WorkerGroup::running() const {
  return std::any_of(workers_.begin(), workers_.end(), [](const Worker& w) { return w.running; });
}

bool WorkerGroup::may_start_again() const {
  return context_.options.restart_policy == RestartPolicy::kGroup &&
         context_.options.max_restarts > node_.restart_count;
}

void WorkerGroup::add_polls(std::vector<pollfd>& polls) const {
  for (const Worker& worker : workers_) {
    for (const Stream& stream : worker.streams) {
      if (stream.wants_more()) polls.push_back({stream.fd(), POLLIN, 0});
    }
  }
}

std::optional<WorkerGroup::Clock::time_point> WorkerGroup::deadline() const {
  std::optional<Clock::time_point> earliest;
  const auto at_most = [&earliest](const std::optional<Clock::time_point>& time) {
    if (time && (!earliest || *time < *earliest)) earliest = time;
  };
  at_most(term_at_);
  at_most(kill_at_);
  for (const Worker& worker : workers_) {
    if (worker.running && worker.killed_at) at_most(*worker.killed_at + kKillTime);
  }
  return earliest;
}

std::vector<std::string> WorkerGroup::poll() {
  for (Worker& worker : workers_) {
    for (Stream& stream : worker.streams) {
      if (stream.wants_more()) stream.pump();
    }
  }
  notice_exits();
  keep_deadlines();
  return std::exchange(lines_, {});
}

void WorkerGroup::notice_exits() {
  for (Worker& worker : workers_) {
    if (!worker.running) continue;
    if (const auto status = peek_exit(worker.pid)) {
      note_end(worker, *status);
    } else if (survives_kill(worker.killed_at)) {
      note_end(worker, {128 + SIGKILL, SIGKILL});
    }
  }
}

void WorkerGroup::note_end(Worker& worker, ExitStatus status) {
  worker.running = false;
  const bool stopped = stopping_ && worker.note.empty();
  const Outcome outcome{
      .rank = worker.rank,
      .pid = worker.pid,
      .status = status,
      .passed_signal = passed_signal_,
      .stopped = stopped,
      .note = worker.note,
      .log_begin = worker.streams.back().log_begin(),
      .explained = explains(error_file(context_.log_dir, worker.rank), status.exit_code)};
  if (recover_from(worker, outcome)) return;
  outcomes_.push_back(outcome);
  const bool first_failure = outcome.failed() && !std::exchange(failed_, true);
  if (!first_failure || passed_signal_ != 0 || stopping_) return;
  if (may_start_again() && outcome.meaning() == kExitFailure) {
    stop(context_.options.grace, "all workers restart");
  } else {
    term_at_ = Clock::now() + context_.options.grace;
  }
}

// Whether the job continues despite this exit, which only independent workers allow.
bool WorkerGroup::recover_from(Worker& worker, const Outcome& outcome) {
  const RunOptions& options = context_.options;
  if (!options.independent() || !outcome.failed() || passed_signal_ != 0 || stopping_) return false;
  const std::string what = describe(outcome, context_.log_dir);
  const bool may_start = options.restart_policy == RestartPolicy::kSingle &&
                         outcome.meaning() != kExitUsage && restarts_ < options.max_restarts;
  if (may_start) {
    start_again(worker, what);
    return true;
  }
  const bool others_are_left =
      running() || std::any_of(outcomes_.begin(), outcomes_.end(),
                               [](const Outcome& other) { return !other.failed(); });
  if (options.on_trainer_loss != "continue" || !others_are_left) return false;
  lines_.push_back(what + "; the others continue without it");
  return true;
}

void WorkerGroup::start_again(Worker& worker, const std::string& reason) {
  kill_sessions({&worker.pid, 1});
  const bool waited = survives_kill(worker.killed_at);
  if (reap(worker.pid, Clock::now() + (waited ? milliseconds(0) : kKillTime)))
    context_.reaper.untrack(worker.pid);
  worker.pid = -1;
  drain({&worker, 1});
  worker.killed_at.reset();
  worker.note.clear();
  ++worker.restarts;
  ++restarts_;
  lines_.push_back(reason + "; restarting it alone, restart " + std::to_string(restarts_) + " of " +
                   std::to_string(context_.options.max_restarts));
  start(worker, -1);
}

void WorkerGroup::keep_deadlines() {
  const auto now = Clock::now();
  if (term_at_ && now >= *term_at_) stop(kTermToKill, kStillRunning);
  if (kill_at_ && now >= *kill_at_) kill_now(kStillRunning);
}

// To the workers that run still; the sessions of the others are ended with the round.
void WorkerGroup::send(int signal) const {
  std::vector<pid_t> leaders;
  for (const Worker& worker : workers_) {
    if (worker.running) leaders.push_back(worker.pid);
  }
  signal_sessions(leaders, signal);
}

void WorkerGroup::pass_stop(int signal) {
  notice_exits();  // What ended before the signal did not end because of it.
  passed_signal_ = signal;
  send(signal);
  if (!kill_at_) kill_at_ = Clock::now() + context_.options.grace + kSaveTime;
}

void WorkerGroup::stop(milliseconds grace, const std::string& why) {
  term_at_.reset();
  if (std::exchange(stopping_, true)) return;
  stopped_because_ = why;
  send(SIGTERM);
  const auto kill_at = Clock::now() + grace;
  kill_at_ = kill_at_ ? std::min(*kill_at_, kill_at) : kill_at;
}

void WorkerGroup::kill_now(const std::string& why) {
  notice_exits();
  if (!std::exchange(stopping_, true)) stopped_because_ = why;
  term_at_.reset();
  kill_at_.reset();
  send(SIGKILL);
  for (Worker& worker : workers_) {
    if (!worker.killed_at) worker.killed_at = Clock::now();
  }
}

void WorkerGroup::postpone(Clock::duration pause) {
  const auto add = [pause](std::optional<Clock::time_point>& time) {
    if (time) *time += pause;
  };
  add(term_at_);
  add(kill_at_);
  for (Worker& worker : workers_) add(worker.killed_at);
}

void WorkerGroup::fail(int rank, const std::string& note) {
  for (Worker& worker : workers_) {
    if (worker.rank != rank || !worker.running) continue;
    worker.note = note;
    kill_sessions({&worker.pid, 1});
    worker.killed_at = Clock::now();
  }
}

void WorkerGroup::pass_window_size() const {
  const Worker& worker = workers_.front();
  if (worker.rank != 0 || context_.options.tee != Tee::kRank0) return;
  bool changed = false;
  for (size_t i = 0; i < worker.streams.size(); ++i) {
    const int which = i == 0 ? kStdout : kStderr;
    const bool shown = context_.options.shown_streams(0, worker.local_rank) & which;
    if (!shown || !terminal(which).is_tty() || worker.streams[i].fd() < 0) continue;
    copy_window_size(terminal(which).fd(), worker.streams[i].fd());
    changed = true;
  }
  if (changed && worker.running) ::kill(-worker.pid, SIGWINCH);
}

std::vector<std::string> WorkerGroup::end() {
  std::vector<std::string> lines = std::exchange(lines_, {});
  std::ranges::move(kill_workers(), std::back_inserter(lines));
  drain(workers_);
  if (!context_.logs.flush())
    lines.push_back("warning: the logs in " + context_.log_dir +
                    " are incomplete: their disk accepts no writes");
  return lines;
}

std::vector<std::string> WorkerGroup::kill_workers() {
  std::vector<std::string> left_behind;
  std::vector<pid_t> leaders;
  for (const Worker& worker : workers_) leaders.push_back(worker.pid);
  kill_sessions(leaders);
  const auto deadline = Clock::now() + kKillTime;
  for (Worker& worker : workers_) {
    // One that was waited for already is not waited for again.
    const bool waited = survives_kill(worker.killed_at);
    if (worker.pid > 0 && reap(worker.pid, waited ? Clock::now() : deadline)) {
      context_.reaper.untrack(worker.pid);
    } else if (worker.pid > 0) {
      left_behind.push_back(left_behind_line("rank " + std::to_string(worker.rank), worker.pid));
    }
    worker.pid = -1;
    worker.running = false;
  }
  return left_behind;
}

// Only a process that left its worker's session can hold a stream open longer; it is not waited
// for.
void WorkerGroup::drain(std::span<Worker> workers) {
  const auto end = Clock::now() + kDrainTime;
  const auto open = [](const Stream& stream) { return stream.fd() >= 0; };
  for (Worker& worker : workers) {
    for (Stream& stream : worker.streams) {
      while (open(stream) && Clock::now() < end) {
        if (stream.pump() || !open(stream)) continue;
        const auto left = std::chrono::ceil<milliseconds>(end - Clock::now()).count();
        pollfd wait{stream.fd(), POLLIN, 0};
        ::poll(&wait, 1, static_cast<int>(std::max<decltype(left)>(left, 0)));
      }
      for (int reads = 0; reads < kLastReads && stream.pump(); ++reads) {
      }
      stream.finish();
    }
  }
}

}  // namespace cohort::launch
