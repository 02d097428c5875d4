#include "cohort/comm/failure_watch.h"

#include <algorithm>
#include <pthread.h>
#include <sstream>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "cohort/comm/collective_log.h"

namespace cohort::comm {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr milliseconds kPollInterval{250};
constexpr milliseconds kAnswerLimit{2000};
constexpr milliseconds kReportLimit{5000};
// For the look at the store that is under way when the group closes.
constexpr milliseconds kLastCallLimit{2000};
constexpr int64_t kStuckNs = 2'000'000'000;
const char* const kDeclared = "declared";
const char* const kReport = "verdict";
const char* const kNumRecords = "num_stories";

std::string key(const char* what, int rank) {
  return std::string(what) + "/" + std::to_string(rank);
}

std::vector<uint8_t> bytes(const std::string& text) {
  return {text.begin(), text.end()};
}

// Three lines: lost ranks, mismatch, others.
std::string to_text(const FailureReport& report) {
  std::ostringstream out;
  for (int rank : report.lost) out << rank << ' ';
  out << '\n' << report.mismatch << '\n' << report.others << '\n';
  return out.str();
}

FailureReport from_text(const std::string& text) {
  std::istringstream in(text);
  std::string ranks;
  FailureReport report;
  std::getline(in, ranks);
  std::getline(in, report.mismatch);
  std::getline(in, report.others);
  std::istringstream numbers(ranks);
  for (int rank = 0; numbers >> rank;) report.lost.push_back(rank);
  return report;
}

}  // namespace

FailureWatch::FailureWatch(StoreConnection connection, int rank, int world_size,
                           bool host_dies_with_rank_0, FailureWatchCalls calls)
    : store_(std::move(connection.store)),
      cut_store_(std::move(connection.cut)),
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
  {
    // c10d's client prints a trace of a call that is cut off: only a silent host needs that.
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, kLastCallLimit, [&] { return ended_; });
  }
  cut_store_();
  thread_.join();
}

FailureReport FailureWatch::report() {
  std::unique_lock lock(mutex_);
  declare_ = true;
  changed_.notify_all();
  if (changed_.wait_for(lock, kReportLimit + milliseconds(1000),
                        [&] { return report_.has_value(); })) {
    return *report_;
  }
  // The watching thread hangs in the store, whose host does not answer but has not closed the
  // connection either. It will find it closed, and end what else waits.
  cut_store_();
  return store_lost("does not answer");
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
  while (!stop.stop_requested()) {
    bool declare = false;
    {
      std::unique_lock lock(mutex_);
      changed_.wait_for(lock, stop, kPollInterval, [&] { return declare_; });
      declare = declare_;
    }
    if (stop.stop_requested()) return;
    if (!declare) publish_if_stuck();
    if (declare || store_->check({kDeclared}) || published_records_differ())
      return check_liveness();
  }
}

void FailureWatch::publish_if_stuck() {
  if (calls_.waiting_ns().value_or(0) < kStuckNs) return;
  std::string record = calls_.flight_record();
  const std::string past = record.substr(record.find('\n'));  // the first line holds a running time
  if (past == published_) return;
  published_ = past;
  store_->set(key("story", rank_), bytes(record));
  store_->add(kNumRecords, 1);
}

// Rank 0 compares for all; each change of a record is read once.
bool FailureWatch::published_records_differ() {
  if (rank_ != 0 || !store_->check({kNumRecords})) return false;
  const int64_t num_published = store_->add(kNumRecords, 0);
  if (num_published == num_published_) return false;
  num_published_ = num_published;
  FlightRecords records;
  for (int peer = 0; peer < world_size_; ++peer) {
    if (store_->check({key("story", peer)})) records[peer] = store_->get_to_str(key("story", peer));
  }
  return find_mismatch(records).has_value();
}

FailureReport FailureWatch::collect_records() {
  FailureReport report;
  FlightRecords records;
  const auto deadline = Clock::now() + kAnswerLimit;
  for (int peer = 0; peer < world_size_; ++peer) {
    const auto left = std::chrono::duration_cast<milliseconds>(deadline - Clock::now());
    if (wait_for_key(key("alive", peer), left)) {
      records[peer] = store_->get_to_str(key("alive", peer));
    } else {
      report.lost.push_back(peer);
    }
  }
  report.mismatch = find_mismatch(records).value_or("");
  report.others = report.lost.empty() ? describe_others(records)
                                      : "gave no sign of life for " +
                                            std::to_string(kAnswerLimit.count()) + " ms after that";
  return report;
}

void FailureWatch::check_liveness() {
  const auto mine = bytes(std::to_string(rank_));
  store_->set(key("alive", rank_), bytes(calls_.flight_record()));
  if (store_->compareSet(kDeclared, {}, mine) == mine)
    store_->set(kReport, bytes(to_text(collect_records())));
  if (!wait_for_key(kReport, kReportLimit)) return decide({});
  const FailureReport report = from_text(store_->get_to_str(kReport));
  store_->set(key("heard", rank_), mine);
  if (rank_ == 0 && host_dies_with_rank_0_) {
    // The store dies with this process: wait until every survivor has acknowledged the report.
    for (int peer = 1; peer < world_size_; ++peer) {
      if (std::find(report.lost.begin(), report.lost.end(), peer) == report.lost.end()) {
        wait_for_key(key("heard", peer), milliseconds(1000));
      }
    }
  }
  decide(report);
}

bool FailureWatch::wait_for_key(const std::string& key, milliseconds limit) {
  const auto deadline = Clock::now() + limit;
  while (!store_->check({key})) {
    if (Clock::now() >= deadline) return false;
    std::this_thread::sleep_for(milliseconds(20));
  }
  return true;
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
