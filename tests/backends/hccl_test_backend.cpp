// SPDX-License-Identifier: Apache-2.0
// libcohort_hccl.so, the shortest backend that works: every tensor goes through the group's store.
#include <ATen/ops/add.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <atomic>
#include <cstring>

#include "cohort/comm/backend.h"

namespace {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
std::atomic<int> calls = 0;  // for the tests only

class StoreBackend : public c10d::Backend {
 public:
  explicit StoreBackend(const cohort::comm::BackendRequest& request)
      : Backend(request.rank, request.world_size), store_(request.store) {
    setTimeout(request.timeout);
    init();
  }
  const std::string getBackendName() const override { return "hccl"; }
  void setTimeout(std::chrono::milliseconds timeout) override { store_->setTimeout(timeout); }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    const c10d::ReduceOp::RedOpType op = options.reduceOp;
    TORCH_CHECK_VALUE(
        op == c10d::ReduceOp::SUM || op == c10d::ReduceOp::MIN || op == c10d::ReduceOp::MAX,
        "hccl allreduce: expected sum, min or max");
    const Tensors all = exchange(tensors.at(0));
    at::Tensor result = all[0];
    for (size_t i = 1; i < all.size(); ++i) {
      result = op == c10d::ReduceOp::SUM   ? at::add(result, all[i])
               : op == c10d::ReduceOp::MIN ? at::minimum(result, all[i])
                                           : at::maximum(result, all[i]);
    }
    tensors[0].copy_(result);
    return ended(tensors);
  }
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    tensors.at(0).copy_(exchange(tensors[0]).at(static_cast<size_t>(options.rootRank)));
    return ended(tensors);
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions&) override {
    const Tensors all = exchange(inputs.at(0));
    for (size_t i = 0; i < all.size(); ++i) outputs.at(0).at(i).copy_(all[i]);
    return ended(outputs[0]);
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions&) override {
    output.copy_(at::cat(exchange(input)).view_as(output));
    return ended({output});
  }
  WorkPtr barrier(const c10d::BarrierOptions&) override {
    exchange(at::empty({1}));
    return ended({});
  }

 private:
  // Every rank's `tensor`, by rank. The store waits for those that are not there yet.
  Tensors exchange(const at::Tensor& tensor) {
    ++calls;
    const std::string prefix = std::to_string(sequence_++) + "/";
    const auto* data = static_cast<const uint8_t*>(tensor.const_data_ptr());
    store_->set(prefix + std::to_string(rank_), std::vector<uint8_t>(data, data + tensor.nbytes()));
    Tensors all;
    for (int rank = 0; rank < size_; ++rank) {
      const auto bytes = store_->get(prefix + std::to_string(rank));
      all.push_back(at::empty_like(tensor));
      TORCH_CHECK_VALUE(bytes.size() == tensor.nbytes(), "hccl: rank ", rank, " sent ",
                        bytes.size(), " bytes, expected ", tensor.nbytes());
      std::memcpy(all.back().mutable_data_ptr(), bytes.data(), bytes.size());
    }
    return all;
  }
  // A work that is done. Its future must hold the list of tensors: DistributedDataParallel reads
  // it.
  static WorkPtr ended(const Tensors& results) {
    auto future =
        c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    future->markCompleted(c10::IValue(results));
    return c10d::Work::create_from_future(future);
  }

  c10::intrusive_ptr<c10d::Store> store_;
  int64_t sequence_ = 0;
};

c10::intrusive_ptr<c10d::Backend> connect(const cohort::comm::BackendRequest& request) {
  return c10::make_intrusive<StoreBackend>(request);
}

}  // namespace

extern "C" const cohort::comm::BackendAbi* cohort_backend() {
  static const cohort::comm::BackendAbi abi{.device = c10::DeviceType::CPU, .make = connect};
  return &abi;
}

extern "C" int cohort_hccl_calls() {
  return calls;
}
