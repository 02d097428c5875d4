// SPDX-License-Identifier: Apache-2.0
#include "cohort/ps/rpc/security.h"

#include "cohort/base/env.h"

namespace cohort::ps {

std::string job_secret_of(const SecurityOptions& security) {
  if (!security.job_secret.empty()) return security.job_secret;
  return env_string("COHORT_JOB_SECRET").value_or("");
}

}  // namespace cohort::ps
