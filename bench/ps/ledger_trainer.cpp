// SPDX-License-Identifier: Apache-2.0
// A trainer whose pushes can be counted afterwards: every gradient is -1, every learning rate 1,
// all begins with zeros and is summed. So a weight is the number of pushes to it.
#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "cohort/base/endpoint_list.h"
#include "cohort/base/program.h"
#include "cohort/cli/parse.h"
#include "cohort/ps/client/client.h"

namespace {

using namespace cohort;
using Clock = std::chrono::steady_clock;

constexpr uint64_t kRows = 1000;
constexpr uint64_t kRowsOfPush = 20;
constexpr int64_t kDense = 8;
constexpr int64_t kWidth = 4;

struct Flags {
  std::string servers;
  uint32_t trainer = 0;
  int trainers = 2;
  std::string mode = "async";
  double seconds = 10;
  double pause_ms = 1;
  bool read = false;
};

ps::JobOptions job_of(const Flags& flags, int servers) {
  const ps::RuleOptions rule{.rule = ps::Rule::kSgd, .learning_rate = 1};
  ps::JobOptions job{.mode = flags.mode == "sync" ? ps::Mode::kSync : ps::Mode::kAsync,
                     .reduce = ps::Reduce::kSum,
                     .trainers = flags.trainers,
                     .servers = servers,
                     .dense_rule = rule};
  for (int server = 0; server < servers; ++server)
    job.blocks.push_back({"w", kDense * server, kDense * (server + 1), server});
  job.tables = {{.name = "ids",
                 .width = kWidth,
                 .rule = rule,
                 .initializer = {.kind = ps::Initializer::Kind::kZeros}}};
  return job;
}

// The ids of the n-th push: others each time, all as often in the end.
std::vector<uint64_t> ids_of(uint64_t number) {
  std::vector<uint64_t> ids;
  for (uint64_t i = 0; i < kRowsOfPush; ++i) ids.push_back((number * kRowsOfPush + i) % kRows);
  return ids;
}

struct Values {
  std::vector<float> dense, rows;
};

Values pull(ps::Client& client, std::span<const uint64_t> ids, int64_t dense) {
  Values values{std::vector<float>(static_cast<size_t>(dense)),
                std::vector<float>(ids.size() * kWidth)};
  const ps::PullRows rows{.ids = ids, .weights = values.rows};
  client.pull(std::span(&rows, 1), {std::span<float>(values.dense)}).wait();
  return values;
}

// Prints every weight: dense ones, then the first of each row.
int print_weights(ps::Client& client, int64_t dense) {
  std::vector<uint64_t> ids;
  for (uint64_t id = 0; id < kRows; ++id) ids.push_back(id);
  const Values values = pull(client, ids, dense);
  nlohmann::json result{{"dense", values.dense}, {"rows", nlohmann::json::array()}};
  for (uint64_t id = 0; id < kRows; ++id) result["rows"].push_back(values.rows[id * kWidth]);
  std::printf("%s\n", result.dump().c_str());
  return kExitOk;
}

int train(const Flags& flags, ps::Client& client, int64_t dense) {
  if (client.needs_initial_values() && flags.trainer == 0) {
    const std::vector<float> zeros(static_cast<size_t>(dense));
    const std::span<const float> values(zeros);
    client.initialise(std::span(&values, 1));
  }
  const std::vector<float> dense_gradient(static_cast<size_t>(dense), -1);
  const std::vector<float> gradients(kRowsOfPush * kWidth, -1);
  uint64_t pushes = 0;
  const auto end = Clock::now() + std::chrono::duration<double>(flags.seconds);
  while (Clock::now() < end) {
    const auto ids = ids_of(pushes);
    pull(client, ids, dense);
    const ps::PushRows rows{.ids = ids, .gradients = gradients};
    client.push(std::span(&rows, 1), {std::span<const float>(dense_gradient)});
    ++pushes;
    std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(flags.pause_ms));
  }
  client.leave();  // Everything is acknowledged before.
  std::printf("%s\n", nlohmann::json{{"pushes", pushes}}.dump().c_str());
  return kExitOk;
}

int run(int argc, char** argv) {
  Flags flags;
  CLI::App app("A trainer whose pushes can be counted", "ps_ledger_trainer");
  app.add_option("--pservers", flags.servers, "Endpoints")->required();
  app.add_option("--trainer", flags.trainer, "Its number");
  app.add_option("--trainers", flags.trainers, "Those that a step needs at least");
  app.add_option("--mode", flags.mode, "sync or async")->check(cli::one_of({"sync", "async"}));
  app.add_option("--seconds", flags.seconds, "Trains for this time, then leaves");
  app.add_option("--pause", flags.pause_ms, "Milliseconds between pushes");
  app.add_flag("--read", flags.read, "Only prints the weights");
  if (const auto ended = cli::parse(app, argc, argv)) return *ended;
  const auto servers = parse_server_endpoints("--pservers", flags.servers);
  const auto count = static_cast<int>(servers.size());
  ps::Client client({.servers = servers, .trainer = flags.read ? ps::kNoTrainer : flags.trainer},
                    job_of(flags, count));
  return flags.read ? print_weights(client, kDense * count) : train(flags, client, kDense * count);
}

}  // namespace

int main(int argc, char** argv) {
  return cohort::run_program("ps_ledger_trainer", [&] { return run(argc, argv); });
}
