// SPDX-License-Identifier: Apache-2.0
// `cohort nmt info`: a model's sizes and its number of parameters.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>

#include "cohort/nmt/options.h"
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

void print_precision(const nmt::PrecisionChoice& choice) {
  std::printf("%-24s %s\n", "precision (auto)", nmt::to_string(choice.precision).c_str());
  if (choice.float32_flop_per_s == 0) {
    std::printf("%-24s this processor has no products of bfloat16\n", "because");
    return;
  }
  std::printf(
      "%-24s one thread multiplies %.0f GFLOP/s in float32, %.0f in bfloat16 (chosen from %.1f "
      "times float32 on)\n",
      "because", choice.float32_flop_per_s / 1e9, choice.bfloat16_flop_per_s / 1e9,
      nmt::kWorthwhileGain);
}

int run(const ModelFlags& flags) {
  const nmt::TransformerOptions options = flags.resolve();
  const nmt::Transformer model(options);
  for (const auto& [name, value] : translate::metadata_of(options)) {
    std::printf("%-24s %s\n", name.c_str(), value.c_str());
  }
  print_precision(nmt::precision_choice());
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
