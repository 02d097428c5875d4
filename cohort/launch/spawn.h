// `cohort run` from inside a program: it starts itself once per rank.
#pragma once
#include "cohort/launch/options.h"

namespace cohort::launch {

/// Whether this process is one of the workers that spawn() started.
bool is_spawned();

/// Runs this very program again, with its own arguments, as options.nproc_per_node workers of node
/// options.node_rank; options.command must be empty. Everything else is as with run(): environment,
/// logs, signals, the report of the first failing rank, and that no process is left behind.
///
///     int main(int argc, char** argv) {
///       if (!cohort::launch::is_spawned()) return cohort::launch::spawn({.nproc_per_node = 4});
///       return train(rank_info_from_environment());
///     }
///
/// A program whose --rank and --world-size count nodes gives them as node_rank and nnodes.
/// Returns:  what run() returns, once all workers ended.
/// Threads:  call at the start of main(): no other thread may exist (workers are forked, and
///           signals are taken from this thread).
/// Errors:   ConfigError: as run(); other threads exist; called by a spawned worker.
int spawn(RunOptions options);

}  // namespace cohort::launch
