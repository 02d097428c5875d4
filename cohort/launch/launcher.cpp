// SPDX-License-Identifier: Apache-2.0
#include "cohort/launch/launcher.h"

#include <fcntl.h>

#include "cohort/launch/elastic_agent.h"
#include "cohort/launch/local_agent.h"

namespace cohort::launch {
namespace {

// A process without standard descriptors would give their numbers to its pipes.
void open_standard_descriptors() {
  for (int fd = 0; fd < 3; ++fd) {
    if (::fcntl(fd, F_GETFD) < 0) ::open("/dev/null", O_RDWR);
  }
}

}  // namespace

int run(const RunOptions& options, const WorkerFunction& function) {
  validate(options);
  open_standard_descriptors();
  if (options.elastic()) return ElasticAgent(options, function).run();
  return LocalAgent(options, function).run();
}

}  // namespace cohort::launch
