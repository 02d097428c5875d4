// SPDX-License-Identifier: Apache-2.0
#include "cohort/launch/options.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <iomanip>
#include <map>
#include <net/if.h>
#include <optional>
#include <set>
#include <sstream>
#include <string_view>

#include "cohort/base/endpoint_list.h"
#include "cohort/base/error.h"
#include "cohort/launch/to_int.h"

namespace cohort::launch {
namespace {

void require(bool holds, const std::string& flag, const std::string& expected,
             const std::string& got) {
  if (!holds) throw ConfigError(flag + ": expected " + expected + ", got " + got);
}

std::string interfaces() {
  std::string names;
  struct if_nameindex* all = ::if_nameindex();
  for (auto* entry = all; entry && entry->if_index != 0; ++entry) {
    names += (names.empty() ? "" : ", ") + std::string(entry->if_name);
  }
  if (all) ::if_freenameindex(all);
  return names;
}

void validate_nodes(const RunOptions& options) {
  const NodeCount& nodes = options.nnodes;
  require(nodes.min >= 1 && nodes.min <= nodes.max && nodes.max <= 65536, "--nnodes",
          "N, or MIN:MAX, from 1 to 65536",
          std::to_string(nodes.min) + ":" + std::to_string(nodes.max));
  require(options.node_rank >= 0 && options.node_rank < nodes.max, "--node-rank",
          "0 to nnodes - 1 = " + std::to_string(nodes.max - 1), std::to_string(options.node_rank));
  require(options.master_port >= 0 && options.master_port <= 65535, "--master-port",
          "0 (a free port) or 1 to 65535", std::to_string(options.master_port));
  require(options.rdzv_timeout.count() > 0, "--rdzv-timeout", "seconds > 0",
          seconds_text(options.rdzv_timeout));
  require(options.elastic() || nodes.max > 1 || options.rdzv_secret.empty(), "--rdzv-secret-file",
          "--rdzv-endpoint or several nodes beside it", "none");
  if (options.elastic()) {
    require(options.master_addr.empty(), "--master-addr",
            "none with --rdzv-endpoint, whose host it is", options.master_addr);
    return;
  }
  require(nodes.min == nodes.max, "--rdzv-endpoint", "host:port when --nnodes is MIN:MAX", "none");
  if (nodes.max == 1) return;
  require(options.max_restarts == 0, "--rdzv-endpoint",
          "host:port when --nnodes > 1 and --max-restarts > 0: all nodes restart together", "none");
  require(options.master_port != 0, "--master-port", "a port when --nnodes > 1", "none");
  require(!options.master_addr.empty(), "--master-addr", "node 0's address when --nnodes > 1",
          "none");
}

void validate_streams(const RunOptions& options, const std::string& flag,
                      const StreamChoice& choice) {
  for (const auto& [rank, streams] : choice.of_rank) {
    require(rank < options.nproc_per_node, flag,
            "local ranks 0 to nproc-per-node - 1 = " + std::to_string(options.nproc_per_node - 1),
            std::to_string(rank));
  }
}

void validate_servers(const RunOptions& options) {
  if (!options.pservers.empty()) parse_server_endpoints("--pservers", options.pservers);
  const ServerOptions& servers = options.servers;
  require(servers.count >= 0 && servers.count <= 4096, "--servers", "0 to 4096",
          std::to_string(servers.count));
  require(servers.max_restarts >= 0, "--max-server-restarts", "0 or more",
          std::to_string(servers.max_restarts));
  if (servers.count == 0) {
    require(options.restart_policy == RestartPolicy::kGroup, "--restart-policy",
            "group, or --servers beside it (a rank of a process group cannot start again alone)",
            "single");
    require(options.on_trainer_loss.empty(), "--on-trainer-loss", "--servers beside it", "none");
    require(options.pservers.empty() || options.nnodes.min == options.nnodes.max, "--nnodes",
            "one number with --pservers, whose number of trainers is fixed", options.nnodes.text());
    return;
  }
  require(options.pservers.empty(), "--pservers", "none with --servers, which starts its own",
          options.pservers);
  require(options.nnodes.max == 1 && !options.elastic(), "--servers",
          "one node: on several, start `cohort ps server` by hand and name it in --pservers",
          options.elastic() ? "--rdzv-endpoint" : "--nnodes " + options.nnodes.text());
}

}  // namespace

std::string seconds_text(std::chrono::milliseconds time) {
  std::ostringstream text;
  text << std::setprecision(10) << static_cast<double>(time.count()) / 1000 << " s";
  return text.str();
}

int StreamChoice::of(int local_rank) const {
  const auto found = of_rank.find(local_rank);
  return found == of_rank.end() ? every : found->second;
}

StreamChoice parse_stream_choice(const std::string& flag, const std::string& text,
                                 const std::string& words) {
  const std::string expected =
      words + "0 to 3 (1 stdout, 2 stderr), or LOCAL_RANK:0-3 with commas between";
  const auto streams = [&](std::string_view word) {
    const auto bits = to_int(word);
    require(bits && *bits >= 0 && *bits <= (kStdout | kStderr), flag, expected, text);
    return *bits;
  };
  StreamChoice choice;
  if (text.find(':') == std::string::npos) {
    choice.every = streams(text);
    return choice;
  }
  std::istringstream choices(text);
  for (std::string word; std::getline(choices, word, ',');) {
    const size_t colon = word.find(':');
    const auto rank = to_int(std::string_view(word).substr(0, colon));
    require(colon != std::string::npos && rank && *rank >= 0, flag, expected, text);
    const int bits = streams(std::string_view(word).substr(colon + 1));
    require(choice.of_rank.emplace(*rank, bits).second, flag, "each local rank once", text);
  }
  return choice;
}

std::string NodeCount::text() const {
  return min == max ? std::to_string(min) : std::to_string(min) + ":" + std::to_string(max);
}

NodeCount parse_node_count(const std::string& text) {
  const size_t colon = text.find(':');
  const auto first = to_int(std::string_view(text).substr(0, colon));
  const auto last =
      colon == std::string::npos ? first : to_int(std::string_view(text).substr(colon + 1));
  require(first && last, "--nnodes", "N or MIN:MAX", text);
  return {*first, *last};
}

void parse_rdzv_conf(const std::string& text, RunOptions& options) {
  const std::string flag = "--rdzv-conf";
  const std::map<std::string, std::chrono::milliseconds*> times{
      {"join_timeout", &options.rdzv_timeout},
      {"keep_alive_interval", &options.keep_alive.interval},
      {"last_call_timeout", &options.last_call_timeout}};
  require(!text.empty(), flag, "KEY=NUMBER, with commas between", "an empty text");
  std::set<std::string> given;
  std::istringstream words(text);
  for (std::string word; std::getline(words, word, ',');) {
    const size_t equals = std::min(word.find('='), word.size());
    const std::string key = word.substr(0, equals);
    const std::string value = word.substr(std::min(equals + 1, word.size()));
    const auto time = times.find(key);
    require(time != times.end() || key == "keep_alive_max_attempt", flag,
            "KEY=NUMBER with KEY one of join_timeout, keep_alive_interval, keep_alive_max_attempt, "
            "last_call_timeout, with commas between",
            word.empty() ? "nothing" : word);
    require(given.insert(key).second, flag, key + " once", "it twice");
    if (time == times.end()) {
      const auto count = to_int(value);
      require(count && *count >= 1 && *count <= 1000, flag, key + "=1 to 1000", word);
      options.keep_alive.max_attempt = *count;
      continue;
    }
    char* end = nullptr;
    const double seconds = std::strtod(value.c_str(), &end);
    require(!value.empty() && *end == '\0' && seconds >= 0.05 && seconds <= 1e6, flag,
            key + "=seconds from 0.05 to 1000000", word);
    *time->second = std::chrono::milliseconds(std::llround(seconds * 1000));
  }
}

int RunOptions::shown_streams(int rank, int local_rank) const {
  switch (tee) {
    case Tee::kAll:
      return kStdout | kStderr;
    case Tee::kChosen:
      return tee_streams.of(local_rank);
    case Tee::kRank0:
      return rank == 0 ? (kStdout | kStderr) & ~redirects.of(local_rank) : 0;
    case Tee::kNone:
      break;
  }
  return 0;
}

void validate(const RunOptions& options) {
  require(options.nproc_per_node >= 1 && options.nproc_per_node <= kMostWorkers, "--nproc-per-node",
          "1 to " + std::to_string(kMostWorkers), std::to_string(options.nproc_per_node));
  require(options.max_restarts >= 0, "--max-restarts", "0 or more",
          std::to_string(options.max_restarts));
  validate_nodes(options);
  validate_servers(options);
  validate_streams(options, "--tee", options.tee_streams);
  validate_streams(options, "--redirects", options.redirects);
  require(options.grace.count() >= 0, "--grace", "seconds >= 0", seconds_text(options.grace));
  require(options.watch_period.count() >= 0, "--watch", "seconds >= 0",
          seconds_text(options.watch_period));
  require(options.stall_timeout.count() >= 0, "--stall-timeout", "seconds >= 0",
          seconds_text(options.stall_timeout));
  require(options.keep_alive.interval.count() > 0, "--rdzv-conf", "keep_alive_interval > 0",
          seconds_text(options.keep_alive.interval));
  require(options.keep_alive.max_attempt >= 1 && options.keep_alive.max_attempt <= 1000,
          "--rdzv-conf", "keep_alive_max_attempt 1 to 1000",
          std::to_string(options.keep_alive.max_attempt));
  require(options.last_call_timeout.count() >= 0, "--rdzv-conf", "last_call_timeout >= 0",
          seconds_text(options.last_call_timeout));
  require(options.interface.empty() || ::if_nametoindex(options.interface.c_str()) != 0,
          "--interface", "one of " + interfaces(), options.interface);
  require(!options.command.empty(), "PROGRAM", "a program to start after --", "nothing");
}

}  // namespace cohort::launch
