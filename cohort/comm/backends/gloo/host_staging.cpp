// SPDX-License-Identifier: Apache-2.0
#include "cohort/comm/backends/gloo/host_staging.h"

#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

#include "cohort/comm/backends/gloo/gloo.h"
#include "cohort/comm/libtorch_version.h"

namespace cohort::comm {
namespace {

using StagedWork = c10::intrusive_ptr<c10d::Work>;
using StagedTensors = std::vector<at::Tensor>;

// What stands in host memory for the tensors of one call.
class HostStage {
 public:
  // A copy, which is there when this returns.
  at::Tensor read(const at::Tensor& tensor) {
    const at::NoGradGuard no_grad;
    return tensor.detach().to(at::kCPU, /*non_blocking=*/false, /*copy=*/true);
  }
  at::Tensor written(const at::Tensor& tensor) {
    written_.emplace_back(tensor, read(tensor));
    return written_.back().second;
  }
  StagedTensors read(const StagedTensors& tensors) {
    StagedTensors hosts;
    for (const at::Tensor& tensor : tensors) hosts.push_back(read(tensor));
    return hosts;
  }
  StagedTensors written(const StagedTensors& tensors) {
    StagedTensors hosts;
    for (const at::Tensor& tensor : tensors) hosts.push_back(written(tensor));
    return hosts;
  }

  void copy_back() {
    const at::NoGradGuard no_grad;
    for (auto& [tensor, host] : written_) tensor.detach().copy_(host);
  }
  // Waits for `work`, and returns one that has ended with what it wrote.
  StagedWork finish(const StagedWork& work) {
    work->wait();
    copy_back();
    StagedTensors results;
    std::vector<c10::Device> devices;
    for (const auto& [tensor, host] : written_) {
      results.push_back(tensor);
      if (devices.empty() && !tensor.is_cpu()) devices.push_back(tensor.device());
    }
    auto future = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::move(devices));
    future->markCompleted(results);
    return c10d::Work::create_from_future(future);
  }

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> written_;  // Of the device, and for it.
};

// A message under way: Gloo sees memory, not tensors.
class StagedMessage final : public c10d::Work {
 public:
  StagedMessage(HostStage stage, StagedTensors hosts, StagedWork work)
      : stage_(std::move(stage)), hosts_(std::move(hosts)), work_(std::move(work)) {}
  bool wait(std::chrono::milliseconds timeout) override {
    const bool ended = work_->wait(timeout);
    stage_.copy_back();
    return ended;
  }

 private:
  HostStage stage_;
  StagedTensors hosts_;
  StagedWork work_;
};

class StagedGloo final : public c10d::Backend {
 public:
  StagedGloo(const BackendRequest& request, std::string name)
      : c10d::Backend(request.rank, request.world_size),
        name_(std::move(name)),
        gloo_(make_gloo_backend(request)) {}

  const std::string getBackendName() const override { return name_; }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }
  void abort() override { gloo_->abort(); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return gloo_->getSequenceNumberForGroup(); }

  StagedWork broadcast(StagedTensors& tensors, const c10d::BroadcastOptions& options) override {
    HostStage stage;
    StagedTensors hosts = stage.written(tensors);
    return stage.finish(gloo_->broadcast(hosts, options));
  }
  StagedWork allreduce(StagedTensors& tensors, const c10d::AllreduceOptions& options) override {
    HostStage stage;
    StagedTensors hosts = stage.written(tensors);
    return stage.finish(gloo_->allreduce(hosts, options));
  }
  StagedWork reduce(StagedTensors& tensors, const c10d::ReduceOptions& options) override {
    HostStage stage;
    StagedTensors hosts = stage.written(tensors);
    return stage.finish(gloo_->reduce(hosts, options));
  }
  StagedWork gather(std::vector<StagedTensors>& outputs, StagedTensors& inputs,
                    const c10d::GatherOptions& options) override {
    HostStage stage;
    std::vector<StagedTensors> to;
    for (const StagedTensors& each : outputs) to.push_back(stage.written(each));
    StagedTensors from = stage.read(inputs);
    return stage.finish(gloo_->gather(to, from, options));
  }
  StagedWork scatter(StagedTensors& outputs, std::vector<StagedTensors>& inputs,
                     const c10d::ScatterOptions& options) override {
    HostStage stage;
    StagedTensors to = stage.written(outputs);
    std::vector<StagedTensors> from;
    for (const StagedTensors& each : inputs) from.push_back(stage.read(each));
    return stage.finish(gloo_->scatter(to, from, options));
  }
  StagedWork _allgather_base(at::Tensor& output, at::Tensor& input,
                             const c10d::AllgatherOptions& options) override {
    HostStage stage;
    at::Tensor to = stage.written(output), from = stage.read(input);
    return stage.finish(gloo_->COHORT_ALL_GATHER_SINGLE(to, from, options));
  }
  StagedWork _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                  const c10d::ReduceScatterOptions& options) override {
    HostStage stage;
    at::Tensor to = stage.written(output), from = stage.read(input);
    return stage.finish(gloo_->COHORT_REDUCE_SCATTER_SINGLE(to, from, options));
  }
  StagedWork alltoall_base(at::Tensor& output, at::Tensor& input,
                           std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
                           const c10d::AllToAllOptions& options) override {
    HostStage stage;
    at::Tensor to = stage.written(output), from = stage.read(input);
    return stage.finish(
        gloo_->COHORT_ALL_TO_ALL_SINGLE(to, from, output_splits, input_splits, options));
  }
  StagedWork send(StagedTensors& tensors, int destination, int tag) override {
    HostStage stage;
    StagedTensors hosts = stage.read(tensors);
    StagedWork work = gloo_->send(hosts, destination, tag);
    return c10::make_intrusive<StagedMessage>(std::move(stage), std::move(hosts), std::move(work));
  }
  StagedWork recv(StagedTensors& tensors, int source, int tag) override {
    HostStage stage;
    StagedTensors hosts = stage.written(tensors);
    StagedWork work = gloo_->recv(hosts, source, tag);
    return c10::make_intrusive<StagedMessage>(std::move(stage), std::move(hosts), std::move(work));
  }

 private:
  const std::string name_;
  const c10::intrusive_ptr<c10d::Backend> gloo_;
};

}  // namespace

BackendPlugin gloo_through_host(c10::DeviceType device) {
  const std::string name = "gloo_" + c10::DeviceTypeName(device, /*lower_case=*/true);
  return {
      .device = device, .make = [name](const BackendRequest& request) {
        return c10::intrusive_ptr<c10d::Backend>(c10::make_intrusive<StagedGloo>(request, name));
      }};
}

}  // namespace cohort::comm
