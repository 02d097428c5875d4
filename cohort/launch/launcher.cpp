// SPDX-License-Identifier: Apache-2.0
#include "cohort/launch/launcher.h"

#include "cohort/base/program.h"
#include "cohort/launch/elastic_agent.h"
#include "cohort/launch/local_agent.h"

namespace cohort::launch {

int run(const RunOptions& options, const WorkerFunction& function) {
  validate(options);
  open_standard_descriptors();  // Pipes to workers must not get their numbers.
  if (options.elastic()) return ElasticAgent(options, function).run();
  return LocalAgent(options, function).run();
}

}  // namespace cohort::launch
