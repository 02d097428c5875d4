// SPDX-License-Identifier: Apache-2.0
#include "cohort/launch/agent.h"

#include <algorithm>
#include <cstdlib>
#include <set>

#include "cohort/base/env.h"
#include "cohort/base/program.h"
#include "cohort/base/secret.h"
#include "cohort/launch/cores.h"
#include "cohort/launch/environment.h"
#include "cohort/launch/report.h"
#include "cohort/launch/worker.h"

namespace cohort::launch {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kCongestedPoll{50};
constexpr int kTailLines = 20;

}  // namespace

Agent::Agent(const RunOptions& options, const WorkerFunction& function)
    : options_(options),
      function_(function),
      program_(find_program(options.command.front())),
      logs_(options.log_dir, options.elastic() || options.nnodes.max > 1
                                 ? LogSharing::kSeveralNodes
                                 : LogSharing::kOneLauncher) {}

Agent::~Agent() = default;

int Agent::run() {
  announce_cores();
  return run_job();
}

void Agent::announce_cores() {
  const auto shares = bound_cores(options_);
  if (shares.empty()) return;
  const char* set = std::getenv("OMP_NUM_THREADS");
  const std::string threads = set && *set ? set : std::to_string(threads_each(shares));
  print_line(describe_cores(shares, threads));
}

// The workers cannot continue without a server that stays down: SIGTERM at once.
void Agent::poll_servers() {
  for (const std::string& line : servers_->poll()) {
    logs_.keep();
    print_line(line);
  }
  if (!servers_->failure() || !group_ || !group_->running()) return;
  const JobOutcome job = job_outcome(group_->outcomes());
  if (!job.root_cause || job.meaning == kExitLostPeer) server_failed_first_ = true;
  group_->stop(options_.grace, "server " + std::to_string(servers_->failure()->rank) + " failed");
}

void Agent::poll_group() {
  for (const std::string& line : group_->poll()) {
    logs_.keep();
    print_line(line);
  }
}

void Agent::bind_store() {
  const bool local = !options_.elastic() && options_.nnodes.max == 1 &&
                     (options_.master_addr.empty() || options_.master_addr == "127.0.0.1");
  const Reach reach = local ? Reach::kLoopback : Reach::kAllInterfaces;
  store_.fd.reset();
  store_ = store_.port == 0 ? listen_for_store(reach, options_.master_port)
                            : listen_again(reach, store_.port, options_.master_port);
}

// The same in all rounds and on all nodes. No worker receives the launchers' own secret.
std::string Agent::job_secret(const NodeInfo& node) const {
  if (servers_) return servers_->job_secret();
  if (const auto inherited = env_string("COHORT_JOB_SECRET")) return *inherited;
  if (options_.rdzv_secret.empty()) return node.job_secret;
  return hmac_sha256(options_.rdzv_secret, "store of " + options_.rdzv_id);
}

void Agent::start_round(const NodeInfo& node) {
  const RoundContext context{.options = options_,
                             .program = program_,
                             .function = function_,
                             .log_dir = log_dir_,
                             .reaper = reaper_,
                             .signals = signals_,
                             .logs = log_writer_,
                             .out = out_,
                             .err = err_,
                             .servers = servers_ ? servers_->endpoints() : "",
                             .job_secret = job_secret(node)};
  group_.reset();
  group_ = std::make_unique<WorkerGroup>(context, node, std::move(store_.fd));
  hang_detector_.reset();
}

void Agent::end_group() {
  for (const std::string& line : group_->end()) print_line(line);
}

void Agent::run_once(std::optional<Clock::time_point> until) {
  wait_for_events(until);
  while (const auto signal = signals_.next()) handle_signal(*signal);
  handle_events();
  if (servers_) poll_servers();
  if (group_) poll_group();
  check_for_hangs();
  out_.flush();
  err_.flush();
}

milliseconds Agent::poll_timeout(std::optional<Clock::time_point> until) const {
  const auto now = Clock::now();
  milliseconds timeout{-1};
  const auto at_most = [&timeout](milliseconds wait) {
    wait = std::max(wait, milliseconds(0));
    timeout = timeout.count() < 0 ? wait : std::min(timeout, wait);
  };
  if (const auto deadline = servers_ ? servers_->deadline() : std::nullopt) {
    at_most(std::chrono::ceil<milliseconds>(*deadline - now));
  }
  if (until) at_most(std::chrono::ceil<milliseconds>(*until - now));
  if (log_writer_.congested()) at_most(kCongestedPoll);
  if (!group_ || !group_->running()) return timeout;
  at_most(std::chrono::ceil<milliseconds>(check_at_ - now));
  if (const auto deadline = group_->deadline()) {
    at_most(std::chrono::ceil<milliseconds>(*deadline - now));
  }
  return timeout;
}

void Agent::wait_for_events(std::optional<Clock::time_point> until) {
  std::vector<pollfd> polls{{signals_.fd(), POLLIN, 0}};
  for (const Terminal* terminal : {&out_, &err_}) {
    if (terminal->pending()) polls.push_back({terminal->fd(), POLLOUT, 0});
  }
  add_polls(polls);
  if (servers_) servers_->add_polls(polls);
  if (group_) group_->add_polls(polls);
  ::poll(polls.data(), polls.size(), static_cast<int>(poll_timeout(until).count()));
}

void Agent::handle_signal(int signal) {
  const bool runs = group_ && group_->running();
  if (signal == table_signal()) {
    if (runs) err_.write(hang_detector_.table(group_->workers()));
    return;
  }
  switch (signal) {
    case SIGCHLD:
      return;
    case SIGWINCH:
      return runs ? group_->pass_window_size() : void();
    case SIGTSTP:
      return suspend();
    case SIGUSR1:
    case SIGUSR2:
      return runs ? group_->send(signal) : void();
    default:
      break;
  }
  if (!stop_requested()) leave_at_ = Clock::now() + options_.grace + kSaveTime;
  stop_signal_ = signal;
  if (signal == SIGINT || signal == SIGTERM) ++num_stop_requests_;
  if (num_stop_requests_ > 1 && servers_) servers_->kill_now();
  if (!runs) return;
  if (num_stop_requests_ > 1) return group_->kill_now("a second signal was received");
  group_->pass_stop(signal);
}

void Agent::suspend() {
  const auto begin = Clock::now();
  if (group_) group_->send(SIGSTOP);
  if (servers_) servers_->send(SIGSTOP);
  ::kill(::getpid(), SIGSTOP);
  const auto pause = Clock::now() - begin;
  if (leave_at_) *leave_at_ += pause;
  if (servers_) {
    servers_->postpone(pause);
    servers_->send(SIGCONT);
  }
  if (group_) {
    group_->postpone(pause);
    group_->send(SIGCONT);
  }
  hang_detector_.reset();
}

void Agent::check_for_hangs() {
  if (!group_ || !group_->running() || Clock::now() < check_at_) return;
  const HangDetector::Finding finding = hang_detector_.check(group_->workers());
  err_.write(finding.text);
  if (finding.failed_rank) group_->fail(*finding.failed_rank, finding.why);
  check_at_ = Clock::now() + hang_detector_.interval();
}

// The launcher's own lines begin on a line of their own, also after a progress bar.
void Agent::print_line(const std::string& text) {
  const bool mid_line = !err_.at_line_start() || (out_.is_tty() && !out_.at_line_start());
  err_.write((mid_line ? "\n" : "") + options_.program_name + ": " + text + "\n");
}

int Agent::conclude(const JobOutcome& job) {
  if (job.root_cause) return finish(report(*job.root_cause), job.exit_code);
  if (job.exit_code <= 128) return finish("", job.exit_code);
  return finish("stopped by signal " + signal_name(job.exit_code - 128), job.exit_code);
}

int Agent::finish(const std::string& text, int code) {
  if (!text.empty()) {
    logs_.keep();
    print_line(text);
  }
  out_.flush();
  if (!out_.error().empty()) {
    logs_.keep();
    print_line("standard output cannot be written: " + out_.error());
    if (code == kExitOk) code = kExitFailure;
  }
  const bool with_state = servers_ && options_.servers.folder.empty();
  if (with_state && stop_requested()) logs_.keep();  // A later job resumes from the state.
  if (logs_.stays()) {
    print_line((with_state ? "logs and the servers' state are in " : "logs are in ") + log_dir_);
  }
  // All workers are gone. Signals until now asked for that; from here on a signal may end this
  // process by default, in case a reader has stalled.
  while (signals_.next()) {
  }
  signals_.unblock();
  out_.flush_all();
  err_.flush_all();
  return code;
}

std::string Agent::report(const Outcome& root_cause) {
  const std::string name = "\n" + options_.program_name + ": ";
  std::string text = describe(root_cause, log_dir_);
  const int local_rank = root_cause.rank - group_->node().base_rank;
  const bool shown =
      !root_cause.is_server && options_.shown_streams(root_cause.rank, local_rank) & kStderr;
  const std::string log = root_cause.is_server ? server_log_file(log_dir_, root_cause.rank)
                                               : log_file(log_dir_, root_cause.rank, "stderr");
  const std::string tail = shown ? "" : indented_tail(log, kTailLines, root_cause.log_begin);
  if (!tail.empty()) {
    text += name + "last lines of its " + (root_cause.is_server ? "log" : "stderr") + ":\n" + tail;
  }
  const std::string stack = indented_stack(root_cause, log_dir_);
  if (!stack.empty())
    text += (text.ends_with('\n') ? name.substr(1) : name) + "raised at:\n" + stack;
  const auto add_ranks = [&](const std::string& what, const auto& counts) {
    std::set<int> ranks;
    for (const Outcome& outcome : group_->outcomes())
      if (counts(outcome)) ranks.insert(outcome.rank);
    std::string list;
    for (const int rank : ranks)
      list += (list.empty() ? "rank " : ", rank ") + std::to_string(rank);
    if (!list.empty()) text += (text.ends_with('\n') ? name.substr(1) : name) + what + ": " + list;
  };
  if (root_cause.meaning() == kExitLostPeer) {
    add_ranks("ended with exit code 0, perhaps too early",
              [](const Outcome& o) { return o.status.signal == 0 && o.meaning() == kExitOk; });
  }
  add_ranks("stopped because " + group_->stopped_because(),
            [](const Outcome& o) { return o.stopped; });
  if (text.ends_with('\n')) text.pop_back();
  return text;
}

}  // namespace cohort::launch
