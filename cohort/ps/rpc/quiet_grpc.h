// gRPC's own lines on stderr.
#pragma once
#include <cstdlib>
#include <grpc/support/log.h>

namespace cohort::ps {

/// Errors say in one line what gRPC says in several of its own, which then do not appear. Whoever
/// sets GRPC_VERBOSITY sees them. Of the whole process; any number of times.
inline void quiet_grpc() {
  if (std::getenv("GRPC_VERBOSITY") == nullptr) gpr_set_log_function([](gpr_log_func_args*) {});
}

}  // namespace cohort::ps
