#include "cohort/launch/launcher.h"

#include <algorithm>
#include <chrono>
#include <fcntl.h>
#include <filesystem>
#include <memory>
#include <optional>
#include <poll.h>
#include <string>
#include <unistd.h>
#include <vector>

#include "cohort/launch/environment.h"
#include "cohort/launch/guardian.h"
#include "cohort/launch/log_directory.h"
#include "cohort/launch/report.h"
#include "cohort/launch/signals.h"
#include "cohort/launch/store_socket.h"
#include "cohort/launch/stream.h"
#include "cohort/launch/terminal.h"
#include "cohort/launch/worker.h"

namespace cohort::launch {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kTermToKill{3000};
constexpr milliseconds kSaveTime{25000};  // Beyond the grace, for a checkpoint on request.
constexpr milliseconds kDrainTime{1000};  // For the last bytes of groups that were killed.
constexpr int kLastReads = 64;            // More than a pipe holds.
constexpr int kTailLines = 20;

// A process without standard descriptors would give their numbers to its pipes.
void open_standard_descriptors() {
  for (int fd = 0; fd < 3; ++fd) {
    if (::fcntl(fd, F_GETFD) < 0) ::open("/dev/null", O_RDWR);
  }
}

StoreSocket make_store_socket(const RunOptions& options) {
  if (options.node_rank != 0) return {Fd(), options.master_port};
  const bool local =
      options.nnodes == 1 && (options.master_addr.empty() || options.master_addr == "127.0.0.1");
  return listen_for_store(local ? Reach::kLoopback : Reach::kAllInterfaces, options.master_port);
}

struct Worker {
  int rank = 0;
  pid_t pid = -1;
  bool running = false;
  std::vector<Stream> streams;  // stdout, stderr
};

class Launcher {
 public:
  explicit Launcher(const RunOptions& options)
      : options_(options),
        program_(find_program(options.command.front())),
        store_(make_store_socket(options)),
        logs_(options.log_dir) {}
  ~Launcher() { end_workers(); }
  Launcher(const Launcher&) = delete;
  Launcher& operator=(const Launcher&) = delete;

  int run() {
    for (int local_rank = 0; local_rank < options_.nproc_per_node; ++local_rank) {
      start(local_rank);
      store_.fd.reset();  // Rank 0 has it now; the others must not.
    }
    while (any_running()) turn();
    end_workers();
    drain();
    return conclude();
  }

 private:
  void start(int local_rank);
  Stream make_stream(int rank, const std::string& name, Channel& channel, Terminal& terminal) const;
  Channel make_channel(int rank, const Terminal& terminal) const;
  bool any_running() const;
  void turn();
  void poll_once(milliseconds timeout);
  void answer(int signal);
  void notice_exits();
  void keep_deadlines();
  void send(int signal) const;
  void kill_now();
  void suspend() const;
  void pass_window_size() const;
  void end_workers();
  void drain();
  int conclude();
  std::string report(const Outcome& culprit) const;

  const RunOptions& options_;
  const std::string program_;
  StoreSocket store_;
  LogDirectory logs_;
  Signals signals_;
  Guardian guardian_;
  Terminal out_{STDOUT_FILENO};
  Terminal err_{STDERR_FILENO};
  std::vector<Worker> workers_;
  std::vector<Outcome> outcomes_;  // In order of exit.
  int num_stop_requests_ = 0;
  int passed_signal_ = 0;
  bool failed_ = false;
  bool stopping_ = false;  // SIGTERM or SIGKILL went out on our own account.
  std::optional<Clock::time_point> term_at_;
  std::optional<Clock::time_point> kill_at_;
};

Channel Launcher::make_channel(int rank, const Terminal& terminal) const {
  const bool as_terminal = rank == 0 && options_.tee == Tee::kRank0 && terminal.is_tty();
  return as_terminal ? make_pseudo_terminal(terminal.fd()) : make_pipe();
}

Stream Launcher::make_stream(int rank, const std::string& name, Channel& channel,
                             Terminal& terminal) const {
  Stream::Options options;
  options.log_path = log_file(logs_.path(), rank, name);
  if (options_.tee == Tee::kAll) {
    options.terminal = &terminal;
    options.prefix = "[rank " + std::to_string(rank) + "] ";
  } else if (options_.tee == Tee::kRank0 && rank == 0) {
    options.terminal = &terminal;
  }
  return Stream(std::move(channel.launcher), std::move(options));
}

void Launcher::start(int local_rank) {
  const int rank = options_.rank_of(local_rank);
  Channel out = make_channel(rank, out_);
  Channel err = make_channel(rank, err_);
  Worker worker;
  worker.rank = rank;
  worker.streams.push_back(make_stream(rank, "stdout", out, out_));
  worker.streams.push_back(make_stream(rank, "stderr", err, err_));
  std::filesystem::remove(error_file(logs_.path(), rank));
  const WorkerPlace place{.local_rank = local_rank,
                          .master_port = store_.port,
                          .log_dir = logs_.path(),
                          .store_fd = rank == 0 ? store_.fd.get() : -1,
                          .num_cores = usable_cores()};
  workers_.push_back(std::move(worker));
  workers_.back().pid =
      spawn({.program = program_,
             .command = options_.command,
             .environment = worker_environment(own_environment(), options_, place),
             .stdout_fd = out.worker.get(),
             .stderr_fd = err.worker.get(),
             .inherited_fd = place.store_fd},
            guardian_, signals_);
  workers_.back().running = true;
}

bool Launcher::any_running() const {
  return std::any_of(workers_.begin(), workers_.end(), [](const Worker& w) { return w.running; });
}

// One round: wait for something, then look at everything.
void Launcher::turn() {
  milliseconds timeout{-1};
  for (const auto& deadline : {term_at_, kill_at_}) {
    if (!deadline) continue;
    const auto left = std::chrono::ceil<milliseconds>(*deadline - Clock::now());
    const auto wait = std::max(left, milliseconds(0));
    timeout = timeout.count() < 0 ? wait : std::min(timeout, wait);
  }
  poll_once(timeout);
  while (const auto signal = signals_.next()) answer(*signal);
  notice_exits();
  keep_deadlines();
}

void Launcher::poll_once(milliseconds timeout) {
  std::vector<pollfd> waits{{signals_.fd(), POLLIN, 0}};
  for (const Terminal* terminal : {&out_, &err_}) {
    if (terminal->pending()) waits.push_back({terminal->fd(), POLLOUT, 0});
  }
  std::vector<Stream*> sources;
  const size_t first_source = waits.size();
  for (Worker& worker : workers_) {
    for (Stream& stream : worker.streams) {
      if (!stream.wants_more()) continue;
      sources.push_back(&stream);
      waits.push_back({stream.fd(), POLLIN, 0});
    }
  }
  if (::poll(waits.data(), waits.size(), static_cast<int>(timeout.count())) <= 0) return;
  for (size_t i = 0; i < sources.size(); ++i) {
    if (waits[first_source + i].revents != 0) sources[i]->pump();
  }
  out_.flush();
  err_.flush();
}

void Launcher::answer(int signal) {
  switch (signal) {
    case SIGCHLD:
      return;
    case SIGWINCH:
      return pass_window_size();
    case SIGTSTP:
      return suspend();
    case SIGUSR1:
    case SIGUSR2:
      return send(signal);
    default:
      break;
  }
  if (signal == SIGINT || signal == SIGTERM) ++num_stop_requests_;
  if (num_stop_requests_ > 1) return kill_now();
  notice_exits();  // What ended before the signal did not end because of it.
  passed_signal_ = signal;
  send(signal);
  if (!kill_at_) kill_at_ = Clock::now() + options_.grace + kSaveTime;
}

void Launcher::notice_exits() {
  for (Worker& worker : workers_) {
    if (!worker.running) continue;
    const auto status = peek_exit(worker.pid);
    if (!status) continue;
    worker.running = false;
    outcomes_.push_back({worker.rank, worker.pid, *status, passed_signal_, stopping_});
    const bool first_failure = outcomes_.back().failed() && !std::exchange(failed_, true);
    if (first_failure && passed_signal_ == 0) term_at_ = Clock::now() + options_.grace;
  }
}

void Launcher::keep_deadlines() {
  const auto now = Clock::now();
  if (term_at_ && now >= *term_at_) {
    term_at_.reset();
    stopping_ = true;
    send(SIGTERM);
    kill_at_ = now + kTermToKill;
  }
  if (kill_at_ && now >= *kill_at_) kill_now();
}

// To the workers that run still; the groups of the others are ended with the job.
void Launcher::send(int signal) const {
  for (const Worker& worker : workers_) {
    if (worker.running) ::kill(-worker.pid, signal);
  }
}

void Launcher::kill_now() {
  notice_exits();
  stopping_ = true;
  term_at_.reset();
  kill_at_.reset();
  send(SIGKILL);
}

void Launcher::suspend() const {
  send(SIGSTOP);
  ::kill(::getpid(), SIGSTOP);
  send(SIGCONT);
}

void Launcher::pass_window_size() const {
  if (workers_.front().rank != 0 || options_.tee != Tee::kRank0) return;
  const Worker& worker = workers_.front();
  bool changed = false;
  for (size_t i = 0; i < worker.streams.size(); ++i) {
    const Terminal& terminal = i == 0 ? out_ : err_;
    if (!terminal.is_tty() || worker.streams[i].fd() < 0) continue;
    copy_window_size(terminal.fd(), worker.streams[i].fd());
    changed = true;
  }
  if (changed && worker.running) ::kill(-worker.pid, SIGWINCH);
}

void Launcher::end_workers() {
  for (Worker& worker : workers_) {
    if (worker.pid > 0) kill_group_and_reap(worker.pid);
    worker.pid = -1;
    worker.running = false;
  }
}

// Only a process that left its worker's group can hold a stream open longer; it is not waited for.
void Launcher::drain() {
  const auto end = Clock::now() + kDrainTime;
  const auto open = [](const Stream& stream) { return stream.fd() >= 0; };
  for (Worker& worker : workers_) {
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

int Launcher::conclude() {
  const Verdict verdict = judge(outcomes_);
  std::string text;
  if (verdict.culprit) {
    text = report(*verdict.culprit);
  } else if (verdict.exit_code > 128) {
    text = "cohort run: stopped by signal " + signal_name(verdict.exit_code - 128) + "\n";
    text += "cohort run: logs are in " + logs_.path() + "\n";
  }
  if (!text.empty()) {
    logs_.keep();
    // The report begins on a line of its own, also after a progress bar.
    const bool mid_line = !err_.at_line_start() || (out_.is_tty() && !out_.at_line_start());
    err_.write((mid_line ? "\n" : "") + text);
  }
  // All workers are gone: from here on a signal may end this process in the plain way.
  signals_.restore();
  out_.flush_all();
  err_.flush_all();
  return verdict.exit_code;
}

std::string Launcher::report(const Outcome& culprit) const {
  std::string text = "cohort run: " + describe(culprit, logs_.path()) + "\n";
  const bool shown =
      options_.tee == Tee::kAll || (options_.tee == Tee::kRank0 && culprit.rank == 0);
  const std::string tail =
      shown ? "" : indented_tail(log_file(logs_.path(), culprit.rank, "stderr"), kTailLines);
  if (!tail.empty()) {
    text += "cohort run: last lines of its stderr:\n" + tail;
  }
  std::string stopped;
  for (const Outcome& outcome : outcomes_) {
    if (!outcome.stopped) continue;
    stopped += (stopped.empty() ? "rank " : ", rank ") + std::to_string(outcome.rank);
  }
  if (!stopped.empty()) {
    text += "cohort run: stopped because still running after the grace: " + stopped + "\n";
  }
  return text + "cohort run: logs are in " + logs_.path() + "\n";
}

}  // namespace

int run(const RunOptions& options) {
  validate(options);
  open_standard_descriptors();
  return Launcher(options).run();
}

}  // namespace cohort::launch
