// SPDX-License-Identifier: Apache-2.0
// Training speed of the base translator on synthetic sentences with a news corpus's lengths.
//
//   cohort run --nproc-per-node 2 -- build/release/bin/nmt_step --steps 5
//
// Rank 0 prints one JSON line: target tokens per second over all ranks (median of the steps), and
// the rate of bfloat16 (or float32) matrix products that the same ranks reach together, as the
// yardstick. With --exposed-communication it takes every step a second time without the exchange of
// gradients, before it and after it in turns, and adds what that saves; the ranks' parameters go
// apart, so it says nothing of losses then. With --save-every it prints instead what a checkpoint
// in the background costs: the time by which steps with one are longer than the same steps without.
#include <ATen/Parallel.h>
#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <functional>
#include <iterator>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <string>
#include <sys/resource.h>
#include <torch/types.h>

#include "cohort/base/error.h"
#include "cohort/base/program.h"
#include "cohort/cli/parse.h"
#include "cohort/comm/accelerator.h"
#include "cohort/comm/process_group.h"
#include "cohort/nmt/transformer.h"
#include "cohort/parallel/strategy.h"
#include "cohort/train/metrics.h"
#include "cohort/train/sharded_checkpoint.h"
#include "cohort/translate/corpus.h"
#include "cohort/translate/precision.h"
#include "cohort/translate/tensor_memory.h"
#include "cohort/translate/tensor_parallel_context.h"
#include "cohort/translate/updater.h"

#include "apps/step_batches.h"
#include "bench/median.h"
#include "bench/sent_bytes.h"

namespace {

using cohort::apps::BatchLengths;
using cohort::apps::make_batch;
using cohort::apps::plan_batches;
using cohort::apps::product_rate;
using cohort::apps::step_flop;
using cohort::apps::wait_for_device;
using cohort::bench::median_of;
using Clock = std::chrono::steady_clock;

struct Options {
  int64_t steps = 5;
  int64_t warmup = 2;
  int64_t mini_batch_words = 4096;
  uint64_t seed = 1;
  std::string precision = "auto";
  std::string device = "cpu";
  std::string backend = "auto";
  int64_t vocabulary = 32000;
  int64_t depth = 6;
  std::string strategy = "ddp";
  int64_t tensor_parallel = 1;
  int64_t rows = 0;
  int64_t length = 12;
  bool gradient_checkpointing = false;
  bool exposed_communication = false;
  int64_t save_every = 0;
  std::string save_to;
  std::string save_by = "all";
};

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

int64_t peak_rss_bytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_maxrss * 1024;
}

// Of memory that several processes have (libraries, what ranks share), what the others' shares add up
// to: Linux counts it whole in each one's resident memory.
int64_t bytes_of_others() {
  std::ifstream file("/proc/self/smaps_rollup");
  int64_t resident = 0, proportional = 0;
  for (std::string word; file >> word;) {
    if (word == "Rss:") file >> resident;
    if (word == "Pss:") file >> proportional;
  }
  TORCH_CHECK(proportional > 0, "/proc/self/smaps_rollup: expected Rss and Pss, found none");
  return (resident - proportional) * 1024;
}

// Saves in the background, as training does, at the first of every 2 * `cycle` steps: in every
// other cycle. All cycles have the same sentences, so what a cycle takes longer than its neighbours
// is what the save cost. A save is a checkpoint before its cycle ends.
class Saves {
 public:
  Saves(const Options& options, const cohort::comm::ProcessGroup& group,
        cohort::translate::Updater& updater)
      : folder_(options.save_to),
        cycle_(options.save_every),
        shared_(options.save_by == "all"),
        group_(group),
        updater_(updater) {
    if (shared_ || updater.model().is_sharded()) {
      writer_.emplace(group);
    } else if (group.rank() == 0) {
      writer_.emplace(alone_.emplace(cohort::comm::RankInfo{}));
    }
  }

  // Steps count from 0, the first that is measured.
  void before(int64_t step) {
    if (!writer_ || step < 0 || step % (2 * cycle_) != 0) return;
    begun_ = Clock::now();
    const auto parts = updater_.parts();
    const bool cuts = shared_ && !updater_.model().is_sharded();
    writer_->begin(folder_,
                   cuts ? cohort::train::share_of(parts, group_.rank(), group_.size()) : parts,
                   step, {});
    begin_s_.push_back(seconds_since(begun_));
  }
  bool writing() const { return writer_ && !writer_->done(); }
  // `written`: no rank is writing.
  void after(int64_t step, bool written) {
    if (!writer_ || !writer_->pending() || (!written && (step + 1) % cycle_ != 0)) return;
    const auto start = Clock::now();
    writer_->commit();
    commit_s_.push_back(seconds_since(start));
    until_checkpoint_s_.push_back(seconds_since(begun_));
  }

  nlohmann::ordered_json cost(const std::vector<double>& times) const {
    std::vector<double> cycles;
    const auto cycle = static_cast<size_t>(cycle_);
    for (size_t i = 0; i + cycle <= times.size(); i += cycle)
      cycles.push_back(std::accumulate(times.begin() + i, times.begin() + i + cycle, 0.));
    std::vector<double> costs;
    for (size_t i = 0; i + 1 < cycles.size(); i += 2) {
      const double before = cycles[i == 0 ? 1 : i - 1];
      costs.push_back(cycles[i] - (before + cycles[i + 1]) / 2);
    }
    uint64_t bytes = 0;
    for (const auto& [key, file] : cohort::Manifest::read(folder_).files) bytes += *file.bytes;
    return {{"share_at_one_a_minute", median_of(costs) / 60},
            {"cost_s", median_of(costs)},
            {"cost_s_min", *std::ranges::min_element(costs)},
            {"cost_s_max", *std::ranges::max_element(costs)},
            {"cost_s_each", costs},
            {"begin_s", median_of(begin_s_)},
            {"commit_s", median_of(commit_s_)},
            {"until_checkpoint_s", median_of(until_checkpoint_s_)},
            {"bytes", bytes},
            {"cycle_s", cycles}};
  }

 private:
  const std::string folder_;
  const int64_t cycle_;
  const bool shared_;
  cohort::comm::ProcessGroup group_;
  cohort::translate::Updater& updater_;
  std::optional<cohort::comm::ProcessGroup> alone_;  // where rank 0 saves everything
  std::optional<cohort::train::ShardedCheckpointWriter> writer_;
  Clock::time_point begun_;
  std::vector<double> begin_s_, commit_s_, until_checkpoint_s_;
};

// Bytes of tensors when gradients are there and activations are gone: what a rank's state takes.
int64_t bytes_after_backward(cohort::translate::Updater& updater, const BatchLengths& rows,
                             const Options& options,
                             const cohort::translate::TensorMemory& memory) {
  {
    const auto batch = make_batch(rows, options.seed, options.vocabulary);
    auto& model = updater.model();
    std::get<0>(model(batch.to(at::Device(options.device)))).backward();
  }
  return memory.now();
}

int run(const Options& options) {
  if (2 * options.save_every > options.steps) {
    throw cohort::ConfigError("--save-every " + std::to_string(options.save_every) +
                              ": expected at most half of --steps " +
                              std::to_string(options.steps));
  }
  at::set_num_threads(1);
  const cohort::comm::RankInfo info = cohort::comm::rank_info_from_environment();
  const at::Device device = cohort::comm::init_accelerator(options.device, info);
  const cohort::comm::ProcessGroup group(info, {.backend = options.backend, .device = device});
  std::optional<cohort::nmt::Precision> asked;
  if (options.precision != "auto") asked = cohort::nmt::parse_precision(options.precision);
  const auto precision = cohort::translate::agreed_precision(asked, group);
  cohort::nmt::check_precision(precision, device.is_cpu());
  const auto type = precision == cohort::nmt::Precision::kBFloat16 ? at::kBFloat16 : at::kFloat;
  const double gemm = product_rate(group, type, options.mini_batch_words);
  cohort::translate::TensorMemory memory(device.type());
  cohort::nmt::TransformerOptions sizes;
  sizes.dim_vocab_source = sizes.dim_vocab_target = options.vocabulary;
  sizes.enc_depth = sizes.dec_depth = options.depth;
  const auto strategy = cohort::parallel::parse_strategy(options.strategy);
  // As training does: where parameters are sharded, no rank ever has the whole model.
  const bool sharded = shards_parameters(strategy);
  const auto mesh = cohort::parallel::init_strategy_mesh(group, strategy,
                                                         static_cast<int>(options.tensor_parallel));
  const cohort::comm::ProcessGroup data_group = cohort::parallel::data_axes(mesh).group();
  const auto tensor_parallel =
      mesh.has("tp") ? cohort::translate::make_tensor_parallel_context(mesh.group("tp"))
                     : std::make_shared<cohort::nmt::TensorParallelContext>();
  cohort::nmt::Transformer model(sizes, precision, sharded ? at::Device(at::kMeta) : device,
                                 tensor_parallel);
  if (!sharded) model->initialise(options.seed);
  cohort::translate::Updater updater(
      model, group,
      {.mesh = mesh,
       .strategy = strategy,
       .fill = cohort::nmt::Initialiser(sizes, options.seed, tensor_parallel),
       .gradient_checkpointing = options.gradient_checkpointing,
       .seed = options.seed});
  const auto batches = plan_batches({.words = options.mini_batch_words,
                                     .seed = options.seed,
                                     .rows = options.rows,
                                     .length = options.length});

  std::optional<Saves> saves;
  if (options.save_every > 0) saves.emplace(options, group, updater);
  std::vector<double> times;
  std::vector<double> rates;
  std::vector<double> flops;
  std::vector<double> alone;  // --exposed-communication: the same steps without communication
  double loss_per_token = 0;
  int64_t sent_before = 0;
  for (int64_t step = 0; step < options.warmup + options.steps; ++step) {
    const int64_t turn = saves ? step % options.save_every : step;
    const auto index =
        static_cast<size_t>(turn * data_group.size() + data_group.rank()) % batches.size();
    auto batch = make_batch(batches[index], options.seed * 1000003 + index, options.vocabulary);
    if (!device.is_cpu()) batch = cohort::translate::pinned(batch);
    // The same step without communication. Both times end when the slower rank has come.
    const auto step_alone = [&] {
      wait_for_device(device);
      group.barrier("alone");
      const cohort::parallel::NoSync local(updater.model());
      const auto start = Clock::now();
      updater.update({batch});
      cohort::train::reduce_sums(group, std::array{0.});
      wait_for_device(device);
      if (step >= options.warmup) alone.push_back(seconds_since(start));
    };
    // Whichever comes second finds the batch in caches and the allocator warm: in turns.
    const bool alone_first = step % 2 != 0;
    if (options.exposed_communication && alone_first) step_alone();
    wait_for_device(device);
    group.barrier("step");
    if (step == options.warmup) {
      memory.reset_peak();
      sent_before = cohort::bench::tcp_bytes_sent();
    }
    const auto start = Clock::now();
    if (saves) saves->before(step - options.warmup);
    const auto report = updater.update({batch});
    const auto tokens = static_cast<double>(report.num_tokens);
    const double writing = saves && saves->writing() ? 1 : 0;
    const auto sums = cohort::train::reduce_sums(
        group, std::array{report.nll_sum, writing, step_flop(batches[index], sizes)});
    const auto copies = static_cast<double>(options.tensor_parallel);  // of every batch
    loss_per_token = sums[0] / copies / tokens;
    if (saves) saves->after(step - options.warmup, sums[1] == 0);
    wait_for_device(device);
    const double elapsed = seconds_since(start);
    if (options.exposed_communication && !alone_first) step_alone();
    if (step < options.warmup) continue;
    times.push_back(elapsed);
    rates.push_back(tokens / elapsed);
    flops.push_back(sums[2] / copies);
  }
  group.barrier("end");
  const int64_t sent = cohort::bench::tcp_bytes_sent() - sent_before;
  const int64_t at_rest = memory.now();
  const int64_t at_peak = memory.peak();
  // The largest of all ranks. All of them are there, with what they share.
  const int64_t peak = peak_rss_bytes();
  at::Tensor bytes = at::tensor({at_rest, at_peak, peak, sent,
                                 bytes_after_backward(updater, batches.front(), options, memory),
                                 peak - bytes_of_others()});
  group.all_reduce(bytes, cohort::comm::ReduceOp::kMax);
  const auto* largest = bytes.const_data_ptr<int64_t>();
  if (saves && group.rank() == 0) {
    nlohmann::ordered_json line = {{"bench", "save_cost"},
                                   {"strategy", to_string(strategy)},
                                   {"world_size", group.size()},
                                   {"save_by", options.save_by},
                                   {"mini_batch_words", options.mini_batch_words},
                                   {"median_step_s", median_of(times)}};
    line.update(saves->cost(times));
    std::printf("%s\n", line.dump().c_str());
  } else if (group.rank() == 0) {
    std::vector<double> flop_rates;
    std::ranges::transform(flops, times, std::back_inserter(flop_rates), std::divides());
    nlohmann::ordered_json line = {{"bench", "nmt_step"},
                                   {"strategy", to_string(strategy)},
                                   {"tensor_parallel", options.tensor_parallel},
                                   {"tgt_tokens_per_s", median_of(rates)},
                                   {"tgt_tokens_per_s_min", *std::ranges::min_element(rates)},
                                   {"tgt_tokens_per_s_max", *std::ranges::max_element(rates)},
                                   {"steps", options.steps},
                                   {"world_size", group.size()},
                                   {"params", cohort::nmt::count_parameters(*model)},
                                   {"precision", cohort::nmt::to_string(precision)},
                                   {"device", device.str()},
                                   {"mini_batch_words", options.mini_batch_words},
                                   {"gradient_checkpointing", options.gradient_checkpointing},
                                   {"gemm_flop_per_s", gemm},
                                   {"flop_per_step", median_of(flops)},
                                   {"share_of_gemm_rate", median_of(flop_rates) / gemm},
                                   {"median_step_s", median_of(times)},
                                   {"step_s", times},
                                   {"tensor_bytes_at_rest", largest[0]},
                                   {"tensor_bytes_after_backward", largest[4]},
                                   {"tensor_bytes_at_peak", largest[1]},
                                   {"peak_rss_bytes", largest[2]},
                                   {"peak_pss_bytes", largest[5]}};
    if (!options.exposed_communication) {
      line["bytes_sent_per_step_and_rank"] = largest[3] / options.steps;
      line["final_loss"] = loss_per_token;
    } else {
      std::vector<double> exposed;
      std::ranges::transform(times, alone, std::back_inserter(exposed), std::minus());
      line["step_without_communication_s"] = alone;
      line["exposed_communication_s"] = median_of(exposed);
    }
    std::printf("%s\n", line.dump().c_str());
  }
  group.close();
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app("Training speed of the base translator");
  app.add_option("--steps", options.steps, "Measured steps")
      ->capture_default_str()
      ->check(cohort::cli::above_zero());
  app.add_option("--warmup", options.warmup, "Steps before, not measured")->capture_default_str();
  app.add_option("--strategy", options.strategy, "ddp, zero1, zero2, zero3, fsdp or hybrid")
      ->capture_default_str();
  app.add_option("--tensor-parallel", options.tensor_parallel, "Ranks that compute one model")
      ->capture_default_str()
      ->check(cohort::cli::above_zero());
  app.add_option("--rows", options.rows, "Sentences of a batch, all alike (0: of many lengths) ...")
      ->capture_default_str();
  app.add_option("--length", options.length, "... and their length on both sides without end marks")
      ->capture_default_str();
  app.add_option("--mini-batch-words", options.mini_batch_words,
                 "Target tokens per rank and step, padded")
      ->capture_default_str();
  app.add_option("--seed", options.seed, "Of sentences, parameters and dropout")
      ->capture_default_str();
  app.add_option("--precision", options.precision, "auto, bfloat16 or float32")
      ->capture_default_str();
  app.add_option("--device", options.device, "cpu, cuda or cuda:N")->capture_default_str();
  app.add_option("--dist-backend", options.backend, "As of cohort nmt train")
      ->capture_default_str();
  auto* save_to =
      app.add_option("--save-to", options.save_to, "Folder of the checkpoints of --save-every");
  app.add_flag("--exposed-communication", options.exposed_communication,
               "Take every step a second time without the exchange of gradients (ddp)");
  app.add_option("--save-every", options.save_every,
                 "Save in every second block of this many steps, from the first on")
      ->check(CLI::Range(2, 1000))
      ->needs(save_to);
  app.add_option("--save-by", options.save_by,
                 "Ranks that write what all hold: all (their shares) or one (everything)")
      ->capture_default_str()
      ->check(CLI::IsMember({"all", "one"}));
  app.add_option("--vocabulary", options.vocabulary, "Pieces on each side")->capture_default_str();
  app.add_option("--depth", options.depth, "Layers of the encoder, and of the decoder")
      ->capture_default_str()
      ->check(cohort::cli::above_zero());
  app.add_flag("--gradient-checkpointing", options.gradient_checkpointing,
               "Compute the layers again in backward");
  return cohort::run_program("nmt_step", [&] {
    if (const auto ended = cohort::cli::parse(app, argc, argv)) return *ended;
    return run(options);
  });
}
