// SPDX-License-Identifier: Apache-2.0
#include "cohort/comm/backends/gloo/direct_exchange.h"

#include <ATen/ops/add.h>
#include <ATen/ops/bitwise_and.h>
#include <ATen/ops/bitwise_or.h>
#include <ATen/ops/bitwise_xor.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/mul.h>
#include <functional>
#include <vector>

namespace cohort::comm {
namespace {

using Tensors = std::vector<at::Tensor>;
using BackendWork = c10::intrusive_ptr<c10d::Work>;

// into = a op b, the backend's arithmetic for one pair.
void combine(at::Tensor into, const at::Tensor& a, const at::Tensor& b, c10d::ReduceOp op) {
  switch (static_cast<c10d::ReduceOp::RedOpType>(op)) {
    case c10d::ReduceOp::SUM:
      at::add_out(into, a, b);
      break;
    case c10d::ReduceOp::PRODUCT:
      at::mul_out(into, a, b);
      break;
    case c10d::ReduceOp::MAX:
      at::maximum_out(into, a, b);
      break;
    case c10d::ReduceOp::MIN:
      at::minimum_out(into, a, b);
      break;
    case c10d::ReduceOp::BAND:
      at::bitwise_and_out(into, a, b);
      break;
    case c10d::ReduceOp::BOR:
      at::bitwise_or_out(into, a, b);
      break;
    case c10d::ReduceOp::BXOR:
      at::bitwise_xor_out(into, a, b);
      break;
    default:
      TORCH_CHECK_VALUE(false, "reduce_scatter: gloo does not reduce by operation ",
                        static_cast<int>(static_cast<c10d::ReduceOp::RedOpType>(op)));
  }
}

// output = parts[0] op parts[1] op ..., in this order. Intermediate results lie in parts, but never
// in the `own`-th. `output` may be that one, or the last of the others.
void combine_all(const at::Tensor& output, const Tensors& parts, size_t own, c10d::ReduceOp op) {
  if (parts.size() == 1 && !output.is_same(parts[0])) at::Tensor(output).copy_(parts[0]);
  at::Tensor sum = parts[0];
  for (size_t i = 1; i < parts.size(); ++i) {
    const at::Tensor& into = i + 1 == parts.size() ? output : i == own ? sum : parts[i];
    combine(into, sum, parts[i], op);
    sum = into;
  }
}

// Several works as one, and what is left to do after them. Gloo sees memory, not tensors: those lie
// here until it is at rest.
class Exchange : public c10d::Work {
 public:
  explicit Exchange(std::function<void()> finish = {}) : finish_(std::move(finish)) {}
  void add(BackendWork work, at::Tensor tensor) {
    tensors_.push_back(std::move(tensor));
    works_.push_back(std::move(work));
  }
  bool wait(std::chrono::milliseconds timeout) override {
    for (const BackendWork& work : works_) work->wait(timeout);
    works_.clear();
    if (const auto finish = std::exchange(finish_, {})) finish();
    return true;
  }

 private:
  std::function<void()> finish_;
  Tensors tensors_;  // outlive works_
  std::vector<BackendWork> works_;
};

at::Tensor as_bytes(const at::Tensor& tensor) {
  return tensor.view({-1}).view(at::kByte);
}

// Sends outgoing[r] to every other rank r and fills incoming[r] with what r sends, in place.
BackendWork begin_exchange(c10d::Backend& gloo, const Tensors& outgoing, const Tensors& incoming,
                           int tag, std::function<void()> finish) {
  auto exchange = c10::make_intrusive<Exchange>(std::move(finish));
  const int size = outgoing.front().numel() > 0 ? gloo.getSize() : 1;
  for (int step = 1; step < size; ++step) {
    const int from = (gloo.getRank() + size - step) % size;
    Tensors tensors{as_bytes(incoming[static_cast<size_t>(from)])};
    exchange->add(gloo.recv(tensors, from, tag), tensors[0]);
  }
  for (int step = 1; step < size; ++step) {
    const int to = (gloo.getRank() + step) % size;
    Tensors tensors{as_bytes(outgoing[static_cast<size_t>(to)])};
    exchange->add(gloo.send(tensors, to, tag), tensors[0]);
  }
  return exchange;
}

}  // namespace

BackendWork direct_all_gather(c10d::Backend& gloo, const at::Tensor& output,
                              const at::Tensor& input, int tag) {
  const auto size = static_cast<size_t>(gloo.getSize());
  const Tensors parts = output.detach().view({gloo.getSize(), input.numel()}).unbind(0);
  at::Tensor own = parts[static_cast<size_t>(gloo.getRank())];
  const at::Tensor flat = input.detach().view({-1});
  if (own.const_data_ptr() != flat.const_data_ptr()) own.copy_(flat);
  return begin_exchange(gloo, Tensors(size, flat), parts, tag, {});
}

BackendWork direct_reduce_scatter(c10d::Backend& gloo, const at::Tensor& output,
                                  const at::Tensor& input, c10d::ReduceOp op, int tag) {
  const auto own = static_cast<size_t>(gloo.getRank());
  const Tensors outgoing = input.detach().view({gloo.getSize(), output.numel()}).unbind(0);
  const at::Tensor result = output.detach().view({-1});
  // The last part that comes may lie where the result will, unless this rank's own lies there.
  const size_t last = own + 1 == outgoing.size() ? own - 1 : outgoing.size() - 1;
  Tensors parts;
  for (size_t peer = 0; peer < outgoing.size(); ++peer) {
    const bool there = peer == last && !output.is_alias_of(input);
    parts.push_back(peer == own ? outgoing[own] : there ? result : at::empty_like(outgoing[peer]));
  }
  return begin_exchange(gloo, outgoing, parts, tag,
                        [parts, own, result, op] { combine_all(result, parts, own, op); });
}

}  // namespace cohort::comm
