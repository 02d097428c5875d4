// SPDX-License-Identifier: Apache-2.0
#include "cohort/comm/backends/mpi/mpi_thread.h"

#include <ATen/core/grad_mode.h>
#include <cstdlib>
#include <future>
#include <iterator>
#include <memory>
#include <pthread.h>

#include "cohort/base/error.h"
#include "cohort/comm/backends/mpi/mpi_types.h"

namespace cohort::comm {
namespace {

using Clock = std::chrono::steady_clock;

std::exception_ptr timed_out(const std::string& name, std::chrono::milliseconds timeout) {
  try {
    C10_THROW_ERROR(DistBackendError, "MPI " + name + " has not ended within " +
                                          std::to_string(timeout.count()) + " ms");
  } catch (...) {
    return std::current_exception();
  }
}

}  // namespace

void check_mpi(int code, const char* call) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  MPI_Error_string(code, text, &length);
  C10_THROW_ERROR(DistBackendError,
                  std::string(call) + ": " + std::string(text, static_cast<size_t>(length)));
}

MpiThread& MpiThread::of_process() {
  // Never destroyed: after an exit with a failure the thread may still be inside MPI.
  static MpiThread& instance = *new MpiThread;
  return instance;
}

MpiThread::MpiThread() {
  std::promise<void> ready;
  thread_ = std::thread([this, &ready] {
    pthread_setname_np(pthread_self(), "cohort-mpi");
    try {
      initialise();
    } catch (...) {
      ready.set_exception(std::current_exception());
      return;
    }
    ready.set_value();
    loop();
  });
  try {
    ready.get_future().get();
  } catch (...) {
    thread_.join();
    throw;
  }
  on_exit(&MpiThread::at_exit, this);
}

void MpiThread::initialise() {
  int initialised = 0;
  check_mpi(MPI_Initialized(&initialised), "MPI_Initialized");
  int level = MPI_THREAD_SINGLE;
  if (initialised != 0) {
    owns_mpi_ = false;
    check_mpi(MPI_Query_thread(&level), "MPI_Query_thread");
    if (level < MPI_THREAD_MULTIPLE) {
      throw ConfigError(
          "the program initialised MPI for one thread only: backend mpi needs MPI_THREAD_MULTIPLE");
    }
  } else {
    // Funneled is enough: only this thread, which initialises MPI, calls it.
    check_mpi(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &level), "MPI_Init_thread");
    if (level < MPI_THREAD_FUNNELED)
      throw ConfigError("this MPI serves programs of one thread only");
  }
  check_mpi(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  check_mpi(MPI_Comm_rank(MPI_COMM_WORLD, &rank_), "MPI_Comm_rank");
  check_mpi(MPI_Comm_size(MPI_COMM_WORLD, &world_size_), "MPI_Comm_size");
  create_narrow_operations();
}

void MpiThread::submit(MpiOperation operation) {
  {
    const std::lock_guard lock(mutex_);
    queue_.push_back({std::move(operation), Clock::now(), {}});
  }
  changed_.notify_one();
}

void MpiThread::run(const std::string& name, std::chrono::milliseconds timeout,
                    std::function<void()> call) {
  const auto promise = std::make_shared<std::promise<void>>();
  auto ended = promise->get_future();
  submit({.name = name,
          .timeout = timeout,
          .start = [call = std::move(call)](MpiRequests&) { call(); },
          .finish = {},
          .done =
              [promise](std::exception_ptr error) {
                error ? promise->set_exception(error) : promise->set_value();
              }});
  if (ended.wait_for(timeout) == std::future_status::timeout) {
    mark_broken();
    std::rethrow_exception(timed_out(name, timeout));
  }
  ended.get();
}

void MpiThread::abort() {
  const std::lock_guard lock(mutex_);
  aborted_ = Clock::now();
}

bool MpiThread::is_aborted(const Running& running) {
  const std::lock_guard lock(mutex_);
  return aborted_ && running.submitted <= *aborted_;
}

void MpiThread::loop() {
  const at::NoGradGuard no_grad;
  while (take_new()) {
    bool progress = false;
    for (auto running = active_.begin(); running != active_.end();) {
      const auto here = running++;
      const Progress outcome = advance(*here);
      if (outcome == Progress::kPending) continue;
      progress = true;
      if (outcome == Progress::kEnded) {
        active_.erase(here);
      } else {
        abandoned_.splice(abandoned_.end(), active_, here);
      }
    }
    if (!progress && !active_.empty()) std::this_thread::yield();
  }
  if (owns_mpi_ && !is_broken()) MPI_Finalize();
}

// Starts what was submitted, in order; with nothing to do it waits. Returns false when it is time
// to go.
bool MpiThread::take_new() {
  std::deque<Running> fresh;
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return stop_ || !queue_.empty() || !active_.empty(); });
    if (stop_ && queue_.empty() && active_.empty()) return false;
    fresh.swap(queue_);
  }
  for (Running& running : fresh) {
    active_.push_back(std::move(running));
    const auto here = std::prev(active_.end());
    try {
      here->operation.start(here->requests);
      here->requests.statuses.resize(here->requests.pending.size());
    } catch (...) {
      if (!here->requests.pending.empty())
        mark_broken();  // what was posted before the error may be under way
      here->operation.done(std::current_exception());
      abandoned_.splice(abandoned_.end(), active_, here);
    }
  }
  return true;
}

MpiThread::Progress MpiThread::advance(Running& running) {
  MpiRequests& requests = running.requests;
  try {
    int ended = 1;
    if (!requests.pending.empty()) {
      check_mpi(MPI_Testall(static_cast<int>(requests.pending.size()), requests.pending.data(),
                            &ended, requests.statuses.data()),
                ("MPI " + running.operation.name).c_str());
    }
    if (ended == 0 && is_aborted(running))
      C10_THROW_ERROR(DistBackendError, "MPI " + running.operation.name + " was aborted");
    if (ended == 0 && Clock::now() < running.deadline()) return Progress::kPending;
    if (ended == 0)
      std::rethrow_exception(timed_out(running.operation.name, running.operation.timeout));
  } catch (...) {
    mark_broken();
    running.operation.done(std::current_exception());
    return Progress::kAbandoned;
  }
  try {
    if (running.operation.finish) running.operation.finish(requests);
  } catch (...) {
    running.operation.done(std::current_exception());
    return Progress::kEnded;
  }
  running.operation.done(nullptr);
  return Progress::kEnded;
}

bool MpiThread::is_broken() {
  const std::lock_guard lock(mutex_);
  return broken_;
}

void MpiThread::mark_broken() {
  const std::lock_guard lock(mutex_);
  broken_ = true;
}

void MpiThread::at_exit(int status, void* self) {
  auto& mpi = *static_cast<MpiThread*>(self);
  if (status != 0) return;
  {
    const std::lock_guard lock(mpi.mutex_);
    if (mpi.broken_) return;
    mpi.stop_ = true;
  }
  mpi.changed_.notify_one();
  mpi.thread_.join();
}

}  // namespace cohort::comm
