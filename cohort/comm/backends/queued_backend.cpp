// SPDX-License-Identifier: Apache-2.0
#include "cohort/comm/backends/queued_backend.h"

#include <c10/util/Exception.h>
#include <exception>
#include <iterator>
#include <utility>

#include "cohort/base/error.h"

namespace cohort::comm {

QueuedBackend::QueuedBackend(int rank, int world_size, std::chrono::milliseconds timeout,
                             std::string thread_name, TitleOf title_of)
    : Backend(rank, world_size),
      title_of_(title_of),
      timeout_(timeout),
      queue_(std::move(thread_name)) {}

uint64_t QueuedBackend::getSequenceNumberForGroup() {
  const std::lock_guard lock(mutex_);
  return sequence_;
}

void QueuedBackend::number_next(uint32_t number) {
  const std::lock_guard lock(mutex_);
  number_ = number;
}

uint32_t QueuedBackend::take_number() {
  const std::lock_guard lock(mutex_);
  ++sequence_;
  return number_++;
}

QueuedBackend::WorkPtr QueuedBackend::launch(BackendCall call) {
  call.shared.number = take_number();
  auto work = c10::make_intrusive<QueuedWork>(rank_, call.type, title_of_(call.type), call.results,
                                              [this, call] { run(call); });
  queue_.launch(work, call.in_background);
  return work;
}

void QueuedBackend::run(const BackendCall& call) {
  try {
    if (!failure_.empty()) C10_THROW_ERROR(DistBackendError, failure_);
    begin(call);
    call.run();
  } catch (const std::exception& cause) {
    if (failure_.empty()) failure_ = one_line(cause);
    abort();  // for the peers, which may be in the middle of it
    throw;
  }
}

void QueuedBackend::end_queue() {
  if (queue_.is_busy()) abort();
  queue_.end();
}

void QueuedBackend::check_as_many(size_t outputs, size_t inputs, const char* name) const {
  TORCH_CHECK_VALUE(outputs == inputs && inputs > 0, getBackendName(), " ", name,
                    ": expected as many outputs as inputs, got ", outputs, " and ", inputs);
}

QueuedBackend::WorkPtr QueuedBackend::allgather_coalesced(std::vector<Tensors>& outputs,
                                                          Tensors& inputs,
                                                          const c10d::AllgatherOptions& options) {
  TORCH_CHECK_VALUE(std::ssize(outputs) == size_, getBackendName(),
                    " allgather_coalesced: expected ", size_, " lists of outputs, got ",
                    outputs.size());
  for (const Tensors& of_rank : outputs)
    check_as_many(of_rank.size(), inputs.size(), "allgather_coalesced");
  WorkPtr last;
  for (size_t i = 0; i < inputs.size(); ++i) {
    std::vector<Tensors> list(1);
    for (const Tensors& of_rank : outputs) list[0].push_back(of_rank[i]);
    Tensors input{inputs[i]};
    last = allgather(list, input, options);
  }
  return last;
}

QueuedBackend::WorkPtr QueuedBackend::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  check_as_many(outputs.size(), inputs.size(), "allgather_into_tensor_coalesced");
  WorkPtr last;
  for (size_t i = 0; i < inputs.size(); ++i) last = _allgather_base(outputs[i], inputs[i], options);
  return last;
}

QueuedBackend::WorkPtr QueuedBackend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  check_as_many(outputs.size(), inputs.size(), "reduce_scatter_tensor_coalesced");
  WorkPtr last;
  for (size_t i = 0; i < inputs.size(); ++i)
    last = _reduce_scatter_base(outputs[i], inputs[i], options);
  return last;
}

int QueuedBackend::checked_rank(int64_t rank, const char* name) const {
  TORCH_CHECK_VALUE(rank >= 0 && rank < size_, getBackendName(), " ", name,
                    ": expected a rank in [0, ", size_, "), got ", rank);
  return static_cast<int>(rank);
}

}  // namespace cohort::comm
