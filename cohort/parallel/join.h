// SPDX-License-Identifier: Apache-2.0
// Training when the ranks have unequal numbers of batches.
#pragma once
#include <utility>

#include "cohort/parallel/distributed_data_parallel.h"

namespace cohort::parallel {

/// Runs `body`, the loop over this rank's batches. Then shadows the collectives of ranks that still
/// have batches, with zero gradients, until all are done; in the end every rank has the model of a
/// rank that ran longest.
///
/// Collective: every rank calls it, once per loop; `body` may run any number of steps, none, too,
///             and forwards without gradient mode (validation) in between; with buffers, all ranks
///             that have batches validate after the same steps. A step is one forward and its
///             backward; steps within no_sync are within it on every rank that has batches. `body`
///             holds no other collective.
/// Blocks:     until the last rank has finished its loop.
/// Cost:       one all-reduce of W + 1 numbers per forward.
/// Numerics:   see JoinOptions. An optimizer's state does not follow: a rank that ran out of
///             batches keeps the moments of its own last step.
/// Errors:     c10::Error on every rank, at the first forward that a rank no longer takes part in,
///             if throw_on_early_termination; c10::ValueError on every rank if the ranks disagree
///             on no_sync, or if a rank would have to shadow the first step of a static graph;
///             c10::ValueError at once with delay_all_reduce_named_params or
///             skip_all_reduce_unused_params, and for a join within a join. What `body` throws
///             passes through, and the others then lose this rank.
template <class Holder, class Body>
void join(DistributedDataParallel<Holder>& ddp, Body&& body, const JoinOptions& options = {},
          CallSite site = CallSite::here()) {
  struct Scope {
    GradientEngine& engine;
    ~Scope() { engine.end_join(); }
  };
  ddp.engine().begin_join(options);
  const Scope scope{ddp.engine()};
  std::forward<Body>(body)();
  const CallSiteScope at_end(site);  // Not of what `body` calls.
  ddp.engine().finish_join();
}

}  // namespace cohort::parallel
