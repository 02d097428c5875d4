// SPDX-License-Identifier: Apache-2.0
#include "cohort/launch/server_group.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <stdlib.h>
#include <sys/un.h>
#include <system_error>
#include <utility>

#include "cohort/base/atomic_file.h"
#include "cohort/base/env.h"
#include "cohort/base/error.h"
#include "cohort/base/program.h"
#include "cohort/base/secret.h"
#include "cohort/launch/environment.h"
#include "cohort/launch/session.h"

namespace cohort::launch {
namespace {

constexpr int kLastLogReads = 64;  // More than a pipe holds.
constexpr size_t kSocketName = 8;  // "/4095" and more.

// A folder that this user alone may enter; a socket's path has 107 bytes at most.
std::string make_private_folder() {
  std::string path = env_string("TMPDIR").value_or("/tmp") + "/cohort-servers-XXXXXX";
  if (path.size() + kSocketName > sizeof(sockaddr_un{}.sun_path) - 1) {
    throw ConfigError("TMPDIR: expected a path of at most " +
                      std::to_string(sizeof(sockaddr_un{}.sun_path) - 1 - kSocketName -
                                     std::string("/cohort-servers-XXXXXX").size()) +
                      " bytes, in which servers have their sockets, got " + path);
  }
  if (!::mkdtemp(path.data())) {
    throw ConfigError("TMPDIR: expected a folder that can be written, got " + path + ": " +
                      std::strerror(errno));
  }
  return path;
}

}  // namespace

ServerGroup::ServerGroup(Key, const RunOptions& options, const std::string& log_dir,
                         LogWriter& logs, const Reaper& reaper, const Signals& signals)
    : options_(options),
      log_dir_(log_dir),
      logs_(logs),
      reaper_(reaper),
      signals_(signals),
      program_(find_program(options.servers.program)),
      sockets_(make_private_folder()),
      job_secret_(random_hex(16)) {}

// The delegation makes the object whole, so that its destructor runs if the secret cannot be
// written or a later server cannot start.
ServerGroup::ServerGroup(const RunOptions& options, const std::string& log_dir, LogWriter& logs,
                         const Reaper& reaper, const Signals& signals)
    : ServerGroup(Key{}, options, log_dir, logs, reaper, signals) {
  const std::string secret = sockets_ + "/secret";
  write_atomically(secret, job_secret_ + "\n");
  std::filesystem::permissions(
      secret, std::filesystem::perms::owner_read | std::filesystem::perms::owner_write);
  for (int id = 0; id < options.servers.count; ++id) {
    Server server;
    server.id = id;
    server.endpoint = "unix:" + sockets_ + "/" + std::to_string(id);
    endpoints_ += (id == 0 ? "" : ",") + server.endpoint;
    servers_.push_back(std::move(server));
  }
  for (Server& server : servers_) start(server, /*again=*/false);
}

ServerGroup::~ServerGroup() {
  for (Server& server : servers_) clear(server);
  std::error_code ignored;
  std::filesystem::remove_all(sockets_, ignored);
}

std::string ServerGroup::folder(const Server& server) const {
  const std::string& root = options_.servers.folder;
  return (root.empty() ? log_dir_ + "/servers" : root) + "/server." + std::to_string(server.id);
}

std::vector<std::string> ServerGroup::arguments(const Server& server) const {
  std::vector<std::string> words{options_.servers.program,
                                 "server",
                                 "--endpoint",
                                 server.endpoint,
                                 "--server-id",
                                 std::to_string(server.id),
                                 "--servers",
                                 std::to_string(options_.servers.count),
                                 "--folder",
                                 folder(server)};
  if (!options_.on_trainer_loss.empty())
    words.push_back("--on-trainer-loss=" + options_.on_trainer_loss);
  words.insert(words.end(), options_.servers.arguments.begin(), options_.servers.arguments.end());
  return words;
}

void ServerGroup::start(Server& server, bool again) {
  std::error_code error;
  std::filesystem::create_directories(folder(server), error);
  if (error) {
    throw ConfigError("--server-dir: expected a folder that can be made, got " + folder(server) +
                      ": " + error.message());
  }
  const ServerInfo info{server.id, server.endpoint, endpoints_, log_dir_, job_secret_};
  std::filesystem::remove(server_error_file(log_dir_, server.id));
  Channel channel = make_pipe();
  Stream::Options log;
  log.log_path = server_log_file(log_dir_, server.id);
  log.append = again;
  log.log_begin = server.log_end;
  server.log = std::make_unique<Stream>(std::move(channel.launcher), logs_, std::move(log));
  server.pid = start_process({.program = program_,
                              .command = arguments(server),
                              .environment = server_environment(own_environment(), options_, info),
                              .stdout_fd = channel.worker.get(),
                              .stderr_fd = channel.worker.get()},
                             reaper_, signals_);
  server.running = true;
}

bool ServerGroup::running() const {
  return std::any_of(servers_.begin(), servers_.end(), [](const Server& s) { return s.running; });
}

void ServerGroup::add_polls(std::vector<pollfd>& polls) const {
  for (const Server& server : servers_) {
    if (server.log && server.log->wants_more()) polls.push_back({server.log->fd(), POLLIN, 0});
  }
}

std::vector<std::string> ServerGroup::poll() {
  std::vector<std::string> lines;
  for (Server& server : servers_) {
    if (server.log && server.log->wants_more()) server.log->pump();
    if (auto line = notice_exit(server)) lines.push_back(std::move(*line));
  }
  if (kill_at_ && Clock::now() >= *kill_at_) {
    for (const Server& server : servers_) {
      if (!server.running) continue;
      lines.push_back("server " + std::to_string(server.id) + " (pid " +
                      std::to_string(server.pid) +
                      ") was killed because still running after the grace period");
    }
    kill_now();
  }
  return lines;
}

std::optional<std::string> ServerGroup::notice_exit(Server& server) {
  if (!server.running) return std::nullopt;
  auto status = peek_exit(server.pid);
  if (!status && survives_kill(killed_at_)) status = {128 + SIGKILL, SIGKILL};
  if (!status) return std::nullopt;
  server.running = false;
  Outcome outcome;
  outcome.rank = server.id;
  outcome.is_server = true;
  outcome.pid = server.pid;
  outcome.status = *status;
  outcome.log_begin = server.log->log_begin();
  outcome.explained = explains(server_error_file(log_dir_, server.id), status->exit_code);
  if (killed_at_ || failure_) return std::nullopt;
  if (stopping_) {
    if (outcome.failed() && status->signal != SIGTERM) failure_ = outcome;
    return std::nullopt;
  }
  if (!outcome.failed()) {
    outcome.note =
        "exited with code " + std::to_string(status->exit_code) + " before the trainers were done";
    outcome.status.exit_code = kExitFailure;
  }
  const int max_restarts = options_.servers.max_restarts;
  if (outcome.meaning() == kExitUsage || num_restarts_ >= max_restarts) {
    failure_ = outcome;
    if (outcome.meaning() == kExitUsage || max_restarts == 0) return std::nullopt;
    return "server " + std::to_string(server.id) + " is not restarted: all " +
           std::to_string(max_restarts) + " of --max-server-restarts are used";
  }
  ++num_restarts_;
  const std::string line = describe(outcome, log_dir_) + "; server restart " +
                           std::to_string(num_restarts_) + " of " + std::to_string(max_restarts);
  clear(server);
  start(server, /*again=*/true);
  return line;
}

void ServerGroup::send(int signal) const {
  std::vector<pid_t> leaders;
  for (const Server& server : servers_) {
    if (server.running) leaders.push_back(server.pid);
  }
  signal_sessions(leaders, signal);
}

void ServerGroup::stop(milliseconds grace) {
  if (std::exchange(stopping_, true)) return;
  send(SIGTERM);
  kill_at_ = Clock::now() + grace;
}

void ServerGroup::kill_now() {
  stopping_ = true;
  if (!killed_at_) killed_at_ = Clock::now();
  kill_at_.reset();
  send(SIGKILL);
}

void ServerGroup::postpone(Clock::duration pause) {
  if (kill_at_) *kill_at_ += pause;
  if (killed_at_) *killed_at_ += pause;
}

std::optional<ServerGroup::Clock::time_point> ServerGroup::deadline() const {
  if (!running()) return std::nullopt;
  return killed_at_ ? *killed_at_ + kKillTime : kill_at_;
}

std::vector<std::string> ServerGroup::end() {
  std::vector<std::string> left_behind;
  for (Server& server : servers_) {
    const pid_t pid = server.pid;
    if (!clear(server))
      left_behind.push_back(left_behind_line("server " + std::to_string(server.id), pid));
  }
  return left_behind;
}

// Ends what is left of the server's session, and its log. False if SIGKILL does not end it.
bool ServerGroup::clear(Server& server) {
  bool ended = true;
  if (server.pid > 0) {
    kill_sessions({&server.pid, 1});
    const bool waited = survives_kill(killed_at_);
    ended = reap(server.pid, Clock::now() + (waited ? milliseconds(0) : kKillTime));
    if (ended) reaper_.untrack(server.pid);
  }
  server.pid = -1;
  server.running = false;
  if (!server.log) return ended;
  for (int reads = 0; reads < kLastLogReads && server.log->pump(); ++reads) {
  }
  server.log->finish();
  server.log_end = server.log->log_end();
  server.log.reset();
  return ended;
}

}  // namespace cohort::launch
