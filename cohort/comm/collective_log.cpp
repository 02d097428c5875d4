// SPDX-License-Identifier: Apache-2.0
#include "cohort/comm/collective_log.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <functional>
#include <unistd.h>

namespace cohort::comm {
namespace {

constexpr size_t kKept = 64;

std::string describe(int rank, const MatchedCall& call) {
  return "rank " + std::to_string(rank) + " calls " + call.what + " at " +
         (call.site.empty() ? "an unknown location" : call.site);
}

std::string seconds_text(int64_t ms) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.1f s", static_cast<double>(ms) / 1000);
  return text.data();
}

// "rank 1", "ranks 0, 2".
std::string ranks_text(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  return text;
}

std::string place_of(const FlightRecord& record) {
  return (record.waiting ? "in " + record.last + " since " : "outside of collectives since ") +
         seconds_text(record.ms) + (record.waiting ? "" : ", last called " + record.last);
}

bool has_called(const FlightRecord& record, const MatchedCall& call) {
  const auto found = record.num_matched.find(call.group);
  return found != record.num_matched.end() && found->second >= call.number;
}

// In the order of the calls: what a device waits in may be older than those that are kept.
std::vector<const MatchedCall*> calls_of(const FlightRecord& record) {
  std::vector<const DeviceWait*> older;
  for (const DeviceWait& wait : record.device_waits) {
    if (std::ranges::find(record.matched, wait.call) == record.matched.end())
      older.push_back(&wait);
  }
  std::ranges::sort(older, std::ranges::greater(), &DeviceWait::ms);
  std::vector<const MatchedCall*> calls;
  for (const DeviceWait* wait : older) calls.push_back(&wait->call);
  for (const MatchedCall& call : record.matched) calls.push_back(&call);
  return calls;
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

int64_t DeviceWait::stuck_ms() const {
  return std::min(std::max<int64_t>(2000, timeout_ms / 10), timeout_ms);
}

int64_t CollectiveLog::begin(TraceRecord record, std::optional<MatchedCall> matched) {
  record.pid = blank_.pid;
  record.rank = blank_.rank;
  record.world_size = blank_.world_size;
  record.state = TraceState::kWaiting;
  record.since_ns = steady_now_ns();
  trace_->show(this, record);
  const std::lock_guard lock(mutex_);
  underway_.push_back(record);
  last_ = record;
  return matched ? add_locked(std::move(*matched)) : 0;
}

int64_t CollectiveLog::add(MatchedCall matched) {
  const std::lock_guard lock(mutex_);
  return add_locked(std::move(matched));
}

int64_t CollectiveLog::add_locked(MatchedCall matched) {
  if (matched_.size() == kKept) matched_.pop_front();
  matched.number = ++num_matched_[matched.group];
  matched_.push_back(std::move(matched));
  return matched_.back().number;
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
          .matched = {matched_.begin(), matched_.end()},
          .num_matched = num_matched_};
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
    for (const MatchedCall* call : calls_of(record)) {
      const Entry entry{rank, position++, call};
      const auto [known, is_new] = known_calls.try_emplace({call->group, call->number}, entry);
      if (!is_new && known->second.call->what != call->what)
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
    result += (result.empty() ? "" : "; ") + std::string("rank ") + std::to_string(rank) +
              (record.waiting ? " waits " : " has not come: ") + place_of(record);
  }
  return result;
}

std::string describe_device_waits(const FlightRecords& records) {
  // Of each group the first call that a device waits in; a later one waits for it.
  struct Stalled {
    const DeviceWait* wait;
    std::vector<int> waiting, missing;
  };
  std::map<std::string, Stalled> stalled;
  for (const auto& [rank, record] : records) {
    for (const DeviceWait& wait : record.device_waits) {
      Stalled& group = stalled.try_emplace(wait.call.group, Stalled{&wait, {}, {}}).first->second;
      if (wait.call.number < group.wait->call.number) group = {&wait, {}, {}};
      if (wait.call.number == group.wait->call.number) group.waiting.push_back(rank);
    }
  }
  // A rank that waits for its own device has not come because of that: another one is at fault.
  bool one_is_free = false;
  for (auto& [group, call] : stalled) {
    for (const int rank : call.wait->ranks) {
      const auto found = records.find(rank);
      if (found == records.end() || has_called(found->second, call.wait->call)) continue;
      call.missing.push_back(rank);
      one_is_free = one_is_free || found->second.device_waits.empty();
    }
  }
  std::string result;
  const auto append = [&](const std::string& text) {
    result += (result.empty() ? "" : "; ") + text;
  };
  for (const auto& [group, call] : stalled) {
    const MatchedCall& what = call.wait->call;
    const std::string which = what.what + (what.site.empty() ? "" : " at " + what.site) +
                              ", call " + std::to_string(what.number) + " of group \"" +
                              call.wait->name + "\"";
    const std::string who = ranks_text(call.waiting), since = seconds_text(call.wait->ms);
    for (const int rank : call.missing) {
      const FlightRecord& record = records.at(rank);
      if (one_is_free && !record.device_waits.empty()) continue;
      append("rank " + std::to_string(rank) + " has not come to " + which +
             ", for which the devices of " + who + " wait since " + since + ": " +
             place_of(record));
    }
    if (call.missing.empty())
      append("all ranks have called " + which + ", which has not ended on the devices of " + who +
             " since " + since);
  }
  return result;
}

}  // namespace cohort::comm
