// SPDX-License-Identifier: Apache-2.0
#include "cohort/comm/failure_watch.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <pthread.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "cohort/comm/time_left.h"

namespace cohort::comm {
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(MatchedCall, group, number, what, site)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(DeviceWait, call, name, ranks, ms, timeout_ms)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(FlightRecord, waiting, ms, last, matched, num_matched,
                                   device_waits)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(FailureReport, lost, mismatch, others)

namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr milliseconds kPollInterval{250};
constexpr milliseconds kShortPollInterval{20};  // while ranks answer
constexpr milliseconds kAnswerLimit{2000};
// How often the declarer looks whether the process whose answer it waits for has ended.
constexpr milliseconds kLookAtProcess{50};
constexpr milliseconds kReportLimit{5000};
// For the call of the store that is under way when the group closes.
constexpr milliseconds kLastCallLimit{2000};
constexpr milliseconds kStuck{2000};
constexpr milliseconds kBeatInterval{2000};
constexpr int kSilentLooks = 5;
const char* const kDeclared = "declared";
const char* const kReport = "report";
const char* const kNumRecords = "num_records";

std::string key(const char* what, int rank) {
  return std::string(what) + "/" + std::to_string(rank);
}

template <class T>
std::vector<uint8_t> encode(const T& value) {
  return nlohmann::json::to_cbor(value);
}

template <class T>
T decode(const std::vector<uint8_t>& bytes) {
  return nlohmann::json::from_cbor(bytes).get<T>();
}

}  // namespace

FailureWatch::FailureWatch(StoreConnection connection, int rank, int world_size,
                           bool host_dies_with_rank_0, FailureWatchCalls calls)
    : connection_(std::move(connection)),
      rank_(rank),
      world_size_(world_size),
      host_dies_with_rank_0_(host_dies_with_rank_0),
      calls_(std::move(calls)) {
  thread_ = std::jthread([this](const std::stop_token& stop) {
    run(stop);
    const std::lock_guard lock(mutex_);
    ended_ = true;
    changed_.notify_all();
  });
  pthread_setname_np(thread_.native_handle(), "cohort-watch");
}

FailureWatch::~FailureWatch() {
  thread_.request_stop();
  wake();
  {
    // c10d's client prints a trace of a call that is cut off: only a silent host needs that.
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, kLastCallLimit, [&] { return ended_; });
  }
  connection_.cut();
  thread_.join();
}

FailureReport FailureWatch::report() {
  {
    const std::lock_guard lock(mutex_);
    declare_ = true;
  }
  wake();
  std::unique_lock lock(mutex_);
  if (changed_.wait_for(lock, kReportLimit + milliseconds(1000),
                        [&] { return report_.has_value(); })) {
    return *report_;
  }
  // The watching thread hangs in the store, whose host does not answer but has not closed the
  // connection either. It will find it closed, and end what else waits.
  connection_.cut();
  return store_lost("does not answer");
}

void FailureWatch::follow(int peer) {
  const std::lock_guard lock(mutex_);
  to_follow_.push_back(peer);
}

void FailureWatch::run(const std::stop_token& stop) {
  try {
    watch_store(stop);
  } catch (const std::exception&) {
    if (stop.stop_requested()) return;
    decide(store_lost("closed the connection"));
  }
}

FailureReport FailureWatch::store_lost(const std::string& how) const {
  if (rank_ == 0 || !host_dies_with_rank_0_) return {};
  return {.lost = {0}, .mismatch = {}, .others = "its store " + how};
}

void FailureWatch::watch_store(const std::stop_token& stop) {
  while (true) {
    const bool declared = wait_or_wake(kDeclared, until_next_look());
    if (stop.stop_requested()) return;
    const bool declare = [&] {
      const std::lock_guard lock(mutex_);
      return declare_;
    }();
    if (declared || declare) return check_liveness();
    if (calls_.device_waits) device_waits_ = calls_.device_waits();
    publish_if_stuck();
    if (a_device_is_overdue() || published_records_differ() || followed_rank_is_silent())
      return check_liveness();
  }
}

// A collective that this rank enters meanwhile is not yet stuck then.
milliseconds FailureWatch::until_next_look() const {
  if (rank_ == 0 || !connection_.interrupt) return kPollInterval;
  const std::chrono::nanoseconds waited(calls_.waiting_ns().value_or(0));
  milliseconds next = waited < kStuck ? std::chrono::ceil<milliseconds>(kStuck - waited) : kStuck;
  for (const DeviceWait& wait : device_waits_) {
    const milliseconds left((wait.is_stuck() ? wait.timeout_ms : wait.stuck_ms()) - wait.ms);
    next = std::min(next, std::max(left, milliseconds(1)));
  }
  return next;
}

void FailureWatch::publish_if_stuck() {
  if (std::chrono::nanoseconds(calls_.waiting_ns().value_or(0)) < kStuck &&
      std::ranges::none_of(device_waits_, &DeviceWait::is_stuck))
    return;
  const FlightRecord record = calls_.flight_record();
  std::vector<MatchedCall> calls = record.matched;
  for (const DeviceWait& wait : record.device_waits) calls.push_back(wait.call);
  if (calls == published_) return;
  published_ = std::move(calls);
  store_->set(key("record", rank_), encode(record));
  store_->add(kNumRecords, 1);
}

bool FailureWatch::a_device_is_overdue() const {
  return std::ranges::any_of(device_waits_, &DeviceWait::is_overdue);
}

// Rank 0 compares for all; each change of a record is read once.
bool FailureWatch::published_records_differ() {
  if (rank_ != 0 || !store_->check({kNumRecords})) return false;
  const int64_t num_published = store_->add(kNumRecords, 0);
  if (num_published == num_published_) return false;
  num_published_ = num_published;
  FlightRecords records;
  for (int peer = 0; peer < world_size_; ++peer) {
    if (store_->check({key("record", peer)}))
      records[peer] = decode<FlightRecord>(store_->get(key("record", peer)));
  }
  return find_mismatch(records).has_value();
}

// Looks are counted, not seconds: where a whole job is stopped and resumes, no rank has been silent.
bool FailureWatch::followed_rank_is_silent() {
  {
    const std::lock_guard lock(mutex_);
    for (const int peer : to_follow_) followed_.try_emplace(peer);
    to_follow_.clear();
  }
  if (followed_.empty()) return false;
  for (const auto& [peer, beats] : followed_) {
    if (has_ended(peer)) return true;
  }
  if (Clock::now() < beat_at_) return false;
  beat_at_ = Clock::now() + kBeatInterval;
  store_->add(key("beat", rank_), 1);
  bool one_is_silent = false;
  for (auto& [peer, beats] : followed_) {
    const int64_t num_now = store_->add(key("beat", peer), 0);
    beats.num_silent_looks = num_now == beats.num_seen ? beats.num_silent_looks + 1 : 0;
    beats.num_seen = num_now;
    one_is_silent = one_is_silent || beats.num_silent_looks >= kSilentLooks;
  }
  return one_is_silent;
}

FailureReport FailureWatch::collect_records() {
  FailureReport report;
  FlightRecords records;
  const auto deadline = Clock::now() + kAnswerLimit;
  bool all_ended = true;
  for (int peer = 0; peer < world_size_; ++peer) {
    if (wait_for_key_of(peer, key("alive", peer), deadline)) {
      records[peer] = decode<FlightRecord>(store_->get(key("alive", peer)));
    } else {
      report.lost.push_back(peer);
      all_ended = all_ended && has_ended(peer);
    }
  }
  report.mismatch = find_mismatch(records).value_or("");
  if (report.lost.empty()) {
    report.others = describe_device_waits(records);
    if (report.others.empty()) report.others = describe_others(records);
  } else if (all_ended) {
    report.others =
        report.lost.size() == 1 ? "its process has ended" : "their processes have ended";
  } else {
    report.others =
        "gave no sign of life for " + std::to_string(kAnswerLimit.count()) + " ms after that";
  }
  return report;
}

bool FailureWatch::has_ended(int peer) const {
  return calls_.has_ended && calls_.has_ended(peer);
}

// What a process writes before it ends is there when it has ended. Looks once in any case: the wait
// for another rank may have taken all the time.
bool FailureWatch::wait_for_key_of(int peer, const std::string& key, Clock::time_point deadline) {
  bool ended = false;
  do {
    ended = has_ended(peer);
    const auto limit = ended ? milliseconds(1) : std::min(time_left(deadline), kLookAtProcess);
    if (wait_for_key(key, limit)) return true;
  } while (!ended && Clock::now() < deadline);
  return false;
}

void FailureWatch::check_liveness() {
  const auto mine = encode(rank_);
  store_->set(key("alive", rank_), encode(calls_.flight_record()));
  const auto deadline = Clock::now() + kReportLimit;
  auto declarer = store_->compareSet(kDeclared, {}, mine);
  while (declarer != mine && !wait_for_key_of(decode<int>(declarer), kReport, deadline)) {
    if (Clock::now() >= deadline) return decide({});
    declarer = store_->compareSet(kDeclared, declarer, mine);  // It has ended before its report.
  }
  if (declarer == mine) store_->set(kReport, encode(collect_records()));
  const auto report = decode<FailureReport>(store_->get(kReport));
  store_->set(key("ack", rank_), mine);
  if (rank_ == 0 && host_dies_with_rank_0_) {
    // The store dies with this process: wait until every survivor has acknowledged the report.
    for (int peer = 1; peer < world_size_; ++peer) {
      if (std::find(report.lost.begin(), report.lost.end(), peer) == report.lost.end()) {
        wait_for_key(key("ack", peer), milliseconds(1000));
      }
    }
  }
  decide(report);
}

bool FailureWatch::wait_for_key(const std::string& key, milliseconds limit) {
  const auto deadline = Clock::now() + limit;
  do {
    const auto left = time_left(deadline);
    if (wait_or_wake(key, connection_.interrupt ? left : std::min(left, kShortPollInterval)))
      return true;
  } while (Clock::now() < deadline);
  return false;
}

// Returns whether `key` is there: after `limit` at the latest, earlier for a `wake` meanwhile or
// before.
bool FailureWatch::wait_or_wake(const std::string& key, milliseconds limit) {
  if (!connection_.interrupt) {
    if (store_->check({key})) return true;
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, limit, [&] { return std::exchange(woken_, false); });
    return false;
  }
  try {
    store_->wait({key}, limit);
    return true;
  } catch (const c10::DistStoreError&) {
    return false;
  }
}

void FailureWatch::wake() {
  if (connection_.interrupt) return connection_.interrupt();
  const std::lock_guard lock(mutex_);
  woken_ = true;
  changed_.notify_all();
}

void FailureWatch::decide(FailureReport report) {
  {
    const std::lock_guard lock(mutex_);
    report_ = std::move(report);
    changed_.notify_all();
  }
  calls_.abort();
}

}  // namespace cohort::comm
