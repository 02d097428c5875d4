// SPDX-License-Identifier: Apache-2.0
#include "cohort/ps/client/server_link.h"

#include <algorithm>
#include <c10/util/Exception.h>
#include <condition_variable>
#include <list>
#include <mutex>
#include <optional>
#include <random>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/ps/client/timer_thread.h"

namespace cohort::ps {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

namespace {

constexpr milliseconds kFirstPause{20};
constexpr milliseconds kLongestPause{1'000};
constexpr milliseconds kRejoinPause{100};
constexpr milliseconds kClockTolerance{5};

int64_t seconds_since(steady_clock::time_point time) {
  return std::chrono::duration_cast<std::chrono::seconds>(steady_clock::now() - time).count();
}

[[noreturn]] void fail(const Reply& reply) {
  if (reply.code == Code::kInvalid) C10_THROW_ERROR(ValueError, reply.text);
  // No peer is lost: a restarted job would find the same full disk. Where the trainer asked for the
  // checkpoint explains nothing.
  if (reply.code == Code::kNotWritten) throw_without_stack(reply.text);
  C10_THROW_ERROR(DistError, reply.text);
}

}  // namespace

uint64_t draw_nonce() {
  std::random_device random;
  return uint64_t{random()} << 32 | random() | 1;
}

struct ReplyFuture::State {
  Request request;
  Header header;  // Of pushes and pulls, to be sealed again after a restart.
  int64_t push_bytes = 0;
  milliseconds timeout{0};  // Of a sending.
  steady_clock::time_point sent_at{};
  milliseconds pause = kFirstPause;
  steady_clock::time_point began = steady_clock::now();
  steady_clock::time_point retry_at{};
  uint64_t progress = 0;  // Of the last answer that had some.

  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  Reply reply;
};

ReplyFuture::ReplyFuture(std::shared_ptr<State> state) : state_(std::move(state)) {}

bool ReplyFuture::is_done() const {
  const std::lock_guard lock(state_->mutex);
  return state_->done;
}

Reply ReplyFuture::wait() {
  std::unique_lock lock(state_->mutex);
  state_->changed.wait(lock, [this] { return state_->done; });
  if (state_->reply.code != Code::kOk) fail(state_->reply);
  return std::move(state_->reply);
}

// Shared with the callbacks of calls under way, which may outlive the link.
class ServerLink::Worker : public std::enable_shared_from_this<Worker> {
 public:
  using Operation = std::shared_ptr<ReplyFuture::State>;

  Worker(std::unique_ptr<Channel> channel, const LinkOptions& options, TimerThread& timer)
      : options_(options), timer_(timer), channel_(std::move(channel)) {}

  void start() {
    const std::lock_guard lock(mutex_);
    call_at(steady_clock::now() + options_.heartbeat_period, &Worker::tick);
  }

  void stop() {
    {
      const std::lock_guard lock(mutex_);
      closing_ = true;
    }
    timer_.cancel(this);
    // Here rather than with the last callback: in a channel to this process that one runs in the
    // server's thread, which cannot end the server.
    channel_.reset();
    std::list<Operation> left;
    {
      const std::lock_guard lock(mutex_);
      stopped_ = true;
      left.swap(waiting_);
    }
    for (const Operation& operation : left)
      finish(operation, {.code = Code::kLost, .text = name() + ": the connection was closed"});
  }

  Operation begin(Request request) {
    auto operation = std::make_shared<ReplyFuture::State>();
    operation->request = std::move(request);
    start(operation);
    return operation;
  }

  Operation begin(Call call, MessageWriter message, uint64_t sequence, uint64_t step,
                  uint32_t flags, size_t answer_bytes = 0) {
    auto operation = std::make_shared<ReplyFuture::State>();
    {
      const std::lock_guard lock(mutex_);
      operation->header = {.kind = call == Call::kPush ? MessageKind::kPush : MessageKind::kPull,
                           .flags = flags,
                           .job = job_,
                           .trainer = options_.trainer,
                           .trainer_incarnation = trainer_incarnation_,
                           .server_incarnation = server_incarnation_,
                           .sequence = sequence,
                           .step = step};
      confirmed_ = std::max(confirmed_, step);
    }
    auto sealed = std::make_shared<const Buffer>(message.finish(operation->header));
    operation->header.num_sections = parse_header(sealed->span()).num_sections;
    operation->request = {
        .call = call, .trainer = options_.trainer, .message = sealed, .answer_bytes = answer_bytes};
    if (call == Call::kPush) {
      operation->push_bytes = static_cast<int64_t>(sealed->size());
      await_credit(operation->push_bytes);
    }
    start(operation);
    return operation;
  }

  Buffer make_buffer(size_t bytes) { return channel_->make_buffer(bytes); }

  Reply join(uint64_t job, const std::string& text) {
    {
      const std::lock_guard lock(mutex_);
      job_ = job;
    }
    const Request request{.call = Call::kJoin,
                          .trainer = options_.trainer,
                          .job = job,
                          .nonce = draw_nonce(),
                          .text = text};
    Reply reply = ReplyFuture(begin(request)).wait();
    const std::lock_guard lock(mutex_);
    state_ = State::kJoined;
    server_incarnation_ = reply.server_incarnation;
    trainer_incarnation_ = reply.trainer_incarnation;
    return reply;
  }

  void confirm(uint64_t step) {
    Request request{.call = Call::kConfirm, .trainer = options_.trainer, .step = step};
    {
      const std::lock_guard lock(mutex_);
      request.incarnation = trainer_incarnation_;
      confirmed_ = std::max(confirmed_, step);
    }
    ReplyFuture(begin(std::move(request))).wait();
  }

  void flush() {
    std::unique_lock lock(mutex_);
    credit_.wait(lock, [this] { return in_flight_bytes_ == 0 || failure_.code != Code::kOk; });
    if (failure_.code != Code::kOk) fail(failure_);
  }

  void check_pushes() {
    const std::lock_guard lock(mutex_);
    if (failure_.code != Code::kOk) fail(failure_);
  }

  void give_up_pushes() {
    {
      const std::lock_guard lock(mutex_);
      if (failure_.code == Code::kOk)
        failure_ = {.code = Code::kLost, .text = name() + ": the pushes were abandoned"};
    }
    credit_.notify_all();
  }

  void leave() {
    Request request{.call = Call::kLeave, .trainer = options_.trainer};
    {
      const std::lock_guard lock(mutex_);
      request.incarnation = trainer_incarnation_;
      // No heartbeats: the server would reject them now.
      if (state_ != State::kFailed) state_ = State::kLeft;
    }
    ReplyFuture(begin(std::move(request))).wait();
  }

 private:
  enum class State {
    kConnecting,  // Until the first join.
    kJoined,
    kRejoining,  // The server restarted: messages wait until it knows this process again.
    kLeft,
    kFailed,  // This process is no longer part of the job: requests fail with `end_`.
  };

  // The server expects heartbeats.
  bool is_member() const { return state_ == State::kJoined || state_ == State::kRejoining; }

  std::string name() const {
    return "server " + std::to_string(options_.server) + " (" + options_.endpoint + ")";
  }

  std::string no_reply_text(const std::string& reason) const {
    return "no reply for " + std::to_string(seconds_since(last_answer_)) + " s: " + reason;
  }

  // Needs the lock. `work` runs on the timer's thread, which it must not block; never after stop().
  void call_at(steady_clock::time_point time, void (Worker::*work)()) {
    if (!closing_) timer_.call_at(this, time, [this, work] { (this->*work)(); });
  }

  void end(Code code, const std::string& why) {
    state_ = State::kFailed;
    end_ = {.code = code, .text = name() + ": " + why};
    call_at(steady_clock::now(), &Worker::send_due);
  }

  static Header parse_header(std::span<const std::byte> message) {
    Header header;
    std::copy_n(message.data(), sizeof(header), reinterpret_cast<std::byte*>(&header));
    return header;
  }

  void await_credit(int64_t bytes) {
    std::unique_lock lock(mutex_);
    // A single push is always sent, however large.
    credit_.wait(lock, [&] {
      return in_flight_bytes_ == 0 || in_flight_bytes_ + bytes <= options_.max_in_flight_bytes ||
             failure_.code != Code::kOk;
    });
    if (failure_.code != Code::kOk) fail(failure_);
    in_flight_bytes_ += bytes;
  }

  void start(const Operation& operation) {
    operation->timeout = options_.attempt_timeout;
    operation->began = steady_clock::now();  // A push may have waited for its credit.
    {
      const std::lock_guard lock(mutex_);
      if (open_++ == 0) last_progress_ = steady_clock::now();
    }
    send(operation);
  }

  void send(const Operation& operation) {
    auto self = shared_from_this();
    operation->sent_at = steady_clock::now();
    channel_->send(operation->request, operation->timeout.count(),
                   [self, operation](Reply reply) { self->answered(operation, std::move(reply)); });
  }

  void finish(const Operation& operation, Reply reply) {
    {
      const std::lock_guard lock(mutex_);
      --open_;
      last_progress_ = steady_clock::now();
      wait_reason_.clear();
      in_flight_bytes_ -= operation->push_bytes;
      // A failed push leaves a gap in the sequence: no later push can be applied.
      if (reply.code != Code::kOk && operation->request.call == Call::kPush &&
          failure_.code == Code::kOk)
        failure_ = {.code = reply.code, .text = reply.text};
    }
    credit_.notify_all();
    {
      const std::lock_guard lock(operation->mutex);
      operation->reply = std::move(reply);
      operation->done = true;
    }
    operation->changed.notify_all();
  }

  // Needs the lock. Whether to send again what the server put off; if not, `reply` becomes the
  // operation's end.
  bool may_wait_on(const Operation& operation, Reply& reply, steady_clock::time_point now) {
    wait_reason_ = reply.text;
    if (reply.progress != 0 && reply.progress != operation->progress) {
      operation->progress = reply.progress;
      operation->began = now;
    }
    // It waits for a push that failed.
    if (failure_.code != Code::kOk &&
        (operation->request.call == Call::kPull || operation->request.call == Call::kPush) &&
        operation->header.sequence > acknowledged_) {
      reply = {.code = failure_.code, .text = failure_.text};
      return false;
    }
    if (now - operation->began > options_.trainer_timeout) {
      reply.code = Code::kFailed;
      reply.text = name() + ": waited " + std::to_string(seconds_since(operation->began)) +
                   " s: " + reply.text;
      return false;
    }
    return true;
  }

  void answered(const Operation& operation, Reply reply) {
    const auto now = steady_clock::now();
    // The deadline's clock may be a little ahead of this one.
    const bool late = reply.code == Code::kLost &&
                      now - operation->sent_at >= operation->timeout - kClockTolerance;
    std::unique_lock lock(mutex_);
    if (reply.code != Code::kLost) last_answer_ = now;
    switch (reply.code) {
      case Code::kOk:
      case Code::kInvalid:
      case Code::kReplaced:
      case Code::kFailed:
      case Code::kNotWritten:
        if (operation->request.call == Call::kPush) retry_next_push_now(now);
        if (operation->request.call == Call::kPush && reply.code == Code::kOk)
          acknowledged_ = std::max(acknowledged_, operation->header.sequence);
        lock.unlock();
        if (reply.code != Code::kOk) reply.text = name() + ": " + reply.text;
        return finish(operation, std::move(reply));
      case Code::kNotYet:
      case Code::kBusy:
        if (!may_wait_on(operation, reply, now)) {
          lock.unlock();
          return finish(operation, std::move(reply));
        }
        operation->pause = reply.code == Code::kBusy ? longer_pause(*operation) : milliseconds(0);
        break;
      case Code::kRestarted:
        if (state_ == State::kJoined) {
          state_ = State::kRejoining;
          call_at(now, &Worker::rejoin);
        }
        break;
      case Code::kLost:
        wait_reason_ = reply.text;
        operation->pause = longer_pause(*operation);
        break;
    }
    if (state_ == State::kFailed) {
      Reply ended{.code = end_.code, .text = end_.text};
      lock.unlock();
      return finish(operation, std::move(ended));
    }
    const bool was_last = late && operation->timeout >= options_.server_timeout;
    if (stopped_ || was_last ||
        now - std::max(last_answer_, operation->began) > options_.server_timeout) {
      const std::string text = was_last && last_answer_ > operation->sent_at
                                   ? name() + ": it is alive, but did not reply to a call for " +
                                         std::to_string(seconds_since(operation->began)) +
                                         " s: " + reply.text
                                   : name() + ": " + no_reply_text(reply.text);
      lock.unlock();
      return finish(operation, {.code = Code::kLost, .text = text});
    }
    if (late) operation->timeout = std::min(2 * operation->timeout, options_.server_timeout);
    operation->retry_at = now + operation->pause;
    waiting_.push_back(operation);
    call_at(operation->retry_at, &Worker::send_due);
  }

  static milliseconds longer_pause(const ReplyFuture::State& operation) {
    return std::clamp(2 * operation.pause, kFirstPause, kLongestPause);
  }

  // Once a server has space, the push that it can take next is retried at once.
  void retry_next_push_now(steady_clock::time_point now) {
    Operation next;
    for (const Operation& operation : waiting_) {
      if (operation->request.call != Call::kPush) continue;
      if (!next || operation->header.sequence < next->header.sequence) next = operation;
    }
    if (!next) return;
    next->retry_at = now;
    call_at(now, &Worker::send_due);
  }

  // Joins again with the same number: the server knows what it has applied.
  void rejoin() {
    Request request{.call = Call::kJoin, .trainer = options_.trainer};
    {
      const std::lock_guard lock(mutex_);
      if (state_ != State::kRejoining) return;
      request.job = job_;
      request.incarnation = trainer_incarnation_;
    }
    channel_->send(request, options_.attempt_timeout.count(),
                   [self = shared_from_this()](const Reply& reply) { self->rejoined(reply); });
  }

  void rejoined(const Reply& reply) {
    const std::lock_guard lock(mutex_);
    const auto now = steady_clock::now();
    if (state_ != State::kRejoining) return;  // It left, or failed, meanwhile.
    if (reply.code == Code::kOk && reply.last_sequence < acknowledged_) {
      end(Code::kFailed, "it restarted without push " + std::to_string(acknowledged_) +
                             ", which it had acknowledged: it has " +
                             std::to_string(reply.last_sequence) + " of this trainer's");
    } else if (reply.code == Code::kOk) {
      state_ = State::kJoined;
      server_incarnation_ = reply.server_incarnation;
      last_answer_ = now;
      call_at(now, &Worker::send_due);
    } else if (reply.code == Code::kNotYet) {
      end(Code::kFailed, "it restarted without its state");
    } else if (reply.code == Code::kLost && now - last_answer_ > options_.server_timeout) {
      end(Code::kLost, no_reply_text(reply.text));
    } else if (reply.code != Code::kLost && reply.code != Code::kBusy) {
      end(reply.code, reply.text);
    } else {
      call_at(now + kRejoinPause, &Worker::rejoin);
    }
  }

  // Needs the lock; sending does not.
  Request heartbeat() const {
    return {.call = Call::kHeartbeat,
            .trainer = options_.trainer,
            .incarnation = trainer_incarnation_,
            .step = confirmed_};
  }

  void send_heartbeat(const Request& request) {
    auto self = shared_from_this();
    channel_->send(request, options_.attempt_timeout.count(), [self](const Reply& reply) {
      const std::lock_guard lock(self->mutex_);
      if (reply.code == Code::kOk) self->last_answer_ = steady_clock::now();
      if (reply.code == Code::kReplaced && self->is_member()) self->end(reply.code, reply.text);
    });
  }

  // Gives a message the server's present incarnation.
  void update_incarnation(ReplyFuture::State& operation) const {
    if (!operation.request.message || operation.header.server_incarnation == server_incarnation_)
      return;
    operation.header.server_incarnation = server_incarnation_;
    const auto bytes = operation.request.message->span();
    Buffer copy(bytes.size());  // gRPC may still hold the other one.
    std::copy(bytes.begin(), bytes.end(), copy.data());
    reseal(copy.span(), operation.header);
    operation.request.message = std::make_shared<const Buffer>(std::move(copy));
  }

  // Sends what is due again; ends all that waits if this process is no longer part of the job.
  void send_due() {
    const auto now = steady_clock::now();
    std::unique_lock lock(mutex_);
    const bool has_failed = state_ == State::kFailed;
    std::vector<Operation> due;
    waiting_.remove_if([&](const Operation& operation) {
      const bool must_wait =
          operation->retry_at > now || (state_ == State::kRejoining && operation->request.message);
      if (must_wait && !has_failed) return false;
      due.push_back(operation);
      return true;
    });
    for (const Operation& operation : due) update_incarnation(*operation);
    lock.unlock();
    for (const Operation& operation : due) {
      if (has_failed) {
        finish(operation, {.code = end_.code, .text = end_.text});
      } else {
        send(operation);
      }
    }
  }

  // The notice about a wait, once a period.
  std::optional<std::string> notice(steady_clock::time_point now) {
    if (open_ == 0 || now - last_progress_ < options_.notice_period) return std::nullopt;
    last_progress_ = now;
    return name() + ": waiting: " + (wait_reason_.empty() ? "no reply yet" : wait_reason_);
  }

  void tick() {
    const auto now = steady_clock::now();
    std::unique_lock lock(mutex_);
    call_at(now + options_.heartbeat_period, &Worker::tick);
    const auto said = notice(now);
    const bool beats = is_member() && options_.trainer != kNoTrainer;
    const Request present = heartbeat();
    lock.unlock();
    if (said && options_.on_wait) options_.on_wait(*said);
    if (beats) send_heartbeat(present);
  }

  const LinkOptions options_;
  TimerThread& timer_;  // It may have ended once stop() has returned.
  std::unique_ptr<Channel> channel_;
  std::mutex mutex_;
  std::condition_variable credit_;
  std::list<Operation> waiting_;  // For their next sending.
  int64_t in_flight_bytes_ = 0;
  Reply failure_;  // Of a push.
  State state_ = State::kConnecting;
  Reply end_;  // kFailed: why.
  uint64_t job_ = 0;
  uint64_t server_incarnation_ = 0;
  uint64_t trainer_incarnation_ = 0;
  uint64_t acknowledged_ = 0;  // The last push.
  uint64_t confirmed_ = 0;     // The last step that was confirmed here.
  bool closing_ = false;       // stop() was called, and has
  bool stopped_ = false;       // closed the channel.
  std::string wait_reason_;    // The last one since the last progress.
  int64_t open_ = 0;           // Operations that were started and are not finished.
  steady_clock::time_point last_answer_ = steady_clock::now();
  steady_clock::time_point last_progress_ = steady_clock::now();  // Or notice.
};

ServerLink::ServerLink(std::unique_ptr<Channel> channel, const LinkOptions& options,
                       TimerThread& timer)
    : worker_(std::make_shared<Worker>(std::move(channel), options, timer)) {
  worker_->start();
}

ServerLink::~ServerLink() {
  worker_->stop();
}

ReplyFuture ServerLink::begin(Request request) {
  return ReplyFuture(worker_->begin(std::move(request)));
}

Reply ServerLink::call(Request request) {
  return begin(std::move(request)).wait();
}

Reply ServerLink::join(uint64_t job, const std::string& text) {
  return worker_->join(job, text);
}

void ServerLink::confirm(uint64_t step) {
  worker_->confirm(step);
}

BufferMaker ServerLink::buffer_maker() const {
  return [worker = worker_.get()](size_t bytes) { return worker->make_buffer(bytes); };
}

ReplyFuture ServerLink::push(MessageWriter message, uint64_t sequence, uint64_t confirmed,
                             uint32_t flags) {
  return ReplyFuture(worker_->begin(Call::kPush, std::move(message), sequence, confirmed, flags));
}

ReplyFuture ServerLink::pull(MessageWriter message, uint64_t sequence, uint64_t step,
                             uint32_t flags, size_t answer_bytes) {
  return ReplyFuture(
      worker_->begin(Call::kPull, std::move(message), sequence, step, flags, answer_bytes));
}

void ServerLink::flush() {
  worker_->flush();
}

void ServerLink::check_pushes() {
  worker_->check_pushes();
}

void ServerLink::give_up_pushes() {
  worker_->give_up_pushes();
}

void ServerLink::leave() {
  worker_->leave();
}

}  // namespace cohort::ps
