// SPDX-License-Identifier: Apache-2.0
#include "cohort/translate/gpu_watch.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

namespace cohort::translate {

void GpuWatch::Sum::add(double value) {
  if (!std::isfinite(value)) return;
  sum += value;
  peak = std::max(peak, value);  // No figure is below 0.
  ++count;
}

MeanAndPeak GpuWatch::Sum::result() const {
  if (count == 0) return {std::nan(""), std::nan("")};
  return {sum / static_cast<double>(count), peak};
}

GpuWatch::GpuWatch(Role role, std::chrono::milliseconds period) : period_(period) {
  if (role == Role::kSamples) monitor_.emplace();
}

void GpuWatch::sample() {
  const std::vector<GpuUse> now = monitor_->sample();
  gpus_.resize(std::max(gpus_.size(), now.size()));
  for (size_t i = 0; i < now.size(); ++i) {
    gpus_[i].percent.add(now[i].busy_percent);
    gpus_[i].memory_gib.add(now[i].memory_used_bytes / (1 << 30));
  }
  sampled_ = Clock::now();
  has_samples_ = true;
}

void GpuWatch::sample_if_due() {
  if (monitor_ && (!sampled_ || Clock::now() - *sampled_ >= period_)) sample();
}

std::string GpuWatch::take() {
  if (!monitor_) return "";
  if (!has_samples_) sample();
  auto all = nlohmann::json::array();
  for (const Gpu& gpu : gpus_) {
    const MeanAndPeak percent = gpu.percent.result(), memory = gpu.memory_gib.result();
    all.push_back({percent.mean, percent.peak, memory.mean, memory.peak});
  }
  gpus_.clear();
  has_samples_ = false;
  return all.dump();
}

std::vector<GpuUseSummary> parse_gpu_use(const std::string& text) {
  std::vector<GpuUseSummary> summaries;
  if (text.empty()) return summaries;
  for (const auto& gpu : nlohmann::json::parse(text)) {
    const auto number = [&](size_t i) {  // What is no number was written as null.
      return gpu.at(i).is_number() ? gpu.at(i).get<double>() : std::nan("");
    };
    summaries.push_back({.percent = {number(0), number(1)}, .memory_gib = {number(2), number(3)}});
  }
  return summaries;
}

}  // namespace cohort::translate
