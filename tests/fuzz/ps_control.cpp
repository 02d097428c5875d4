// SPDX-License-Identifier: Apache-2.0
// Fuzzing of a server's rules: a list of calls that one trainer or several make, the hot ones among
// them, as they come out of the network's library.
//
// An input is a list of calls: a Head, then as many bytes as it says: a job, a message. Saving is
// left out: it would write wherever the input says.
#include <limits>
#include <memory>
#include <optional>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/ps/server/request_handler.h"

#include "tests/fuzz/input.h"

namespace {

using namespace cohort;
using namespace cohort::ps;

struct Head {
  uint8_t call = 0;
  uint8_t trainer = 0;  // 255: kNoTrainer.
  uint8_t marks = 0;
  uint8_t step = 0;
};
// What a caller knows who has been answered before.
constexpr uint8_t kRightJob = 1;
constexpr uint8_t kRightIncarnation = 2;
constexpr uint8_t kNonce = 4;
constexpr uint8_t kLater = 8;  // A second passes first.
// It arrives now, and is handled behind the next call: a job may be declared in between.
constexpr uint8_t kOvertaken = 16;

// Whether a job is one for the memory that a fuzzer has. A server makes what it is told to.
bool is_small(const std::string& text) {
  try {
    const JobOptions job = JobOptions::parse(text);
    int64_t elements = 0;
    for (const BlockOptions& block : job.blocks) {
      if (block.end - block.begin > 1 << 16) return false;
      elements += block.end - block.begin;
    }
    for (const TableOptions& table : job.tables) elements += table.width;
    return elements <= 1 << 16 && job.trainers <= 1 << 10;
  } catch (const ConfigError&) {
    return true;  // The server shall say so.
  }
}

class Caller {
 public:
  explicit Caller(RequestHandler& handler) : handler_(handler) {}

  void call(const Head& head, std::span<const uint8_t> bytes) {
    const auto call = static_cast<Call>(head.call % 12);  // One is unknown.
    if (call == Call::kSave || call == Call::kFinishSave) return;
    if (head.marks & kLater) now_ += std::chrono::seconds(1);
    const uint32_t trainer = head.trainer == 255 ? kNoTrainer : head.trainer % 4;
    Request request{.call = call, .trainer = trainer};
    if (call == Call::kPush || call == Call::kPull) {
      if (!set_message(request, head, bytes)) return;
    } else {
      set_control(request, head, bytes);
      if (call == Call::kJob && !is_small(request.text)) return;
    }
    auto overtaken = std::exchange(overtaken_, std::nullopt);
    if (auto pending = arrive(std::move(request))) {
      if (head.marks & kOvertaken) {
        overtaken_ = std::move(pending);
      } else {
        handle(std::move(*pending));
      }
    }
    if (overtaken) handle(std::move(*overtaken));
  }

 private:
  // As Server::submit takes it.
  std::optional<Pending> arrive(Request request) {
    try {
      Pending pending = handler_.arrival_check().check(std::move(request));
      pending.arrived = now_;
      pending.done = [this](const Reply& reply) { hear(reply); };
      return pending;
    } catch (const c10::ValueError&) {
      return std::nullopt;  // Refused, as it should be.
    }
  }

  void handle(Pending pending) {
    if (handler_.is_stopped()) return;
    handler_.handle(std::move(pending));
    handler_.finish_batch(now_);
    handler_.tick(now_);
  }

  void set_control(Request& request, const Head& head, std::span<const uint8_t> bytes) const {
    request.text = fuzz::text_of(bytes);
    if (request.call == Call::kJob) job_of(request.text);
    request.job = head.marks & kRightJob ? job_ : head.step;
    request.incarnation = head.marks & kRightIncarnation ? trainer_incarnation_ : head.step % 4;
    request.step = head.step;
    request.nonce = head.marks & kNonce ? 1 + head.step % 4 : 0;
  }

  bool set_message(Request& request, const Head& head, std::span<const uint8_t> bytes) const {
    auto buffer = std::make_shared<Buffer>(bytes.size());
    std::copy(bytes.begin(), bytes.end(), reinterpret_cast<uint8_t*>(buffer->data()));
    try {
      Message message = parse_message(buffer->span(), Checksums::kIgnored);
      Header& header = message.header;
      header.kind = request.call == Call::kPush ? MessageKind::kPush : MessageKind::kPull;
      header.trainer = request.trainer;
      header.sequence = header.step = head.step;
      if (head.marks & kRightJob) header.job = job_;
      if (head.marks & kRightIncarnation) {
        header.trainer_incarnation = trainer_incarnation_;
        header.server_incarnation = server_incarnation_;
      }
      reseal(buffer->span(), header);
    } catch (const c10::ValueError&) {
      return false;  // Refused, as it should be.
    }
    request.message = std::move(buffer);
    return true;
  }

  void job_of(const std::string& text) const {
    try {
      job_ = JobOptions::parse(text).fingerprint();
    } catch (const ConfigError&) {
    }
  }

  void hear(const Reply& reply) {
    server_incarnation_ = reply.server_incarnation;
    if (reply.trainer_incarnation != 0) trainer_incarnation_ = reply.trainer_incarnation;
  }

  RequestHandler& handler_;
  std::optional<Pending> overtaken_;
  std::chrono::steady_clock::time_point now_ = std::chrono::steady_clock::now();
  mutable uint64_t job_ = 0;
  uint64_t server_incarnation_ = 0;
  uint64_t trainer_incarnation_ = 0;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const Log log({.console = LogConsole::kNever});
  RequestHandler handler({.durability = Durability::kApplied,
                          .on_trainer_loss = OnTrainerLoss::kContinue,
                          .max_queue_bytes = 1 << 16},
                         log);
  Caller caller(handler);
  fuzz::Pieces pieces(data, size);
  while (!pieces.empty() && !handler.is_stopped()) {
    const auto head = pieces.number<Head>();
    caller.call(head, pieces.counted());
  }
  handler.close();
  return 0;
}
