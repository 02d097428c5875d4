// SPDX-License-Identifier: Apache-2.0
#include "cohort/ps/rpc/rpc_server.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <grpc/grpc.h>
#include <grpcpp/grpcpp.h>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/secret.h"
#include "cohort/ps/client/timer_thread.h"
#include "cohort/ps/endpoints.h"
#include "cohort/ps/rpc/hot_reply.h"
#include "cohort/ps/rpc/pem_files.h"
#include "cohort/ps/rpc/quiet_grpc.h"
#include "cohort/ps/rpc/shared_area.h"
#include "cohort/ps/rpc/slices.h"

#include "control.grpc.pb.h"

namespace cohort::ps {

namespace {

using grpc::ByteBuffer;
using grpc::CallbackServerContext;
using grpc::ServerUnaryReactor;
using Base = ParameterServer::WithCallbackMethod_Control<
    ParameterServer::WithCallbackMethod_Share<ParameterServer::WithRawCallbackMethod_Push<
        ParameterServer::WithRawCallbackMethod_Pull<ParameterServer::Service>>>>;

constexpr std::chrono::seconds kOrphanPeriod{1};

// More wait with their sender.
constexpr int kMaxCallsOfConnection = 128;

// By its number: a name that begins with 127 may be anybody's.
bool is_local(const std::string& endpoint) {
  return unix_path(endpoint) || endpoint.substr(0, endpoint.rfind(':')) == "localhost" ||
         is_loopback(endpoint);
}

std::shared_ptr<grpc::ServerCredentials> server_credentials(const SecurityOptions& security) {
  if (!security.tls()) return grpc::InsecureServerCredentials();
  PemFiles files = read_pem_files(security);
  grpc::SslServerCredentialsOptions options(
      GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  options.pem_root_certs = std::move(files.authority);
  options.pem_key_cert_pairs.push_back({std::move(files.key), std::move(files.certificate)});
  return grpc::SslServerCredentials(options);
}

void write_reply(Reply reply, ByteBuffer& out) {
  static constexpr std::array<char, 8> kZeros{};
  const bool is_shared = !reply.message.empty() && !reply.message.is_owner();
  const HotReply head{.code = static_cast<uint32_t>(reply.code),
                      .text_bytes = static_cast<uint32_t>(reply.text.size()),
                      .steps = reply.steps,
                      .progress = reply.progress,
                      .shared_bytes = is_shared ? reply.message.size() : 0};
  std::vector<grpc::Slice> slices;
  slices.emplace_back(&head, sizeof(head));
  if (!reply.text.empty()) {
    slices.emplace_back(reply.text);
    slices.emplace_back(kZeros.data(), (8 - reply.text.size() % 8) % 8);
  }
  if (!reply.message.empty() && !is_shared)
    slices.push_back(
        slice_of(std::make_shared<const Buffer>(std::move(reply.message)), std::move(reply.hold)));
  ByteBuffer bytes(slices.data(), slices.size());
  out.Swap(&bytes);
}

}  // namespace

struct RpcServer::Service : Base {
  Service(Server& its_server, const RpcServerOptions& options)
      : server(its_server),
        security(options.security),
        job_secret(job_secret_of(options.security)),
        max_message_bytes(options.max_message_bytes) {
    remove_orphans();
  }

  Server& server;
  SecurityOptions security;
  std::string job_secret;
  int64_t max_message_bytes;
  std::unique_ptr<grpc::Server> grpc_server;
  SharedAreas areas;
  TimerThread timer;

  // The memory of trainers that were killed: nobody takes it back.
  void remove_orphans() {
    areas.remove_orphans();
    timer.call_at(this, std::chrono::steady_clock::now() + kOrphanPeriod,
                  [this] { remove_orphans(); });
  }

  // Returns OK, or why the caller is rejected.
  grpc::Status authorize(const CallbackServerContext& context) const {
    if (!has_secret(context))
      return {grpc::StatusCode::PERMISSION_DENIED,
              "the caller does not have the job's secret (--job-secret-file, COHORT_JOB_SECRET)"};
    if (!is_authorized(context))
      return {grpc::StatusCode::PERMISSION_DENIED,
              "the caller's certificate has no name that is allowed here"};
    return grpc::Status::OK;
  }

  bool has_secret(const CallbackServerContext& context) const {
    if (job_secret.empty()) return true;
    const auto found = context.client_metadata().find(kJobSecret);
    return found != context.client_metadata().end() &&
           equal_secrets({found->second.data(), found->second.size()}, job_secret);
  }

  // Whether the caller's certificate has an allowed name.
  bool is_authorized(const CallbackServerContext& context) const {
    if (!security.tls()) return true;
    const auto peer = context.auth_context();
    for (const char* property : {GRPC_X509_CN_PROPERTY_NAME, GRPC_X509_SAN_PROPERTY_NAME}) {
      for (const grpc::string_ref& name : peer->FindPropertyValues(property)) {
        for (const auto* names : {&security.trainer_names, &security.server_names}) {
          if (std::find(names->begin(), names->end(), std::string(name.data(), name.size())) !=
              names->end())
            return true;
        }
      }
    }
    return false;
  }

  ServerUnaryReactor* Control(CallbackServerContext* context, const ControlRequest* asked,
                              ControlReply* answer) override {
    auto* const reactor = context->DefaultReactor();
    if (const grpc::Status refusal = authorize(*context); !refusal.ok()) {
      reactor->Finish(refusal);
      return reactor;
    }
    answer->set_format(kFormat);
    if (static_cast<Call>(asked->call()) == Call::kJoin && asked->format() != kFormat) {
      answer->set_code(static_cast<uint32_t>(Code::kInvalid));
      answer->set_text("join: this server's messages are of format " + std::to_string(kFormat) +
                       ", the trainer's of format " + std::to_string(asked->format()) +
                       ": expected both of one version of Cohort");
      reactor->Finish(grpc::Status::OK);
      return reactor;
    }
    Request request{.call = static_cast<Call>(asked->call()),
                    .trainer = asked->trainer(),
                    .job = asked->job(),
                    .incarnation = asked->incarnation(),
                    .step = asked->step(),
                    .nonce = asked->nonce(),
                    .text = asked->text()};
    server.submit(std::move(request), [answer, reactor](const Reply& reply) {
      answer->set_code(static_cast<uint32_t>(reply.code));
      answer->set_text(reply.text);
      answer->set_server_incarnation(reply.server_incarnation);
      answer->set_trainer_incarnation(reply.trainer_incarnation);
      answer->set_last_sequence(reply.last_sequence);
      answer->set_steps(reply.steps);
      answer->set_is_initialised(reply.is_initialised);
      answer->set_joined_after(reply.joined_after);
      answer->set_steps_at_start(reply.steps_at_start);
      answer->set_server(static_cast<uint32_t>(reply.server));
      answer->set_progress(reply.progress);
      reactor->Finish(grpc::Status::OK);
    });
    return reactor;
  }

  // Whether the caller is one that shares memory: of this host, by the socket's file.
  bool may_share(const CallbackServerContext& context) const {
    return !security.tls() && context.peer().starts_with("unix:");
  }

  ServerUnaryReactor* Share(CallbackServerContext* context, const ShareRequest* asked,
                            ShareReply* answer) override {
    auto* const reactor = context->DefaultReactor();
    const grpc::Status refusal = authorize(*context);
    if (refusal.ok() && !may_share(*context)) {
      answer->set_refusal("memory is shared over a unix socket without TLS alone");
    } else if (refusal.ok() && asked->bytes() == 0) {
      areas.remove(asked->channel());
    } else if (refusal.ok()) {
      try {
        areas.add(asked->channel(), {.process = asked->process(),
                                     .file = asked->file(),
                                     .number = asked->number(),
                                     .bytes = asked->bytes()});
      } catch (const std::exception& error) {
        answer->set_refusal(one_line(error));
      }
    }
    reactor->Finish(refusal);
    return reactor;
  }

  ServerUnaryReactor* hot(Call call, CallbackServerContext* context, const ByteBuffer* asked,
                          ByteBuffer* answer) {
    auto* const reactor = context->DefaultReactor();
    if (const grpc::Status refusal = authorize(*context); !refusal.ok()) {
      reactor->Finish(refusal);
      return reactor;
    }
    Request request{.call = call};
    auto message = std::make_shared<Buffer>(buffer_of(*asked));
    if (const auto shared = read_shared_message(message->span())) {
      const auto places = areas.find(*shared);
      if (!places) {
        reactor->Finish({grpc::StatusCode::FAILED_PRECONDITION, "no such shared memory"});
        return reactor;
      }
      // Before it is copied: a call of a few bytes names as many as the area has.
      const auto bytes = static_cast<int64_t>(places->message.size());
      if (bytes > max_message_bytes) {
        reactor->Finish({grpc::StatusCode::RESOURCE_EXHAUSTED,
                         "message in shared memory larger than max (" + std::to_string(bytes) +
                             " vs. " + std::to_string(max_message_bytes) + ")"});
        return reactor;
      }
      if (!server.has_room(bytes)) {
        write_reply({.code = Code::kBusy, .text = "the server's queue is full"}, *answer);
        reactor->Finish(grpc::Status::OK);
        return reactor;
      }
      // The other side may write to its memory at any time: what is checked and logged is a copy.
      message = std::make_shared<Buffer>(places->message.size());
      std::memcpy(message->data(), places->message.data(), places->message.size());
      if (places->answer)
        request.answer_maker = [area = places->area, room = *places->answer](size_t answer_bytes) {
          return answer_bytes <= room.size() ? Buffer(room.first(answer_bytes), area)
                                             : Buffer(answer_bytes);
        };
    }
    request.message = std::move(message);
    server.submit(std::move(request), [answer, reactor](Reply reply) {
      write_reply(std::move(reply), *answer);
      reactor->Finish(grpc::Status::OK);
    });
    return reactor;
  }

  ServerUnaryReactor* Push(CallbackServerContext* context, const ByteBuffer* asked,
                           ByteBuffer* answer) override {
    return hot(Call::kPush, context, asked, answer);
  }

  ServerUnaryReactor* Pull(CallbackServerContext* context, const ByteBuffer* asked,
                           ByteBuffer* answer) override {
    return hot(Call::kPull, context, asked, answer);
  }
};

namespace {

// The library stays until the process ends. Taking it down after the last server waits for a poller
// of its own, up to 10 s (gRPC 1.51, issue 41050): a launcher would have killed the server by then.
void keep_grpc() {
  [[maybe_unused]] static const bool kKept = (grpc_init(), true);
}

}  // namespace

void check_rpc_server(const RpcServerOptions& options) {
  const SecurityOptions& security = options.security;
  check_listening_endpoint("--endpoint", options.endpoint);
  if (security.tls()) check_server_name(security, read_pem_files(security));
  if (!security.tls() && !is_local(options.endpoint))
    throw ConfigError("--endpoint " + options.endpoint +
                      ": without TLS a server listens on this host alone: expected 127.0.0.1:PORT "
                      "or unix:PATH, or --tls-authority, --tls-certificate and --tls-key");
  check_can_listen("--endpoint", options.endpoint);
}

RpcServer::RpcServer(Server& server, const RpcServerOptions& options)
    : service_(std::make_unique<Service>(server, options)) {
  quiet_grpc();
  keep_grpc();
  check_rpc_server(options);
  grpc::ServerBuilder builder;
  builder.AddListeningPort(options.endpoint, server_credentials(options.security), &port_);
  builder.RegisterService(service_.get());
  builder.SetMaxReceiveMessageSize(static_cast<int>(options.max_message_bytes));
  builder.SetMaxSendMessageSize(-1);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kMaxCallsOfConnection);
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, 10'000);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 5'000);
  service_->grpc_server = builder.BuildAndStart();
  if (!service_->grpc_server || port_ == 0)
    throw ConfigError("--endpoint " + options.endpoint +
                      ": cannot listen there: another process does, or it is not of this host");
  if (unix_path(options.endpoint)) port_ = 0;  // gRPC says 1.
}

RpcServer::~RpcServer() {
  service_->grpc_server->Shutdown(std::chrono::system_clock::now() + std::chrono::seconds(2));
  service_->grpc_server->Wait();
}

}  // namespace cohort::ps
