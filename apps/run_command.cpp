// SPDX-License-Identifier: Apache-2.0
#include "apps/run_command.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <optional>
#include <string>

#include "cohort/base/error.h"
#include "cohort/base/secret.h"
#include "cohort/cli/milliseconds.h"
#include "cohort/cli/parse.h"
#include "cohort/launch/cores.h"
#include "cohort/launch/launcher.h"

namespace {

using cohort::ConfigError;
using cohort::kFile;
using cohort::kFolder;
using cohort::kSeconds;
using cohort::cli::one_of;
using cohort::launch::BindCores;
using cohort::launch::kMostWorkers;
using cohort::launch::RunOptions;
using cohort::launch::Tee;
using std::chrono::milliseconds;

// Flags whose values are words or seconds, as they stand on the command line.
struct Words {
  std::string nproc_per_node = "1";
  std::string nnodes = "1";
  std::string tee = "rank0";
  std::string redirects = "0";
  std::string bind_cores = "none";
  std::string numa_binding;
  std::string rdzv_backend;
  std::string restart_policy = "group";
  int trainers = 1;
  double grace = 5;
  double rdzv_timeout = 600;
  bool has_rdzv_timeout = false;
  std::optional<std::string> rdzv_conf;
  std::optional<std::string> rdzv_secret_file;
  double watch = 0;
  double stall_timeout = 60;
  bool standalone = false;
  bool no_python = false;
};

milliseconds to_milliseconds(const std::string& flag, double seconds) {
  if (!(seconds >= 0 && seconds <= 1e6)) {
    std::array<char, 32> given{};
    std::snprintf(given.data(), given.size(), "%.15g", seconds);
    throw ConfigError(flag + ": expected seconds from 0 to 1000000, got " + given.data());
  }
  return cohort::cli::to_milliseconds(seconds);
}

// torchrun takes its flags with underscores as well.
std::string both_spellings(const std::string& name) {
  std::string underscores = name.substr(2);
  std::replace(underscores.begin(), underscores.end(), '-', '_');
  return name + ",--" + underscores;
}

void add_job_flags(CLI::App& app, RunOptions& options, Words& words) {
  const char* group = "Job";
  app.add_option(both_spellings("--nproc-per-node"), words.nproc_per_node,
                 "Workers on this node: a number, cpu or auto (one per core), or gpu (one per GPU)")
      ->type_name("N")
      ->capture_default_str()
      ->group(group);
  app.add_flag("--standalone", words.standalone, "One node without rendezvous: the default")
      ->group(group);
  app.add_option("--nnodes", words.nnodes,
                 "Number of nodes: N, or MIN:MAX (elastic; requires --rdzv-endpoint)")
      ->type_name("N")
      ->capture_default_str()
      ->group(group);
  app.add_option(both_spellings("--node-rank"), options.node_rank,
                 "Rank of this node, from 0 (--rdzv-endpoint assigns it)")
      ->capture_default_str()
      ->group(group);
  app.add_option(both_spellings("--max-restarts"), options.max_restarts,
                 "Maximum number of restarts after a worker failed")
      ->capture_default_str()
      ->group(group);
  app.add_option("--restart-policy", words.restart_policy,
                 "What restarts: all workers (group), or only the failed one (single; for trainers "
                 "of parameter servers that form no process group)")
      ->capture_default_str()
      ->check(one_of({"group", "single"}))
      ->group(group);
  app.add_option("--bind-cores", words.bind_cores,
                 "Bind each worker to cores of its own, with as many threads")
      ->capture_default_str()
      ->check(one_of({"none", "cores"}))
      ->group(group);
  app.add_option(both_spellings("--numa-binding"), words.numa_binding,
                 "node: bind each worker to the cores of its GPU's NUMA node (default: not bound)")
      ->check(one_of({"node"}))
      ->excludes("--bind-cores")
      ->group(group);
}

void add_rendezvous_flags(CLI::App& app, RunOptions& options, Words& words) {
  const char* group = "Rendezvous";
  app.add_option(both_spellings("--master-addr"), options.master_addr,
                 "Address of node 0 (one node: 127.0.0.1; several: required)")
      ->type_name("HOST")
      ->group(group);
  app.add_option(both_spellings("--master-port"), options.master_port,
                 "Port of the store on node 0 (default: a free one; several nodes: required)")
      ->type_name("PORT")
      ->group(group);
  app.add_option(both_spellings("--rdzv-endpoint"), options.rdzv_endpoint,
                 "HOST[:PORT] of the rendezvous; the launcher on HOST serves it and is node 0")
      ->type_name("HOST")
      ->group(group);
  app.add_option(both_spellings("--rdzv-id"), options.rdzv_id, "Name of the job")
      ->capture_default_str()
      ->group(group);
  app.add_option(
         both_spellings("--rdzv-backend"), words.rdzv_backend,
         "Accepted, no effect: with --rdzv-endpoint the launchers serve the rendezvous themselves")
      ->check(one_of({"static", "c10d"}))
      ->group(group);
  app.add_option("--rdzv-timeout", words.rdzv_timeout, "Rendezvous timeout")
      ->type_name(kSeconds)
      ->capture_default_str()
      ->group(group);
  app.add_option(
         both_spellings("--rdzv-conf"), words.rdzv_conf,
         "KEY=NUMBER,...: keep_alive_interval=5 (seconds), keep_alive_max_attempt=3 (missed "
         "intervals after which a node is lost), last_call_timeout=1, "
         "join_timeout (--rdzv-timeout)")
      ->type_name("TEXT")
      ->group(group);
  app.add_option("--rdzv-secret-file", words.rdzv_secret_file,
                 "File with the secret of a multi-node job: launchers and workers without it are "
                 "rejected")
      ->type_name(kFile)
      ->group(group);
  app.add_option("--interface", options.interface,
                 "Network interface of collectives (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)")
      ->type_name("NAME")
      ->group(group);
}

void add_server_flags(CLI::App& app, RunOptions& options, Words& words) {
  const char* group = "Parameter servers";
  app.add_option(
         "--servers", options.servers.count,
         "Number of parameter servers (cohort ps server); the program's processes are the trainers")
      ->type_name("N")
      ->capture_default_str()
      ->group(group);
  app.add_option("--pservers", options.pservers,
                 "Endpoints of servers that are started by hand, HOST:PORT,HOST:PORT in the order "
                 "of their numbers; the program's processes, on all nodes, are the trainers")
      ->type_name("LIST")
      ->group(group);
  app.add_option("--trainers", words.trainers,
                 "Number of trainers of --servers: another name of --nproc-per-node")
      ->type_name("N")
      ->capture_default_str()
      ->excludes("--nproc-per-node")
      ->needs("--servers")
      ->group(group);
  app.add_option("--on-trainer-loss", options.on_trainer_loss,
                 "What servers do when a trainer stops responding (default: fail); continue: the "
                 "job continues without it, which requires trainers without a process group")
      ->check(one_of({"fail", "wait", "continue"}))
      ->needs("--servers")
      ->group(group);
  app.add_option(
         "--server-dir", options.servers.folder,
         "Folder of the servers' state, server.N/ for each (default: servers/ in --log-dir)")
      ->type_name(kFolder)
      ->needs("--servers")
      ->group(group);
  app.add_option("--max-server-restarts", options.servers.max_restarts,
                 "Maximum number of server restarts; a server keeps its socket and folder")
      ->capture_default_str()
      ->needs("--servers")
      ->group(group);
  app.add_option("--server-arg", options.servers.arguments,
                 "Additional argument of the servers; repeatable")
      ->type_name("TEXT")
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
      ->needs("--servers")
      ->group(group);
  app.add_option("--server-program", options.servers.program,
                 "Program of the servers (default: cohort-ps beside cohort)")
      ->type_name(kFile)
      ->needs("--servers")
      ->group(group);
}

void add_output_flags(CLI::App& app, RunOptions& options, Words& words) {
  const char* group = "Output";
  app.add_option(
         both_spellings("--log-dir"), options.log_dir,
         "Folder of the workers' logs (default: a temporary one, kept only after a failure)")
      ->type_name(kFolder)
      ->group(group);
  app.add_option(
         "--tee", words.tee,
         "Ranks whose output is also shown: rank0 (and lines of others that begin with '[rank R] "
         "'), all, none, or streams as torchrun numbers them (1 stdout, 2 stderr, 3 both): 3 for "
         "every local rank, 0:1,1:2 for the stdout of local rank 0 and the stderr of 1")
      ->capture_default_str()
      ->group(group);
  app.add_option("--redirects", words.redirects,
                 "Streams of rank 0 that go only to log files, numbered as in --tee")
      ->capture_default_str()
      ->group(group);
  app.add_option("--watch", words.watch, "Interval between tables of the ranks' state (0: never)")
      ->type_name(kSeconds)
      ->capture_default_str()
      ->group(group);
}

void add_failure_flags(CLI::App& app, Words& words) {
  const char* group = "Failures";
  app.add_option("--grace", words.grace, "Time for the other workers to exit after one failed")
      ->type_name(kSeconds)
      ->capture_default_str()
      ->group(group);
  app.add_option("--stall-timeout", words.stall_timeout,
                 "Time in one collective after which the missing ranks are reported (0: never)")
      ->type_name(kSeconds)
      ->capture_default_str()
      ->group(group);
  app.add_flag(both_spellings("--no-python"), words.no_python,
               "Accepted, no effect: programs never run through Python")
      ->group("Job");
}

void describe(CLI::App& app, RunOptions& options, Words& words) {
  app.name("cohort run");
  app.description(
      "Starts one worker per rank, monitors them, and cleans up all processes at the end.");
  app.footer("PROGRAM and its arguments follow: cohort run --nproc-per-node 4 -- ./train --lr 0.1");
  app.prefix_command();
  add_job_flags(app, options, words);
  add_rendezvous_flags(app, options, words);
  add_server_flags(app, options, words);
  add_output_flags(app, options, words);
  add_failure_flags(app, words);
}

void read_tee(const std::string& word, RunOptions& options) {
  if (word == "rank0") {
    options.tee = Tee::kRank0;
  } else if (word == "all") {
    options.tee = Tee::kAll;
  } else if (word == "none") {
    options.tee = Tee::kNone;
  } else {
    options.tee = Tee::kChosen;
    options.tee_streams = cohort::launch::parse_stream_choice("--tee", word, "rank0, all, none, ");
  }
}

void read_words(const Words& words, RunOptions& options) {
  options.nproc_per_node = cohort::launch::parse_nproc_per_node(words.nproc_per_node);
  options.nnodes = cohort::launch::parse_node_count(words.nnodes);
  read_tee(words.tee, options);
  options.redirects = cohort::launch::parse_stream_choice("--redirects", words.redirects);
  options.restart_policy = words.restart_policy == "single" ? cohort::launch::RestartPolicy::kSingle
                                                            : cohort::launch::RestartPolicy::kGroup;
  options.bind_cores = !words.numa_binding.empty()   ? BindCores::kNode
                       : words.bind_cores == "cores" ? BindCores::kCores
                                                     : BindCores::kNone;
  options.grace = to_milliseconds("--grace", words.grace);
  options.rdzv_timeout = to_milliseconds("--rdzv-timeout", words.rdzv_timeout);
  if (words.has_rdzv_timeout && !options.elastic())
    throw ConfigError(
        "--rdzv-timeout: expected --rdzv-endpoint beside it; the limit in which the ranks of a "
        "program find each other is the program's");
  if (words.rdzv_conf) {
    const milliseconds timeout = options.rdzv_timeout;
    cohort::launch::parse_rdzv_conf(*words.rdzv_conf, options);
    if (words.rdzv_conf->find("join_timeout") != std::string::npos && words.has_rdzv_timeout)
      throw ConfigError("--rdzv-timeout: expected none beside --rdzv-conf join_timeout, got " +
                        cohort::launch::seconds_text(timeout));
    if (!options.elastic()) throw ConfigError("--rdzv-conf: expected --rdzv-endpoint beside it");
  }
  if (words.rdzv_secret_file)
    options.rdzv_secret = cohort::read_secret("--rdzv-secret-file", *words.rdzv_secret_file);
  options.watch_period = to_milliseconds("--watch", words.watch);
  options.stall_timeout = to_milliseconds("--stall-timeout", words.stall_timeout);
  if (words.standalone && (options.elastic() || options.nnodes.max != 1)) {
    throw ConfigError("--standalone: expected one node and no --rdzv-endpoint, got more");
  }
  // One node that listens on any free port meets nobody: that is what --standalone means.
  if (options.nnodes.max == 1 && options.rdzv_endpoint.ends_with(":0"))
    options.rdzv_endpoint.clear();
}

void take_trainers(const Words& words, RunOptions& options) {
  if (words.trainers < 1 || words.trainers > kMostWorkers)
    throw ConfigError("--trainers: expected 1 to " + std::to_string(kMostWorkers) + ", got " +
                      std::to_string(words.trainers));
  options.nproc_per_node = words.trainers;
}

// CLI11 sees that --servers is there, but not that it is 0.
void check_flags_of_servers(const CLI::App& app, const RunOptions& options) {
  if (options.servers.count != 0) return;
  for (const char* flag : {"--trainers", "--on-trainer-loss", "--server-dir",
                           "--max-server-restarts", "--server-arg", "--server-program"}) {
    if (app.count(flag) > 0)
      throw ConfigError(std::string(flag) + ": expected --servers 1 or more beside it, got 0");
  }
}

std::string server_program() {
  const auto path = std::filesystem::read_symlink("/proc/self/exe").parent_path() / "cohort-ps";
  if (!std::filesystem::exists(path))
    throw ConfigError("--servers: expected " + path.string() +
                      ", got no such program; build it with scripts/build, or name one in "
                      "--server-program");
  return path.string();
}

}  // namespace

// Flags end at the first word that is none, or at "--"; the rest is the program's.
int run_command(int argc, char** argv) {
  RunOptions options;
  Words words;
  CLI::App app;
  describe(app, options, words);
  if (const auto ended = cohort::cli::parse(app, argc, argv)) return *ended;
  options.command = app.remaining();
  if (!options.command.empty() && options.command.front() == "--") {
    options.command.erase(options.command.begin());
  } else if (!options.command.empty() && options.command.front().starts_with("-")) {
    throw ConfigError(options.command.front() + ": expected a flag of `cohort run --help`");
  }
  words.has_rdzv_timeout = app.count("--rdzv-timeout") > 0;
  read_words(words, options);
  check_flags_of_servers(app, options);
  if (app.count("--trainers") > 0) take_trainers(words, options);
  if (options.elastic() && app.count("--node-rank") > 0) {
    throw ConfigError("--node-rank: expected none with --rdzv-endpoint, which numbers the nodes");
  }
  if (options.servers.count > 0 && options.servers.program.empty()) {
    cohort::launch::validate(options);  // A bad flag is named first.
    options.servers.program = server_program();
  }
  return cohort::launch::run(options);
}

std::vector<cohort::cli::FlagLine> flags_of_run() {
  RunOptions options;
  Words words;
  CLI::App app;
  describe(app, options, words);
  return cohort::cli::list_flags(app);
}
