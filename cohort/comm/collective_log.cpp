// SPDX-License-Identifier: Apache-2.0
#include "cohort/comm/collective_log.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <unistd.h>

namespace cohort::comm {
namespace {

constexpr size_t kKept = 64;

std::string describe(int rank, const MatchedCall& call) {
  return "rank " + std::to_string(rank) + " calls " + call.what + " at " +
         (call.site.empty() ? "an unknown location" : call.site);
}

TraceRecord blank(int rank, int world_size) {
  TraceRecord record;
  record.pid = getpid();
  record.rank = rank;
  record.world_size = world_size;
  record.since_ns = steady_now_ns();
  return record;
}

}  // namespace

CollectiveLog::CollectiveLog(int rank, int world_size, std::shared_ptr<RankTrace> trace)
    : blank_(blank(rank, world_size)), trace_(std::move(trace)), last_(blank_) {
  trace_->show(this, last_);
}

CollectiveLog::~CollectiveLog() {
  trace_->forget(this);
}

void CollectiveLog::begin(TraceRecord record, std::optional<MatchedCall> matched) {
  record.pid = blank_.pid;
  record.rank = blank_.rank;
  record.world_size = blank_.world_size;
  record.state = TraceState::kWaiting;
  record.since_ns = steady_now_ns();
  trace_->show(this, record);
  const std::lock_guard lock(mutex_);
  if (matched) {
    if (matched_.size() == kKept) matched_.pop_front();
    matched->number = ++num_matched_[matched->group];
    matched_.push_back(std::move(*matched));
  }
  underway_.push_back(record);
  last_ = record;
}

void CollectiveLog::end() {
  const std::lock_guard lock(mutex_);
  if (underway_.empty()) return;
  underway_.pop_back();
  if (underway_.empty()) {
    last_.state = TraceState::kRunning;
    last_.since_ns = steady_now_ns();
  } else {
    last_ = underway_.back();  // a collective inside of another guarded call
  }
  trace_->show(this, last_);
}

std::optional<int64_t> CollectiveLog::waiting_ns() const {
  const std::lock_guard lock(mutex_);
  if (underway_.empty()) return std::nullopt;
  return steady_now_ns() - underway_.back().since_ns;
}

FlightRecord CollectiveLog::flight_record() const {
  const std::lock_guard lock(mutex_);
  return {.waiting = !underway_.empty(),
          .ms = (steady_now_ns() - last_.since_ns) / 1'000'000,
          .last = describe(last_),
          .matched = {matched_.begin(), matched_.end()}};
}

std::optional<std::string> find_mismatch(const FlightRecords& records) {
  struct Entry {
    int rank;
    size_t position;  // among the rank's calls
    const MatchedCall* call;
  };
  // A collective is compared with that of the lowest rank that knows it.
  std::map<std::pair<std::string, int64_t>, Entry> known_calls;  // by group and number
  std::vector<std::pair<Entry, Entry>> differences;
  for (const auto& [rank, record] : records) {
    size_t position = 0;
    for (const MatchedCall& call : record.matched) {
      const Entry entry{rank, position++, &call};
      const auto [known, is_new] = known_calls.try_emplace({call.group, call.number}, entry);
      if (!is_new && known->second.call->what != call.what)
        differences.emplace_back(entry, known->second);
    }
  }
  if (differences.empty()) return std::nullopt;
  // The fault is a difference before which its two ranks have none; others may be its consequences.
  // Ranks that call two groups in different orders have no such one: any will do.
  const auto is_before = [](const Entry& a, const Entry& b) {
    return a.rank == b.rank && a.position < b.position;
  };
  const auto is_first = [&](const auto& difference) {
    const auto& [a, b] = difference;
    return std::none_of(differences.begin(), differences.end(), [&](const auto& other) {
      const auto& [c, d] = other;
      return is_before(c, a) || is_before(c, b) || is_before(d, a) || is_before(d, b);
    });
  };
  const auto found = std::find_if(differences.begin(), differences.end(), is_first);
  const auto& [mine, theirs] = found == differences.end() ? differences.front() : *found;
  return describe(mine.rank, *mine.call) + " where " + describe(theirs.rank, *theirs.call);
}

std::string describe_others(const FlightRecords& records) {
  std::map<std::string, int> votes;
  for (const auto& [rank, record] : records) {
    if (record.waiting) ++votes[record.last];
  }
  if (votes.empty()) return "";
  // Where fewer than half of the ranks wait in one call, none is the one that the others miss.
  const auto most = std::max_element(
      votes.begin(), votes.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
  std::string result;
  for (const auto& [rank, record] : records) {
    const bool with_most = record.waiting && record.last == most->first;
    if (with_most && 2 * most->second > static_cast<int>(records.size())) continue;
    std::array<char, 32> seconds{};
    std::snprintf(seconds.data(), seconds.size(), "%.1f s", static_cast<double>(record.ms) / 1000);
    result += (result.empty() ? "" : "; ") + std::string("rank ") + std::to_string(rank) +
              (record.waiting ? " waits in " + record.last + " since " + seconds.data()
                              : " has not come: outside of collectives since " +
                                    std::string(seconds.data()) + ", last called " + record.last);
  }
  return result;
}

}  // namespace cohort::comm
