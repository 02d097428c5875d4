// SPDX-License-Identifier: Apache-2.0
// The collectives that a rank's devices have begun and not ended. The host does not wait for them,
// so no call of the program shows that they stand still. Not installed.
#pragma once
#include <c10/util/intrusive_ptr.h>
#include <chrono>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "cohort/comm/collective_log.h"

namespace cohort::comm {

using BackendWork = c10::intrusive_ptr<c10d::Work>;

/// What does not change in a group while its devices work.
struct DeviceGroupInfo {
  std::string id;                        ///< As MatchedCall::group.
  std::string name;                      ///< For users.
  std::vector<int> ranks;                ///< Of the job, by this group's rank.
  std::chrono::milliseconds timeout{0};  ///< Of each collective.
  c10::DeviceType device{};              ///< Whose collectives these are.
  /// BackendPlugin::progress.
  std::function<BackendWork(const c10d::Work&)> progress = {};
};

/// The collectives of one group that its device has not ended, the oldest first.
///
/// A work whose query throws counts as ended: its backend tells that error.
/// Threads: any. A query of a device may block, while another thread frees its memory, say: works are
/// asked outside of the lock, by `begin` and `forget_ended` alone.
class DeviceCalls {
 public:
  explicit DeviceCalls(DeviceGroupInfo info) : info_(std::move(info)) {}

  const DeviceGroupInfo& info() const { return info_; }
  /// Forgets what has ended, and begins `call` by `operation`, whose work it returns. It counts from
  /// before: the host may wait in there, as in a first one, which connects. One that throws, returns
  /// no work, or one without progress, is not added.
  BackendWork begin(MatchedCall call, const std::function<BackendWork()>& operation);
  /// The oldest that had not ended when the device was last asked. Does not ask it.
  std::optional<DeviceWait> oldest() const;
  /// Asks the device. May block.
  void forget_ended();

 private:
  struct Begun {
    MatchedCall call;
    int64_t since_ns;
    BackendWork work;  // none: the host is still beginning it
  };

  const DeviceGroupInfo info_;
  mutable std::mutex mutex_;
  std::list<Begun> begun_;  // guarded by mutex_
};

/// The c10d group of a group whose backend is a device's. It adds what others than Cohort's own
/// operations call on it, as c10d's Reducer does with its buckets, to those that are watched.
///
/// Ranks compare these by operation, dtype and shape, and number them apart from Cohort's own.
/// allreduce and broadcast are added, of tensors of the device; other operations are not.
/// Threads: one caller at a time.
class DeviceGroup final : public c10d::ProcessGroup {
 public:
  DeviceGroup(c10::intrusive_ptr<c10d::Store> store, int rank, std::shared_ptr<CollectiveLog> log,
              std::shared_ptr<DeviceCalls> calls);

  /// Begins one of Cohort's operations, which `call` names, with its number of the log.
  BackendWork begin(const MatchedCall& call, const std::function<BackendWork()>& operation);

  BackendWork broadcast(std::vector<at::Tensor>& tensors,
                        const c10d::BroadcastOptions& options) override;
  BackendWork allreduce(std::vector<at::Tensor>& tensors,
                        const c10d::AllreduceOptions& options) override;
  /// The job's weak reference keeps this object's memory, not what it refers to.
  void release_resources() override;

 private:
  BackendWork add(const std::string& operation, const std::vector<at::Tensor>& tensors,
                  const std::function<BackendWork()>& begin);

  std::shared_ptr<CollectiveLog> log_;
  std::shared_ptr<DeviceCalls> calls_;
  bool in_operation_ = false;  // of Cohort's own
};

}  // namespace cohort::comm
