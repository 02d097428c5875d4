// SPDX-License-Identifier: Apache-2.0
// Trains a ResNet on images:  cohort run --nproc-per-node 2 -- imagenet --arch resnet18 DATA
//
// The flags are those of PyTorch's examples/imagenet; docs/imagenet.md lists the differences.
#include <ATen/Context.h>
#include <CLI/CLI.hpp>
#include <cstdlib>
#include <string>
#include <utility>

#include "cohort/base/env.h"
#include "cohort/base/error.h"
#include "cohort/base/program.h"
#include "cohort/cli/group_flags.h"
#include "cohort/cli/offload_flag.h"
#include "cohort/cli/parse.h"
#include "cohort/cli/profile_flags.h"
#include "cohort/cli/security_flags.h"
#include "cohort/launch/spawn.h"
#include "cohort/ps/module/host_ranks.h"

#include "examples/imagenet/trainer.h"

namespace {

using imagenet::Options;

void add_model_flags(CLI::App& app, Options& o) {
  app.add_option("-a,--arch", o.arch, "resnet18, resnet34, resnet50, resnet101 or resnet152")
      ->capture_default_str();
  app.add_flag("--sync-bn", o.sync_bn,
               "Batch normalisation over the batches of all ranks (SyncBatchNorm)");
  app.add_option("--precision", o.precision,
                 "float32, float64, or bfloat16 or float16: convolutions and products in it, "
                 "parameters in float32 (autocast)")
      ->capture_default_str();
  app.add_option("--init-scale", o.init_scale,
                 "float16: first factor of the loss, which adapts to the gradients (GradScaler)")
      ->check(cohort::cli::above_zero())
      ->capture_default_str();
  app.add_flag("--channels-last", o.channels_last,
               "Keep the channels of a pixel together in memory, as torch.channels_last: faster on "
               "a CPU");
  app.add_option(
         "--strategy", o.strategy,
         "Which part of the model each rank holds (docs/strategies.md), or parameter servers, "
         "synchronous or asynchronous")
      ->check(cohort::cli::one_of(
          {"ddp", "zero1", "zero2", "zero3", "fsdp", "hybrid", "ps-sync", "ps-async"}))
      ->capture_default_str();
  app.add_option("--ps-host-ranks", o.ps_host_ranks,
                 "ps-sync, ps-async: number of neighbouring ranks that form one trainer: they "
                 "average their gradients, and one of them exchanges with the servers")
      ->check(cohort::cli::above_zero())
      ->capture_default_str();
  cohort::cli::add_offload_flag(app, o.cpu_offload);
}

void add_data_flags(CLI::App& app, Options& o) {
  app.add_option("data", o.data, "Folder with train/<class>/ and val/<class>/")->required();
  app.add_option("-j,--workers", o.workers, "Decoding threads of each rank")
      ->check(cohort::cli::above_zero())
      ->capture_default_str();
  app.add_option("--image-size", o.image_size, "Pixels on each side of the network's input")
      ->check(cohort::cli::above_zero())
      ->capture_default_str();
  app.add_flag("--skip-damaged", o.skip_damaged, "Skip corrupt images, and count them");
  app.add_option("-b,--batch-size", o.batch_size, "Images of a step over all ranks")
      ->check(cohort::cli::above_zero())
      ->capture_default_str();
  app.add_option("--batch-size-per-rank", o.batch_size_per_rank, "Images of a step on each rank")
      ->check(cohort::cli::above_zero())
      ->excludes("--batch-size");
}

void add_training_flags(CLI::App& app, Options& o) {
  app.add_option("--epochs", o.epochs, "Total number of epochs")
      ->check(cohort::cli::above_zero())
      ->capture_default_str();
  app.add_option("--start-epoch", o.start_epoch, "First epoch (default: as --resume says, or 0)")
      ->check(cohort::cli::zero_or_more());
  app.add_option("--lr,--learning-rate", o.lr,
                 "Learning rate of the first 30 epochs; it falls to a tenth every 30")
      ->check(cohort::cli::number_that([](double n) { return n >= 0 && n <= 100; },
                                       "a number from 0 to 100"))
      ->capture_default_str();
  app.add_option("--lr-rule", o.lr_rule, "Scale --lr by batch / 256: none, linear or sqrt")
      ->capture_default_str();
  app.add_option("--momentum", o.momentum, "Momentum of SGD")
      ->check(cohort::cli::zero_or_more())
      ->capture_default_str();
  app.add_option("--wd,--weight-decay", o.weight_decay, "Weight decay of SGD")
      ->check(cohort::cli::zero_or_more())
      ->capture_default_str();
  app.add_option("--seed", o.seed, "Random seed of parameters, data order and augmentation")
      ->capture_default_str();
  app.add_option("-p,--print-freq", o.print_freq, "Steps between progress lines")
      ->check(cohort::cli::above_zero())
      ->capture_default_str();
  app.add_option("--resume", o.resume, "Folder of the checkpoint to resume from")
      ->type_name(cohort::kFolder);
  app.add_flag("--overwrite", o.overwrite, "Replace the training that --output has");
  app.add_flag("-e,--evaluate", o.evaluate, "Only evaluate on val/ the weights of --resume");
  app.add_option("--output", o.output, "Folder for checkpoint/, model_best/ and history.jsonl")
      ->type_name(cohort::kFolder)
      ->capture_default_str();
  cohort::cli::add_profile_flags(app, o.profile, "Output");
}

// Checks flags that are valid alone, but not together.
void check_together(const CLI::App& app, const Options& options, bool on_cpu) {
  if (app.count("--init-scale") > 0 && options.precision != "float16")
    throw cohort::ConfigError("--init-scale: expected --precision float16, got " +
                              options.precision);
  if (options.evaluate && options.resume.empty())
    throw cohort::ConfigError("--evaluate: expected --resume FOLDER, whose weights it evaluates");
  const bool servers = cohort::ps::server_training(options.strategy).has_value();
  if (options.ps_host_ranks > 1 && !servers)
    throw cohort::ConfigError("--ps-host-ranks: expected --strategy ps-sync or ps-async");
  cohort::cli::check_offload(options.cpu_offload, on_cpu, options.strategy);
  if (servers) return;
  if (!options.evaluate) cohort::ps::refuse_servers(options.strategy);
  cohort::cli::refuse_security(options.security, "--strategy ps-sync or ps-async");
  if (!options.evaluate && options.start_epoch && *options.start_epoch >= options.epochs)
    throw cohort::ConfigError("--start-epoch " + std::to_string(*options.start_epoch) +
                              ": expected less than --epochs " + std::to_string(options.epochs) +
                              ", or no epoch is trained");
}

// Ranks that a launcher restarts resume at the last epoch that the job has saved.
void go_on_where_the_job_was(Options& options) {
  const std::string last = options.output + "/checkpoint";
  if (options.evaluate || !imagenet::is_of_this_job(last)) return;
  options.resume = last;
  options.start_epoch.reset();
}

// A script that starts each rank of a node exports LOCAL_RANK, and nothing else of a launcher's: this is that rank.
bool is_local_rank() {
  return cohort::env_string("LOCAL_RANK") && !cohort::comm::launcher_rank_variable();
}

// Whether a launcher has put more processes than this one on the node. Slurm's number may have a tail: "2(x3),1".
bool is_one_of_several() {
  for (const char* name :
       {"LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_STEP_TASKS_PER_NODE"}) {
    if (std::atoi(cohort::env_string(name).value_or("1").c_str()) > 1) return true;
  }
  return false;
}

// Under a launcher every process would start a whole job, and all of them would write one folder.
void refuse_launchers() {
  const auto launched = cohort::comm::launcher_rank_variable();
  if (!launched) return;
  throw cohort::ConfigError(
      "--multiprocessing-distributed: a launcher started this process (" + launched->first + "=" +
      launched->second +
      "): leave the flag out, or start one process a node and give --rank and "
      "--world-size, which then count nodes");
}

// Without it --rank and --world-size, which count nodes here, would be taken for those of processes.
void check_ranks_of_node(const cohort::comm::RankInfoOptions& node) {
  if (!node.nproc_per_node) {
    throw cohort::ConfigError(
        "--multiprocessing-distributed: expected --nproc-per-node, the ranks of each node");
  }
}

int run_rank(Options options, cohort::cli::GroupFlags group_flags, const CLI::App& app) {
  const auto group = group_flags.connect();
  cohort::cli::check_same_flags(
      group, app, {"--workers", "--print-freq", "--profile", "--profile-skip", "--profile-steps"});
  // Batches are alike in size: cuDNN may try which of its convolutions are the fastest for it.
  if (group.device().is_cuda()) at::globalContext().setBenchmarkCuDNN(true);
  go_on_where_the_job_was(options);
  imagenet::Trainer trainer(options, group);
  if (options.evaluate) {
    trainer.evaluate();
  } else {
    trainer.train();
  }
  group.close();
  return cohort::kExitOk;
}

// The ranks of one node meet at a free port of it; those of several at node 0's.
void check_meeting_place(const cohort::comm::RankInfoOptions& node) {
  const std::string url = node.dist_url.value_or("env://");
  if (url.starts_with("file://"))
    throw cohort::ConfigError("--dist-url " + url +
                              ": expected tcp://host:port with --multiprocessing-distributed");
  if (!node.rank && !node.world_size && (url != "env://" || node.master_addr || node.master_port)) {
    throw cohort::ConfigError(
        "--dist-url, --addr, --port: expected --rank and --world-size, which count nodes");
  }
}

// --multiprocessing-distributed: this process stands for a node, and --rank and --world-size count
// nodes. It starts the node's ranks, which find their places in their environment.
int spawn_ranks(const Options& options, cohort::cli::GroupFlags group_flags, const CLI::App& app) {
  const cohort::comm::RankInfoOptions node = std::exchange(group_flags.rank_info, {});
  if (!node.rank || !node.world_size || is_one_of_several()) refuse_launchers();
  check_ranks_of_node(node);
  check_meeting_place(node);
  cohort::launch::RunOptions ranks;
  if (node.rank || node.world_size) {
    cohort::comm::RankInfoOptions of_node = node;
    of_node.nproc_per_node.reset();
    const cohort::comm::RankInfo info = cohort::comm::rank_info_from_environment(of_node);
    ranks.node_rank = info.rank;
    ranks.nnodes = {.min = info.world_size, .max = info.world_size};
    ranks.master_addr = info.master_addr;
    ranks.master_port = info.master_port;
  }
  return cohort::launch::spawn([&](int) { return run_rank(options, group_flags, app); },
                               *node.nproc_per_node, ranks);
}

int run(int argc, char** argv) {
  CLI::App app("Trains a ResNet on folders of pictures, on one or many ranks", "imagenet");
  Options options;
  cohort::cli::GroupFlags group_flags;
  add_data_flags(app, options);
  add_model_flags(app, options);
  add_training_flags(app, options);
  group_flags.add_to(app, cohort::cli::GroupFlags::Devices::kAny);
  cohort::cli::add_client_security_flags(app, options.security);
  bool spawns = false;
  app.add_flag("--multiprocessing-distributed", spawns,
               "Start --nproc-per-node ranks here; --rank and --world-size count nodes")
      ->group("Ranks");
  if (const auto ended = cohort::cli::parse(app, argc, argv, "imagenet --help lists the flags"))
    return *ended;
  check_together(app, options, group_flags.computes_on_cpu());
  if (spawns && !is_local_rank()) return spawn_ranks(options, group_flags, app);
  if (spawns) check_ranks_of_node(group_flags.rank_info);
  return run_rank(options, group_flags, app);
}

}  // namespace

int main(int argc, char** argv) {
  return cohort::run_program("imagenet", [&] { return run(argc, argv); });
}
