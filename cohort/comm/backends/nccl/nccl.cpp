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

// NCCL and c10d have no other way to be told; what the user has set stays.
void set_default(const char* variable, const char* value) {
  setenv(variable, value, /*overwrite=*/0);
}

c10::intrusive_ptr<c10d::Backend> make_nccl_backend(const BackendRequest& request) {
  if (!request.interface.empty()) set_default("NCCL_SOCKET_IFNAME", request.interface.c_str());
  // Work::wait returns when the operation has ended, and throws when it failed, was aborted or has
  // taken longer than the timeout, as every backend must: the group then says which rank is lost.
  // As c10d would have it, wait only puts the operation into the stream; its watchdog would end the
  // process for a lost peer, and until then a step would compute with what never arrived.
  set_default("TORCH_NCCL_BLOCKING_WAIT", "1");
  // For users who set that to 0: the watchdog then aborts communicators (CleanUpOnly), and the next
  // operation throws. c10d's default (SkipCleanUp) is std::terminate in a thread of its own.
  set_default("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2");
  auto options = c10d::ProcessGroupNCCL::Options::create();
  // Of every operation: wait counts from its begin.
  options->timeout = request.timeout;
  // The first operation blocks until NCCL has connected. c10d gave up the other mode as a default
  // because NCCL 2.26 hung in it.
  options->config.blocking = 1;
  return c10::make_intrusive<c10d::ProcessGroupNCCL>(request.store, request.rank,
                                                     request.world_size, options);
}

}  // namespace
}  // namespace cohort::comm

extern "C" const cohort::comm::BackendAbi* cohort_backend() {
  static const cohort::comm::BackendAbi abi{.device = c10::DeviceType::CUDA,
                                            .make = cohort::comm::make_nccl_backend};
  return &abi;
}
