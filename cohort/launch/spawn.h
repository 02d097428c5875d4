// SPDX-License-Identifier: Apache-2.0
// `cohort run` from inside a program: it starts itself once per rank, or a function of it.
#pragma once
#include "cohort/launch/options.h"

namespace cohort::launch {

/// Whether this process is one of the workers that spawn() started.
bool is_spawned();

/// Runs this very program again, with its own arguments, as options.nproc_per_node workers of node
/// options.node_rank; options.command must be empty. Everything else is as with `cohort run`: environment,
/// logs, signals, the report of the first failing rank, and that no process is left behind.
///
///     int main(int argc, char** argv) {
///       if (!cohort::launch::is_spawned()) return cohort::launch::spawn({.nproc_per_node = 4});
///       return train(rank_info_from_environment());
///     }
///
/// A program whose --rank and --world-size count nodes gives them as node_rank and nnodes.
/// Returns:  once all workers have ended: 0 if all exited with 0; otherwise the exit code of the
///           first rank that failed (base/program.h), or 128 + n if signal n ended it; 4 if they
///           stopped with a checkpoint; 3 if the rendezvous server was lost or too few nodes came.
/// Threads:  call at the start of main(): no other thread may exist (workers are forked, and
///           signals are taken from this thread).
/// Errors:   ConfigError: bad options; the port is in use; other threads exist; called by a worker.
int spawn(RunOptions options);

/// Calls `function` with the local rank, 0 to nprocs - 1, in as many forks of this process: what
/// torch.multiprocessing.spawn does. All else is as above: a worker finds its rank in its
/// environment, and the first failure is reported and decides the exit code.
///
///     return cohort::launch::spawn([&](int local_rank) { return train(options, local_rank); }, 4);
///
/// A worker has what `function` captured, as it was before the call; what it changes, it alone
/// sees. It ends with what `function` returns, or as under run_program: an exception becomes an
/// exit code, and its text is in the report. Its standard input is empty, descriptors that are
/// marked close-on-exec are closed, and neither atexit functions nor destructors of static objects
/// run. options.nproc_per_node is not read: it is `nprocs`.
/// Threads: as above. Tensor operations and devices start threads: use none of them before.
/// Errors:  as above, and an empty function.
int spawn(const WorkerFunction& function, int nprocs, RunOptions options = {});

}  // namespace cohort::launch
