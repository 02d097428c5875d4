// SPDX-License-Identifier: Apache-2.0
#include "cohort/ps/server/server.h"

#include <chrono>
#include <cmath>
#include <csignal>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <system_error>
#include <thread>

#include "cohort/base/atomic_file.h"
#include "cohort/base/error.h"
#include "cohort/base/log.h"
#include "cohort/base/program.h"
#include "cohort/base/stop_request.h"
#include "cohort/cli/milliseconds.h"
#include "cohort/cli/parse.h"
#include "cohort/cli/security_flags.h"
#include "cohort/ps/endpoints.h"
#include "cohort/ps/role.h"
#include "cohort/ps/rpc/rpc_server.h"
#include "cohort/ps/server/saved_state.h"
#include "cohort/ps/table/table_threads.h"

#include "apps/ps/commands.h"
#include "apps/ps/device.h"
#include "apps/ps/metrics.h"

namespace cohort::cli {

namespace {

using std::chrono::milliseconds;

constexpr double kMebibyte = 1024.0 * 1024;

// The flags' own units stand beside what they set, with the same defaults.
struct ServerFlags {
  ps::ServerOptions server;
  ps::RpcServerOptions rpc;
  std::string durability = "logged";
  std::string on_trainer_loss = "fail";
  std::string device = "host";
  std::string port_file;
  std::string metrics;
  double trainer_timeout_s = std::chrono::duration<double>(server.trainer_timeout).count();
  double evict_period_s = std::chrono::duration<double>(server.evict_period).count();
  double snapshot_log_mib = static_cast<double>(server.snapshot_log_bytes) / kMebibyte;
  double max_queue_mib = static_cast<double>(server.max_queue_bytes) / kMebibyte;
};

// What Paddle's environment says counts where the flags do not.
void take_role(const CLI::App& app, ServerFlags& flags) {
  const auto info = ps::role_from_environment();
  if (!info) return;
  if (info->role != ps::Role::kServer) {
    const bool is_placed = app.count("--server-id") > 0 && app.count("--servers") > 0;
    if (app.count("--endpoint") > 0 && (is_placed || info->servers.size() == 1)) return;
    throw ConfigError(
        "PADDLE_TRAINING_ROLE, TRAINING_ROLE: expected PSERVER, or --endpoint, --server-id and "
        "--servers in this trainer's environment");
  }
  if (app.count("--endpoint") == 0) flags.rpc.endpoint = info->endpoint();
  if (app.count("--server-id") == 0) flags.server.server = info->server_id;
  if (app.count("--servers") == 0) flags.server.servers = static_cast<int>(info->servers.size());
}

int64_t mebibytes(double number) {
  return std::llround(number * kMebibyte);
}

void check_device(const std::string& device) {
  if (device == "host" || device == "cpu" || device == "cuda" || device.starts_with("cuda:"))
    return;
  throw ConfigError("--device " + device + ": expected host, cpu, cuda or cuda:N");
}

// A server that is refused leaves the folder as it was.
void check_before_anything_is_made(const ServerFlags& flags) {
  if (!flags.server.load.empty()) ps::saved_folders(flags.server.load);
  if (!flags.metrics.empty()) check_metrics(flags.metrics);
  const std::string beside = std::filesystem::path(flags.port_file).parent_path().string();
  std::error_code ignored;
  if (!beside.empty() && !std::filesystem::is_directory(beside, ignored))
    throw ConfigError("--port-file " + flags.port_file + ": the folder " + beside +
                      " does not exist");
  ps::check_rpc_server(flags.rpc);
}

int serve(const CLI::App& app, ServerFlags flags) {
  // The parent process may have left it ignored: then the exit status of a snapshot's child is lost.
  std::signal(SIGCHLD, SIG_DFL);
  take_role(app, flags);
  const std::map<std::string, ps::Durability> levels{{"applied", ps::Durability::kApplied},
                                                     {"logged", ps::Durability::kLogged},
                                                     {"synced", ps::Durability::kSynced}};
  const std::map<std::string, ps::OnTrainerLoss> losses{{"fail", ps::OnTrainerLoss::kFail},
                                                        {"wait", ps::OnTrainerLoss::kWait},
                                                        {"continue", ps::OnTrainerLoss::kContinue}};
  check_device(flags.device);
  ps::ServerOptions& options = flags.server;
  options.make_block = blocks_on(flags.device);
  options.durability = levels.at(flags.durability);
  options.on_trainer_loss = losses.at(flags.on_trainer_loss);
  options.trainer_timeout = to_milliseconds(flags.trainer_timeout_s);
  options.evict_period = to_milliseconds(flags.evict_period_s);
  if (app.count("--snapshot-log") > 0 && options.durability == ps::Durability::kApplied)
    throw ConfigError(
        "--snapshot-log: expected --acknowledge logged or synced, for applied keeps no log");
  options.snapshot_log_bytes = mebibytes(flags.snapshot_log_mib);
  options.max_queue_bytes = mebibytes(flags.max_queue_mib);
  if (options.server < 0 || options.server >= options.servers)
    throw ConfigError("--server-id: expected 0 to " + std::to_string(options.servers - 1) +
                      ", got " + std::to_string(options.server));
  if (app.count("--save-root") > 0 && options.save_root.empty())
    throw ConfigError("--save-root: expected a folder, got an empty text");
  // Without a secret or TLS any process of this host may ask for a save.
  if (app.count("--save-root") == 0 && !flags.rpc.security.tls() &&
      ps::job_secret_of(flags.rpc.security).empty())
    options.save_root = std::filesystem::current_path().string();
  if (options.folder.empty()) options.folder = "ps-server-" + std::to_string(options.server);
  check_before_anything_is_made(flags);
  const Log log(
      {.rank = options.server, .world_size = options.servers, .console = LogConsole::kAlways});
  const StopRequest stop_request;
  ps::Server server(options, log);
  const ps::RpcServer rpc(server, flags.rpc);
  std::optional<MetricsEndpoint> metrics;
  if (!flags.metrics.empty()) metrics.emplace(server, flags.metrics);
  if (!flags.port_file.empty())
    write_atomically(flags.port_file, std::to_string(rpc.port()) + "\n");
  const auto socket = ps::unix_path(flags.rpc.endpoint);
  const LogField where = socket ? LogField{"socket", std::filesystem::absolute(*socket).string()}
                                : LogField{"port", rpc.port()};
  log.info("serving", {{"endpoint", flags.rpc.endpoint},
                       where,
                       {"folder", options.folder},
                       {"acknowledge", flags.durability}});
  // A signal's handler may only set a flag: somebody must look at it.
  const std::jthread watcher([&](const std::stop_token& stop) {
    while (!stop.stop_requested()) {
      if (stop_request.signal() != 0) server.stop();
      std::this_thread::sleep_for(milliseconds(50));
    }
  });
  server.wait();
  log.info("stopped");
  return kExitOk;
}

void add_place_flags(CLI::App& server, ServerFlags& flags) {
  const char* place = "Server";
  server
      .add_option("--endpoint", flags.rpc.endpoint, "Address to listen on: HOST:PORT or unix:PATH")
      ->type_name("ADDRESS")
      ->capture_default_str()
      ->group(place);
  server.add_option("--server-id", flags.server.server, "This server's number, from 0")
      ->capture_default_str()
      ->group(place);
  server.add_option("--servers", flags.server.servers, "Number of servers of the job")
      ->capture_default_str()
      ->check(CLI::Range(1, 4096))
      ->group(place);
  server
      .add_option("--folder", flags.server.folder,
                  "Folder of the log and the snapshots (default: ps-server-ID)")
      ->type_name(kFolder)
      ->group(place);
  server
      .add_option("--load", flags.server.load,
                  "Start a new job from this checkpoint, written by any number of servers")
      ->type_name(kFolder)
      ->group(place);
  server
      .add_option("--save-root", flags.server.save_root,
                  "Write checkpoints only below this folder (default: the working folder without "
                  "a secret and TLS, else any)")
      ->type_name(kFolder)
      ->group(place);
  server
      .add_option("--port-file", flags.port_file,
                  "File that receives the port once the server listens (0: a unix socket)")
      ->type_name(kFile)
      ->group(place);
  server
      .add_option(
          "--device", flags.device,
          "Memory of dense parameters and their optimizer: host, a GPU (cuda, cuda:N), or cpu "
          "(tensors of libtorch)")
      ->capture_default_str()
      ->group(place);
  server
      .add_option("--table-threads", flags.server.table_threads,
                  "Threads that share the work on tables, 1 to 64: large pulls and pushes, "
                  "evictions and loading then use as many cores; the results stay the same")
      ->capture_default_str()
      ->check(CLI::Range(1, ps::TableThreads::kMost))
      ->group(place);
  server
      .add_option(
          "--metrics", flags.metrics,
          "Serve metrics for Prometheus at http://HOST:PORT/metrics; an address of this host")
      ->type_name("ADDRESS")
      ->group(place);
}

void add_reliability_flags(CLI::App& server, ServerFlags& flags) {
  const char* reliability = "Reliability";
  server
      .add_option("--acknowledge", flags.durability,
                  "When a push is acknowledged: applied (no log: lost with the process), logged "
                  "(survives the process) or synced (survives a power failure)")
      ->capture_default_str()
      ->check(one_of({"applied", "logged", "synced"}))
      ->group(reliability);
  server
      .add_option("--on-trainer-loss", flags.on_trainer_loss,
                  "When a trainer is lost: fail, wait for it, or continue without it")
      ->capture_default_str()
      ->check(one_of({"fail", "wait", "continue"}))
      ->group(reliability);
  server
      .add_option("--trainer-timeout", flags.trainer_timeout_s,
                  "Time without a message after which a trainer is lost")
      ->type_name(kSeconds)
      ->capture_default_str()
      ->check(time_limit())
      ->group(reliability);
  server
      .add_option("--snapshot-log", flags.snapshot_log_mib,
                  "Log size after which a snapshot is taken (0: never)")
      ->type_name(kMebibytes)
      ->capture_default_str()
      ->check(zero_or_more())
      ->group(reliability);
  server
      .add_option("--max-queue", flags.max_queue_mib,
                  "Limit of queued messages; beyond it trainers retry")
      ->type_name(kMebibytes)
      ->capture_default_str()
      ->check(above_zero())
      ->group(reliability);
  server.add_option("--evict-period", flags.evict_period_s, "Time between evictions")
      ->type_name(kSeconds)
      ->capture_default_str()
      ->check(time_limit())
      ->group(reliability);
}

// A server also checks its clients' certificates.
void add_security_flags(CLI::App& server, ps::SecurityOptions& security) {
  add_client_security_flags(server, security);
  server
      .add_option("--tls-trainer-names", security.trainer_names,
                  "Names that a trainer's certificate may have")
      ->needs("--tls-authority")
      ->capture_default_str()
      ->group(kSecurity);
}

}  // namespace

void add_server_command(CLI::App& app, PsCommand& command) {
  auto flags = std::make_shared<ServerFlags>();
  CLI::App* const server = app.add_subcommand("server", "Runs a server until it is stopped");
  add_place_flags(*server, *flags);
  add_reliability_flags(*server, *flags);
  add_security_flags(*server, flags->rpc.security);
  server->callback([server, flags, &command] {
    command.run = [server, flags] { return serve(*server, *flags); };
  });
}

}  // namespace cohort::cli
