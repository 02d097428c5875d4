// SPDX-License-Identifier: Apache-2.0
// `cohort nmt quantize`: a trained model with 8-bit weights.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>

#include "cohort/base/error.h"
#include "cohort/cli/option_flags.h"

#include "apps/nmt/commands.h"
#include "apps/nmt/trained_model.h"

namespace cohort::cli {
namespace {

struct QuantizeFlags {
  std::string model_dir;
  std::string output;
};

int run(const QuantizeFlags& flags) {
  const std::string best = flags.model_dir + "/best";
  train::Metadata metadata = train::read_manifest(best);
  if (translate::has_int8_weights(metadata))
    throw ConfigError(best + " holds 8-bit weights already: expected a trained model");
  expect_no_model(flags.output);
  nmt::Transformer model(translate::model_of(metadata));
  train::load_checkpoint(best, *model);
  metadata["precision"] = nmt::to_string(nmt::Precision::kInt8);
  save_model(flags.output, nmt::quantize(model), train::read_update(best), metadata,
             flags.model_dir);
  std::printf("the model of %s with 8-bit weights is in %s/best\n", flags.model_dir.c_str(),
              flags.output.c_str());
  return 0;
}

}  // namespace

void add_quantize_command(CLI::App& app, Action& action) {
  auto* command = app.add_subcommand(
      "quantize", "Round a model's weights to 8 bits, for faster translation on CPUs");
  auto flags = std::make_shared<QuantizeFlags>();
  add_options(
      *command,
      {{"--model-dir", &flags->model_dir, "The run's folder", {.unit = kFolder, .required = true}},
       {"--output",
        &flags->output,
        "A new folder, used as --model-dir afterwards",
        {.unit = kFolder, .required = true}}});
  command->callback([flags, &action] { action = [flags] { return run(*flags); }; });
}

}  // namespace cohort::cli
