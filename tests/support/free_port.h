// SPDX-License-Identifier: Apache-2.0
// A port that nobody listens on.
#pragma once
#include <random>
#include <stdexcept>
#include <unistd.h>

#include "cohort/base/error.h"
#include "cohort/comm/listen.h"

namespace cohort::test {

/// Returns a port that was free a moment ago, outside of the range from which the system picks
/// ports for bind() to port 0 and for connect().
inline int free_port() {
  std::random_device random;
  for (int tries = 0; tries < 1000; ++tries) {
    const auto port = static_cast<int>(20'000 + random() % 12'000);
    try {
      ::close(comm::listen_on(port));
      return port;
    } catch (const ConfigError&) {  // It is taken.
    }
  }
  throw std::runtime_error("no port of 1000 was free");
}

}  // namespace cohort::test
