// A plug-in that serves another device than the CPU: find_backend must say so.
#include "cohort/comm/backend.h"

extern "C" const cohort::comm::BackendAbi* cohort_backend() {
  static const cohort::comm::BackendAbi abi{.device = c10::DeviceType::Meta,
                                            .make = [](const cohort::comm::BackendRequest&) {
                                              return c10::intrusive_ptr<c10d::Backend>();
                                            }};
  return &abi;
}
