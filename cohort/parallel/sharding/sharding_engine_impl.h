// SPDX-License-Identifier: Apache-2.0
// The inside of ShardingEngine, shared by sharding_engine.cpp (construction, state),
// sharding_forward.cpp and sharding_backward.cpp. Not installed.
#pragma once
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/comm/libtorch_version.h"
#include "cohort/optim/gradient_memory.h"
#include "cohort/parallel/sharding/flat_bucket.h"
#include "cohort/parallel/sharding/sharding_engine.h"
#include "cohort/parallel/sharding/unit_parameters.h"

namespace cohort::parallel {

struct ShardingEngine::Impl : std::enable_shared_from_this<Impl> {
  struct Bucket {
    FlatBucket flat;
    size_t unit;         // it belongs to
    size_t missing = 0;  // gradients that this backward still owes
  };
  struct Unit {
    std::string name;
    std::string forward_label;  // for the profiler
    std::vector<Bucket*> buckets;
    std::optional<size_t> place;   // in the order of running; none if it has never run
    bool ran = false;              // in the present forward, or the last one
    bool awaits_backward = false;  // its last forward has left a graph that no backward has passed
  };
  // One forward of a unit with frozen parameters.
  struct Run {
    size_t unit = 0;
    size_t num_nodes = 0;   // where gradients leave its part of the graph
    size_t left = 0;        // of these in
    int64_t backward = -1;  // this backward
  };

  Impl(std::shared_ptr<torch::nn::Module> m, comm::ProcessGroup g, const ShardingEngineOptions& o)
      : owned_model(std::move(m)),
        model(*owned_model),
        group(std::move(g)),
        options(o),
        ignored(resolve_names(model, o.ignored)) {}
  ~Impl();

  void make_units(const std::vector<torch::nn::Module*>& modules);
  void fill_deferred();
  void cast_buffers();
  void watch_gradients();
  void watch_passing(size_t unit, const std::vector<at::Tensor>& outputs, uint64_t position);
  void node_passed(Run& run);
  void gradient_arrived(Bucket& bucket);
  void reduce(Bucket& bucket);
  void finish_first_reduction();
  void begin_backward();
  void finish_backward(bool with_graph);
  void finish_copies();
  void drop_unused();
  void clean_up();
  void gather(size_t unit, int direction);
  void free(size_t unit);
  void hide();
  void refresh();
  struct Agreement {
    bool accumulates;     // Gradients wait for more, so no trained parameter has changed.
    bool frozen_changed;  // On any rank.
  };
  Agreement agree();
  bool gradients_wait() const;
  bool may_stay() const;
  bool sharded() const { return options.shard == Shard::kParameters; }
  std::vector<LocalShard> sharded_state() const;
  std::vector<LocalShard> unsharded_state() const;
  template <class Body>
  void with_unit_context(size_t unit, const Body& body);
  std::string left_out(size_t unit) const;

  const std::shared_ptr<torch::nn::Module> owned_model;
  torch::nn::Module& model;
  const comm::ProcessGroup group;
  ShardingEngineOptions options;
  std::vector<std::string> ignored;  // full names
  comm::ProcessGroup reshard_group;
  std::vector<Unit> units;  // the first is the whole model's own
  std::unordered_map<const torch::nn::Module*, size_t> unit_of;
  std::vector<std::unique_ptr<Bucket>> buckets;
  optim::GradientMemory gradient_memory;                       // the buckets'
  std::vector<std::pair<comm::NodePointer, uintptr_t>> hooks;  // to be taken off again
  std::vector<LocalShard> local_shards;
  std::multimap<std::string, std::string> further_names;  // of shared parameters, by the first one

  std::vector<size_t> order;  // of the units' first forwards
  bool order_known = false;   // a whole forward has run
  int unsharded = 0;          // guards, one within another
  bool synchronized = true;
  bool in_backward = false;     // one has begun and not finished ...
  std::weak_ptr<void> alive;    // ... and owns this until it ends, by an error, too
  bool has_reduced = false;     // in this backward
  bool may_accumulate = false;  // a forward was within no_sync, and no sum of gradients came since
  int64_t num_backwards = 0;
  std::deque<Bucket*> reductions;  // under way in this backward, the first one first
};

// Runs `body`, which communicates for `unit`. To the error of mismatched collectives it adds what
// to look for.
template <class Body>
void ShardingEngine::Impl::with_unit_context(size_t unit, const Body& body) {
  try {
    body();
  } catch (const PeerError& error) {
    PeerError::Facts facts = error.facts();
    if (!facts.disagreement) throw;
    facts.cause +=
        "; sharding: expected every rank to run the same units in the same order, and to use the "
        "same parameters of them, and each forward and backward within no_sync on every rank or "
        "on none" +
        left_out(unit);
    throw PeerError(std::move(facts));
  }
}

}  // namespace cohort::parallel
