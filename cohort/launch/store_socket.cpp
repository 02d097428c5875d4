// SPDX-License-Identifier: Apache-2.0
#include "cohort/launch/store_socket.h"

#include <cstring>
#include <string>

#include "cohort/base/error.h"
#include "cohort/base/tcp.h"

namespace cohort::launch {

StoreSocket listen_for_store(Reach reach, int port) {
  int error = 0;
  Fd fd = listen_on(port, reach == Reach::kLoopback ? "127.0.0.1" : "", error);
  if (!fd) {
    throw ConfigError("--master-port " + std::to_string(port) +
                      ": expected a port that can be listened on, got " + std::strerror(error));
  }
  const int bound = port_of(fd.get());
  return {std::move(fd), bound};
}

StoreSocket listen_again(Reach reach, int last_port, int wanted_port) {
  try {
    return listen_for_store(reach, last_port);
  } catch (const ConfigError&) {
    return listen_for_store(reach, wanted_port);
  }
}

}  // namespace cohort::launch
