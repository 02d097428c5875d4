#include "cohort/ps/client/exchange.h"

namespace cohort::ps {

namespace {

class DirectExchange final : public Exchange {
 public:
  explicit DirectExchange(Client& client) : client_(client) {}

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

std::unique_ptr<Exchange> make_direct_exchange(Client& client) {
  return std::make_unique<DirectExchange>(client);
}

}  // namespace cohort::ps
