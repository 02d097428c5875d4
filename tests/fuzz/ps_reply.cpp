// SPDX-License-Identifier: Apache-2.0
// Fuzzing of what a trainer does with the bytes that servers answer to a pull. The channel stands
// for the network: it answers all other calls as a server does, and a pull with the input.
//
// An input is the replies of both servers, each with its length before it. Checksums are made to
// fit, so that inputs get past them.
#include <array>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "cohort/ps/client/client.h"

#include "tests/fuzz/input.h"

namespace {

using namespace cohort;
using namespace cohort::ps;

constexpr int64_t kWidth = 3;
constexpr int64_t kElements = 13;

// What the two servers answer to the next pull.
std::array<std::vector<uint8_t>, 2>& answers() {
  static std::array<std::vector<uint8_t>, 2> bytes;
  return bytes;
}

class FuzzedChannel final : public Channel {
 public:
  explicit FuzzedChannel(int server) : server_(server) {}

  void send(const Request& request, int64_t, Done done) override {
    Reply reply{.server_incarnation = 1,
                .trainer_incarnation = 1,
                .is_initialised = true,
                .server = server_};
    if (request.call == Call::kPull) reply.message = sealed(answers()[size_t(server_)]);
    done(std::move(reply));
  }

 private:
  static Buffer sealed(std::span<const uint8_t> bytes) {
    Buffer buffer(bytes.size());
    std::copy(bytes.begin(), bytes.end(), reinterpret_cast<uint8_t*>(buffer.data()));
    if (buffer.size() < sizeof(Header)) return buffer;
    Header header;
    std::memcpy(&header, buffer.data(), sizeof(header));
    reseal(buffer.span(), header);
    return buffer;
  }

  int server_;
};

std::unique_ptr<Client> make_client() {
  const JobOptions job{
      .mode = Mode::kAsync,
      .servers = 2,
      .dense_rule = {.rule = Rule::kSgd, .learning_rate = 0.1f},
      .blocks = {{"w", 0, 5, 0}, {"w", 5, kElements, 1}},
      .tables = {{.name = "a", .width = kWidth},
                 {.name = "b", .width = 1},
                 {.name = "c", .width = kWidth, .wire_dtype = WireDtype::kBfloat16}}};
  const ClientOptions options{.servers = {"first", "second"}};
  return std::make_unique<Client>(
      options, job, [](int server) { return std::make_unique<FuzzedChannel>(server); });
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const std::unique_ptr<Client> client = make_client();
  fuzz::Pieces pieces(data, size);
  for (auto& answer : answers()) {
    const auto bytes = pieces.counted();
    answer.assign(bytes.begin(), bytes.end());
  }
  static const std::vector<uint64_t> ids{0, 1, 2, 3, 4, 5, 6, 7};
  // On the heap: a sanitizer sees what is written behind them.
  const float untouched = std::numeric_limits<float>::quiet_NaN();
  std::vector<float> a(ids.size() * kWidth, untouched);
  std::vector<float> b(ids.size(), untouched);
  std::vector<float> c(ids.size() * kWidth, untouched);
  std::vector<float> w(kElements, untouched);
  try {
    const std::vector<PullRows> rows{{.table = 0, .ids = ids, .weights = a},
                                     {.table = 1, .ids = ids, .weights = b},
                                     {.table = 2, .ids = ids, .weights = c}};
    client->pull(rows, {std::span(w)}).wait();
  } catch (const c10::Error&) {
    // Refused, as it should be. Anything else that is thrown ends the program.
  }
  return 0;
}
