// SPDX-License-Identifier: Apache-2.0
// gRPC's own lines on stderr.
#pragma once
#include <cstdlib>
#include <grpc/support/log.h>

namespace cohort::ps {

/// Silences gRPC's own lines, which errors repeat in one. Set GRPC_VERBOSITY to see them. Affects
/// the whole process; may be called repeatedly.
inline void quiet_grpc() {
  if (std::getenv("GRPC_VERBOSITY") == nullptr) gpr_set_log_function([](gpr_log_func_args*) {});
}

}  // namespace cohort::ps
