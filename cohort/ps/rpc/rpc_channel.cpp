// SPDX-License-Identifier: Apache-2.0
#include "cohort/ps/rpc/rpc_channel.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/ps/endpoints.h"
#include "cohort/ps/rpc/hot_reply.h"
#include "cohort/ps/rpc/pem_files.h"
#include "cohort/ps/rpc/quiet_grpc.h"
#include "cohort/ps/rpc/shared_area.h"
#include "cohort/ps/rpc/slices.h"

#include "control.grpc.pb.h"

namespace cohort::ps {

namespace {

// Of a message and its answer. One that finds no room goes through the socket, too.
constexpr size_t kLeastShared = size_t{16} << 10;
constexpr int64_t kShareTimeoutMs = 10'000;
constexpr int64_t kUnshareTimeoutMs = 1'000;  // A server that is stuck does not hold up the end.

std::shared_ptr<grpc::ChannelCredentials> channel_credentials(const SecurityOptions& security) {
  if (!security.tls()) return grpc::InsecureChannelCredentials();
  PemFiles files = read_pem_files(security);
  return grpc::SslCredentials({.pem_root_certs = std::move(files.authority),
                               .pem_private_key = std::move(files.key),
                               .pem_cert_chain = std::move(files.certificate)});
}

grpc::ChannelArguments arguments_of(const SecurityOptions& security) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);
  arguments.SetMaxSendMessageSize(-1);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);  // A connection of its own for each.
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 10'000);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 10'000);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 50);
  // How long connecting may take, with the handshake of TLS; a refused connection is retried
  // sooner.
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 5'000);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 500);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  // Retries are ours (client/server_link.h): they must know what was applied.
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  if (security.tls() && !security.server_names.empty())
    arguments.SetSslTargetNameOverride(security.server_names.front());
  return arguments;
}

Reply lost(const grpc::Status& status) {
  using grpc::StatusCode;
  const StatusCode code = status.error_code();
  const bool final = code == StatusCode::PERMISSION_DENIED || code == StatusCode::UNAUTHENTICATED ||
                     code == StatusCode::UNIMPLEMENTED || code == StatusCode::RESOURCE_EXHAUSTED;
  return {.code = final ? Code::kFailed : Code::kLost, .text = status.error_message()};
}

Reply read_reply(const ControlReply& reply, Call call) {
  if (call == Call::kJoin && reply.code() == static_cast<uint32_t>(Code::kOk) &&
      reply.format() != kFormat)
    return {.code = Code::kInvalid,
            .text = "join: this trainer's messages are of format " + std::to_string(kFormat) +
                    ", the server's of format " + std::to_string(reply.format()) +
                    ": expected both of one version of Cohort"};
  const bool known = reply.code() <= static_cast<uint32_t>(kLastCode);
  return {.code = known ? static_cast<Code>(reply.code()) : Code::kLost,
          .text = reply.text(),
          .server_incarnation = reply.server_incarnation(),
          .trainer_incarnation = reply.trainer_incarnation(),
          .last_sequence = reply.last_sequence(),
          .steps = reply.steps(),
          .is_initialised = reply.is_initialised(),
          .joined_after = reply.joined_after(),
          .steps_at_start = reply.steps_at_start(),
          .server = static_cast<int>(reply.server()),
          .progress = reply.progress()};
}

// `room`: where the server may have written the message.
Reply read_reply(const grpc::ByteBuffer& bytes,
                 const std::shared_ptr<const SharedParts::Part>& room) {
  Buffer all = buffer_of(bytes);
  HotReply head;
  if (all.size() < sizeof(head)) return {.code = Code::kLost, .text = "its answer is cut off"};
  std::memcpy(&head, all.data(), sizeof(head));
  const size_t text_end = sizeof(head) + head.text_bytes;
  const size_t begin = head.text_bytes == 0 ? sizeof(head) : (text_end + 7) / 8 * 8;
  if (head.code > static_cast<uint32_t>(kLastCode) || begin > all.size())
    return {.code = Code::kLost, .text = "its answer is damaged"};
  Reply reply{.code = static_cast<Code>(head.code), .steps = head.steps, .progress = head.progress};
  reply.text.assign(reinterpret_cast<const char*>(all.data()) + sizeof(head), head.text_bytes);
  if (head.shared_bytes > 0) {
    if (!room || head.shared_bytes > room->bytes().size())
      return {.code = Code::kLost, .text = "its answer is damaged"};
    reply.message = Buffer(room->bytes().first(head.shared_bytes), room);
  } else if (begin < all.size()) {
    reply.message = std::move(all);
    reply.message.remove_prefix(begin);
  }
  return reply;
}

class RpcChannel final : public Channel {
 public:
  explicit RpcChannel(const RpcChannelOptions& options)
      : job_secret_(job_secret_of(options.security)),
        may_share_(unix_path(options.endpoint) && !options.security.tls()) {
    quiet_grpc();
    const auto credentials = channel_credentials(options.security);
    const auto arguments = arguments_of(options.security);
    for (int i = 0; i < std::max(1, options.connections); ++i) {
      channels_.push_back(grpc::CreateCustomChannel(options.endpoint, credentials, arguments));
      stubs_.push_back(std::make_unique<grpc::GenericStub>(channels_.back()));
    }
    control_ = ParameterServer::NewStub(channels_.front());
  }

  // Calls under way end first. One that ended later would hold the last reference to its
  // connection, and destroy it, with gRPC's threads, in one of these threads.
  ~RpcChannel() override {
    {
      const std::lock_guard lock(mutex_);
      for (grpc::ClientContext* const call : running_) call->TryCancel();
    }
    unshare();
    std::unique_lock lock(mutex_);
    none_running_.wait(lock, [this] { return num_running_ == 0; });
  }

  Buffer make_buffer(size_t bytes) override {
    const auto parts = bytes >= kLeastShared ? shared() : nullptr;
    const auto part = parts ? parts->take(bytes) : nullptr;
    return part ? Buffer(part->bytes().first(bytes), part) : Buffer(bytes);
  }

  void send(const Request& request, int64_t timeout_ms, Done done) override {
    if (request.call == Call::kPush || request.call == Call::kPull) {
      send_hot(request, timeout_ms, std::move(done));
    } else {
      if (request.call == Call::kLeave) unshare();
      send_control(request, timeout_ms, std::move(done));
    }
  }

 private:
  static void set_deadline(grpc::ClientContext& context, int64_t timeout_ms) {
    if (timeout_ms > 0)
      context.set_deadline(std::chrono::system_clock::now() +
                           std::chrono::milliseconds(timeout_ms));
  }

  void send_control(const Request& request, int64_t timeout_ms, Done done) {
    struct Running {
      grpc::ClientContext context;
      ControlRequest request;
      ControlReply reply;
    };
    auto* const running = begin(std::make_unique<Running>(), timeout_ms);
    running->request.set_call(static_cast<uint32_t>(request.call));
    running->request.set_trainer(request.trainer);
    running->request.set_job(request.job);
    running->request.set_incarnation(request.incarnation);
    running->request.set_step(request.step);
    running->request.set_nonce(request.nonce);
    running->request.set_text(request.text);
    running->request.set_format(kFormat);
    control_->async()->Control(
        &running->context, &running->request, &running->reply,
        [this, running, call = request.call, done = std::move(done)](const grpc::Status& status) {
          Reply reply = status.ok() ? read_reply(running->reply, call) : lost(status);
          end(running);
          done(std::move(reply));
        });
  }

  // Memory for messages, if the server has taken it; else offers some to it, for later calls.
  std::shared_ptr<SharedParts> shared() {
    if (!may_share_) return nullptr;
    std::shared_ptr<SharedParts> offered;
    {
      const std::lock_guard lock(mutex_);
      if (sharing_ == Sharing::kDone) return parts_;
      if (sharing_ != Sharing::kNone) return nullptr;
      sharing_ = Sharing::kOffered;
      try {
        offered = parts_ = std::make_shared<SharedParts>(SharedArea::kMostBytes);
        if (number_ == 0) number_ = parts_->area().name().number;
      } catch (const c10::Error&) {
        sharing_ = Sharing::kRefused;
        return nullptr;
      }
    }
    share(offered->area().name(), kShareTimeoutMs, [this](bool is_answered, bool is_taken) {
      const std::lock_guard lock(mutex_);
      if (sharing_ != Sharing::kOffered) return;
      sharing_ = is_taken ? Sharing::kDone : is_answered ? Sharing::kRefused : Sharing::kNone;
      if (!is_taken) parts_.reset();
    });
    return nullptr;
  }

  // Nothing is shared from now on. The server drops what it has.
  void unshare() {
    {
      const std::lock_guard lock(mutex_);
      parts_.reset();
      const bool has_offered = number_ != 0 && sharing_ != Sharing::kRefused;
      sharing_ = Sharing::kRefused;
      if (!has_offered) return;
    }
    share({}, kUnshareTimeoutMs, [](bool, bool) {});
  }

  // Offers memory in place of what was offered before; `name` {}: none.
  template <class Answered>
  void share(const SharedAreaName& name, int64_t timeout_ms, Answered answered) {
    struct Running {
      grpc::ClientContext context;
      ShareRequest request;
      ShareReply reply;
    };
    auto* const running = begin(std::make_unique<Running>(), timeout_ms);
    running->request.set_channel(number_);
    running->request.set_process(name.process);
    running->request.set_file(name.file);
    running->request.set_number(name.number);
    running->request.set_bytes(name.bytes);
    control_->async()->Share(&running->context, &running->request, &running->reply,
                             [this, running, answered](const grpc::Status& status) {
                               answered(status.ok(),
                                        status.ok() && running->reply.refusal().empty());
                               end(running);
                             });
  }

  // A server may still read and write the memory of a call that was given up: it is lost. Where
  // much is, and where the server does not have it, other memory is offered.
  template <class Running>
  void give_up(const Running& call, const grpc::Status& status) {
    if (!call.parts) return;
    if (call.message) call.parts->lose(*call.message);
    if (call.room) call.parts->lose(call.room->offset());
    const bool is_unknown = status.error_code() == grpc::StatusCode::FAILED_PRECONDITION;
    if (!is_unknown && call.parts->lost_bytes() <= SharedArea::kMostBytes / 2) return;
    const std::lock_guard lock(mutex_);
    if (parts_ != call.parts) return;
    parts_.reset();
    sharing_ = Sharing::kNone;
  }

  // What was not written to shared memory at once: a message of before the server had it, for
  // example.
  template <class Running>
  static void copy_message(Running& call, std::span<const std::byte> message) {
    const auto part = call.parts->take(message.size());
    if (!part) return;
    std::memcpy(part->bytes().data(), message.data(), message.size());
    call.message = part->offset();
    call.message_owner = part;
  }

  void send_hot(const Request& request, int64_t timeout_ms, Done done) {
    static const std::string kPush = "/cohort.ps.ParameterServer/Push";
    static const std::string kPull = "/cohort.ps.ParameterServer/Pull";
    struct Running {
      grpc::ClientContext context;
      grpc::ByteBuffer request;
      grpc::ByteBuffer reply;
      std::shared_ptr<SharedParts> parts;
      std::optional<uint64_t> message;  // Where it is in shared memory, which this keeps:
      std::shared_ptr<const void> message_owner;
      std::shared_ptr<SharedParts::Part> room;  // For the answer, in shared memory.
    };
    auto* const running = begin(std::make_unique<Running>(), timeout_ms);
    const auto message = request.message->span();
    if (message.size() + request.answer_bytes >= kLeastShared) running->parts = shared();
    if (running->parts) {
      running->message = running->parts->area().offset_of(message);
      running->message_owner = request.message;
      if (!running->message) copy_message(*running, message);
      running->room = running->parts->take(request.answer_bytes);
    }
    grpc::Slice slice = slice_of(request.message);
    if (running->message) {
      SharedMessage shared{.area = running->parts->area().name().number,
                           .offset = *running->message,
                           .bytes = message.size()};
      if (running->room) {
        shared.answer_offset = running->room->offset();
        shared.answer_bytes = running->room->bytes().size();
      }
      slice = grpc::Slice(&shared, sizeof(shared));
    }
    grpc::ByteBuffer bytes(&slice, 1);
    running->request.Swap(&bytes);
    auto& stub = *stubs_[next_++ % stubs_.size()];
    stub.UnaryCall(
        &running->context, request.call == Call::kPush ? kPush : kPull, {}, &running->request,
        &running->reply, [this, running, done = std::move(done)](const grpc::Status& status) {
          if (!status.ok()) give_up(*running, status);
          Reply reply = status.ok() ? read_reply(running->reply, running->room) : lost(status);
          end(running);
          done(std::move(reply));
        });
  }

  // A call's memory is its own until `end`.
  template <class Running>
  Running* begin(std::unique_ptr<Running> running, int64_t timeout_ms) {
    set_deadline(running->context, timeout_ms);
    if (!job_secret_.empty()) running->context.AddMetadata(kJobSecret, job_secret_);
    const std::lock_guard lock(mutex_);
    running_.insert(&running->context);
    ++num_running_;
    return running.release();
  }

  template <class Running>
  void end(Running* running) {
    {
      const std::lock_guard lock(mutex_);
      running_.erase(&running->context);
    }
    delete running;
    const std::lock_guard lock(mutex_);
    if (--num_running_ == 0) none_running_.notify_all();
  }

  enum class Sharing { kNone, kOffered, kDone, kRefused };  // kRefused: never again.

  const std::string job_secret_;
  const bool may_share_;
  std::vector<std::shared_ptr<grpc::Channel>> channels_;
  std::vector<std::unique_ptr<grpc::GenericStub>> stubs_;
  std::unique_ptr<ParameterServer::Stub> control_;
  std::atomic<size_t> next_ = 0;
  std::atomic<uint64_t> number_ = 0;  // That of the first memory offered, which is random.
  std::mutex mutex_;
  std::condition_variable none_running_;
  std::set<grpc::ClientContext*> running_;
  int64_t num_running_ = 0;
  Sharing sharing_ = Sharing::kNone;  // Guarded by mutex_, like what follows.
  std::shared_ptr<SharedParts> parts_;
};

}  // namespace

std::unique_ptr<Channel> make_rpc_channel(const RpcChannelOptions& options) {
  return std::make_unique<RpcChannel>(options);
}

}  // namespace cohort::ps
