// SPDX-License-Identifier: Apache-2.0
// Training in cases drawn from a seed, beside one process that trains on the union of all ranks' batches.
//
// Thirty seeds run by default. More, each set of rank processes running 50 of them, with a record that is resumed:
//   COHORT_RANDOM_CASES=0:2000 COHORT_RANDOM_RECORD=cases.jsonl parallel_test --gtest_filter='RandomCasesTest.Of*'
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <gtest/gtest.h>
#include <iostream>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <sstream>

#include "cohort/parallel/join.h"
#include "cohort/parallel/sharding/fully_sharded_data_parallel.h"
#include "cohort/parallel/zero_redundancy_optimizer.h"

#include "tests/parallel/random_cases_model.h"
#include "tests/support/ranks.h"

namespace cohort {
namespace random_cases_test {

using namespace test::random_cases;

constexpr size_t kCasesOfOneSet = 50;  // of rank processes

// What one rank finds that one process does not. NaN differs from everything.
class Comparison {
 public:
  explicit Comparison(const RandomCase& c)
      : rank_type_eps_(c.single ? std::numeric_limits<float>::epsilon()
                                : std::numeric_limits<double>::epsilon()) {}

  void at(std::string where) { where_ = std::move(where); }

  // Sums of at most 4 ranks x 3 batches x 3 rows x 5 columns through at most 9 layers: some 500 roundings of numbers of
  // about 1. A step carries at most 5 times a gradient's error into a parameter.
  void near(const at::Tensor& got, const at::Tensor& expected, const std::string& what) {
    if (got.numel() != expected.numel()) return add(what + ": has another size");
    if (got.numel() == 0) return;
    const double scale = std::max(1.0, expected.abs().max().item<double>());
    const double difference =
        (got.to(at::kDouble).reshape({-1}) - expected.to(at::kDouble).reshape({-1}))
            .abs()
            .max()
            .item<double>();
    if (difference <= 5'000 * rank_type_eps_ * scale) return;
    std::ostringstream out;
    out << what << ": off by " << difference << ", of at most "
        << expected.abs().max().item<double>();
    add(out.str());
  }
  // A gradient of nothing and zeros are the same where `zero_is_none`.
  void gradient(const at::Tensor& got, const at::Tensor& expected, const std::string& what,
                bool zero_is_none) {
    if (got.defined() && expected.defined()) return near(got, expected, what);
    if (got.defined() == expected.defined()) return;
    const at::Tensor& one = got.defined() ? got : expected;
    if (!zero_is_none || !(one.numel() == 0 || one.abs().max().item<double>() == 0))
      add(what + (got.defined() ? ": expected none" : ": there is none"));
  }
  void equal(bool same, const std::string& what) {
    if (!same) add(what);
  }

  const std::vector<std::string>& faults() const { return faults_; }

 private:
  void add(const std::string& fault) {
    if (faults_.size() < 6) faults_.push_back(where_ + ": " + fault);
  }
  double rank_type_eps_;
  std::string where_;
  std::vector<std::string> faults_;
};

at::Tensor part_of(const at::Tensor& whole, const parallel::LocalShard& local_shard) {
  return whole.defined()
             ? whole.reshape({-1}).narrow(0, local_shard.begin, local_shard.end - local_shard.begin)
             : whole;
}

struct Ddp {
  using Wrapper = parallel::DistributedDataParallel<Net>;
  using ZeroOptimizer = parallel::ZeroRedundancyOptimizer<Optimizer>;

  Ddp(const RandomCase& c, Net& net, const comm::ProcessGroup& group)
      : c_(c), net_(net), wrapper(net, group, options_of(c)) {
    if (c.strategy == Strategy::kZeroRedundancy) {
      zero.emplace(optim::named_parameters(*net), group, [&](const auto& shards) {
        std::vector<std::pair<std::string, at::Tensor>> named;
        for (const auto& local_shard : shards)
          named.emplace_back(local_shard.name, local_shard.tensor);
        return Optimizer(named, c.sgd);
      });
    } else {
      plain.emplace(trained(*net), c.sgd);
    }
  }

  static parallel::DistributedDataParallelOptions options_of(const RandomCase& c) {
    parallel::DistributedDataParallelOptions options{.broadcast_buffers = !c.own_buffers,
                                                     .find_unused_parameters = c.find_unused,
                                                     .gradient_as_bucket_view = c.bucket_view,
                                                     .static_graph = c.static_graph,
                                                     .skip_all_reduce_unused_params = c.skip_unused,
                                                     .rebuild_buckets = c.rebuild};
    if (c.small_buckets) options.bucket_cap_mb_list = {1e-4};
    if (c.delayed) {
      options.delay_all_reduce_named_params = {c.tied ? "table" : "last.weight"};
      options.param_to_hook_all_reduce = "scale";
    }
    return options;
  }

  double norm() { return wrapper.gradient_norm(); }
  void step(double factor) { zero ? zero->step(factor) : plain->step(factor); }
  void zero_grad() { zero ? zero->zero_grad() : plain->zero_grad(); }

  void compare_gradients(OneProcess& alone, Comparison& found) {
    const auto expected = alone.net->named_parameters();
    for (const auto& item : net_->named_parameters())
      found.gradient(item.value().grad(), expected[item.key()].grad(), "gradient of " + item.key(),
                     c_.static_graph);
  }
  void compare_state(OneProcess& alone, Comparison& found) {
    const auto expected = alone.net->named_parameters();
    for (const auto& item : net_->named_parameters())
      found.near(item.value(), expected[item.key()], item.key());
    auto moments = alone.adam->moments();
    if (plain) {
      for (auto& [name, tensor] : plain->moments()) found.near(tensor, moments[name], name);
      return;
    }
    auto own = zero->optimizer().moments();
    for (const auto& local_shard : zero->local_shards())
      for (const char* moment : {".exp_avg", ".exp_avg_sq"})
        found.near(own[local_shard.name + moment],
                   part_of(moments[local_shard.name + moment], local_shard),
                   local_shard.name + moment);
  }
  void compare_whole(OneProcess&, Comparison&) {}

  RandomCase c_;
  Net net_;
  Wrapper wrapper;
  std::optional<Optimizer> plain;
  std::optional<ZeroOptimizer> zero;
};

struct Sharded {
  using Wrapper = parallel::FullyShardedDataParallel<Net>;

  Sharded(const RandomCase& c, Net& net, const comm::ProcessGroup& group)
      : wrapper(net, group, options_of(c),
                c.units ? net->units() : std::vector<torch::nn::Module*>{}),
        optimizer(wrapper.named_parameters(), c.sgd) {}

  static parallel::ShardingOptions options_of(const RandomCase& c) {
    const auto shard = c.strategy == Strategy::kZero1   ? parallel::Shard::kOptimizer
                       : c.strategy == Strategy::kZero2 ? parallel::Shard::kGradients
                                                        : parallel::Shard::kParameters;
    return {.shard = shard,
            .reshard_after_forward = !c.keep,
            .reshard_ranks = c.pairs ? 2 : 0,
            .prefetch = !c.no_prefetch,
            .cpu_offload = c.offload};
  }

  double norm() { return wrapper.gradient_norm(); }
  void step(double factor) { optimizer.step(factor); }
  void zero_grad() { optimizer.zero_grad(); }

  void compare_gradients(OneProcess& alone, Comparison& found) {
    const auto expected = alone.net->named_parameters();
    for (const auto& local_shard : wrapper.local_shards())
      found.gradient(local_shard.tensor.grad(),
                     part_of(expected[local_shard.name].grad(), local_shard),
                     "gradient of " + local_shard.name, true);
  }
  void compare_state(OneProcess& alone, Comparison& found) {
    const auto expected = alone.net->named_parameters();
    auto moments = alone.adam->moments();
    auto own = optimizer.moments();
    for (const auto& local_shard : wrapper.local_shards()) {
      found.near(local_shard.tensor, part_of(expected[local_shard.name], local_shard),
                 local_shard.name);
      for (const char* moment : {".exp_avg", ".exp_avg_sq", ".momentum"}) {
        const at::Tensor& mine = own[local_shard.name + moment];
        const at::Tensor& theirs = moments[local_shard.name + moment];
        // SGD has one once a gradient has come, and a shard may have one of zeros.
        found.gradient(mine, part_of(theirs, local_shard), local_shard.name + moment, true);
      }
    }
  }
  void compare_whole(OneProcess& alone, Comparison& found) {
    const auto expected = alone.net->named_parameters();
    const auto whole = wrapper.unsharded();
    for (const auto& item : wrapper.module()->named_parameters())
      found.near(item.value(), expected[item.key()], "whole " + item.key());
  }

  Wrapper wrapper;
  Optimizer optimizer;
};

// Five steps of this rank.
template <class Model>
class Training {
 public:
  Training(const RandomCase& c, const comm::ProcessGroup& group)
      : c_(c),
        group_(group),
        rank_(group.rank()),
        net_(c, rank_),
        head_(make_head(c)),
        model_(c, net_, group),
        alone_(c),
        found_(c) {
    if (c.head == Head::kDdp) ddp_head_.emplace(head_, group);
    if (c.head == Head::kSharded)
      sharded_head_.emplace(head_, group,
                            parallel::ShardingOptions{.shard = parallel::Shard::kOptimizer});
    head_optimizer_.emplace(sharded_head_ ? sharded_head_->named_parameters() : trained(*head_),
                            c.sgd);
    leaf_ = at::full({}, 1.5, c.single ? at::kFloat : at::kDouble).requires_grad_(true);
  }

  std::vector<std::string> run() {
    if constexpr (std::is_same_v<Model, Ddp>) {
      if (c_.join != 0) {
        parallel::join(model_.wrapper, [&] { steps(num_steps_of(c_, rank_)); },
                       {.divide_by_initial_world_size = !c_.divide_by_active});
        compare_end();
        return found_.faults();
      }
    }
    steps(kSteps);
    return found_.faults();
  }

 private:
  void steps(int count) {
    for (; step_ < count; ++step_) {
      found_.at("step " + std::to_string(step_));
      one_step();
      if (c_.evaluation) evaluate();
      if (c_.whole) model_.compare_whole(alone_, found_);
    }
  }

  void one_step() {
    for (int i = 0; i < c_.accumulation; ++i) {
      const bool last = i + 1 == c_.accumulation;
      if (last || c_.synchronize_always) {
        one_batch(i);
      } else {
        const auto guard = model_.wrapper.no_sync();
        if (ddp_head_) {
          const auto head_guard = ddp_head_->no_sync();
          one_batch(i);
        } else if (sharded_head_) {
          const auto head_guard = sharded_head_->no_sync();
          one_batch(i);
        } else {
          one_batch(i);
        }
      }
    }
    model_.compare_gradients(alone_, found_);
    compare_outside();
    const double norm = model_.norm();
    alone_.step();
    found_.near(at::tensor(norm, at::kDouble), at::tensor(alone_.norm, at::kDouble),
                "norm of the gradient");
    model_.step(OneProcess::clip_factor(c_, norm));
    model_.compare_state(alone_, found_);
    model_.zero_grad();
    if (ddp_head_ || sharded_head_) head_optimizer_->step(1);
    compare_head();
    head_optimizer_->zero_grad();
    leaf_.mutable_grad().reset();
    alone_.zero_grad();
    compare_buffers(rank_);
  }

  void one_batch(int index) {
    alone_.add_batch(step_, index);
    Batch batch = batch_of(c_, rank_, step_, index);
    if (c_.input) batch.x.requires_grad_(true);
    at::Tensor y = model_.wrapper(batch.x, batch.uses_extra);
    if (ddp_head_) {
      y = (*ddp_head_)(y);
    } else if (sharded_head_) {
      y = (*sharded_head_)(y);
    } else if (c_.head == Head::kPlain) {
      y = head_(y);
    }
    if (c_.leaf) y = y * leaf_;
    at::Tensor loss = y.square().mean();
    if (c_.average) group_.all_reduce(loss, comm::ReduceOp::kAvg);
    loss.backward();
    if (c_.input)
      found_.gradient(batch.x.grad(),
                      alone_.inputs[static_cast<size_t>(rank_)].grad() * alone_.own_factor,
                      "gradient of the batch", false);
  }

  void compare_outside() {
    const auto me = static_cast<size_t>(rank_);
    if (c_.leaf)
      found_.gradient(leaf_.grad(), alone_.leaves[me].grad() * alone_.own_factor,
                      "gradient of the factor outside", false);
    if (c_.head == Head::kPlain) {
      const auto expected = alone_.heads[me]->named_parameters();
      for (const auto& item : head_->named_parameters())
        found_.gradient(item.value().grad(), expected[item.key()].grad() * alone_.own_factor,
                        "gradient of the plain head's " + item.key(), false);
    }
  }

  void compare_head() {
    const auto expected = alone_.shared_head->named_parameters();
    if (ddp_head_)
      for (const auto& item : head_->named_parameters())
        found_.near(item.value(), expected[item.key()], "the head's " + item.key());
    if (sharded_head_)
      for (const auto& local_shard : sharded_head_->local_shards())
        found_.near(local_shard.tensor, part_of(expected[local_shard.name], local_shard),
                    "the head's " + local_shard.name);
  }

  void compare_buffers(int rank) {
    if (!c_.buffers) return;
    const Buffers& expected = alone_.buffers_of(rank);
    found_.near(net_->mean, expected.mean, "running mean");
    found_.near(net_->count, expected.count, "count");
    found_.near(net_->offset, alone_.net->offset, "constant buffer");
  }

  void evaluate() {
    const at::NoGradGuard no_grad;
    const Batch batch = batch_of(c_, rank_, step_, 7);
    net_->eval();
    const at::Tensor y = model_.wrapper(batch.x, batch.uses_extra);
    net_->train();
    found_.near(y, alone_.evaluate(batch, rank_, step_), "evaluation");
  }

  // After join: what the last rank to join has.
  void compare_end() {
    found_.at("after join");
    for (int step = step_; step < kSteps; ++step) {
      for (int i = 0; i < c_.accumulation; ++i) alone_.add_batch(step, i);
      alone_.step();
      alone_.zero_grad();
      if (c_.evaluation) alone_.evaluate(batch_of(c_, 0, step, 7), 0, step);
    }
    compare_buffers(/*rank=*/0);
    const auto expected = alone_.net->named_parameters();
    for (const auto& item : net_->named_parameters())
      found_.near(item.value(), expected[item.key()], item.key());
  }

  RandomCase c_;
  comm::ProcessGroup group_;
  int rank_;
  Net net_;
  torch::nn::Linear head_;
  Model model_;
  OneProcess alone_;
  Comparison found_;
  std::optional<parallel::DistributedDataParallel<torch::nn::Linear>> ddp_head_;
  std::optional<parallel::FullyShardedDataParallel<torch::nn::Linear>> sharded_head_;
  std::optional<Optimizer> head_optimizer_;
  at::Tensor leaf_;
  int step_ = 0;
};

std::vector<std::string> run_case(const RandomCase& c, const comm::ProcessGroup& group) {
  return is_sharded(c) ? Training<Sharded>(c, group).run() : Training<Ddp>(c, group).run();
}

// Runs every case; one that throws ends this rank, since the others may be anywhere.
void run_cases(const std::vector<RandomCase>& cases, const comm::ProcessGroup& group) {
  for (const RandomCase& c : cases) {
    if (group.rank() == 0) std::cout << "begin case " << c.seed << std::endl;
    try {
      for (const std::string& fault : run_case(c, group))
        ADD_FAILURE() << "rank " << group.rank() << " of case " << describe(c) << ": " << fault;
    } catch (const std::exception& error) {
      std::cout << "rank " << group.rank() << " of case " << describe(c)
                << " threw: " << error.what() << std::endl;
      throw;
    }
    group.barrier("case");
  }
}

std::vector<std::string> lines_with(const std::string& text, const std::string& part) {
  std::vector<std::string> found;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);)
    if (line.find(part) != std::string::npos) found.push_back(line);
  return found;
}

// What one set of rank processes has found.
struct Found {
  size_t num_run = 0;
  std::vector<std::string> faults;
};

Found run_set(int ranks, const std::vector<RandomCase>& cases) {
  const auto ends =
      test::run_ranks(ranks, [&](const comm::ProcessGroup& group) { run_cases(cases, group); },
                      {.timeout = std::chrono::seconds(60)});
  Found found{.num_run = lines_with(ends.front().output, "begin case ").size(), .faults = {}};
  for (size_t rank = 0; rank < ends.size(); ++rank) {
    const auto faults = lines_with(ends[rank].output, " of case {");
    found.faults.insert(found.faults.end(), faults.begin(), faults.end());
    if (ends[rank].exit_code > 1 || (ends[rank].exit_code == 1 && faults.empty()))
      found.faults.push_back(
          "rank " + std::to_string(rank) + " ended with " + std::to_string(ends[rank].exit_code) +
          ": " +
          ends[rank].output.substr(ends[rank].output.size() -
                                   std::min<size_t>(400, ends[rank].output.size())));
  }
  return found;
}

std::vector<uint64_t> numbers_in(const std::string& text) {
  std::vector<uint64_t> numbers;
  std::istringstream in(text);
  for (std::string number; std::getline(in, number, ',');) numbers.push_back(std::stoull(number));
  return numbers;
}

// The seeds for this number of ranks in COHORT_RANDOM_CASES ("first:count") that the record lacks.
std::vector<uint64_t> seeds_to_run(int ranks, const char* record) {
  const char* range = std::getenv("COHORT_RANDOM_CASES");
  uint64_t first = 0, count = 30;
  if (range) {
    const std::string text = range;
    first = std::stoull(text);
    count = std::stoull(text.substr(text.find(':') + 1));
  }
  std::set<uint64_t> done;
  std::ifstream in(record ? record : "/dev/null");
  for (std::string line; std::getline(in, line);) {
    const auto seeds = nlohmann::json::parse(line).at("seeds").get<std::vector<uint64_t>>();
    done.insert(seeds.begin(), seeds.end());
  }
  std::vector<uint64_t> seeds;
  for (uint64_t seed = first; seed < first + count; ++seed)
    if (draw(seed).ranks == ranks && !done.contains(seed)) seeds.push_back(seed);
  return seeds;
}

std::vector<RandomCase> cases_of(const std::vector<uint64_t>& seeds) {
  std::vector<RandomCase> cases;
  for (const uint64_t seed : seeds) cases.push_back(draw(seed));
  return cases;
}

void expect_one_process(int ranks) {
  constexpr const char* kSeeds =
      "COHORT_RANDOM_SEEDS";  // tells a rank's process which cases it is started for
  if (const char* seeds = std::getenv(kSeeds)) {
    run_set(ranks, cases_of(numbers_in(seeds)));
    return;
  }
  const char* record = std::getenv("COHORT_RANDOM_RECORD");
  std::vector<uint64_t> left = seeds_to_run(ranks, record);
  ASSERT_TRUE(record || !left.empty());
  while (!left.empty()) {
    std::vector<uint64_t> set(
        left.begin(), left.begin() + static_cast<int64_t>(std::min(left.size(), kCasesOfOneSet)));
    std::string text;
    for (const uint64_t seed : set) text += (text.empty() ? "" : ",") + std::to_string(seed);
    ::setenv(kSeeds, text.c_str(), 1);
    const auto start = std::chrono::steady_clock::now();
    const Found found = run_set(ranks, cases_of(set));
    ::unsetenv(kSeeds);
    for (const std::string& fault : found.faults) ADD_FAILURE() << fault;
    ASSERT_GT(found.num_run, 0U) << "no case began";
    set.resize(found.num_run);
    left.erase(left.begin(), left.begin() + static_cast<int64_t>(found.num_run));
    if (!record) continue;
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    std::ofstream(record, std::ios::app) << nlohmann::json{{"ranks", ranks},
                                                           {"seeds", set},
                                                           {"faults", found.faults},
                                                           {"seconds", seconds.count()}}
                                         << std::endl;
  }
}

TEST(RandomCasesTest, OfOneRankAreOneProcess) {
  expect_one_process(1);
}

TEST(RandomCasesTest, OfTwoRanksAreOneProcess) {
  expect_one_process(2);
}

TEST(RandomCasesTest, OfThreeRanksAreOneProcess) {
  expect_one_process(3);
}

TEST(RandomCasesTest, OfFourRanksAreOneProcess) {
  expect_one_process(4);
}

}  // namespace random_cases_test
}  // namespace cohort
