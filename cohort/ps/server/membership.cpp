// SPDX-License-Identifier: Apache-2.0
#include "cohort/ps/server/membership.h"

#include <algorithm>
#include <optional>

namespace cohort::ps {

const TrainerState* Membership::find(uint32_t id) const {
  const auto found = trainers_.find(id);
  return found == trainers_.end() ? nullptr : &found->second;
}

void Membership::join(uint32_t id, uint64_t incarnation, uint64_t nonce, uint64_t closed,
                      bool is_sync) {
  const uint64_t clock = slowest_clock();
  const auto [found, is_new] = trainers_.try_emplace(id);
  TrainerState& trainer = found->second;
  trainer.incarnation = incarnation;
  trainer.nonce = nonce;
  if (!is_new && trainer.is_member) return;
  trainer.is_member = true;
  trainer.joined_after = closed;
  trainer.clock = clock;
  // Closed steps are not its own.
  if (is_sync) trainer.last_sequence = std::max(trainer.last_sequence, closed);
}

void Membership::push(uint32_t id, uint64_t sequence) {
  TrainerState& trainer = trainers_.at(id);
  trainer.last_sequence = sequence;
  ++trainer.clock;
}

std::vector<uint32_t> Membership::absent() const {
  std::vector<uint32_t> ids;
  for (uint32_t id = 0; id < expected_; ++id) {
    if (!find(id)) ids.push_back(id);
  }
  return ids;
}

bool Membership::have_pushed(uint64_t step) const {
  return missing(step).empty();
}

std::vector<uint32_t> Membership::missing(uint64_t step) const {
  std::vector<uint32_t> ids = absent();
  for (const auto& [id, trainer] : trainers_) {
    if (trainer.is_member && trainer.last_sequence < step) ids.push_back(id);
  }
  return ids;
}

std::vector<uint32_t> Membership::slowest() const {
  std::vector<uint32_t> ids = absent();
  const uint64_t clock = slowest_clock();
  for (const auto& [id, trainer] : trainers_) {
    if (trainer.is_member && trainer.clock == clock) ids.push_back(id);
  }
  return ids;
}

uint64_t Membership::slowest_clock() const {
  if (!absent().empty()) return 0;
  std::optional<uint64_t> slowest;
  for (const auto& [id, trainer] : trainers_) {
    if (trainer.is_member) slowest = std::min(slowest.value_or(trainer.clock), trainer.clock);
  }
  return slowest.value_or(0);
}

uint64_t Membership::lead_of(uint32_t id) const {
  const TrainerState* const trainer = find(id);
  return trainer && trainer->is_member ? trainer->clock - slowest_clock() : 0;
}

}  // namespace cohort::ps
