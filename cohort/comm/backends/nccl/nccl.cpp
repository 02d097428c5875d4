// SPDX-License-Identifier: Apache-2.0
// The plug-in libcohort_nccl.so: c10d's NCCL backend from libtorch_cuda, for tensors on CUDA
// devices.
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

c10::intrusive_ptr<c10d::Backend> make_nccl_backend(const BackendRequest& request) {
  // NCCL has no other way to be told; what the user has set stays.
  if (!request.interface.empty())
    setenv("NCCL_SOCKET_IFNAME", request.interface.c_str(), /*overwrite=*/0);
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = request.timeout;
  auto backend = c10::make_intrusive<c10d::ProcessGroupNCCL>(request.store, request.rank,
                                                             request.world_size, options);
  return backend;
}

}  // namespace
}  // namespace cohort::comm

extern "C" const cohort::comm::BackendAbi* cohort_backend() {
  static const cohort::comm::BackendAbi abi{.device = c10::DeviceType::CUDA,
                                            .make = cohort::comm::make_nccl_backend};
  return &abi;
}
