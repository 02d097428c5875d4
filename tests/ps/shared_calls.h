// SPDX-License-Identifier: Apache-2.0
// Calls and answers that no client and no server of ours makes.
#pragma once
#include <cstdint>
#include <memory>
#include <string>

#include "cohort/ps/rpc/shared_area.h"

namespace cohort::ps {

/// What the server at `endpoint` says to an offer of shared memory, 20 seconds at most; empty: it
/// is taken. `secret`: the job's, empty for none.
std::string offer(const std::string& endpoint, uint64_t channel, const SharedAreaName& name,
                  const std::string& secret = "");

/// What it says to a trainer that joins with messages of `format`.
std::string join_with_format(const std::string& endpoint, uint32_t format);

/// A server that takes all memory, says yes to all calls, without a format, and answers each pull
/// with the bytes of `answer`.
class FalseServer {
 public:
  FalseServer(const std::string& endpoint, const std::string& answer);
  ~FalseServer();

 private:
  struct Service;
  std::unique_ptr<Service> service_;
};

}  // namespace cohort::ps
