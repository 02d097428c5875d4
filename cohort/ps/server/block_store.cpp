// SPDX-License-Identifier: Apache-2.0
#include "cohort/ps/server/block_store.h"

#include <vector>

namespace cohort::ps {

namespace {

class HostBlock final : public BlockStore {
 public:
  HostBlock(const RuleOptions& rule, int64_t elements)
      : rule_(rule),
        weights_(static_cast<size_t>(elements)),
        state_(static_cast<size_t>(state_width(rule.rule, elements))) {
    initialise_state(rule_, state_);
  }

  std::span<const float> weights() const override { return weights_; }
  std::span<const float> state() const override { return state_; }
  void set_weights(std::span<const float> weights) override {
    weights_.assign(weights.begin(), weights.end());
  }
  void set_state(std::span<const float> state) override {
    state_.assign(state.begin(), state.end());
  }
  void update(int64_t step, std::span<const float> gradient) override {
    ps::update(rule_, step, weights_, state_, gradient);
  }

 private:
  RuleOptions rule_;
  std::vector<float> weights_;
  std::vector<float> state_;
};

}  // namespace

std::unique_ptr<BlockStore> make_host_block(const RuleOptions& rule, int64_t elements) {
  return std::make_unique<HostBlock>(rule, elements);
}

}  // namespace cohort::ps
