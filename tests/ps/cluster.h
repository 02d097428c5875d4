// SPDX-License-Identifier: Apache-2.0
// Servers within the process, a network to them, and jobs to run on them.
#pragma once
#include <array>
#include <chrono>
#include <cstring>
#include <deque>
#include <fstream>
#include <functional>
#include <future>
#include <iterator>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cohort/base/log.h"
#include "cohort/ps/client/client.h"
#include "cohort/ps/server/server.h"

#include "tests/ps/chaos_channel.h"
#include "tests/ps/scratch_folder.h"

namespace cohort::ps {

/// Timeouts for a network of microseconds.
inline LinkOptions quick_link() {
  return {.attempt_timeout = std::chrono::milliseconds(300),
          .server_timeout = std::chrono::milliseconds(20'000),
          .trainer_timeout = std::chrono::milliseconds(20'000),
          .heartbeat_period = std::chrono::milliseconds(100)};
}

/// Servers that are started, ended and started again.
class Cluster {
 public:
  explicit Cluster(int servers, const ServerOptions& options = {}, const ChaosOptions& chaos = {})
      : slots_(static_cast<size_t>(servers)), network_(chaos) {
    for (int server = 0; server < servers; ++server) {
      options_.push_back(options);
      options_.back().server = server;
      options_.back().servers = servers;
      options_.back().folder = folder(server);
      start(server);
    }
  }
  ~Cluster() {
    for (ServerSlot& slot : slots_) slot.end();
  }
  Cluster(const Cluster&) = delete;
  Cluster& operator=(const Cluster&) = delete;

  std::string folder(int server) const { return scratch_.path("server-" + std::to_string(server)); }
  std::string path(const std::string& name) const { return scratch_.path(name); }
  /// What the servers have logged.
  std::string log() const {
    std::ifstream file(path("log"));
    return {std::istreambuf_iterator<char>(file), {}};
  }

  void start(int server) {
    const auto at = static_cast<size_t>(server);
    slots_[at].set(std::make_shared<Server>(options_[at], log_));
  }
  /// Ends it without notice: what it had not logged is lost.
  void end(int server) { slots_[static_cast<size_t>(server)].end(); }
  void restart(int server) {
    end(server);
    start(server);
  }

  ServerOptions& options(int server) { return options_[static_cast<size_t>(server)]; }
  ServerSlot& slot(int server) { return slots_[static_cast<size_t>(server)]; }

  std::unique_ptr<Client> client(uint32_t trainer, const JobOptions& job,
                                 const LinkOptions& link = quick_link(),
                                 const std::optional<std::string>& restore = std::nullopt) {
    ClientOptions client_options{.trainer = trainer, .restore = restore, .link = link};
    for (size_t server = 0; server < slots_.size(); ++server)
      client_options.servers.push_back("in-process:" + std::to_string(server));
    return std::make_unique<Client>(client_options, job,
                                    [this](int server) { return channel(server); });
  }
  std::unique_ptr<Channel> channel(int server) {
    return std::make_unique<ChaosChannel>(slot(server), network_);
  }

  /// Sends one request past the network, and waits for the answer (60 seconds).
  Reply ask(int server, const Request& request) {
    auto answer = send(server, request);
    if (answer.wait_for(std::chrono::seconds(60)) != std::future_status::ready)
      return {.code = Code::kLost, .text = "no answer within the test's 60 s"};
    return answer.get();
  }
  std::future<Reply> send(int server, const Request& request) {
    auto promise = std::make_shared<std::promise<Reply>>();
    if (const auto its_server = slot(server).get()) {
      its_server->submit(request, [promise](Reply reply) { promise->set_value(std::move(reply)); });
    } else {
      promise->set_value({.code = Code::kLost, .text = "there is no server"});
    }
    return promise->get_future();
  }

 private:
  const ScratchFolder scratch_;
  const Log log_{LogOptions{.file = scratch_.path("log"), .console = LogConsole::kNever}};
  std::vector<ServerOptions> options_;
  std::deque<ServerSlot> slots_;
  ChaosNetwork network_;
};

/// Holds a server's thread, so that its queue fills: from the constructor, which blocks until it does,
/// to `release`.
class HeldServer {
 public:
  explicit HeldServer(Server& server) {
    server.submit({.call = Call::kStatus},
                  [this, released = released_.get_future().share()](const Reply&) {
                    held_.set_value();
                    released.wait();
                  });
    held_.get_future().wait();
  }
  void release() { released_.set_value(); }

 private:
  std::promise<void> held_, released_;
};

/// Returns what `attempt` returns in the first run that takes less than a second, which is as long
/// as a server lets a request wait before it answers kNotYet; after 5 runs what the last returns.
template <class Attempt>
auto in_less_than_a_second(const Attempt& attempt) {
  for (int run = 1;; ++run) {
    const auto began = std::chrono::steady_clock::now();
    auto result = attempt();
    const auto took = std::chrono::steady_clock::now() - began;
    if (took < std::chrono::milliseconds(900) || run == 5) return result;
  }
}

/// One table "rows", updated by w -= g from zeros; no dense parameters: sums are exact, as long as
/// they are small integers.
inline JobOptions ledger_job(int trainers, int servers, Mode mode, int64_t width = 2) {
  return {.mode = mode,
          .reduce = Reduce::kSum,
          .trainers = trainers,
          .servers = servers,
          .dense_rule = {.rule = Rule::kSgd, .learning_rate = 1},
          .tables = {{.name = "rows",
                      .width = width,
                      .rule = {.rule = Rule::kSgd, .learning_rate = 1},
                      .initializer = {.kind = Initializer::Kind::kZeros}}}};
}

/// What a trainer without a Client says to a server: the hot calls, byte by byte.
class RawTrainer {
 public:
  RawTrainer(Cluster& cluster, const JobOptions& job, uint32_t trainer, uint64_t nonce = 0,
             int server = 0)
      : cluster_(cluster), job_(job) {
    cluster.ask(server, {.call = Call::kJob, .trainer = 0, .text = job.to_json()});
    joined = cluster.ask(
        server,
        {.call = Call::kJoin, .trainer = trainer, .job = job.fingerprint(), .nonce = nonce});
    header = {.job = job.fingerprint(),
              .trainer = trainer,
              .trainer_incarnation = joined.trainer_incarnation,
              .server_incarnation = joined.server_incarnation};
  }

  /// Pushes -1 to every element of the rows `ids` of table 0: adds 1 to them.
  Request push(uint64_t sequence, std::vector<uint64_t> ids = {1}) const {
    const std::array<SectionShape, 1> shapes{SectionShape{
        .table = 0, .width = static_cast<uint32_t>(job_.tables[0].width), .count = ids.size()}};
    MessageWriter writer(shapes);
    std::copy(ids.begin(), ids.end(), writer.ids(0).begin());
    std::fill(writer.values(0).begin(), writer.values(0).end(), -1.0f);
    Header its_header = header;
    its_header.kind = MessageKind::kPush;
    its_header.sequence = sequence;
    return {.call = Call::kPush,
            .trainer = header.trainer,
            .message = std::make_shared<const Buffer>(writer.finish(its_header))};
  }

  Request confirm(uint64_t step) const {
    return {.call = Call::kConfirm,
            .trainer = header.trainer,
            .incarnation = header.trainer_incarnation,
            .step = step};
  }

  Request pull(std::vector<uint64_t> ids, uint64_t step = 0, uint32_t flags = 0) const {
    const std::array<SectionShape, 1> shapes{
        SectionShape{.table = 0,
                     .width = static_cast<uint32_t>(job_.tables[0].width),
                     .count = ids.size(),
                     .has_values = false}};
    MessageWriter writer(shapes);
    std::copy(ids.begin(), ids.end(), writer.ids(0).begin());
    Header its_header = header;
    its_header.kind = MessageKind::kPull;
    its_header.step = step;
    its_header.flags = flags;
    return {.call = Call::kPull,
            .trainer = header.trainer,
            .message = std::make_shared<const Buffer>(writer.finish(its_header))};
  }

  /// The first weight of a row.
  float weight(uint64_t id) {
    const Reply reply = cluster_.ask(0, pull({id}));
    if (reply.code != Code::kOk) return -1;
    return parse_message(reply.message.span()).sections[0].values[0];
  }

  Header header;
  Reply joined;

 private:
  Cluster& cluster_;
  JobOptions job_;
};

}  // namespace cohort::ps
