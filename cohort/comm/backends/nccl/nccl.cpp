// SPDX-License-Identifier: Apache-2.0
// The plug-in libcohort_nccl.so: c10d's NCCL backend from libtorch_cuda, for tensors on CUDA
// devices.
#define USE_C10D_NCCL
#include <cstdlib>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "cohort/comm/backend.h"

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
