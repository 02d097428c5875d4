// SPDX-License-Identifier: Apache-2.0
#include "cohort/ps/client/communicator.h"

namespace cohort::ps {

namespace {

class DirectCommunicator final : public Communicator {
 public:
  explicit DirectCommunicator(Client& client) : client_(client) {}

  std::function<void()> pull(std::vector<PullRows> rows, std::vector<std::span<float>> parameters,
                             bool is_prediction) override {
    auto pending =
        std::make_shared<PendingPull>(client_.pull(rows, std::move(parameters), is_prediction));
    return [pending] { pending->wait(); };
  }

  void push(std::vector<PushRows> rows, std::vector<std::span<const float>> parameters) override {
    client_.push(rows, std::move(parameters));
  }

  void flush() override { client_.flush(); }

 private:
  Client& client_;
};

}  // namespace

std::unique_ptr<Communicator> make_direct_communicator(Client& client) {
  return std::make_unique<DirectCommunicator>(client);
}

}  // namespace cohort::ps
