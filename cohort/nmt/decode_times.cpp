// SPDX-License-Identifier: Apache-2.0
#include "cohort/nmt/decode_times.h"

#include <c10/util/Exception.h>
#include <utility>

namespace cohort::nmt {
namespace {

thread_local DecodeTimes* current_times = nullptr;

}  // namespace

DecodeTimes::DecodeTimes() {
  TORCH_INTERNAL_ASSERT(current_times == nullptr);
  current_times = this;
}

DecodeTimes::~DecodeTimes() {
  current_times = nullptr;
}

std::array<double, kDecodeSections> DecodeTimes::seconds() {
  change(section_);
  return seconds_;
}

DecodeSection DecodeTimes::change(DecodeSection next) {
  const auto now = std::chrono::steady_clock::now();
  seconds_[static_cast<size_t>(section_)] += std::chrono::duration<double>(now - since_).count();
  since_ = now;
  return std::exchange(section_, next);
}

DecodeScope::DecodeScope(DecodeSection section) : times_(current_times) {
  if (times_ == nullptr) return;
  const DecodeSection now = times_->section_;
  const bool stays = now == DecodeSection::kEncoder || now == DecodeSection::kVocabulary;
  before_ = times_->change(stays ? now : section);
}

DecodeScope::~DecodeScope() {
  if (times_ != nullptr) times_->change(before_);
}

}  // namespace cohort::nmt
