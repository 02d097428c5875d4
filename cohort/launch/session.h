// SPDX-License-Identifier: Apache-2.0
// The processes of a worker's session, which holds more than the worker's own process group.
#pragma once
#include <span>
#include <sys/types.h>

namespace cohort::launch {

/// Sends `signal` to every process group of the sessions that `leaders` lead.
///
/// Programs make groups beside their own: `timeout` does, and a shell with job control. Only a
/// process that began a session of its own is out of reach. Numbers below 1 are passed over; the
/// others must not have been reaped, or their number may belong to an unrelated process.
/// Cost: reads /proc once.
void signal_sessions(std::span<const pid_t> leaders, int signal);

/// The same with SIGKILL, and again until no group is found that was not sent it: a process may
/// have made one meanwhile.
void kill_sessions(std::span<const pid_t> leaders);

}  // namespace cohort::launch
