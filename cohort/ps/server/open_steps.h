// SPDX-License-Identifier: Apache-2.0
// Pushes of the steps of a sync job that are not closed.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <utility>

#include "cohort/ps/wire/message.h"

namespace cohort::ps {

/// Threads: one at a time. Local.
class OpenSteps {
 public:
  using Pushes = std::map<uint32_t, std::shared_ptr<const Buffer>>;  ///< By trainer.

  /// The first push of a trainer to a step counts.
  void add(uint64_t step, uint32_t trainer, std::shared_ptr<const Buffer> push) {
    const auto bytes = static_cast<int64_t>(push->size());
    if (steps_[step].emplace(trainer, std::move(push)).second) bytes_ += bytes;
  }

  /// Whether `step` is the first one that has pushes.
  bool is_first(uint64_t step) const { return !steps_.empty() && steps_.begin()->first == step; }

  /// Removes and returns the pushes of the first step; there is one.
  Pushes take_first() {
    Pushes pushes = std::move(steps_.extract(steps_.begin()).mapped());
    for (const auto& [trainer, push] : pushes) bytes_ -= static_cast<int64_t>(push->size());
    return pushes;
  }

  const std::map<uint64_t, Pushes>& steps() const { return steps_; }
  int64_t bytes() const { return bytes_; }  ///< Of all pushes.

 private:
  std::map<uint64_t, Pushes> steps_;
  int64_t bytes_ = 0;
};

}  // namespace cohort::ps
