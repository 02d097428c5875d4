// SPDX-License-Identifier: Apache-2.0
// One block of a dense parameter and its optimizer, on the host or a device.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "cohort/ps/update_rule.h"

namespace cohort::ps {

/// Threads: one.
class BlockStore {
 public:
  virtual ~BlockStore() = default;

  /// On the host, until the next change. A store on a device copies when they are asked for after a
  /// change; a forked child, which has no device, may ask for what its parent asked for before.
  virtual std::span<const float> weights() const = 0;
  virtual std::span<const float> state() const = 0;  ///< [state_width(rule, elements)]

  /// Sizes as those of weights() and state().
  virtual void set_weights(std::span<const float> weights) = 0;
  virtual void set_state(std::span<const float> state) = 0;
  /// As ps::update of these weights and this state.
  virtual void update(int64_t step, std::span<const float> gradient) = 0;
};

/// Makes a block of `elements` zeros, with the rule's initial state.
using BlockMaker =
    std::function<std::unique_ptr<BlockStore>(const RuleOptions& rule, int64_t elements)>;

/// In the process's memory, by update_rule.h.
std::unique_ptr<BlockStore> make_host_block(const RuleOptions& rule, int64_t elements);

}  // namespace cohort::ps
