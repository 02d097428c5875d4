// SPDX-License-Identifier: Apache-2.0
// Fuzzing of what a server does with bytes from the network: the decoder, with checksums off so
// that inputs get past them, then the state that a message that fits its job is applied to.
#include <c10/util/Exception.h>
#include <cstring>
#include <memory>
#include <span>

#include "cohort/ps/server/parameter_state.h"

namespace {

using namespace cohort::ps;

// One server with small tables, one in bfloat16, and two blocks, and trainer 0.
std::unique_ptr<ParameterState> make_state() {
  auto state = std::make_unique<ParameterState>(0, "");
  JobOptions job{
      .mode = Mode::kAsync,
      .error_if_nonfinite = false,
      .dense_rule = {.rule = Rule::kAdam, .learning_rate = 0.1f},
      .blocks = {{"w", 0, 5, 0}, {"w", 5, 13, 0}},
      .tables = {
          {.name = "a", .width = 3},
          {.name = "b", .width = 1, .rule = {.rule = Rule::kSgd}, .memory_cap_bytes = 1 << 16},
          {.name = "c", .width = 3, .wire_dtype = WireDtype::kBfloat16}}};
  const std::string json = job.to_json();
  state->apply({.kind = RecordKind::kJob, .payload = std::as_bytes(std::span(json))});
  const JoinRecord join{.trainer = 0, .incarnation = 1};
  state->apply({.kind = RecordKind::kJoin, .payload = std::as_bytes(std::span(&join, 1))});
  return state;
}

// What RequestHandler does with it once sender and order are checked.
void take(ParameterState& state, const Message& message, std::span<const std::byte> bytes) {
  if (message.header.kind == MessageKind::kReply) return;  // ArrivalCheck does not take it.
  state.shard().declared_job()->check(message);
  if (message.header.kind == MessageKind::kPull) {
    state.pull(message);
    return;
  }
  const bool initial = message.header.flags & kInitialValues;
  state.apply({.kind = initial ? RecordKind::kInitial : RecordKind::kPush, .payload = bytes});
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static std::unique_ptr<ParameterState> state;
  static int inputs = 0;
  if (inputs++ % 5'000 == 0) state = make_state();  // So that rows do not fill the memory.
  Buffer bytes(size);
  if (size > 0) std::memcpy(bytes.data(), data, size);
  try {
    Message message = parse_message(bytes.span(), Checksums::kIgnored);
    // Another job, or a trainer that the state does not know, is turned away before.
    message.header.trainer = 0;
    message.header.job = state->shard().declared_job()->fingerprint();
    reseal(bytes.span(), message.header);
    take(*state, message, bytes.span());
  } catch (const c10::ValueError&) {
    // Refused, as it should be. Anything else that is thrown ends the program.
  }
  return 0;
}
