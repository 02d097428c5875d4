// SPDX-License-Identifier: Apache-2.0
// The plug-in libcohort_nccl.so: c10d's NCCL backend from libtorch_cuda, for tensors on CUDA
// devices. docs/backends.md says what follows from the settings below.
#define USE_C10D_NCCL
#include <cstdlib>
#include <nccl.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#include <torch/headeronly/version.h>

#include "cohort/comm/backend.h"

// The backend's options hold NCCL's own structs, so the header must be that of the NCCL that
// libtorch was built with.
static_assert(NCCL_VERSION_CODE ==
                  (TORCH_VERSION_MINOR < 15 ? NCCL_VERSION(2, 28, 9) : NCCL_VERSION(2, 30, 7)),
              "libtorch 2.11.0 needs nccl.h of NCCL 2.28.9, libtorch 2.15.0 that of 2.30.7");

namespace cohort::comm {
namespace {

// Stalls are told by Cohort's watch, at the group's timeout, and by name. c10d's watchdog, which ends
// the process, is behind it, for ranks whose watch is blocked: this much later.
constexpr std::chrono::milliseconds kBehindWatch{30'000};

class WatchedNccl final : public c10d::ProcessGroupNCCL {
 public:
  using ProcessGroupNCCL::ProcessGroupNCCL;
  void setTimeout(std::chrono::milliseconds timeout) override {
    ProcessGroupNCCL::setTimeout(timeout + kBehindWatch);
  }
};

// c10d's own watchdog takes such copies. They lack the outputs. Works of another type are not watched.
c10::intrusive_ptr<c10d::Work> nccl_progress(const c10d::Work& work) {
  using NcclWork = c10d::ProcessGroupNCCL::WorkNCCL;
  const auto* own = dynamic_cast<const NcclWork*>(&work);
  if (own == nullptr) return {};
  return c10::make_intrusive<NcclWork>(*own);
}

c10::intrusive_ptr<c10d::Backend> make_nccl_backend(const BackendRequest& request) {
  // NCCL has no other way to be told; what the user has set stays.
  if (!request.interface.empty())
    setenv("NCCL_SOCKET_IFNAME", request.interface.c_str(), /*overwrite=*/0);
  // Waiting and errors are c10d's: wait() puts the operation into the stream, and the watchdog ends
  // the process where one fails or takes far longer than the timeout. With TORCH_NCCL_BLOCKING_WAIT there
  // is no watchdog, and DistributedDataParallel, which waits for futures, would wait for ever.
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = request.timeout;
  // The first operation blocks until NCCL has connected. c10d gave up the other mode as a default
  // because NCCL 2.26 hung in it.
  options->config.blocking = 1;
  return c10::make_intrusive<WatchedNccl>(request.store, request.rank, request.world_size, options);
}

}  // namespace
}  // namespace cohort::comm

extern "C" const cohort::comm::BackendAbi* cohort_backend() {
  static const cohort::comm::BackendAbi abi{.device = c10::DeviceType::CUDA,
                                            .make = cohort::comm::make_nccl_backend,
                                            .progress = cohort::comm::nccl_progress};
  return &abi;
}
