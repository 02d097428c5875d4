// SPDX-License-Identifier: Apache-2.0
#include "cohort/comm/agent_store.h"

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <poll.h>
#include <random>
#include <sys/socket.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "cohort/base/env.h"
#include "cohort/base/error.h"
#include "cohort/base/tcp.h"
#include "cohort/comm/connections.h"
#include "cohort/comm/libtorch_version.h"
#include "cohort/comm/time_left.h"

namespace cohort::comm {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

// What c10d's client sends first, and what its store answers with the number.
struct [[gnu::packed]] Validation {
  c10d::detail::QueryType query = c10d::detail::QueryType::VALIDATE;
  uint32_t magic = c10d::detail::validationMagicNumber;
};
struct [[gnu::packed]] Ping {
  c10d::detail::QueryType query = c10d::detail::QueryType::PING;
  uint32_t number = std::random_device()();
};

std::string text_of(int error) {
  return std::strerror(error);
}

}  // namespace

std::string ping(const Fd& connection, const RankInfo& info, Deadline deadline) {
  const Ping question;
  uint32_t answer = 0;
  if (send(connection.get(), &question, sizeof question, MSG_NOSIGNAL) < 0) return text_of(errno);
  if (!is_ready(connection, POLLIN, deadline)) return "the port is open, but silent";
  const ssize_t count = recv(connection.get(), &answer, sizeof answer, 0);
  if (count < 0) return text_of(errno);
  if (count == 0) return "the connection was closed";
  if (count == sizeof answer && answer == question.number) return "";
  throw ConfigError("MASTER_ADDR and MASTER_PORT: what answers at " + rendezvous_point(info) +
                    " is no store of torchrun's");
}

Fd await_agent_store(const RankInfo& info, Deadline deadline) {
  return find_store(info.master_addr, info.master_port, deadline, [&](const Fd& connection) {
    const Validation validation;
    if (send(connection.get(), &validation, sizeof validation, MSG_NOSIGNAL | MSG_MORE) < 0)
      return text_of(errno);
    return ping(connection, info, deadline);
  });
}

StoreConnection connect_agent_store(const RankInfo& info, Deadline deadline, milliseconds timeout) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(info.master_port);
  options.timeout = std::max(time_left(deadline), kAnswerTime);
  options.waitWorkers = false;
  options.numWorkers = static_cast<size_t>(info.world_size);
  const std::lock_guard lock(connecting());
  const Connections before = Connections::to_port(info.master_port);
  StorePtr store = c10::make_intrusive<c10d::TCPStore>(info.master_addr, options);
  Connections sockets = Connections::to_port(info.master_port);
  sockets.remove(before);
  sockets.limit_waiting(timeout);
  store->setTimeout(timeout);
  // The agents keep one store over all restarts.
  const auto attempt = env_int("TORCHELASTIC_RESTART_COUNT", 0).value_or(0);
  store =
      c10::make_intrusive<c10d::PrefixStore>("/worker/attempt_" + std::to_string(attempt), store);
  return {std::move(store), [sockets] { sockets.shut_down(); }};
}

}  // namespace cohort::comm
