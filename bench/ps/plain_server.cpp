// SPDX-License-Identifier: Apache-2.0
#include "bench/ps/plain_server.h"

#include <chrono>
#include <cmath>
#include <cstring>
#include <future>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <mutex>
#include <stdexcept>
#include <unordered_map>
#include <vector>

#include "plain.grpc.pb.h"

namespace cohort::bench {

namespace {

using grpc::ByteBuffer;
using grpc::Status;

struct Row {
  float accumulator = 0;
  float weights[kWidth] = {};
};

void require(const Status& status) {
  if (!status.ok()) throw std::runtime_error(status.error_message());
}

grpc::Slice borrowed(const void* data, size_t size) {
  return {const_cast<void*>(data), size, [](void*) {}, nullptr};
}

void copy_out(const ByteBuffer& bytes, void* to, size_t size) {
  std::vector<grpc::Slice> slices;
  require(bytes.Dump(&slices));
  auto* out = static_cast<std::byte*>(to);
  for (const grpc::Slice& slice : slices) {
    const size_t part = std::min(size, slice.size());
    std::memcpy(out, slice.begin(), part);
    out += part;
    size -= part;
  }
}

}  // namespace

// Protobuf's calls in gRPC's plain, synchronous form; raw ones in callbacks, as the real server has
// them.
using Base =
    Plain::WithRawCallbackMethod_RawPull<Plain::WithRawCallbackMethod_RawPush<Plain::Service>>;

struct PlainServer::Service final : Base {
  Status Pull(grpc::ServerContext*, const PullRequest* asked, Rows* rows) override {
    const std::lock_guard lock(mutex);
    rows->mutable_values()->Reserve(asked->ids_size() * static_cast<int>(kWidth));
    for (const uint64_t id : asked->ids()) {
      const Row& row = table[id];
      for (const float weight : row.weights) rows->add_values(weight);
    }
    return Status::OK;
  }

  Status Push(grpc::ServerContext*, const PushRequest* asked, Nothing*) override {
    const std::lock_guard lock(mutex);
    for (int i = 0; i < asked->ids_size(); ++i) {
      Row& row = table[asked->ids(i)];
      const float* const gradient = asked->gradients().data() + static_cast<size_t>(i) * kWidth;
      float sum = 0;
      for (size_t j = 0; j < kWidth; ++j) sum += gradient[j] * gradient[j];
      row.accumulator += sum / kWidth;
      const float rate = 0.01f / (std::sqrt(row.accumulator) + 1e-8f);
      for (size_t j = 0; j < kWidth; ++j) row.weights[j] -= rate * gradient[j];
    }
    return Status::OK;
  }

  grpc::ServerUnaryReactor* RawPull(grpc::CallbackServerContext* context, const ByteBuffer* asked,
                                    ByteBuffer* answer) override {
    const size_t rows = asked->Length() / sizeof(uint64_t);
    // Allocated each time, as a reply is.
    auto* const zeros = new std::vector<float>(rows * kWidth);
    const grpc::Slice slice(
        zeros->data(), zeros->size() * sizeof(float),
        [](void* owner) { delete static_cast<std::vector<float>*>(owner); }, zeros);
    ByteBuffer bytes(&slice, 1);
    answer->Swap(&bytes);
    auto* const reactor = context->DefaultReactor();
    reactor->Finish(Status::OK);
    return reactor;
  }

  grpc::ServerUnaryReactor* RawPush(grpc::CallbackServerContext* context, const ByteBuffer* asked,
                                    ByteBuffer* answer) override {
    std::vector<std::byte> bytes(asked->Length());
    copy_out(*asked, bytes.data(), bytes.size());
    const grpc::Slice empty;
    ByteBuffer nothing(&empty, 1);
    answer->Swap(&nothing);
    auto* const reactor = context->DefaultReactor();
    reactor->Finish(Status::OK);
    return reactor;
  }

  std::mutex mutex;
  std::unordered_map<uint64_t, Row> table;
  std::unique_ptr<grpc::Server> server;
  int port = 0;
};

PlainServer::PlainServer() : service_(std::make_unique<Service>()) {
  grpc::ServerBuilder builder;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &service_->port);
  builder.SetMaxReceiveMessageSize(-1);
  builder.RegisterService(service_.get());
  service_->server = builder.BuildAndStart();
}

PlainServer::~PlainServer() = default;

int PlainServer::port() const {
  return service_->port;
}

struct PlainClient::Stub {
  std::shared_ptr<grpc::Channel> channel;
  std::unique_ptr<Plain::Stub> typed;
  std::unique_ptr<grpc::GenericStub> raw;

  void call(const char* method, const ByteBuffer& request, ByteBuffer& reply) const {
    grpc::ClientContext context;
    std::promise<Status> status;
    raw->UnaryCall(&context, std::string("/cohort.bench.Plain/") + method, {}, &request, &reply,
                   [&](const Status& answer) { status.set_value(answer); });
    require(status.get_future().get());
  }
};

PlainClient::PlainClient(int port) : stub_(std::make_unique<Stub>()) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);
  stub_->channel = grpc::CreateCustomChannel("127.0.0.1:" + std::to_string(port),
                                             grpc::InsecureChannelCredentials(), arguments);
  stub_->typed = Plain::NewStub(stub_->channel);
  stub_->raw = std::make_unique<grpc::GenericStub>(stub_->channel);
}

PlainClient::~PlainClient() = default;

void PlainClient::pull(std::span<const uint64_t> ids, std::span<float> weights) {
  PullRequest request;
  request.mutable_ids()->Add(ids.begin(), ids.end());
  Rows rows;
  grpc::ClientContext context;
  require(stub_->typed->Pull(&context, request, &rows));
  std::copy(rows.values().begin(), rows.values().end(), weights.begin());
}

void PlainClient::push(std::span<const uint64_t> ids, std::span<const float> gradients) {
  PushRequest request;
  request.mutable_ids()->Add(ids.begin(), ids.end());
  request.mutable_gradients()->Add(gradients.begin(), gradients.end());
  Nothing nothing;
  grpc::ClientContext context;
  require(stub_->typed->Push(&context, request, &nothing));
}

void PlainClient::raw_pull(std::span<const uint64_t> ids, std::span<float> weights) {
  const grpc::Slice slice = borrowed(ids.data(), ids.size_bytes());
  const ByteBuffer request(&slice, 1);
  ByteBuffer reply;
  stub_->call("RawPull", request, reply);
  copy_out(reply, weights.data(), weights.size_bytes());
}

void PlainClient::raw_push(std::span<const uint64_t> ids, std::span<const float> gradients) {
  const std::vector<grpc::Slice> slices{borrowed(ids.data(), ids.size_bytes()),
                                        borrowed(gradients.data(), gradients.size_bytes())};
  const ByteBuffer request(slices.data(), slices.size());
  ByteBuffer reply;
  stub_->call("RawPush", request, reply);
}

}  // namespace cohort::bench
