// SPDX-License-Identifier: Apache-2.0
// Starts the workers of one node, monitors them, and cleans up all processes at the end.
#pragma once
#include "cohort/launch/options.h"

namespace cohort::launch {

/// Runs options.command once per local rank and returns the exit code for the whole job. With
/// `function`, a worker is a fork of this process that runs it instead of the command.
///
/// Before any worker exists, node 0 binds and listens on the store's port; rank 0 inherits that
/// socket (COHORT_STORE_FD). Each worker leads its own session; its stdout and stderr go to
/// one log file each, and to this process's own streams as options.tee says. Under Tee::kRank0,
/// where this process has a terminal, so has rank 0.
///
/// When a worker fails, the others are stopped (worker_group.h says how). Up to max_restarts times
/// all workers restart, except after exit code 2; then the rank that failed first is reported
/// on stderr. With rdzv_endpoint, launchers of several nodes do this together
/// (rendezvous_server.h). A stall is reported and, where a rank is stopped, ended
/// (hang_detector.h).
///
/// With options.servers, parameter servers run beside the workers (server_group.h). They outlive
/// them and are stopped when the last one is gone; no signal to the launcher is passed on to them.
/// One that stays down ends the job.
///
/// SIGINT, SIGTERM, SIGHUP, SIGQUIT are passed on to every worker; a second SIGINT or SIGTERM, or
/// 25 seconds after the grace, means SIGKILL. SIGUSR1 and SIGUSR2 are passed on and mean nothing
/// here. SIGTSTP suspends the workers too. table_signal() prints the state of the ranks.
///
/// Returns:  0 all workers exited 0; 4 stopped with a checkpoint; the first failing rank's exit
///           code; 128 + n if signal n ended it, or was passed on and ended a worker; 3 if the
///           rendezvous server was lost, or too few nodes came.
/// Blocks:   until every worker is gone. No process of their groups survives, not even if this
///           process is killed.
/// Threads:  call from the main thread, while there is no other (it forks).
/// Errors:   ConfigError: bad options, port in use, program missing; no worker is left running.
int run(const RunOptions& options, const WorkerFunction& function = {});

}  // namespace cohort::launch
