// SPDX-License-Identifier: Apache-2.0
// Fuzzing of what a server in mode sync does with pushes: steps of two trainers that open, wait and
// close, trainers that leave and come back.
//
// An input is a list of events: a byte that says which, and for pushes a message with its length
// before it.
#include <memory>

#include "cohort/ps/server/parameter_state.h"

#include "tests/fuzz/input.h"

namespace {

using namespace cohort;
using namespace cohort::ps;

template <class Payload>
void apply(ParameterState& state, RecordKind kind, const Payload& payload) {
  state.apply({.kind = kind, .payload = std::as_bytes(std::span(&payload, 1))});
}

// One server, alone or the first of two, with three tables and two blocks, and two trainers.
std::unique_ptr<ParameterState> make_state(Reduce reduce, int servers) {
  auto state = std::make_unique<ParameterState>(0, "");
  const JobOptions job{
      .mode = Mode::kSync,
      .reduce = reduce,
      .trainers = 2,
      .servers = servers,
      .error_if_nonfinite = false,
      .dense_rule = {.rule = Rule::kAdam, .learning_rate = 0.1f},
      .blocks = {{"w", 0, 5, 0}, {"w", 5, 13, 0}},
      .tables = {
          {.name = "a", .width = 3},
          {.name = "b", .width = 1, .rule = {.rule = Rule::kSgd}, .memory_cap_bytes = 1 << 16},
          {.name = "c", .width = 3, .wire_dtype = WireDtype::kBfloat16}}};
  const std::string json = job.to_json();
  state->apply({.kind = RecordKind::kJob, .payload = std::as_bytes(std::span(json))});
  return state;
}

// A trainer comes, or comes back as another process.
void join(ParameterState& state, uint32_t trainer) {
  const TrainerState* const before = state.trainer(trainer);
  apply(state, RecordKind::kJoin,
        JoinRecord{.trainer = trainer, .incarnation = before ? before->incarnation + 1 : 1});
}

// What RequestHandler does with a push once sender and order are checked: its number is the next
// of its trainer.
void push(ParameterState& state, uint32_t trainer, std::span<const uint8_t> message) {
  auto buffer = std::make_shared<Buffer>(message.size());
  std::copy(message.begin(), message.end(), reinterpret_cast<uint8_t*>(buffer->data()));
  try {
    Message parsed = parse_message(buffer->span(), Checksums::kIgnored);
    parsed.header.kind = MessageKind::kPush;
    parsed.header.flags = 0;
    parsed.header.job = state.shard().declared_job()->fingerprint();
    parsed.header.trainer = trainer;
    parsed.header.sequence = state.trainer(trainer)->last_sequence + 1;
    reseal(buffer->span(), parsed.header);
    state.shard().declared_job()->check(parsed);
  } catch (const c10::ValueError&) {
    return;  // Refused, as it should be. Anything else that is thrown ends the program.
  }
  // Steps that nobody closes would fill the memory.
  if (state.pending_bytes() > 1 << 16) return;
  state.apply({.kind = RecordKind::kPush, .payload = buffer->span(), .message = buffer});
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  // A state serves several inputs, for a job takes longer to set than an input to read.
  static std::unique_ptr<ParameterState> state;
  static int inputs = 0;
  if (inputs % 100 == 0)
    state = make_state(inputs / 100 % 2 ? Reduce::kSum : Reduce::kMean, 1 + inputs / 200 % 2);
  ++inputs;
  for (const uint32_t trainer : {0u, 1u}) join(*state, trainer);
  fuzz::Pieces pieces(data, size);
  while (!pieces.empty()) {
    const auto event = pieces.number<uint8_t>();
    const uint32_t trainer = event % 2;
    const TrainerState& its = *state->trainer(trainer);
    switch (event / 2 % 8) {
      case 0:
        if (its.is_member) apply(*state, RecordKind::kLeave, LeaveRecord{.trainer = trainer});
        break;
      case 1:
        join(*state, trainer);
        break;
      case 2:
        if (state->is_step_complete()) state->apply({.kind = RecordKind::kClose});
        break;
      default: {
        const auto message = pieces.counted();
        if (its.is_member) push(*state, trainer, message);
      }
    }
  }
  for (const auto& block : state->shard().blocks()) fuzz::touch(std::as_bytes(block.weights));
  return 0;
}
