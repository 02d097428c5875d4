// SPDX-License-Identifier: Apache-2.0
// `cohort nmt info`: a model's sizes and its number of parameters.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>

#include "cohort/nmt/transformer.h"
#include "cohort/translate/run_folder.h"

#include "apps/nmt/commands.h"
#include "apps/nmt/model_flags.h"

namespace cohort::cli {
namespace {

std::string with_commas(int64_t number) {
  std::string text = std::to_string(number);
  for (auto at = static_cast<int64_t>(text.size()) - 3; at > 0; at -= 3) {
    text.insert(static_cast<size_t>(at), ",");
  }
  return text;
}

int run(const ModelFlags& flags) {
  const nmt::TransformerOptions options = flags.resolve();
  const nmt::Transformer model(options);
  for (const auto& [name, value] : translate::metadata_of(options)) {
    std::printf("%-24s %s\n", name.c_str(), value.c_str());
  }
  std::printf("%-24s %s\n", "precision (auto)", nmt::to_string(nmt::best_precision()).c_str());
  std::printf("%-24s %s\n", "parameters", with_commas(nmt::count_parameters(*model)).c_str());
  return 0;
}

}  // namespace

void add_info_command(CLI::App& app, Action& action) {
  auto* command = app.add_subcommand("info", "Sizes and number of parameters of a model");
  auto flags = std::make_shared<ModelFlags>();
  flags->add_to(*command);
  command->callback([flags, &action] { action = [flags] { return run(*flags); }; });
}

}  // namespace cohort::cli
