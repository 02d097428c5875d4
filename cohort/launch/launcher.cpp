#include "cohort/launch/launcher.h"

#include <algorithm>
#include <chrono>
#include <fcntl.h>
#include <memory>
#include <optional>
#include <poll.h>
#include <set>
#include <string>
#include <sys/socket.h>
#include <unistd.h>
#include <vector>

#include "cohort/base/env.h"
#include "cohort/base/program.h"
#include "cohort/base/secret.h"
#include "cohort/base/tcp.h"
#include "cohort/launch/cores.h"
#include "cohort/launch/environment.h"
#include "cohort/launch/hang_detector.h"
#include "cohort/launch/log_directory.h"
#include "cohort/launch/reaper.h"
#include "cohort/launch/rendezvous_thread.h"
#include "cohort/launch/report.h"
#include "cohort/launch/server_group.h"
#include "cohort/launch/signals.h"
#include "cohort/launch/store_socket.h"
#include "cohort/launch/terminal.h"
#include "cohort/launch/worker.h"
#include "cohort/launch/worker_group.h"

namespace cohort::launch {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kCongestedPoll{50};
constexpr int kTailLines = 20;
constexpr int kResolvePollMs = 500;

// A process without standard descriptors would give their numbers to its pipes.
void open_standard_descriptors() {
  for (int fd = 0; fd < 3; ++fd) {
    if (::fcntl(fd, F_GETFD) < 0) ::open("/dev/null", O_RDWR);
  }
}

class Launcher {
 public:
  Launcher(const RunOptions& options, const WorkerFunction& function)
      : options_(options),
        function_(function),
        program_(find_program(options.command.front())),
        logs_(options.log_dir) {}

  int run() {
    announce_cores();
    return options_.elastic() ? run_elastic() : run_static();
  }

 private:
  int run_static();
  int run_elastic();
  void wait_for_endpoint();
  void bind_store();
  void poll_servers();
  void poll_group();
  JobOutcome stop_servers(JobOutcome job);
  int finish_elastic();
  Directive stopped() const;
  std::optional<int> run_round();
  std::string job_secret(const NodeInfo& node) const;
  void start_round(const NodeInfo& node);
  void end_group();
  void run_once();
  void wait_for_events();
  milliseconds poll_timeout() const;
  void handle_signal(int signal);
  void suspend();
  void check_for_hangs();
  void handle_directives();
  void report_failure();
  bool stop_requested() const;
  void announce_cores();
  void print_line(const std::string& text);
  int conclude(const JobOutcome& job);
  int conclude(const Directive& end);
  int finish(const std::string& text, int code);
  std::string report(const Outcome& root_cause);

  const RunOptions& options_;
  const WorkerFunction& function_;
  const std::string program_;
  LogDirectory logs_;
  Signals signals_;
  Reaper reaper_;
  LogWriter log_writer_;
  Terminal out_{STDOUT_FILENO};
  Terminal err_{STDERR_FILENO};
  const std::string& log_dir_ = logs_.path();
  HangDetector hang_detector_{options_, log_dir_};
  StoreSocket store_;                     // Bound and not yet inherited.
  std::unique_ptr<ServerGroup> servers_;  // Of a job that has some.
  bool server_failed_first_ = false;
  std::unique_ptr<WorkerGroup> group_;
  int num_stop_requests_ = 0;
  int stop_signal_ = 0;  // The last one that asks the job to stop.
  Clock::time_point check_at_ = Clock::now();

  // With other nodes only.
  std::unique_ptr<RendezvousThread> rendezvous_;
  std::optional<NodeInfo> node_;  // Of a round that was directed and not started.
  std::optional<Directive> end_;
  bool stop_received_ = false;
  bool failure_reported_ = false;
};

void Launcher::announce_cores() {
  if (options_.bind_cores == BindCores::kNone) return;
  const auto shares = share_cores(usable_cores(), options_.nproc_per_node);
  const char* set = std::getenv("OMP_NUM_THREADS");
  const std::string threads = set && *set ? set : std::to_string(shares.front().size());
  print_line(describe_cores(shares, threads));
}

// One node, or several with fixed node ranks and no restarts.
int Launcher::run_static() {
  NodeInfo node;
  node.node_rank = options_.node_rank;
  node.num_nodes = options_.nnodes.max;
  node.base_rank = options_.node_rank * options_.nproc_per_node;
  node.world_size = options_.nnodes.max * options_.nproc_per_node;
  if (!options_.master_addr.empty()) node.master_addr = options_.master_addr;
  if (node.num_nodes == 1) {
    node.job_id = random_hex(8);
    node.job_secret = random_hex(16);
  }
  if (options_.servers.count > 0) {
    servers_ = std::make_unique<ServerGroup>(options_, log_dir_, log_writer_, reaper_, signals_);
  }
  while (true) {
    node.master_port = options_.master_port;
    if (node.node_rank == 0) bind_store();
    if (node.node_rank == 0) node.master_port = store_.port;
    start_round(node);
    while (group_->running()) run_once();
    end_group();
    const JobOutcome job = job_outcome(group_->outcomes());
    const bool again = job.root_cause && job.meaning != kExitUsage && stop_signal_ == 0 &&
                       node.restart_count < options_.max_restarts && !server_failed_first_ &&
                       options_.restart_policy == RestartPolicy::kGroup;
    if (!again) return conclude(stop_servers(job));
    ++node.restart_count;
    ++node.round;
    logs_.keep();
    print_line(describe(*job.root_cause, log_dir_) + "; restart " +
               std::to_string(node.restart_count) + " of " + std::to_string(options_.max_restarts));
  }
}

// The workers cannot continue without a server that stays down: SIGTERM at once.
void Launcher::poll_servers() {
  for (const std::string& line : servers_->poll()) {
    logs_.keep();
    print_line(line);
  }
  if (!servers_->failure() || !group_ || !group_->running()) return;
  const JobOutcome job = job_outcome(group_->outcomes());
  if (!job.root_cause || job.meaning == kExitLostPeer) server_failed_first_ = true;
  group_->stop(options_.grace, "server " + std::to_string(servers_->failure()->rank) + " failed");
}

void Launcher::poll_group() {
  for (const std::string& line : group_->poll()) {
    logs_.keep();
    print_line(line);
  }
}

// The servers outlive the workers, which save their last state through them.
JobOutcome Launcher::stop_servers(JobOutcome job) {
  if (!servers_) return job;
  servers_->stop(options_.grace);
  while (servers_->running()) run_once();
  for (const std::string& line : servers_->end()) print_line(line);
  log_writer_.flush();
  const auto& failure = servers_->failure();
  const bool server_is_root_cause = failure && (server_failed_first_ || job.exit_code == kExitOk);
  return server_is_root_cause ? JobOutcome{failure->status.exit_code, failure->meaning(), failure}
                              : job;
}

void Launcher::bind_store() {
  const bool local = !options_.elastic() && options_.nnodes.max == 1 &&
                     (options_.master_addr.empty() || options_.master_addr == "127.0.0.1");
  const Reach reach = local ? Reach::kLoopback : Reach::kAllInterfaces;
  store_.fd.reset();
  store_ = store_.port == 0 ? listen_for_store(reach, options_.master_port)
                            : listen_again(reach, store_.port, options_.master_port);
}

// A host's name may come to resolve later: a pod's does once the pod has an address.
void Launcher::wait_for_endpoint() {
  const Endpoint endpoint = parse_endpoint(options_.rdzv_endpoint);
  const auto deadline = Clock::now() + options_.rdzv_timeout;
  for (bool told = false; Clock::now() < deadline && !stop_requested(); told = true) {
    int error = 0;
    resolve(endpoint.host, endpoint.port, SOCK_STREAM, error);
    if (error == 0) return;
    if (!told) {
      print_line("--rdzv-endpoint " + endpoint.text() + " does not resolve yet: " +
                 ::gai_strerror(error) + "; waiting until --rdzv-timeout");
      err_.flush();
    }
    pollfd signal{signals_.fd(), POLLIN, 0};
    ::poll(&signal, 1, kResolvePollMs);
    while (const auto arrived = signals_.next()) handle_signal(*arrived);
  }
}

int Launcher::run_elastic() {
  wait_for_endpoint();
  if (stop_requested()) return conclude(stopped());
  rendezvous_ = std::make_unique<RendezvousThread>(options_);
  while (true) {
    node_.reset();
    stop_received_ = false;
    failure_reported_ = false;
    if (rendezvous_->hosts()) bind_store();
    rendezvous_->join(rendezvous_->hosts() ? store_.port : 0);
    while (!node_ && !end_ && !stop_received_ && !stop_requested()) run_once();
    if (end_ || stop_requested()) return finish_elastic();
    if (!node_) continue;  // The round was cancelled before it started.
    start_round(*std::exchange(node_, std::nullopt));
    if (const auto code = run_round()) return *code;
  }
}

// Runs one round of an elastic job; returns the job's exit code, or nothing if another round
// follows.
std::optional<int> Launcher::run_round() {
  while (group_->running()) {
    run_once();
    if (stop_received_ || end_)
      group_->stop(options_.grace, end_ ? "the job ended: " + end_->why : "a new round begins");
    report_failure();
  }
  end_group();
  const JobOutcome job = job_outcome(group_->outcomes());
  if (!stop_received_ && !end_) {
    if (job.root_cause && !failure_reported_) {
      rendezvous_->send_failed(job, describe(*job.root_cause, log_dir_));
    } else if (!job.root_cause && job.exit_code <= kExitStopped) {
      rendezvous_->send_done(job.exit_code);
    }
  }
  const bool killed_by_request = !job.root_cause && job.exit_code > 128;
  while (!stop_received_ && !end_ && !killed_by_request && num_stop_requests_ < 2) run_once();
  // The node whose worker ended the job reports more than the others know.
  const bool own_failure = job.root_cause && (!stop_received_ || stop_requested());
  if (end_ && own_failure && end_->code == job.exit_code) {
    rendezvous_->finish(end_->code, end_->why);
    return conclude(job);
  }
  if (!end_ && !stop_requested()) return std::nullopt;
  return finish_elastic();
}

// Reports a failure that is not a consequence while the other workers are still stopping.
void Launcher::report_failure() {
  if (failure_reported_ || stop_received_ || end_) return;
  const JobOutcome job = job_outcome(group_->outcomes());
  if (!job.root_cause || job.meaning == kExitLostPeer) return;
  failure_reported_ = true;
  rendezvous_->send_failed(job, describe(*job.root_cause, log_dir_));
}

bool Launcher::stop_requested() const {
  return stop_signal_ != 0;
}

int Launcher::finish_elastic() {
  const int code = end_ ? end_->code : 128 + stop_signal_;
  const std::string why =
      end_ ? end_->why
           : "the rendezvous server's node was stopped by signal " + signal_name(stop_signal_);
  rendezvous_->finish(code, why);
  if (end_ && code == kExitOk && !group_)
    print_line("the job ended before a round admitted this node");
  return conclude(end_ ? *end_ : stopped());
}

Directive Launcher::stopped() const {
  return {Directive::Kind::kEnd,
          {},
          128 + stop_signal_,
          "stopped by signal " + signal_name(stop_signal_)};
}

// The same in all rounds and on all nodes. No worker receives the launchers' own secret.
std::string Launcher::job_secret(const NodeInfo& node) const {
  if (servers_) return servers_->job_secret();
  if (const auto inherited = env_string("COHORT_JOB_SECRET")) return *inherited;
  if (options_.rdzv_secret.empty()) return node.job_secret;
  return hmac_sha256(options_.rdzv_secret, "store of " + options_.rdzv_id);
}

void Launcher::start_round(const NodeInfo& node) {
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

void Launcher::end_group() {
  for (const std::string& line : group_->end()) print_line(line);
}

// One iteration of the event loop: waits for events, then handles all of them.
void Launcher::run_once() {
  wait_for_events();
  while (const auto signal = signals_.next()) handle_signal(*signal);
  if (rendezvous_) handle_directives();
  if (servers_) poll_servers();
  if (group_) poll_group();
  check_for_hangs();
  out_.flush();
  err_.flush();
}

milliseconds Launcher::poll_timeout() const {
  const auto now = Clock::now();
  milliseconds timeout{-1};
  const auto at_most = [&timeout](milliseconds wait) {
    wait = std::max(wait, milliseconds(0));
    timeout = timeout.count() < 0 ? wait : std::min(timeout, wait);
  };
  if (const auto deadline = servers_ ? servers_->deadline() : std::nullopt) {
    at_most(std::chrono::ceil<milliseconds>(*deadline - now));
  }
  if (log_writer_.congested()) at_most(kCongestedPoll);
  if (!group_ || !group_->running()) return timeout;
  at_most(std::chrono::ceil<milliseconds>(check_at_ - now));
  if (const auto deadline = group_->deadline()) {
    at_most(std::chrono::ceil<milliseconds>(*deadline - now));
  }
  return timeout;
}

void Launcher::wait_for_events() {
  std::vector<pollfd> polls{{signals_.fd(), POLLIN, 0}};
  for (const Terminal* terminal : {&out_, &err_}) {
    if (terminal->pending()) polls.push_back({terminal->fd(), POLLOUT, 0});
  }
  if (rendezvous_) polls.push_back({rendezvous_->fd(), POLLIN, 0});
  if (servers_) servers_->add_polls(polls);
  if (group_) group_->add_polls(polls);
  ::poll(polls.data(), polls.size(), static_cast<int>(poll_timeout().count()));
}

void Launcher::handle_signal(int signal) {
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
  stop_signal_ = signal;
  if (signal == SIGINT || signal == SIGTERM) ++num_stop_requests_;
  if (num_stop_requests_ > 1 && servers_) servers_->kill_now();
  if (!runs) return;
  if (num_stop_requests_ > 1) return group_->kill_now("a second signal was received");
  group_->pass_stop(signal);
}

void Launcher::suspend() {
  if (group_) group_->send(SIGSTOP);
  if (servers_) servers_->send(SIGSTOP);
  ::kill(::getpid(), SIGSTOP);
  if (servers_) servers_->send(SIGCONT);
  if (group_) group_->send(SIGCONT);
  hang_detector_.reset();
}

void Launcher::check_for_hangs() {
  if (!group_ || !group_->running() || Clock::now() < check_at_) return;
  const HangDetector::Finding finding = hang_detector_.check(group_->workers());
  err_.write(finding.text);
  if (finding.failed_rank) group_->fail(*finding.failed_rank, finding.why);
  check_at_ = Clock::now() + hang_detector_.interval();
}

void Launcher::handle_directives() {
  while (const auto directive = rendezvous_->next()) {
    if (directive->kind == Directive::Kind::kRound) {
      node_ = directive->node;
      print_line("node " + std::to_string(node_->node_rank) + " of " +
                 std::to_string(node_->num_nodes) + ", " + std::to_string(node_->world_size) +
                 " ranks");
    } else if (directive->kind == Directive::Kind::kStop) {
      node_.reset();
      stop_received_ = true;
      print_line("new round: " + directive->why);
    } else {
      end_ = *directive;
    }
  }
}

// The launcher's own lines begin on a line of their own, also after a progress bar.
void Launcher::print_line(const std::string& text) {
  const bool mid_line = !err_.at_line_start() || (out_.is_tty() && !out_.at_line_start());
  err_.write((mid_line ? "\n" : "") + options_.program_name + ": " + text + "\n");
}

int Launcher::conclude(const JobOutcome& job) {
  if (job.root_cause) return finish(report(*job.root_cause), job.exit_code);
  if (job.exit_code <= 128) return finish("", job.exit_code);
  return finish("stopped by signal " + signal_name(job.exit_code - 128), job.exit_code);
}

int Launcher::conclude(const Directive& end) {
  return finish(end.why.empty() || !end_ ? end.why : "the job ended: " + end.why, end.code);
}

int Launcher::finish(const std::string& text, int code) {
  if (!text.empty()) {
    logs_.keep();
    print_line(text);
    print_line("logs are in " + log_dir_);
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

std::string Launcher::report(const Outcome& root_cause) {
  const std::string name = "\n" + options_.program_name + ": ";
  std::string text = describe(root_cause, log_dir_);
  const int local_rank = root_cause.rank - group_->node().base_rank;
  const bool shown =
      !root_cause.is_server && options_.shown_streams(root_cause.rank, local_rank) & kStderr;
  const std::string log = root_cause.is_server ? server_log_file(log_dir_, root_cause.rank)
                                               : log_file(log_dir_, root_cause.rank, "stderr");
  const std::string tail = shown ? "" : indented_tail(log, kTailLines);
  if (!tail.empty()) {
    text += name + "last lines of its " + (root_cause.is_server ? "log" : "stderr") + ":\n" + tail;
  }
  const std::string stack = indented_stack(root_cause, log_dir_);
  if (!stack.empty())
    text += (text.ends_with('\n') ? name.substr(1) : name) + "raised at:\n" + stack;
  std::set<int> ranks;
  for (const Outcome& outcome : group_->outcomes()) {
    if (outcome.stopped) ranks.insert(outcome.rank);
  }
  std::string stopped;
  for (const int rank : ranks)
    stopped += (stopped.empty() ? "rank " : ", rank ") + std::to_string(rank);
  if (!stopped.empty()) {
    text += (text.ends_with('\n') ? name.substr(1) : name) + "stopped because " +
            group_->stopped_because() + ": " + stopped;
  }
  if (text.ends_with('\n')) text.pop_back();
  return text;
}

}  // namespace

int run(const RunOptions& options, const WorkerFunction& function) {
  validate(options);
  open_standard_descriptors();
  return Launcher(options, function).run();
}

}  // namespace cohort::launch
