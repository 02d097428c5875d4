// SPDX-License-Identifier: Apache-2.0
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <pthread.h>
#include <thread>

#include "cohort/ps/client/communicator.h"
#include "cohort/ps/row_merger.h"

namespace cohort::ps {

namespace {

// A push that owns what it sends.
struct Step {
  struct Rows {
    uint32_t table = 0;
    std::vector<uint64_t> ids;
    std::vector<float> gradients;
  };
  std::vector<Rows> rows;
  std::vector<std::vector<float>> parameters;
};

class HalfAsyncCommunicator final : public Communicator {
 public:
  HalfAsyncCommunicator(Client& client, int64_t max_merge)
      : client_(client),
        servers_(make_direct_communicator(client)),
        max_merge_(static_cast<size_t>(max_merge)),
        thread_([this] { run(); }) {
    pthread_setname_np(thread_.native_handle(), "ps-merge");
  }

  ~HalfAsyncCommunicator() override {
    bool sending = false;
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
      sending = sending_;
    }
    changed_.notify_all();
    if (sending) client_.give_up_pushes();  // Else the thread might wait for a lost server.
  }

  std::function<void()> pull(std::vector<PullRows> rows, std::vector<std::span<float>> parameters,
                             bool is_prediction) override {
    return servers_->pull(std::move(rows), std::move(parameters), is_prediction);
  }

  void push(std::vector<PushRows> rows, std::vector<std::span<const float>> parameters) override {
    Step step;
    for (const PushRows& part : rows) {
      step.rows.push_back({part.table,
                           {part.ids.begin(), part.ids.end()},
                           {part.gradients.begin(), part.gradients.end()}});
    }
    for (const auto& values : parameters)
      step.parameters.emplace_back(values.begin(), values.end());
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return waiting_.size() < max_merge_ || error_; });
    rethrow();
    waiting_.push_back(std::move(step));
    changed_.notify_all();
  }

  void flush() override {
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return (waiting_.empty() && !sending_) || error_; });
      rethrow();
    }
    servers_->flush();
  }

 private:
  void rethrow() {
    if (error_) std::rethrow_exception(error_);
  }

  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return stopping_ || !waiting_.empty(); });
      if (stopping_) return;
      std::deque<Step> steps;
      steps.swap(waiting_);
      sending_ = true;
      changed_.notify_all();
      lock.unlock();
      std::exception_ptr error;
      try {
        send(steps);
      } catch (...) {
        error = std::current_exception();
      }
      lock.lock();
      sending_ = false;
      error_ = error;
      changed_.notify_all();
      if (error_) return;
    }
  }

  // Sums in the order of steps. All steps have the same tables and parameters.
  void send(std::deque<Step>& steps) {
    Step& sum = steps.front();
    std::vector<RowMerger> mergers(sum.rows.size());
    std::vector<PushRows> rows;
    for (size_t table = 0; table < sum.rows.size(); ++table) {
      RowMerger& merger = mergers[table];
      const Step::Rows& first = sum.rows[table];
      const size_t width = first.ids.empty() ? 1 : first.gradients.size() / first.ids.size();
      rows.push_back({.table = first.table, .ids = first.ids, .gradients = first.gradients});
      if (steps.size() == 1) continue;
      merger.begin(width_of(steps, table, width), first.ids.size() * steps.size());
      for (const Step& step : steps) merger.add(step.rows[table].ids, step.rows[table].gradients);
      rows.back().ids = merger.ids();
      rows.back().gradients = merger.gradients();
    }
    std::vector<std::span<const float>> parameters;
    for (size_t i = 0; i < sum.parameters.size(); ++i) {
      for (size_t later = 1; later < steps.size(); ++later) {
        const auto& values = steps[later].parameters[i];
        for (size_t j = 0; j < values.size(); ++j) sum.parameters[i][j] += values[j];
      }
      parameters.emplace_back(sum.parameters[i]);
    }
    servers_->push(std::move(rows), std::move(parameters));
  }

  // A step may have no ids of a table; then the width is that of another step.
  static int64_t width_of(const std::deque<Step>& steps, size_t table, size_t otherwise) {
    for (const Step& step : steps) {
      const Step::Rows& rows = step.rows[table];
      if (!rows.ids.empty()) return static_cast<int64_t>(rows.gradients.size() / rows.ids.size());
    }
    return static_cast<int64_t>(otherwise);
  }

  Client& client_;
  const std::unique_ptr<Communicator> servers_;
  const size_t max_merge_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Step> waiting_;
  bool sending_ = false;
  bool stopping_ = false;
  std::exception_ptr error_;
  std::jthread thread_;
};

}  // namespace

std::unique_ptr<Communicator> make_half_async_communicator(Client& client, int64_t max_merge) {
  return std::make_unique<HalfAsyncCommunicator>(client, max_merge);
}

}  // namespace cohort::ps
