// SPDX-License-Identifier: Apache-2.0
// A trainer of `cohort run --max-restarts 1`: in the first round trainer 1 is killed when trainer 0
// has pushed a step and it has none; in the second both meet, as trainers with a process group do,
// after their first pull and before their first push. usage: ps_restart_trainer FOLDER FIRST
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <unistd.h>
#include <utility>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/ps/client/client.h"
#include "cohort/ps/role.h"

namespace {

using namespace cohort::ps;

class Trainer {
 public:
  Trainer(std::string folder, uint32_t number) : folder_(std::move(folder)), number_(number) {}

  void say(const std::string& word) const {
    std::ofstream(folder_ + "/" + word + "." + std::to_string(number_));
  }
  void await(const std::string& word, uint32_t of) const {
    while (!std::filesystem::exists(folder_ + "/" + word + "." + std::to_string(of)))
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }

  void join(const std::vector<std::string>& servers) {
    const JobOptions job{.mode = Mode::kSync,
                         .reduce = Reduce::kSum,
                         .trainers = 2,
                         .servers = static_cast<int>(servers.size()),
                         .tables = {{.name = "rows",
                                     .width = 1,
                                     .rule = {.rule = Rule::kSgd, .learning_rate = 1},
                                     .initializer = {.kind = Initializer::Kind::kZeros}}}};
    LinkOptions link;
    link.trainer_timeout = std::chrono::milliseconds(30'000);  // Rather than for ever.
    client_ = std::make_unique<Client>(
        ClientOptions{.servers = servers, .trainer = number_, .link = link}, job);
  }
  float pull() const {
    float weight = 0, sum = 0;
    for (const uint64_t id : ids_) {
      const PullRows asked{0, std::span(&id, 1), std::span(&weight, 1)};
      client_->pull(std::span(&asked, 1), {}).wait();
      sum += weight;
    }
    return sum / static_cast<float>(ids_.size());
  }
  void push() {
    const std::vector<float> gradients(ids_.size(), -1);
    const PushRows pushed{0, ids_, gradients};
    client_->push(std::span(&pushed, 1), {});
    client_->flush();
  }

  // Ends by a signal.
  void first_round() {
    push();
    pull();
    if (number_ == 0) {
      push();
      say("pushed");
    } else {
      await("pushed", 0);
      ::kill(::getpid(), SIGKILL);
    }
    for (;;) ::pause();
  }
  void second_round() {
    pull();
    say("met");
    await("met", 1 - number_);
    for (int i = 0; i < 3; ++i) {
      push();
      pull();
    }
    const float weight = pull();
    std::ofstream(folder_ + "/result." + std::to_string(number_))
        << "weight " << weight << " after step " << client_->step();
    say("done");
    await("done", 1 - number_);
    client_->leave();
  }

 private:
  const std::string folder_;
  const uint32_t number_;
  const std::vector<uint64_t> ids_{1, 2, 3, 4, 5, 6, 7, 8};
  std::unique_ptr<Client> client_;
};

}  // namespace

int main(int count, char** arguments) {
  if (count != 3) return 2;
  try {
    const auto info = role_from_environment();
    const auto number = static_cast<uint32_t>(info->trainer_id);
    Trainer trainer(arguments[1], number);
    const bool is_first_round = std::string(std::getenv("COHORT_RESTART_COUNT")) == "0";
    const auto first = static_cast<uint32_t>(std::atoi(arguments[2]));
    if (!is_first_round && number != first) trainer.await("joined", first);
    trainer.join(info->servers);
    if (is_first_round) trainer.first_round();
    trainer.say("joined");
    trainer.second_round();
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", cohort::one_line(error).c_str());
    return 1;
  }
}
