// SPDX-License-Identifier: Apache-2.0
#include "cohort/translate/async_sum.h"

#include <numeric>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/types.h>

namespace cohort::translate {
namespace {

comm::ProcessGroup same_ranks(const comm::ProcessGroup& group) {
  std::vector<int> ranks(static_cast<size_t>(group.size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return group.subgroup(ranks, "async sum");
}

}  // namespace

struct AsyncSum::Round {
  std::vector<double> own;
  at::Tensor sums;  // behind own's the number of ranks in `synchronize`
  c10::intrusive_ptr<c10d::Work> work;
};

AsyncSum::AsyncSum(const comm::ProcessGroup& group, size_t count, Give give, Take take)
    : count_(count), give_(std::move(give)), take_(std::move(take)), group_(same_ranks(group)) {}

AsyncSum::~AsyncSum() = default;

// The backend's own call: a ProcessGroup's would first wait for the other ranks to compare it.
void AsyncSum::join(bool is_synchronizing) {
  auto round = std::make_unique<Round>();
  round->own = give_();
  TORCH_CHECK_VALUE(round->own.size() == count_, "async sum: expected ", count_, " numbers, got ",
                    round->own.size());
  std::vector<double> numbers = round->own;
  numbers.push_back(is_synchronizing ? 1 : 0);
  round->sums = at::tensor(numbers, at::kDouble);
  group_.translate_errors("async sum", [&] {
    std::vector<at::Tensor> tensors{round->sums};
    round->work = group_.c10d_group().allreduce(tensors);
  });
  round_ = std::move(round);
}

bool AsyncSum::finish() {
  const auto round = std::move(round_);
  group_.translate_errors("async sum", [&] { round->work->wait(); });
  const double* sums = round->sums.const_data_ptr<double>();
  take_(round->own, {sums, sums + count_});
  return sums[count_] == group_.size();
}

void AsyncSum::poll() {
  if (round_ && !round_->work->isCompleted()) return;
  if (round_) finish();
  join(/*is_synchronizing=*/false);
}

void AsyncSum::synchronize() {
  do {
    if (!round_) join(/*is_synchronizing=*/true);
  } while (!finish());
}

}  // namespace cohort::translate
