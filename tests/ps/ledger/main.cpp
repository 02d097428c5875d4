// SPDX-License-Identifier: Apache-2.0
// The ledger: servers and trainers are processes, killed, stopped and cut off from each other while
// trainers add 1 to rows. What the rows hold afterwards is held against what was acknowledged.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include "cohort/base/checksum.h"
#include "cohort/base/error.h"
#include "cohort/base/log.h"
#include "cohort/base/program.h"
#include "cohort/ps/rpc/rpc_server.h"
#include "cohort/ps/server/server.h"

#include "tests/ps/ledger/tcp_proxy.h"
#include "tests/ps/ledger/trainer.h"

namespace cohort::ps {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr int kServers = 2;
constexpr int kTrainers = 2;
// A step or a start that takes longer is a failure. Long, because servers sync each push: a disk
// that others write to may hold a sync up for half a minute.
constexpr std::chrono::seconds kTimeout{120};

struct ServerRole {
  int server = 0;
  std::string folder, port_file;
};

int serve(const ServerRole& role) {
  const Log log({.file = role.folder + ".log", .console = LogConsole::kNever});
  Server server({.server = role.server,
                 .servers = kServers,
                 .folder = role.folder,
                 .durability = Durability::kSynced,
                 .on_trainer_loss = OnTrainerLoss::kWait,
                 .trainer_timeout = milliseconds(5'000),
                 .snapshot_log_bytes = 1 << 14},
                log);
  const RpcServer rpc(server, {});
  {
    std::ofstream(role.port_file + ".new") << rpc.port();
    fs::rename(role.port_file + ".new", role.port_file);
  }
  server.wait();
  return kExitOk;
}

// A process of this program in another role; killed when this one ends.
class Process {
 public:
  Process() = default;
  Process(std::vector<std::string> arguments, const std::string& kill_point,
          const std::string& output) {
    arguments.insert(arguments.begin(), "ps_ledger");
    std::vector<char*> pointers;
    for (auto& argument : arguments) pointers.push_back(argument.data());
    pointers.push_back(nullptr);
    const pid_t parent = ::getpid();
    pid_ = ::fork();
    if (pid_ != 0) return;
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != parent) ::_exit(1);
    if (!kill_point.empty()) ::setenv("COHORT_PS_KILL_POINT", kill_point.c_str(), 1);
    if (std::freopen(output.c_str(), "a", stderr) == nullptr) ::_exit(1);
    ::execv("/proc/self/exe", pointers.data());
    ::_exit(127);
  }
  Process(Process&& other) noexcept : pid_(std::exchange(other.pid_, -1)) {}
  Process& operator=(Process&& other) noexcept {
    kill(SIGKILL);
    pid_ = std::exchange(other.pid_, -1);
    return *this;
  }
  ~Process() { kill(SIGKILL); }

  /// Whether it has ended, and then how.
  bool has_ended(int* status = nullptr) {
    int its_status = 0;
    if (pid_ > 0 && ::waitpid(pid_, &its_status, WNOHANG) == pid_) {
      pid_ = -1;
      if (status) *status = its_status;
      return true;
    }
    return pid_ < 0;
  }
  void signal(int number) const {
    if (pid_ > 0) ::kill(pid_, number);
  }
  void kill(int number) {
    if (pid_ <= 0) return;
    ::kill(pid_, number);
    ::waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }

 private:
  pid_t pid_ = -1;
};

struct RunOptions {
  std::string mode;
  int kills = 20;  ///< Of servers, half of them at kill points.
  int trainer_kills = 0;
  int stop_s = 0;       ///< How long one server is stopped (SIGSTOP).
  uint64_t steps = 60;  ///< Of "model".
  double break_probability = 0.01;
  uint64_t seed = 1;
  std::string folder;
  size_t first_point = 0;  ///< Of kKillPoints.
};

const std::vector<std::string> kKillPoints{"before the log",   "after the log",
                                           "after applying",   "before the answer",
                                           "snapshot written", "snapshot named"};

class Run {
 public:
  explicit Run(const RunOptions& options)
      : options_(options), random_(options.seed), next_point_(options.first_point) {
    fs::remove_all(options_.folder);
    fs::create_directories(options_.folder);
    page_ = map_page(path("page"));
    for (int server = 0; server < kServers; ++server) {
      proxies_.push_back(std::make_unique<TcpProxy>(
          options_.seed * 10 + static_cast<uint64_t>(server), options_.break_probability));
      endpoints_.push_back("127.0.0.1:" + std::to_string(proxies_.back()->port()));
      servers_.emplace_back();
      start_server(server, "");
    }
    for (int trainer = 0; trainer < kTrainers; ++trainer) {
      trainers_.emplace_back();
      start_trainer(trainer);
    }
  }

  json play() {
    const auto began = steady_clock::now();
    await_progress(kTimeout);
    if (options_.stop_s > 0) stop_one();
    while (kills_ < options_.kills || trainer_kills_ < options_.trainer_kills) {
      disturb();
      check_trainers();
      if (options_.mode == "model" && all_done()) break;
    }
    page_->stop = true;
    const auto until =
        steady_clock::now() + (options_.mode == "model" ? std::chrono::seconds(900) : 3 * kTimeout);
    while (!trainers_ended()) {
      revive();
      TORCH_CHECK(steady_clock::now() < until, options_.mode, ": the trainers have not ended; see ",
                  options_.folder);
      std::this_thread::sleep_for(milliseconds(20));
    }
    json result = audit();
    result["mode"] = options_.mode;
    result["server_kills"] = kills_;
    result["killed_at"] = killed_at_;
    result["trainer_kills"] = trainer_kills_;
    result["connections_broken"] = 0;
    for (const auto& proxy : proxies_)
      result["connections_broken"] = result["connections_broken"].get<int>() + proxy->broken();
    result["seconds"] = std::chrono::duration<double>(steady_clock::now() - began).count();
    return result;
  }

 private:
  std::string path(const std::string& name) const {
    return (fs::path(options_.folder) / name).string();
  }

  void start_server(int server, const std::string& kill_point) {
    const std::string name = "server-" + std::to_string(server);
    const std::string port_file = path(name + ".port");
    fs::remove(port_file);
    const auto at = static_cast<size_t>(server);
    servers_[at] = Process({"server", "--id", std::to_string(server), "--folder", path(name),
                            "--port-file", port_file},
                           kill_point, path(name + ".stderr"));
    const auto until = steady_clock::now() + kTimeout;
    int port = 0;
    while (!(std::ifstream(port_file) >> port)) {
      int status = 0;
      TORCH_CHECK(!servers_[at].has_ended(&status) || WIFSIGNALED(status), "server ", server,
                  " did not start; see ", path(name + ".stderr"));
      if (servers_[at].has_ended()) return;  // Killed already: at a point in its recovery.
      TORCH_CHECK(steady_clock::now() < until, "server ", server, " did not start in ",
                  kTimeout.count(), " s");
      std::this_thread::sleep_for(milliseconds(2));
    }
    proxies_[at]->set_target(port);
  }

  void start_trainer(int trainer) {
    const std::string name = "trainer-" + std::to_string(trainer);
    trainers_[static_cast<size_t>(trainer)] =
        Process({"trainer", "--mode", options_.mode, "--id", std::to_string(trainer), "--page",
                 path("page"), "--steps", std::to_string(options_.steps), "--seed",
                 std::to_string(options_.seed), endpoints_[0], endpoints_[1]},
                "", path(name + ".stderr"));
  }

  uint64_t progress() const {
    uint64_t steps = 0;
    for (const auto& trainer : page_->trainers) steps += trainer.steps;
    return steps;
  }

  bool all_done() const {
    return std::all_of(page_->trainers.begin(), page_->trainers.begin() + kTrainers,
                       [](const auto& trainer) { return trainer.done.load(); });
  }

  // So that each kill meets a running job, not the one that still recovers from the last.
  void await_progress(milliseconds at_most) {
    const uint64_t before = progress();
    const auto until = steady_clock::now() + at_most;
    while (progress() == before && steady_clock::now() < until && !all_done()) {
      revive();
      check_trainers();
      std::this_thread::sleep_for(milliseconds(2));
    }
    TORCH_CHECK(progress() > before || all_done(), options_.mode, ": no step in ",
                at_most.count() / 1000, " s; see ", options_.folder);
  }

  // Starts servers again that have died at their kill points.
  void revive() {
    for (int server = 0; server < kServers; ++server) {
      if (!servers_[static_cast<size_t>(server)].has_ended()) continue;
      ++kills_;
      ++killed_at_[points_[static_cast<size_t>(server)]];
      start_server(server, "");
    }
  }

  void disturb() {
    await_progress(kTimeout);
    std::this_thread::sleep_for(milliseconds(random_() % 150));
    const auto server = static_cast<size_t>(random_() % kServers);
    if (trainer_kills_ < options_.trainer_kills && random_() % 2 == 0) {
      const int trainer = static_cast<int>(random_() % kTrainers);
      trainers_[static_cast<size_t>(trainer)].kill(SIGKILL);
      ++trainer_kills_;
      start_trainer(trainer);
      return;
    }
    if (kills_ >= options_.kills) return;
    servers_[server].kill(SIGKILL);
    ++kills_;
    ++killed_at_["any moment"];
    // Half of the kills are where they hurt most, one point after the other.
    if (kills_ >= options_.kills) return start_server(static_cast<int>(server), "");
    points_[server] = kKillPoints[next_point_++ % kKillPoints.size()];
    start_server(static_cast<int>(server),
                 points_[server] + ":" + std::to_string(1 + random_() % 3));
    await_death(server);
  }

  // The trainers' pushes bring it to its point. What a point in a snapshot's process kills is that
  // process: the server continues.
  void await_death(size_t server) {
    const bool only_child = points_[server] == "snapshot written";
    const auto until = steady_clock::now() + (only_child ? std::chrono::seconds(1) : kTimeout);
    while (!servers_[server].has_ended() && steady_clock::now() < until && !all_done()) {
      check_trainers();
      std::this_thread::sleep_for(milliseconds(2));
    }
    if (only_child) ++killed_at_[points_[server]];
    TORCH_CHECK(only_child || servers_[server].has_ended() || all_done(), options_.mode,
                ": server ", server, " did not come by \"", points_[server], "\" in ",
                kTimeout.count(), " s");
    revive();
  }

  void stop_one() {
    servers_[0].signal(SIGSTOP);
    std::this_thread::sleep_for(std::chrono::seconds(options_.stop_s));
    servers_[0].signal(SIGCONT);
    await_progress(kTimeout);
  }

  void check_trainers() {
    for (size_t trainer = 0; trainer < trainers_.size(); ++trainer) {
      int status = 0;
      if (!trainers_[trainer].has_ended(&status)) continue;
      TORCH_CHECK(page_->trainers[trainer].done, "trainer ", trainer, " ended with ", status,
                  "; see ", path("trainer-" + std::to_string(trainer) + ".stderr"));
    }
  }

  bool trainers_ended() {
    check_trainers();
    return std::all_of(trainers_.begin(), trainers_.end(),
                       [](Process& trainer) { return trainer.has_ended(); });
  }

  json audit() {
    const std::vector<float> weights = weights_of(options_.mode, kTrainers, endpoints_);
    if (options_.mode == "model") {
      Sha256 checksum;
      checksum.update(std::as_bytes(std::span(weights)));
      return {{"sha256", checksum.hex()}, {"steps", progress()}};
    }
    // Geo divides changes by the number of trainers: halves are exact.
    const double scale = options_.mode == "geo" ? kTrainers : 1;
    uint64_t pushes = 0, in_flight = 0, wrong = 0, lead = 0;
    for (uint64_t id = 0; id < kLedgerRows; ++id) {
      uint64_t sent = 0, acknowledged = 0;
      for (const auto& trainer : page_->trainers) {
        sent += trainer.sent[id];
        acknowledged += trainer.acknowledged[id];
      }
      for (const float weight : {weights[2 * id], weights[2 * id + 1]}) {
        const double count = weight * scale;
        // So that a NaN is wrong, too.
        wrong +=
            !(count >= static_cast<double>(acknowledged) && count <= static_cast<double>(sent));
      }
      pushes += acknowledged;
      in_flight += sent - acknowledged;
    }
    for (const auto& trainer : page_->trainers) lead = std::max(lead, trainer.greatest_lead.load());
    TORCH_CHECK(wrong == 0, options_.mode, ": ", wrong,
                " weights are not what was acknowledged; see ", options_.folder);
    TORCH_CHECK(options_.trainer_kills > 0 || in_flight == 0, options_.mode,
                ": pushes in flight without a trainer killed");
    json result{{"rows_acknowledged", pushes},
                {"rows_in_flight_at_kills", in_flight},
                {"wrong_weights", wrong},
                {"steps", progress()}};
    if (options_.mode == "ssp") {
      result["greatest_lead"] = lead;
      TORCH_CHECK(
          lead <= static_cast<uint64_t>(ledger_job_of("ssp", kTrainers, kServers).max_staleness),
          "ssp: a trainer was ", lead, " steps ahead");
    }
    return result;
  }

  const RunOptions options_;
  std::mt19937_64 random_;
  Page* page_ = nullptr;
  std::vector<std::unique_ptr<TcpProxy>> proxies_;
  std::vector<std::string> endpoints_;
  std::vector<Process> servers_, trainers_;
  std::array<std::string, kServers> points_;
  std::map<std::string, int> killed_at_;
  int kills_ = 0;
  int trainer_kills_ = 0;
  size_t next_point_ = 0;
};

int drive(const RunOptions& asked, std::vector<std::string> modes, const std::string& out) {
  json all{{"servers", kServers},
           {"trainers", kTrainers},
           {"acknowledge", "synced"},
           {"runs", json::array()}};
  if (modes.empty()) {
    modes = ledger_modes();
    modes.emplace_back("model");
  }
  const int share = std::max<int>(1, asked.kills / static_cast<int>(modes.size()));
  for (const std::string& mode : modes) {
    RunOptions options = asked;
    options.mode = mode;
    options.folder = (fs::path(asked.folder) / mode).string();
    options.kills = share;
    options.first_point = static_cast<size_t>(&mode - modes.data());
    if (mode == "model") {
      options.steps = std::max(options.steps, 8 * static_cast<uint64_t>(share));
      RunOptions quiet = options;
      quiet.kills = quiet.stop_s = quiet.trainer_kills = 0;
      quiet.break_probability = 0;
      quiet.folder += "-undisturbed";
      const std::string expected = Run(quiet).play()["sha256"];
      json result = Run(options).play();
      result["undisturbed_sha256"] = expected;
      TORCH_CHECK(result["sha256"] == expected, "model: the state is not the undisturbed run's");
      all["runs"].push_back(result);
    } else {
      all["runs"].push_back(Run(options).play());
    }
    std::printf("%s\n", all["runs"].back().dump().c_str());
    std::fflush(stdout);
    if (!out.empty()) std::ofstream(out) << all.dump(1) << "\n";
    fs::remove_all(options.folder);
    fs::remove_all(options.folder + "-undisturbed");
  }
  return kExitOk;
}

}  // namespace
}  // namespace cohort::ps

int main(int argc, char** argv) {
  using namespace cohort::ps;
  CLI::App app("Kills servers and trainers of a parameter server job, then audits its weights");
  ServerRole server;
  TrainerOptions trainer;
  RunOptions run{.folder = (std::filesystem::temp_directory_path() /
                            ("ps_ledger_" + std::to_string(::getpid())))
                               .string()};
  std::vector<std::string> modes;
  std::string out;
  app.add_option("--kills", run.kills, "Of servers, over all modes")
      ->take_last()
      ->capture_default_str();
  app.add_option("--trainer-kills", run.trainer_kills, "In each mode")->capture_default_str();
  app.add_option("--stop", run.stop_s, "Seconds for which one server is stopped in each mode")
      ->take_last()
      ->capture_default_str();
  app.add_option("--steps", run.steps, "Of the mode \"model\"")->capture_default_str();
  app.add_option("--mode", modes, "sync, async, half-async, geo, ssp, model (default: all)");
  app.add_option("--seed", run.seed)->capture_default_str();
  app.add_option("--folder", run.folder)->capture_default_str();
  app.add_option("--out", out, "Write the results here, JSON");
  auto* const serve_command = app.add_subcommand("server", "");
  serve_command->add_option("--id", server.server);
  serve_command->add_option("--folder", server.folder);
  serve_command->add_option("--port-file", server.port_file);
  auto* const train_command = app.add_subcommand("trainer", "");
  train_command->add_option("--mode", trainer.mode);
  train_command->add_option("--id", trainer.trainer);
  train_command->add_option("--page", trainer.page);
  train_command->add_option("--steps", trainer.steps);
  train_command->add_option("--seed", trainer.seed);
  train_command->add_option("endpoints", trainer.endpoints);
  CLI11_PARSE(app, argc, argv);
  const int code = cohort::run_program("ps_ledger", [&] {
    if (*serve_command) return serve(server);
    if (*train_command) run_trainer(trainer);
    return drive(run, modes, out);
  });
  std::fflush(nullptr);
  ::_exit(code);  // Answers to calls that nobody waits for may still be on their way.
}
