// SPDX-License-Identifier: Apache-2.0
// A way to a server in the same process.
#pragma once
#include <memory>

#include "cohort/ps/server/server.h"
#include "cohort/ps/wire/request.h"

namespace cohort::ps {

/// Hands requests over directly; the server's own waiting bounds how long an answer takes.
class LocalChannel : public Channel {
 public:
  explicit LocalChannel(std::shared_ptr<Server> server) : server_(std::move(server)) {}

  void send(const Request& request, int64_t, Done done) override {
    server_->submit(request, std::move(done));
  }

 private:
  std::shared_ptr<Server> server_;
};

}  // namespace cohort::ps
