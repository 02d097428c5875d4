// The store where the ranks of a job meet: who serves it, and connections to it.
#pragma once
#include <ATen/core/ivalue.h>
#include <chrono>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "cohort/base/fd.h"
#include "cohort/comm/connections.h"
#include "cohort/comm/place.h"

namespace cohort::comm {

using StorePtr = c10::intrusive_ptr<c10d::Store>;
using Deadline = std::chrono::steady_clock::time_point;

/// A store that has answered once has this long to answer again, however late it is.
inline constexpr std::chrono::milliseconds kAnswerTime{1000};

/// "127.0.0.1:29500" or "/shared/meet": where the ranks of `place` meet.
std::string meeting_point(const Place& place);

/// Waits until the store of `place` answers; returns a connection for `ping`, which is none on the
/// store's host and for a file. Nothing is written to stderr.
/// Errors: ConfigError if the host does not resolve, or if something else than a store answers;
/// c10::DistNetworkError if nobody answers before `deadline`.
Fd await_store(const Place& place, Deadline deadline);

/// Asks the store at the other end of `connection` for a sign of life. Returns why none came;
/// nothing if one did. Errors: ConfigError if it is no store.
std::string ping(const Fd& connection, const Place& place, Deadline deadline);

/// A client of the store, and what it talks through; no socket for a file.
struct StoreConnection {
  StorePtr store;
  Connections sockets;
};

/// Connects to the store of `place`, which answers already unless this is its host.
///
/// Rank 0 is, where the launcher serves no store: the first call serves it, on the launcher's
/// socket or one that is bound here, until the process ends. So groups can follow each other, and
/// the other ranks may still be busy with the last one. Keys are those of the place's job alone.
/// Errors: ConfigError for a port that is taken, or a file that is no store.
StoreConnection connect_store(const Place& place, Deadline deadline);

}  // namespace cohort::comm
