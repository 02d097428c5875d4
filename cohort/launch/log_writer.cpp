// SPDX-License-Identifier: Apache-2.0
#include "cohort/launch/log_writer.h"

#include <cerrno>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <deque>
#include <fcntl.h>
#include <mutex>
#include <utility>

#include "cohort/base/error.h"

namespace cohort::launch {
namespace {

constexpr size_t kMostQueuedBytes = 4 << 20;

}  // namespace

class LogWriter::File {
 public:
  File(Fd fd, std::string path) : fd_(std::move(fd)), path_(std::move(path)) {}

  void write(std::string_view bytes) {
    while (!bytes.empty() && !failed_) {
      const ssize_t size = ::write(fd_.get(), bytes.data(), bytes.size());
      if (size < 0 && errno == EINTR) continue;
      if (size < 0) {
        failed_ = true;
        std::fprintf(stderr, "cohort run: warning: %s: %s; its log is incomplete\n", path_.c_str(),
                     std::strerror(errno));
        return;
      }
      bytes.remove_prefix(static_cast<size_t>(size));
    }
  }

 private:
  const Fd fd_;
  const std::string path_;
  bool failed_ = false;
};

// What both threads share: the writer's outlives the launcher's if a disk hangs.
struct LogWriter::Queue {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::pair<std::shared_ptr<File>, std::string>> pieces;  // The first is being written.
  size_t bytes = 0;
  bool over = false;
};

LogWriter::LogWriter() : queue_(std::make_shared<Queue>()) {}

LogWriter::~LogWriter() {
  if (!thread_.joinable()) return;
  const bool written = flush();
  {
    const std::lock_guard lock(queue_->mutex);
    queue_->over = true;
    queue_->changed.notify_all();
  }
  if (written) {
    thread_.join();
  } else {
    thread_.detach();
  }
}

std::shared_ptr<LogWriter::File> LogWriter::open(const std::string& path, bool append) const {
  const int existing = append ? O_APPEND : O_TRUNC;
  Fd fd(::open(path.c_str(), O_WRONLY | O_CREAT | existing | O_CLOEXEC, 0666));
  if (!fd) {
    throw ConfigError(path + ": expected a log file that can be written, got " +
                      std::strerror(errno));
  }
  return std::make_shared<File>(std::move(fd), path);
}

void LogWriter::write(const std::shared_ptr<File>& file, std::string_view bytes) {
  if (!thread_.joinable()) thread_ = std::thread([queue = queue_] { run(queue); });
  const std::lock_guard lock(queue_->mutex);
  queue_->pieces.emplace_back(file, bytes);
  queue_->bytes += bytes.size();
  queue_->changed.notify_all();
}

bool LogWriter::congested() const {
  const std::lock_guard lock(queue_->mutex);
  return queue_->bytes > kMostQueuedBytes;
}

bool LogWriter::flush() const {
  std::unique_lock lock(queue_->mutex);
  return queue_->changed.wait_for(lock, kFlushTimeout, [this] { return queue_->pieces.empty(); });
}

void LogWriter::run(const std::shared_ptr<Queue>& queue) {
  std::unique_lock lock(queue->mutex);
  while (true) {
    queue->changed.wait(lock, [&] { return queue->over || !queue->pieces.empty(); });
    if (queue->over) return;
    const auto& [file, bytes] = queue->pieces.front();
    lock.unlock();
    file->write(bytes);
    lock.lock();
    queue->bytes -= queue->pieces.front().second.size();
    queue->pieces.pop_front();
    queue->changed.notify_all();
  }
}

}  // namespace cohort::launch
