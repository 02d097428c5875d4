// SPDX-License-Identifier: Apache-2.0
// The agent of a job whose nodes and their ranks are given.
#pragma once
#include "cohort/launch/agent.h"

namespace cohort::launch {

/// One node, which may start its workers again, or several with fixed ranks, which may not.
/// Parameter servers run beside the workers of one node.
class LocalAgent : public Agent {
 public:
  using Agent::Agent;

 private:
  int run_job() override;
  JobOutcome stop_servers(JobOutcome job);
};

}  // namespace cohort::launch
