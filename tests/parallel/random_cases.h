// SPDX-License-Identifier: Apache-2.0
// Cases of training drawn from a seed: the model, what stands outside of it, the strategy, what happens between steps.
#pragma once
#include <array>
#include <cstdint>
#include <random>
#include <sstream>
#include <string>
#include <utility>

namespace cohort::test::random_cases {

enum class Strategy { kDdp, kZeroRedundancy, kZero1, kZero2, kZero3 };
/// What the loss uses beside the model: a head of this rank alone, one under DistributedDataParallel, or a sharded one.
enum class Head { kNone, kPlain, kDdp, kSharded };
/// kCaptured: the body captures the block, and nobody lists its parameters.
enum class Recompute { kNone, kModule, kCaptured };

/// Printed by `describe` as a designated initialiser, so that a case that failed can stay, whatever becomes of `draw`.
struct RandomCase {
  uint64_t seed = 0;  ///< Of weights and batches.
  int ranks = 2;
  Strategy strategy = Strategy::kDdp;
  int width = 3;
  int blocks = 2;
  int rows = 2;          ///< Of a batch.
  int accumulation = 1;  ///< Batches of a step.
  double clip = 0;       ///< Largest norm of the gradient; 0: any.
  Head head = Head::kNone;
  Recompute recompute = Recompute::kNone;
  int join =
      0;  ///< Not 0: rank r has batches for 1 + (r * join + seed) % 5 steps, rank 0 for all five.
  bool single = false;  ///< float32, else float64.
  bool sgd = false;     ///< SGD with momentum, else Adam.
  // The model.
  bool tied = false;       ///< The last layer is the first one's table again.
  bool twice = false;      ///< The first block runs again at the end.
  bool frozen = false;     ///< The last block.
  bool unused = false;     ///< A block takes part in no step.
  bool sometimes = false;  ///< A block takes part on some ranks in some steps.
  bool empty = false;      ///< A parameter without elements.
  bool buffers = false;    ///< A constant, running means that evaluation uses, and a count.
  // Outside.
  bool leaf = false;   ///< A factor of the loss that requires a gradient.
  bool input = false;  ///< Batches require gradients.
  // The step.
  bool synchronize_always = false;  ///< No no_sync() around the first batches of a step.
  bool divide_by_active = false;    ///< join: by the ranks that have batches.
  bool evaluation = false;          ///< Between steps.
  bool whole = false;               ///< The module is whole and read between steps.
  bool average = false;  ///< The loss is averaged over ranks for a log line, before backward.
  // DistributedDataParallel.
  bool small_buckets = false;
  bool bucket_view = false;
  bool static_graph = false;
  bool find_unused = false;
  bool skip_unused = false;
  bool rebuild = false;
  bool delayed = false;
  bool own_buffers = false;  ///< No broadcast_buffers.
  // FullyShardedDataParallel.
  bool units = false;  ///< The blocks; else the model is one.
  bool keep = false;   ///< No reshard_after_forward.
  bool pairs = false;  ///< reshard_ranks = 2.
  bool no_prefetch = false;
  bool offload = false;
};

inline constexpr std::array kSwitches{
    std::pair{"single", &RandomCase::single},
    std::pair{"sgd", &RandomCase::sgd},
    std::pair{"tied", &RandomCase::tied},
    std::pair{"twice", &RandomCase::twice},
    std::pair{"frozen", &RandomCase::frozen},
    std::pair{"unused", &RandomCase::unused},
    std::pair{"sometimes", &RandomCase::sometimes},
    std::pair{"empty", &RandomCase::empty},
    std::pair{"buffers", &RandomCase::buffers},
    std::pair{"leaf", &RandomCase::leaf},
    std::pair{"input", &RandomCase::input},
    std::pair{"synchronize_always", &RandomCase::synchronize_always},
    std::pair{"divide_by_active", &RandomCase::divide_by_active},
    std::pair{"evaluation", &RandomCase::evaluation},
    std::pair{"whole", &RandomCase::whole},
    std::pair{"average", &RandomCase::average},
    std::pair{"small_buckets", &RandomCase::small_buckets},
    std::pair{"bucket_view", &RandomCase::bucket_view},
    std::pair{"static_graph", &RandomCase::static_graph},
    std::pair{"find_unused", &RandomCase::find_unused},
    std::pair{"skip_unused", &RandomCase::skip_unused},
    std::pair{"rebuild", &RandomCase::rebuild},
    std::pair{"delayed", &RandomCase::delayed},
    std::pair{"own_buffers", &RandomCase::own_buffers},
    std::pair{"units", &RandomCase::units},
    std::pair{"keep", &RandomCase::keep},
    std::pair{"pairs", &RandomCase::pairs},
    std::pair{"no_prefetch", &RandomCase::no_prefetch},
    std::pair{"offload", &RandomCase::offload},
};

inline bool is_sharded(const RandomCase& c) {
  return c.strategy != Strategy::kDdp && c.strategy != Strategy::kZeroRedundancy;
}

/// Takes back what the options' documentation forbids beside the rest.
inline void make_legal(RandomCase& c) {
  if (is_sharded(c)) {
    c.delayed = c.small_buckets = c.bucket_view = c.static_graph = c.rebuild = c.own_buffers =
        false;
    c.find_unused = c.skip_unused = false;
    c.join = 0;
    c.keep = c.keep && c.strategy == Strategy::kZero3;
    c.pairs = c.pairs && c.strategy == Strategy::kZero3 && c.ranks == 4 && !c.keep;
    // Two sharded models in one backward: ranks use the same parameters.
    c.sometimes = c.sometimes && c.head != Head::kSharded;
  } else {
    c.units = c.keep = c.pairs = c.no_prefetch = c.offload = false;
    if (c.head == Head::kSharded) c.head = Head::kDdp;
    // Gradients of a block that runs twice come twice if it is recomputed.
    if (c.twice && c.recompute != Recompute::kNone) c.static_graph = true;
    c.sometimes = c.sometimes && !c.static_graph;
    c.find_unused = !c.static_graph && (c.find_unused || c.unused || c.sometimes);
    c.skip_unused = c.skip_unused && c.find_unused && !c.sometimes;
    c.rebuild = c.rebuild && !c.find_unused;
    c.delayed = c.delayed && !c.find_unused && !c.static_graph;
  }
  if (c.strategy != Strategy::kDdp) c.join = 0;
  if (c.strategy == Strategy::kZeroRedundancy) c.sgd = false;
  if (c.join != 0) {
    // Within join() the model's forward is the only collective.
    c.average = c.delayed = c.skip_unused = false;
    // There a step is one forward and its backward: what earlier ones have averaged is not divided again.
    c.synchronize_always = false;
    if (c.head == Head::kDdp) c.head = Head::kPlain;
  }
  c.divide_by_active = c.divide_by_active && c.join != 0;
  c.synchronize_always = c.synchronize_always && c.accumulation > 1;
}

inline RandomCase draw(uint64_t seed) {
  std::mt19937_64 generator(seed);
  const auto pick = [&](uint64_t count) { return static_cast<int>(generator() % count); };
  RandomCase c;
  c.seed = seed;
  c.ranks = 1 + static_cast<int>(seed % 4);
  c.strategy = static_cast<Strategy>(pick(5));
  c.width = 2 + pick(4);
  c.blocks = 1 + pick(3);
  c.rows = 1 + pick(3);
  c.accumulation = 1 + pick(3);
  if (pick(2) == 0) c.clip = 0.02 * (1 + pick(50));
  c.head = static_cast<Head>(pick(4));
  c.recompute = static_cast<Recompute>(pick(3));
  if (pick(3) == 0) c.join = 1 + pick(4);
  for (const auto& [name, member] : kSwitches) c.*member = pick(3) == 0;
  make_legal(c);
  return c;
}

inline std::string describe(const RandomCase& c) {
  std::ostringstream out;
  constexpr std::array kStrategies{"kDdp", "kZeroRedundancy", "kZero1", "kZero2", "kZero3"};
  constexpr std::array kHeads{"kNone", "kPlain", "kDdp", "kSharded"};
  constexpr std::array kRecomputes{"kNone", "kModule", "kCaptured"};
  const RandomCase usual;
  out << "{.seed = " << c.seed << ", .ranks = " << c.ranks
      << ", .strategy = Strategy::" << kStrategies[static_cast<size_t>(c.strategy)];
  const auto put = [&](const char* name, const auto& value, const auto& otherwise) {
    if (value != otherwise) out << ", ." << name << " = " << value;
  };
  put("width", c.width, usual.width);
  put("blocks", c.blocks, usual.blocks);
  put("rows", c.rows, usual.rows);
  put("accumulation", c.accumulation, usual.accumulation);
  put("clip", c.clip, usual.clip);
  if (c.head != usual.head) out << ", .head = Head::" << kHeads[static_cast<size_t>(c.head)];
  if (c.recompute != usual.recompute)
    out << ", .recompute = Recompute::" << kRecomputes[static_cast<size_t>(c.recompute)];
  put("join", c.join, usual.join);
  for (const auto& [name, member] : kSwitches)
    if (c.*member) out << ", ." << name << " = true";
  out << "}";
  return out.str();
}

}  // namespace cohort::test::random_cases
