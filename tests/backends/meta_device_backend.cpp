// SPDX-License-Identifier: Apache-2.0
// A plug-in that serves another device than the CPU, and no collective: who would compute on the CPU must be told.
#include "cohort/comm/backend.h"

namespace {

class IdleBackend : public c10d::Backend {
 public:
  explicit IdleBackend(const cohort::comm::BackendRequest& request)
      : Backend(request.rank, request.world_size) {}
  const std::string getBackendName() const override { return "hccl_meta"; }
  void setTimeout(std::chrono::milliseconds) override {}
};

}  // namespace

extern "C" const cohort::comm::BackendAbi* cohort_backend() {
  static const cohort::comm::BackendAbi abi{
      .device = c10::DeviceType::Meta,
      .make = [](const cohort::comm::BackendRequest& request) -> c10::intrusive_ptr<c10d::Backend> {
        return c10::make_intrusive<IdleBackend>(request);
      }};
  return &abi;
}
