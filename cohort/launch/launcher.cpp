#include "cohort/launch/launcher.h"

#include <algorithm>
#include <chrono>
#include <fcntl.h>
#include <memory>
#include <optional>
#include <poll.h>
#include <set>
#include <string>
#include <unistd.h>
#include <vector>

#include "cohort/base/env.h"
#include "cohort/base/program.h"
#include "cohort/base/secret.h"
#include "cohort/launch/cores.h"
#include "cohort/launch/environment.h"
#include "cohort/launch/guardian.h"
#include "cohort/launch/log_directory.h"
#include "cohort/launch/meeting.h"
#include "cohort/launch/report.h"
#include "cohort/launch/server_group.h"
#include "cohort/launch/signals.h"
#include "cohort/launch/store_socket.h"
#include "cohort/launch/terminal.h"
#include "cohort/launch/watch.h"
#include "cohort/launch/worker.h"
#include "cohort/launch/worker_group.h"

namespace cohort::launch {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kCongestedTurn{50};
constexpr int kTailLines = 20;

// A process without standard descriptors would give their numbers to its pipes.
void open_standard_descriptors() {
  for (int fd = 0; fd < 3; ++fd) {
    if (::fcntl(fd, F_GETFD) < 0) ::open("/dev/null", O_RDWR);
  }
}

class Launcher {
 public:
  explicit Launcher(const RunOptions& options)
      : options_(options),
        program_(find_program(options.command.front())),
        logs_(options.log_dir) {}

  int run() {
    announce_cores();
    return options_.elastic() ? run_with_others() : run_alone();
  }

 private:
  int run_alone();
  int run_with_others();
  void bind_store();
  void turn_servers();
  void turn_group();
  Verdict stop_servers(Verdict verdict);
  int finish_with_others();
  std::optional<int> take_part();
  std::string job_secret(const NodePlace& node) const;
  void start_round(const NodePlace& node);
  void end_group();
  void turn();
  void poll_once();
  milliseconds patience() const;
  void answer(int signal);
  void suspend();
  void look();
  void obey();
  void tell_failure();
  bool leaving() const;
  void announce_cores();
  void say(const std::string& text);
  int conclude(const Verdict& verdict);
  int conclude(const Order& end);
  int leave(const std::string& text, int code);
  std::string report(const Outcome& culprit);

  const RunOptions& options_;
  const std::string program_;
  LogDirectory logs_;
  Signals signals_;
  Guardian guardian_;
  LogWriter log_writer_;  // Its thread is begun after the guardian's fork.
  Terminal out_{STDOUT_FILENO};
  Terminal err_{STDERR_FILENO};
  const std::string& log_dir_ = logs_.path();
  Watch watch_{options_, log_dir_};
  StoreSocket store_;                     // Bound and not yet inherited.
  std::unique_ptr<ServerGroup> servers_;  // Of a job that has some.
  bool server_failed_first_ = false;
  std::unique_ptr<WorkerGroup> group_;
  int num_stop_requests_ = 0;
  int stop_signal_ = 0;  // The last one that asks the job to stop.
  Clock::time_point look_at_ = Clock::now();

  // With other nodes only.
  std::unique_ptr<Meeting> meeting_;
  std::optional<NodePlace> place_;  // Ordered, not yet started.
  std::optional<Order> end_;
  bool stop_ordered_ = false;
  bool failure_told_ = false;
};

void Launcher::announce_cores() {
  if (options_.bind_cores == BindCores::kNone) return;
  const auto shares = share_cores(usable_cores(), options_.nproc_per_node);
  const char* set = std::getenv("OMP_NUM_THREADS");
  const std::string threads = set && *set ? set : std::to_string(shares.front().size());
  say(describe_cores(shares, threads));
}

// One node, or several that know their places and never start again.
int Launcher::run_alone() {
  NodePlace node;
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
    servers_ = std::make_unique<ServerGroup>(options_, log_dir_, log_writer_, guardian_, signals_);
  }
  while (true) {
    node.master_port = options_.master_port;
    if (node.node_rank == 0) bind_store();
    if (node.node_rank == 0) node.master_port = store_.port;
    start_round(node);
    while (group_->running()) turn();
    end_group();
    const Verdict verdict = judge(group_->outcomes());
    const bool again = verdict.culprit && verdict.meaning != kExitUsage && stop_signal_ == 0 &&
                       node.restart_count < options_.max_restarts && !server_failed_first_ &&
                       options_.restart_policy == RestartPolicy::kGroup;
    if (!again) return conclude(stop_servers(verdict));
    ++node.restart_count;
    ++node.round;
    logs_.keep();
    say(describe(*verdict.culprit, log_dir_) + "; restart " + std::to_string(node.restart_count) +
        " of " + std::to_string(options_.max_restarts));
  }
}

// The workers cannot go on without a server that stays down: SIGTERM at once.
void Launcher::turn_servers() {
  for (const std::string& line : servers_->turn()) {
    logs_.keep();
    say(line);
  }
  if (!servers_->failure() || !group_ || !group_->running()) return;
  const Verdict verdict = judge(group_->outcomes());
  if (!verdict.culprit || verdict.meaning == kExitLostPeer) server_failed_first_ = true;
  group_->stop(options_.grace, "server " + std::to_string(servers_->failure()->rank) + " failed");
}

void Launcher::turn_group() {
  for (const std::string& line : group_->turn()) {
    logs_.keep();
    say(line);
  }
}

// The servers outlive the workers, who save their last state through them.
Verdict Launcher::stop_servers(Verdict verdict) {
  if (!servers_) return verdict;
  servers_->stop(options_.grace);
  while (servers_->running()) turn();
  for (const std::string& line : servers_->end()) say(line);
  log_writer_.flush();
  const auto& failure = servers_->failure();
  const bool to_blame = failure && (server_failed_first_ || verdict.exit_code == kExitOk);
  return to_blame ? Verdict{failure->status.exit_code, failure->meaning(), failure} : verdict;
}

void Launcher::bind_store() {
  const bool local = !options_.elastic() && options_.nnodes.max == 1 &&
                     (options_.master_addr.empty() || options_.master_addr == "127.0.0.1");
  const Reach reach = local ? Reach::kLoopback : Reach::kAllInterfaces;
  store_.fd.reset();
  store_ = store_.port == 0 ? listen_for_store(reach, options_.master_port)
                            : listen_again(reach, store_.port, options_.master_port);
}

int Launcher::run_with_others() {
  meeting_ = std::make_unique<Meeting>(options_);
  while (true) {
    place_.reset();
    stop_ordered_ = false;
    failure_told_ = false;
    if (meeting_->hosts()) bind_store();
    meeting_->join(meeting_->hosts() ? store_.port : 0);
    while (!place_ && !end_ && !stop_ordered_ && !leaving()) turn();
    if (end_ || leaving()) return finish_with_others();
    if (!place_) continue;  // The round was called off in the turn in which it was ordered.
    start_round(*std::exchange(place_, std::nullopt));
    if (const auto code = take_part()) return *code;
  }
}

// A round with others; returns the job's exit code, or nothing if another round is to come.
std::optional<int> Launcher::take_part() {
  while (group_->running()) {
    turn();
    if (stop_ordered_ || end_)
      group_->stop(options_.grace,
                   end_ ? "the job ended: " + end_->why : "a new round was ordered");
    tell_failure();
  }
  end_group();
  const Verdict verdict = judge(group_->outcomes());
  if (!stop_ordered_ && !end_) {
    if (verdict.culprit && !failure_told_) {
      meeting_->tell_failed(verdict, describe(*verdict.culprit, log_dir_));
    } else if (!verdict.culprit && verdict.exit_code <= kExitStopped) {
      meeting_->tell_done(verdict.exit_code);
    }
  }
  const bool killed_by_request = !verdict.culprit && verdict.exit_code > 128;
  while (!stop_ordered_ && !end_ && !killed_by_request && num_stop_requests_ < 2) turn();
  // The node whose worker ended the job shows more than the others know.
  const bool own_failure = verdict.culprit && (!stop_ordered_ || leaving());
  if (end_ && own_failure && end_->code == verdict.exit_code) {
    meeting_->finish(end_->code, end_->why);
    return conclude(verdict);
  }
  if (!end_ && !leaving()) return std::nullopt;
  return finish_with_others();
}

// A failure that is no consequence is told while the other workers still end.
void Launcher::tell_failure() {
  if (failure_told_ || stop_ordered_ || end_) return;
  const Verdict verdict = judge(group_->outcomes());
  if (!verdict.culprit || verdict.meaning == kExitLostPeer) return;
  failure_told_ = true;
  meeting_->tell_failed(verdict, describe(*verdict.culprit, log_dir_));
}

bool Launcher::leaving() const {
  return stop_signal_ != 0;
}

int Launcher::finish_with_others() {
  const int code = end_ ? end_->code : 128 + stop_signal_;
  const std::string why =
      end_ ? end_->why
           : "its coordinator's node was stopped by signal " + signal_name(stop_signal_);
  meeting_->finish(code, why);
  if (end_ && code == kExitOk && !group_)
    say("the job ended before a round had room for this node");
  return conclude(
      end_ ? *end_
           : Order{Order::Kind::kEnd, {}, code, "stopped by signal " + signal_name(stop_signal_)});
}

// The same in all rounds and on all nodes. What launchers prove to each other is told to no worker.
std::string Launcher::job_secret(const NodePlace& node) const {
  if (servers_) return servers_->job_secret();
  if (const auto inherited = env_string("COHORT_JOB_SECRET")) return *inherited;
  if (options_.rdzv_secret.empty()) return node.job_secret;
  return hmac_sha256(options_.rdzv_secret, "store of " + options_.rdzv_id);
}

void Launcher::start_round(const NodePlace& node) {
  const RoundContext context{.options = options_,
                             .program = program_,
                             .log_dir = log_dir_,
                             .guardian = guardian_,
                             .signals = signals_,
                             .logs = log_writer_,
                             .out = out_,
                             .err = err_,
                             .servers = servers_ ? servers_->endpoints() : "",
                             .job_secret = job_secret(node)};
  group_.reset();
  group_ = std::make_unique<WorkerGroup>(context, node, std::move(store_.fd));
  watch_.begin();
}

void Launcher::end_group() {
  for (const std::string& line : group_->end()) say(line);
}

// One turn of the loop: wait for something, then look at everything.
void Launcher::turn() {
  poll_once();
  while (const auto signal = signals_.next()) answer(*signal);
  if (meeting_) obey();
  if (servers_) turn_servers();
  if (group_) turn_group();
  look();
  out_.flush();
  err_.flush();
}

milliseconds Launcher::patience() const {
  const auto now = Clock::now();
  milliseconds timeout{-1};
  const auto at_most = [&timeout](milliseconds wait) {
    wait = std::max(wait, milliseconds(0));
    timeout = timeout.count() < 0 ? wait : std::min(timeout, wait);
  };
  if (const auto deadline = servers_ ? servers_->deadline() : std::nullopt) {
    at_most(std::chrono::ceil<milliseconds>(*deadline - now));
  }
  if (log_writer_.congested()) at_most(kCongestedTurn);
  if (!group_ || !group_->running()) return timeout;
  at_most(std::chrono::ceil<milliseconds>(look_at_ - now));
  if (const auto deadline = group_->deadline()) {
    at_most(std::chrono::ceil<milliseconds>(*deadline - now));
  }
  return timeout;
}

void Launcher::poll_once() {
  std::vector<pollfd> polls{{signals_.fd(), POLLIN, 0}};
  for (const Terminal* terminal : {&out_, &err_}) {
    if (terminal->pending()) polls.push_back({terminal->fd(), POLLOUT, 0});
  }
  if (meeting_) polls.push_back({meeting_->fd(), POLLIN, 0});
  if (servers_) servers_->add_polls(polls);
  if (group_) group_->add_polls(polls);
  ::poll(polls.data(), polls.size(), static_cast<int>(patience().count()));
}

void Launcher::answer(int signal) {
  const bool runs = group_ && group_->running();
  if (signal == table_signal()) {
    if (runs) err_.write(watch_.table(group_->workers()));
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
  if (num_stop_requests_ > 1) return group_->kill_now("a second signal asked for it");
  group_->pass_stop(signal);
}

void Launcher::suspend() {
  if (group_) group_->send(SIGSTOP);
  if (servers_) servers_->send(SIGSTOP);
  ::kill(::getpid(), SIGSTOP);
  if (servers_) servers_->send(SIGCONT);
  if (group_) group_->send(SIGCONT);
  watch_.begin();
}

void Launcher::look() {
  if (!group_ || !group_->running() || Clock::now() < look_at_) return;
  const Watch::Finding finding = watch_.look(group_->workers());
  err_.write(finding.text);
  if (finding.failed_rank) group_->fail(*finding.failed_rank, finding.why);
  look_at_ = Clock::now() + watch_.interval();
}

void Launcher::obey() {
  while (const auto order = meeting_->next()) {
    if (order->kind == Order::Kind::kRound) {
      place_ = order->place;
      say("node " + std::to_string(place_->node_rank) + " of " + std::to_string(place_->num_nodes) +
          ", " + std::to_string(place_->world_size) + " ranks");
    } else if (order->kind == Order::Kind::kStop) {
      place_.reset();
      stop_ordered_ = true;
      say("new round: " + order->why);
    } else {
      end_ = *order;
    }
  }
}

// The launcher's own lines begin on a line of their own, also after a progress bar.
void Launcher::say(const std::string& text) {
  const bool mid_line = !err_.at_line_start() || (out_.is_tty() && !out_.at_line_start());
  err_.write((mid_line ? "\n" : "") + options_.speaker + ": " + text + "\n");
}

int Launcher::conclude(const Verdict& verdict) {
  if (verdict.culprit) return leave(report(*verdict.culprit), verdict.exit_code);
  if (verdict.exit_code <= 128) return leave("", verdict.exit_code);
  return leave("stopped by signal " + signal_name(verdict.exit_code - 128), verdict.exit_code);
}

int Launcher::conclude(const Order& end) {
  return leave(end.why.empty() || !end_ ? end.why : "the job ended: " + end.why, end.code);
}

int Launcher::leave(const std::string& text, int code) {
  if (!text.empty()) {
    logs_.keep();
    say(text);
    say("logs are in " + log_dir_);
  }
  // All workers are gone. Signals that came until now are answered by that; from here on one may
  // end this process in the plain way, should a reader have stalled.
  while (signals_.next()) {
  }
  signals_.unblock();
  out_.flush_all();
  err_.flush_all();
  return code;
}

std::string Launcher::report(const Outcome& culprit) {
  const std::string name = "\n" + options_.speaker + ": ";
  std::string text = describe(culprit, log_dir_);
  const int local_rank = culprit.rank - group_->node().base_rank;
  const bool shown =
      !culprit.is_server && options_.shown_streams(culprit.rank, local_rank) & kStderr;
  const std::string log = culprit.is_server ? server_log_file(log_dir_, culprit.rank)
                                            : log_file(log_dir_, culprit.rank, "stderr");
  const std::string tail = shown ? "" : indented_tail(log, kTailLines);
  if (!tail.empty()) {
    text += name + "last lines of its " + (culprit.is_server ? "log" : "stderr") + ":\n" + tail;
  }
  const std::string stack = indented_stack(culprit, log_dir_);
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

int run(const RunOptions& options) {
  validate(options);
  open_standard_descriptors();
  return Launcher(options).run();
}

}  // namespace cohort::launch
