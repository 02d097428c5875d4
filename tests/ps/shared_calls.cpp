// SPDX-License-Identifier: Apache-2.0
#include "tests/ps/shared_calls.h"

#include <chrono>
#include <grpcpp/grpcpp.h>

#include "cohort/ps/rpc/hot_reply.h"
#include "cohort/ps/wire/request.h"

#include "control.grpc.pb.h"

namespace cohort::ps {

namespace {

std::unique_ptr<ParameterServer::Stub> stub_of(const std::string& endpoint) {
  return ParameterServer::NewStub(
      grpc::CreateChannel(endpoint, grpc::InsecureChannelCredentials()));
}

void wait_for_server(grpc::ClientContext& context) {
  context.set_wait_for_ready(true);
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
}

}  // namespace

std::string offer(const std::string& endpoint, uint64_t channel, const SharedAreaName& name,
                  const std::string& secret) {
  grpc::ClientContext context;
  wait_for_server(context);
  if (!secret.empty()) context.AddMetadata(kJobSecret, secret);
  ShareRequest request;
  request.set_channel(channel);
  request.set_process(name.process);
  request.set_file(name.file);
  request.set_number(name.number);
  request.set_bytes(name.bytes);
  ShareReply reply;
  const grpc::Status status = stub_of(endpoint)->Share(&context, request, &reply);
  return status.ok() ? reply.refusal() : status.error_message();
}

std::string join_with_format(const std::string& endpoint, uint32_t format) {
  grpc::ClientContext context;
  wait_for_server(context);
  ControlRequest request;
  request.set_call(static_cast<uint32_t>(Call::kJoin));
  request.set_format(format);
  ControlReply reply;
  const grpc::Status status = stub_of(endpoint)->Control(&context, request, &reply);
  return status.ok() ? reply.text() : status.error_message();
}

struct FalseServer::Service
    : ParameterServer::WithCallbackMethod_Control<ParameterServer::WithCallbackMethod_Share<
          ParameterServer::WithRawCallbackMethod_Pull<ParameterServer::Service>>> {
  std::string answer;
  std::unique_ptr<grpc::Server> grpc_server;

  grpc::ServerUnaryReactor* Control(grpc::CallbackServerContext* context, const ControlRequest*,
                                    ControlReply*) override {
    return agree(context);
  }
  grpc::ServerUnaryReactor* Share(grpc::CallbackServerContext* context, const ShareRequest*,
                                  ShareReply*) override {
    return agree(context);
  }
  grpc::ServerUnaryReactor* Pull(grpc::CallbackServerContext* context, const grpc::ByteBuffer*,
                                 grpc::ByteBuffer* out) override {
    const grpc::Slice slice(answer);
    grpc::ByteBuffer bytes(&slice, 1);
    out->Swap(&bytes);
    return agree(context);
  }
  static grpc::ServerUnaryReactor* agree(grpc::CallbackServerContext* context) {
    auto* const reactor = context->DefaultReactor();
    reactor->Finish(grpc::Status::OK);
    return reactor;
  }
};

FalseServer::FalseServer(const std::string& endpoint, const std::string& answer)
    : service_(std::make_unique<Service>()) {
  service_->answer = answer;
  grpc::ServerBuilder builder;
  builder.AddListeningPort(endpoint, grpc::InsecureServerCredentials());
  builder.RegisterService(service_.get());
  service_->grpc_server = builder.BuildAndStart();
}

FalseServer::~FalseServer() {
  service_->grpc_server->Shutdown(std::chrono::system_clock::now());
  service_->grpc_server->Wait();
}

}  // namespace cohort::ps
