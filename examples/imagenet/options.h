// SPDX-License-Identifier: Apache-2.0
// The options of `imagenet`.
#pragma once
#include <cstdint>
#include <optional>
#include <string>

#include "cohort/comm/profiler.h"
#include "cohort/ps/rpc/security.h"

namespace imagenet {

struct Options {
  std::string data;  ///< Folder with train/<class>/ and val/<class>/.
  std::string arch = "resnet18";
  std::string output = ".";            ///< Gets checkpoint/, model_best/ and history.jsonl.
  std::string resume;                  ///< Folder of the checkpoint to resume from; empty: none.
  bool overwrite = false;              ///< Replace the training that `output` has.
  bool evaluate = false;               ///< Only evaluate on val/.
  int64_t epochs = 90;                 ///< Total number of epochs, those before --resume included.
  std::optional<int64_t> start_epoch;  ///< First epoch; default: where the checkpoint ended, or 0.
  int64_t batch_size = 256;            ///< Over all ranks ...
  std::optional<int64_t> batch_size_per_rank;  ///< ... or on each.
  double lr = 0.1;                             ///< For a global batch of 256, if lr_rule scales it.
  std::string lr_rule = "none";
  double momentum = 0.9;
  double weight_decay = 1e-4;
  int64_t print_freq = 10;       ///< Steps between progress lines.
  uint64_t seed = 0;             ///< Of parameters, data order and augmentation.
  int workers = 4;               ///< Decoding threads of each rank.
  std::string strategy = "ddp";  ///< parallel::Strategy's names, and "ps-sync", "ps-async".
  int ps_host_ranks = 1;         ///< Neighbouring ranks that are one trainer of servers together.
  bool cpu_offload = false;      ///< What a rank holds stays in host memory while a GPU computes.
  bool sync_bn = false;          ///< Normalise over the batches of all ranks.
  int64_t image_size = 224;
  /// float32, float64, or bfloat16 or float16: parameters in float32, convolutions and products in
  /// the other.
  std::string precision = "float32";
  double init_scale = 65536;        ///< float16: GradScalerOptions::init_scale.
  bool channels_last = false;       ///< Images, and what is computed of them, in memory as BHWC.
  bool skip_damaged = false;        ///< Skip corrupt images, and count them.
  cohort::ProfilerOptions profile;  ///< A trace of some training steps.
  /// Of the connections to servers.
  cohort::ps::SecurityOptions security;
};

}  // namespace imagenet
