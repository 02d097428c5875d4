// SPDX-License-Identifier: Apache-2.0
#include "cohort/comm/device_calls.h"

#include <c10/util/ScopeExit.h>
#include <utility>

#include "cohort/comm/process_group_impl.h"

namespace cohort::comm {
namespace {

bool work_has_ended(c10d::Work& work) {
  try {
    return work.isCompleted();
  } catch (const std::exception&) {
    return true;
  }
}

}  // namespace

BackendWork DeviceCalls::begin(MatchedCall call, const std::function<BackendWork()>& operation) {
  forget_ended();
  const auto entry = [&] {
    const std::lock_guard lock(mutex_);
    return begun_.insert(begun_.end(), Begun{std::move(call), steady_now_ns(), {}});
  }();
  BackendWork watched;
  const auto over = c10::make_scope_exit([&] {
    const std::lock_guard lock(mutex_);
    if (watched) {
      entry->work = std::move(watched);
    } else {
      begun_.erase(entry);
    }
  });
  BackendWork work = operation();
  if (work) watched = info_.progress ? info_.progress(*work) : work;
  return work;
}

std::optional<DeviceWait> DeviceCalls::oldest() const {
  const std::lock_guard lock(mutex_);
  if (begun_.empty()) return std::nullopt;
  const Begun& first = begun_.front();
  return DeviceWait{.call = first.call,
                    .name = info_.name,
                    .ranks = info_.ranks,
                    .ms = (steady_now_ns() - first.since_ns) / 1'000'000,
                    .timeout_ms = info_.timeout.count()};
}

void DeviceCalls::forget_ended() {
  while (true) {
    BackendWork first;
    {
      const std::lock_guard lock(mutex_);
      if (begun_.empty()) return;
      first = begun_.front().work;
    }
    if (!first || !work_has_ended(*first)) return;
    const std::lock_guard lock(mutex_);
    if (!begun_.empty() && begun_.front().work == first) begun_.pop_front();
  }
}

DeviceGroup::DeviceGroup(c10::intrusive_ptr<c10d::Store> store, int rank,
                         std::shared_ptr<CollectiveLog> log, std::shared_ptr<DeviceCalls> calls)
    : c10d::ProcessGroup(std::move(store), rank, static_cast<int>(calls->info().ranks.size())),
      log_(std::move(log)),
      calls_(std::move(calls)) {}

void DeviceGroup::release_resources() {
  log_.reset();
  calls_.reset();
  c10d::ProcessGroup::release_resources();
}

BackendWork DeviceGroup::begin(const MatchedCall& call,
                               const std::function<BackendWork()>& operation) {
  in_operation_ = true;
  const auto over = c10::make_scope_exit([this] { in_operation_ = false; });
  return calls_->begin(call, operation);
}

BackendWork DeviceGroup::broadcast(std::vector<at::Tensor>& tensors,
                                   const c10d::BroadcastOptions& options) {
  return add("broadcast from " + std::to_string(options.rootRank), tensors,
             [&] { return c10d::ProcessGroup::broadcast(tensors, options); });
}

BackendWork DeviceGroup::allreduce(std::vector<at::Tensor>& tensors,
                                   const c10d::AllreduceOptions& options) {
  return add("all_reduce", tensors,
             [&] { return c10d::ProcessGroup::allreduce(tensors, options); });
}

// Numbered in a group of their own (" c10d"), because a rank that has joined calls the buckets in
// another order relative to Cohort's operations.
BackendWork DeviceGroup::add(const std::string& operation, const std::vector<at::Tensor>& tensors,
                             const std::function<BackendWork()>& begin) {
  const bool is_watched = !in_operation_ && !tensors.empty() &&
                          tensors.front().device().type() == calls_->info().device;
  if (!is_watched) return begin();
  TraceRecord where;
  const CallSite site = CallSiteScope::outermost_or({});
  if (site.line > 0) set_call_site(where, site);
  MatchedCall call{.group = calls_->info().id + " c10d",
                   .what = call_text("c10d's " + operation, tensors.front()),
                   .site = where.call_site.data()};
  call.number = log_->add(call);
  return calls_->begin(std::move(call), begin);
}

}  // namespace cohort::comm
