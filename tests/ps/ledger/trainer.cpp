// SPDX-License-Identifier: Apache-2.0
#include "tests/ps/ledger/trainer.h"

#include <algorithm>
#include <fcntl.h>
#include <memory>
#include <random>
#include <sys/mman.h>
#include <thread>
#include <unistd.h>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/fd.h"
#include "cohort/ps/client/client.h"
#include "cohort/ps/client/communicator.h"
#include "cohort/ps/rpc/rpc_channel.h"

#include "tests/ps/chaos_channel.h"

namespace cohort::ps {

namespace {

using std::chrono::milliseconds;

constexpr uint32_t kWidth = 2;
constexpr int64_t kBound = 3;
constexpr size_t kParameter = 301;

Client::ChannelMaker plain_channels(const std::vector<std::string>& endpoints) {
  return [endpoints](int server) {
    return make_rpc_channel({.endpoint = endpoints.at(static_cast<size_t>(server))});
  };
}

LinkOptions patient_link() {
  return {.attempt_timeout = milliseconds(1'000),
          .server_timeout = milliseconds(180'000),
          .trainer_timeout = milliseconds(180'000),
          .heartbeat_period = milliseconds(200)};
}

// Rows of a step: each once; the same when a successor repeats it.
std::vector<uint64_t> rows_of(uint64_t seed, uint32_t trainer, uint64_t step) {
  std::mt19937_64 random(seed * 1'000'003 + step * 16 + trainer);
  std::vector<uint64_t> ids;
  for (uint64_t id = 0; id < kLedgerRows; ++id) {
    if (random() % 16 == 0) ids.push_back(id);
  }
  return ids;
}

std::unique_ptr<Communicator> communicator_of(const TrainerOptions& options, Client& client) {
  if (options.mode == "half-async") return make_half_async_communicator(client, 8);
  if (options.mode != "geo") return make_direct_communicator(client);
  const RuleOptions plain{.rule = Rule::kSgd, .learning_rate = 1};
  return make_geo_communicator(
      client,
      {.dense_rule = plain, .table_rules = {plain}, .steps = 5, .trainers = options.trainers});
}

// At most the true lead: what is acknowledged here less what may have been pushed there.
void note_lead(Page& page, const TrainerOptions& options) {
  auto& own = page.trainers[options.trainer];
  uint64_t slowest = UINT64_MAX;
  for (int trainer = 0; trainer < options.trainers; ++trainer) {
    const auto& other = page.trainers[static_cast<size_t>(trainer)];
    if (!other.done) slowest = std::min(slowest, other.begun.load());
  }
  const uint64_t steps = own.steps;
  if (steps > slowest) own.greatest_lead = std::max(own.greatest_lead.load(), steps - slowest);
}

// Adds 1 to rows until it is told to stop.
void add_up(const TrainerOptions& options, Client& client, Page& page) {
  auto& own = page.trainers[options.trainer];
  const auto communicator = communicator_of(options, client);
  std::mt19937_64 random(options.seed + options.trainer);
  std::vector<uint32_t> in_flight(kLedgerRows);
  const bool repeats = client.job().mode == Mode::kSync;
  uint64_t step = client.step();
  const auto acknowledge = [&](uint64_t steps) {
    own.acknowledged_steps = steps;  // First: a trainer killed in between has counted too few.
    for (uint64_t id = 0; id < kLedgerRows; ++id)
      own.acknowledged[id] += std::exchange(in_flight[id], 0);
  };
  for (; !page.stop; ++step) {
    const auto ids = rows_of(options.seed, options.trainer, repeats ? step : random());
    std::vector<float> values(ids.size() * kWidth);
    communicator->pull({{0, ids, values}}, {})();
    if (options.mode == "ssp") note_lead(page, options);
    for (const uint64_t id : ids) {
      if (!repeats || step >= own.sent_steps) ++own.sent[id];
      if (!repeats || step >= own.acknowledged_steps) ++in_flight[id];
    }
    own.sent_steps = step + 1;
    std::fill(values.begin(), values.end(), -1.0f);
    ++own.begun;
    communicator->push({{0, ids, values}}, {});
    // Only now and then: most pushes are in flight while others are made.
    if (options.mode != "ssp" && random() % 8 != 0) continue;
    communicator->flush();
    acknowledge(step + 1);
    ++own.steps;
  }
  communicator->flush();
  acknowledge(step);
}

// So many steps with gradients that hang on the values.
void fit(const TrainerOptions& options, Client& client, Page& page) {
  std::vector<float> parameter(kParameter, 0.25f);
  if (options.trainer == 0 && client.needs_initial_values()) {
    const std::span<const float> view(parameter);
    client.initialise(std::span(&view, 1));
  }
  while (client.step() < options.steps) {
    const uint64_t step = client.step();
    const auto ids = rows_of(options.seed, options.trainer, step);
    std::vector<float> rows(ids.size() * kWidth);
    const PullRows asked{0, ids, rows};
    client.pull(std::span(&asked, 1), {std::span<float>(parameter)}).wait();
    std::mt19937_64 random(step * 4 + options.trainer);
    for (auto* values : {&parameter, &rows}) {
      for (float& value : *values)
        value = std::uniform_real_distribution<float>(-1, 1)(random) + 0.1f * value;
    }
    const PushRows pushed{0, ids, rows};
    client.push(std::span(&pushed, 1), {std::span<const float>(parameter)});
    ++page.trainers[options.trainer].steps;
    // Steps that pass in a moment would leave no time to be killed in.
    std::this_thread::sleep_for(milliseconds(5));
  }
  client.flush();
}

}  // namespace

Page* map_page(const std::string& path) {
  const Fd file(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666));
  TORCH_CHECK(file && ::ftruncate(file.get(), sizeof(Page)) == 0, path, ": cannot make it");
  void* const address =
      ::mmap(nullptr, sizeof(Page), PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
  TORCH_CHECK(address != MAP_FAILED, path, ": cannot map it");
  return static_cast<Page*>(address);  // Zeros are what its parts begin with.
}

const std::vector<std::string>& ledger_modes() {
  static const std::vector<std::string> modes{"sync", "async", "half-async", "geo", "ssp"};
  return modes;
}

JobOptions ledger_job_of(const std::string& mode, int trainers, int servers) {
  const RuleOptions plain{.rule = mode == "geo" ? Rule::kAdd : Rule::kSgd, .learning_rate = 1};
  JobOptions job{.mode = mode == "sync" || mode == "model" ? Mode::kSync : Mode::kAsync,
                 .reduce = Reduce::kSum,
                 .trainers = trainers,
                 .servers = servers,
                 .max_staleness = mode == "ssp" ? kBound : -1,
                 .dense_rule = plain,
                 .tables = {{.name = "rows",
                             .width = kWidth,
                             .rule = plain,
                             .initializer = {.kind = Initializer::Kind::kZeros}}}};
  if (mode != "model") return job;
  job.reduce = Reduce::kMean;
  job.dense_rule = {.rule = Rule::kAdam, .learning_rate = 0.01f};
  job.tables[0].rule = {.rule = Rule::kRowwiseAdagrad, .learning_rate = 0.05f};
  job.tables[0].initializer = {.scale = 0.5f};
  for (int server = 0; server < servers; ++server) {
    const auto part = static_cast<int64_t>(kParameter) / servers;
    job.blocks.push_back(
        {"w", server * part,
         server + 1 == servers ? static_cast<int64_t>(kParameter) : (server + 1) * part, server});
  }
  return job;
}

void run_trainer(const TrainerOptions& options) {
  Page& page = *map_page(options.page);
  const JobOptions job =
      ledger_job_of(options.mode, options.trainers, static_cast<int>(options.endpoints.size()));
  // On top of what the proxy does to connections: whole messages lost, twice, late.
  ChaosNetwork network({.seed = options.seed + options.trainer,
                        .lose = 0.01,
                        .twice = 0.05,
                        .late = 0.1,
                        .latest = milliseconds(30)});
  const auto plain = plain_channels(options.endpoints);
  std::vector<std::shared_ptr<Channel>> channels;
  {
    Client client(
        {.servers = options.endpoints, .trainer = options.trainer, .link = patient_link()}, job,
        [&](int server) {
          channels.push_back(plain(server));
          return std::make_unique<ChaosChannel>(
              [channel = channels.back()](const Request& request, int64_t timeout_ms, Done done) {
                channel->send(request, timeout_ms, std::move(done));
              },
              network);
        });
    if (options.mode == "model") {
      fit(options, client, page);
    } else {
      add_up(options, client, page);
    }
    page.trainers[options.trainer].done = true;
    client.leave();
  }
  // Copies of messages are still on their way through the network, which would wait for them.
  ::_exit(0);
}

std::vector<float> weights_of(const std::string& mode, int trainers,
                              const std::vector<std::string>& endpoints) {
  const JobOptions job = ledger_job_of(mode, trainers, static_cast<int>(endpoints.size()));
  Client client({.servers = endpoints, .trainer = kNoTrainer, .link = patient_link()}, job);
  std::vector<uint64_t> ids(kLedgerRows);
  for (uint64_t id = 0; id < kLedgerRows; ++id) ids[id] = id;
  std::vector<float> weights(kLedgerRows * kWidth);
  const PullRows asked{0, ids, weights};
  std::vector<float> parameter(job.blocks.empty() ? 0 : kParameter);
  std::vector<std::span<float>> parameters;
  if (!parameter.empty()) parameters.emplace_back(parameter);
  client.pull(std::span(&asked, 1), parameters).wait();
  weights.insert(weights.end(), parameter.begin(), parameter.end());
  return weights;
}

}  // namespace cohort::ps
