#include "cohort/comm/failure_watch.h"

#include <chrono>
#include <pthread.h>
#include <sstream>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace cohort::comm {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr milliseconds kPollInterval{250};
constexpr milliseconds kAnswerLimit{2000};
constexpr milliseconds kVerdictLimit{5000};
const char* const kDeclared = "declared";
const char* const kVerdict = "verdict";

std::string key(const char* what, int rank) {
  return std::string(what) + "/" + std::to_string(rank);
}

std::string join(const std::vector<int>& ranks) {
  std::ostringstream out;
  for (int rank : ranks) out << rank << ' ';
  return out.str();
}

std::vector<int> split(const std::string& text) {
  std::istringstream in(text);
  std::vector<int> ranks;
  for (int rank = 0; in >> rank;) ranks.push_back(rank);
  return ranks;
}

}  // namespace

FailureWatch::FailureWatch(c10::intrusive_ptr<c10d::Store> store, int rank, int world_size)
    : store_(std::move(store)), rank_(rank), world_size_(world_size) {
  thread_ = std::jthread([this](const std::stop_token& stop) { run(stop); });
  pthread_setname_np(thread_.native_handle(), "cohort-watch");
}

FailureWatch::~FailureWatch() = default;  // jthread asks its thread to stop, then joins it.

std::vector<int> FailureWatch::lost_ranks() {
  std::unique_lock lock(mutex_);
  declare_ = true;
  changed_.notify_all();
  changed_.wait_for(lock, kVerdictLimit + milliseconds(1000), [&] { return verdict_.has_value(); });
  return verdict_.value_or(std::vector<int>{});
}

void FailureWatch::run(const std::stop_token& stop) {
  try {
    while (!stop.stop_requested()) {
      bool declare = false;
      {
        std::unique_lock lock(mutex_);
        changed_.wait_for(lock, stop, kPollInterval, [&] { return declare_; });
        declare = declare_;
      }
      if (stop.stop_requested()) return;
      if (declare || store_->check({kDeclared})) return roll_call(stop);
    }
  } catch (const std::exception&) {
    decide(rank_ == 0 ? std::vector<int>{} : std::vector<int>{0});  // The store's host is gone.
  }
}

void FailureWatch::roll_call(const std::stop_token&) {
  const std::string mine = std::to_string(rank_);
  const std::vector<uint8_t> name(mine.begin(), mine.end());
  store_->set(key("alive", rank_), name);
  if (store_->compareSet(kDeclared, {}, name) == name) {
    std::vector<int> lost;
    const auto deadline = Clock::now() + kAnswerLimit;
    for (int peer = 0; peer < world_size_; ++peer) {
      const auto left = std::chrono::duration_cast<milliseconds>(deadline - Clock::now());
      if (!wait_for_key(key("alive", peer), left)) lost.push_back(peer);
    }
    const std::string text = join(lost);
    store_->set(kVerdict, std::vector<uint8_t>(text.begin(), text.end()));
  }
  if (!wait_for_key(kVerdict, kVerdictLimit)) return decide({});
  const auto bytes = store_->get(kVerdict);
  std::vector<int> lost = split(std::string(bytes.begin(), bytes.end()));
  store_->set(key("heard", rank_), name);
  if (rank_ == 0) {  // The store dies with this process: let every survivor hear the verdict first.
    for (int peer = 1; peer < world_size_; ++peer) {
      if (std::find(lost.begin(), lost.end(), peer) == lost.end()) {
        wait_for_key(key("heard", peer), milliseconds(1000));
      }
    }
  }
  decide(std::move(lost));
}

bool FailureWatch::wait_for_key(const std::string& key, milliseconds limit) {
  const auto deadline = Clock::now() + limit;
  while (!store_->check({key})) {
    if (Clock::now() >= deadline) return false;
    std::this_thread::sleep_for(milliseconds(20));
  }
  return true;
}

void FailureWatch::decide(std::vector<int> lost) {
  const std::lock_guard lock(mutex_);
  verdict_ = std::move(lost);
  changed_.notify_all();
}

}  // namespace cohort::comm
