// SPDX-License-Identifier: Apache-2.0
// `cohort nmt average`: one model whose weights are the mean of several checkpoints of a run.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <system_error>
#include <torch/types.h>

#include "cohort/base/error.h"
#include "cohort/cli/counted.h"
#include "cohort/cli/option_flags.h"
#include "cohort/nmt/transformer.h"
#include "cohort/translate/run_folder.h"

#include "apps/nmt/commands.h"
#include "apps/nmt/trained_model.h"

namespace cohort::cli {
namespace {

struct AverageFlags {
  std::string model_dir;
  std::string output;
  int64_t last = 0;
};

train::NamedTensors empty_like(const train::NamedTensors& tensors, at::ScalarType type) {
  train::NamedTensors result;
  for (const auto& [name, tensor] : tensors)
    result.emplace_back(name, at::zeros_like(tensor, at::TensorOptions().dtype(type)));
  return result;
}

int run(const AverageFlags& flags) {
  auto updates = translate::kept_updates(flags.model_dir);
  std::error_code error;  // The check below says more of a folder that cannot be read.
  if (updates.empty() && std::filesystem::exists(flags.model_dir + "/best", error) &&
      holds_int8(flags.model_dir)) {
    throw ConfigError(
        flags.model_dir +
        " holds 8-bit weights, which have no mean: average the checkpoints of the run "
        "that it was made of, then round the mean by cohort nmt quantize");
  }
  if (std::ssize(updates) < std::max<int64_t>(flags.last, 1)) {
    throw ConfigError(flags.model_dir + "/checkpoints holds the weights of " +
                      counted(updates.size(), "update") + ": expected at least " +
                      std::to_string(std::max<int64_t>(flags.last, 1)) +
                      " (cohort nmt train --save-interval-updates keeps them)");
  }
  if (flags.last > 0) updates.erase(updates.begin(), updates.end() - flags.last);
  expect_no_model(flags.output);

  const std::string newest = translate::kept_folder(flags.model_dir, updates.back());
  train::Metadata metadata = train::read_manifest(newest);
  const nmt::Transformer model(translate::model_of(metadata));
  const auto read = train::state_of(*model);
  const auto sums = empty_like(read, at::kDouble);
  metadata["averaged"] = "";
  for (const int64_t update : updates) {
    train::load_checkpoint(translate::kept_folder(flags.model_dir, update),
                           train::Parts{{"weights", read}});
    for (size_t i = 0; i < sums.size(); ++i) sums[i].second.add_(read[i].second);
    metadata["averaged"] += (metadata["averaged"].empty() ? "" : " ") + std::to_string(update);
  }
  for (size_t i = 0; i < sums.size(); ++i)
    read[i].second.copy_(sums[i].second.div_(static_cast<double>(updates.size())));

  save_model(flags.output, model, updates.back(), metadata, flags.model_dir);
  std::printf("the mean of %s, update%s %s, is in %s/best\n",
              counted(updates.size(), "checkpoint").c_str(), updates.size() == 1 ? "" : "s",
              metadata["averaged"].c_str(), flags.output.c_str());
  return 0;
}

}  // namespace

void add_average_command(CLI::App& app, Action& action) {
  auto* command =
      app.add_subcommand("average", "Average the weights that train --save-interval-updates kept");
  auto flags = std::make_shared<AverageFlags>();
  add_options(
      *command,
      {{"--model-dir", &flags->model_dir, "The run's folder", {.unit = kFolder, .required = true}},
       {"--output",
        &flags->output,
        "A new folder, used as --model-dir afterwards",
        {.unit = kFolder, .required = true}},
       {"--last", &flags->last, "Number of checkpoints to average, the newest (0: all)",
        rule(kZeroOrMore)}});
  command->callback([flags, &action] { action = [flags] { return run(*flags); }; });
}

}  // namespace cohort::cli
