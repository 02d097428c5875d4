// SPDX-License-Identifier: Apache-2.0
#include "cohort/comm/rank_trace.h"

#include <map>

namespace cohort::comm {

RankTrace::RankTrace(const std::string& file)
    : stack_report_(file.empty() ? nullptr : std::make_unique<StackReport>(file + ".stack")),
      page_(file) {}

std::shared_ptr<RankTrace> RankTrace::open(const std::string& file) {
  if (file.empty()) return std::shared_ptr<RankTrace>(new RankTrace(file));
  static std::mutex mutex;
  static auto& traces = *new std::map<std::string, std::weak_ptr<RankTrace>>;
  const std::lock_guard lock(mutex);
  std::weak_ptr<RankTrace>& known = traces[file];
  std::shared_ptr<RankTrace> trace = known.lock();
  if (trace == nullptr) {
    trace = std::shared_ptr<RankTrace>(new RankTrace(file));
    known = trace;
  }
  return trace;
}

void RankTrace::show(const CollectiveLog* log, const TraceRecord& record) {
  const std::lock_guard lock(mutex_);
  std::erase_if(waiting_, [log](const auto& entry) { return entry.first == log; });
  if (record.state == TraceState::kWaiting) waiting_.emplace_back(log, record);
  page_.write(waiting_.empty() ? record : waiting_.back().second);
}

void RankTrace::forget(const CollectiveLog* log) {
  const std::lock_guard lock(mutex_);
  if (std::erase_if(waiting_, [log](const auto& entry) { return entry.first == log; }) == 0) return;
  if (!waiting_.empty()) page_.write(waiting_.back().second);
}

}  // namespace cohort::comm
