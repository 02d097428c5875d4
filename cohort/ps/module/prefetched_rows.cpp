// SPDX-License-Identifier: Apache-2.0
#include "cohort/ps/module/prefetched_rows.h"

#include <algorithm>

namespace cohort::ps {

namespace {

std::span<const int64_t> ids_of(const at::Tensor& ids) {
  return {ids.const_data_ptr<int64_t>(), static_cast<size_t>(ids.numel())};
}

at::Tensor checked(const at::Tensor& ids) {
  TORCH_CHECK_VALUE(ids.defined() && ids.scalar_type() == at::kLong && ids.device().is_cpu(),
                    "embedding: expected ids as int64 on the CPU, got ",
                    ids.defined() ? ids.toString() : "none");
  return ids.contiguous();
}

bool is_same(const at::Tensor& a, const at::Tensor& b) {
  const auto x = ids_of(a), y = ids_of(b);
  return a.sizes() == b.sizes() && std::equal(x.begin(), x.end(), y.begin());
}

}  // namespace

PrefetchedRows::PrefetchedRows(const TableOptions& table, Fetch fetch)
    : table_(table), fetch_(std::move(fetch)) {}

void PrefetchedRows::prefetch(const at::Tensor& ids, const int64_t* padding) {
  prefetched_ = make_batch(ids, padding);
  // The caller may write the next batch's ids into the same memory.
  prefetched_->ids = prefetched_->ids.clone();
}

std::shared_ptr<PrefetchedRows::Batch> PrefetchedRows::make_batch(const at::Tensor& ids,
                                                                  const int64_t* padding) const {
  auto batch = std::make_shared<Batch>();
  batch->ids = checked(ids);
  batch->distinct.assign(ids_of(batch->ids), padding);
  batch->weights.resize(batch->distinct.ids().size() * static_cast<size_t>(table_.width));
  return batch;
}

std::shared_ptr<PrefetchedRows::Batch> PrefetchedRows::look_up(const at::Tensor& ids,
                                                               const int64_t* padding,
                                                               bool prediction) {
  const at::Tensor own = checked(ids);
  if (ready_ && !prediction && is_same(ready_->ids, own)) return ready_;
  auto batch = make_batch(own, padding);
  fetch_(batch->distinct.ids(), batch->weights, prediction);
  return batch;
}

std::shared_ptr<PrefetchedRows::Batch> PrefetchedRows::start_pull() {
  return arriving_ = std::exchange(prefetched_, nullptr);
}

PrefetchedRows::Gradients PrefetchedRows::gradients() {
  if (used_.empty()) return {};
  if (used_.size() == 1) return {used_[0]->distinct.ids(), used_[0]->gradients};
  size_t most = 0;
  for (const auto& batch : used_) most += batch->distinct.ids().size();
  merger_.begin(table_.width, most);
  for (const auto& batch : used_) merger_.add(batch->distinct.ids(), batch->gradients);
  return {merger_.ids(), merger_.gradients()};
}

void PrefetchedRows::forget() {
  for (const auto& batch : used_) batch->gradients.clear();
  used_.clear();
  ready_.reset();
}

}  // namespace cohort::ps
