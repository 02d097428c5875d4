// SPDX-License-Identifier: Apache-2.0
// A run's best model with its tokenizers, as the commands that use it find and load it.
#pragma once
#include <CLI/CLI.hpp>
#include <filesystem>
#include <string>
#include <vector>

#include "cohort/cli/option_flags.h"
#include "cohort/comm/accelerator.h"
#include "cohort/nmt/transformer.h"
#include "cohort/translate/run_folder.h"
#include "cohort/translate/training_options.h"

namespace cohort::cli {

/// For translations that are read.
inline translate::EvaluationOptions full_search() {
  return {.search = {.beam_size = 6, .normalize = 1}};
}

/// Which model, as flags.
struct ModelPlace {
  std::string model_dir;
  std::vector<std::filesystem::path> vocabs;
  nmt::Precision precision = nmt::best_precision();
  std::string device = "cpu";  // comm::init_accelerator

  // For a command of one process; ranks have GroupFlags.
  void add_device_to(CLI::App& app) {
    add_options(app,
                {{"--device", &device, "Where to compute: cpu, cuda or cuda:N", {.unit = "NAME"}}},
                "Model");
  }
  void add_to(CLI::App& app) {
    add_options(
        app,
        {{"--model-dir", &model_dir, "The run's folder", {.unit = kFolder, .required = true}},
         {"--vocabs",
          &vocabs,
          "Source and target vocabulary, .spm (default: in --model-dir)",
          {.unit = kFile, .min_values = 2, .max_values = 2}},
         {"--precision",
          words_for(precision, {"auto", "bfloat16", "float32"}, nmt::parse_precision),
          "Precision of matrix products",
          {.shown_default = "auto"}}},
        "Model");
  }
};

struct TrainedModel {
  nmt::Transformer model;
  translate::Tokenizers tokenizers;
};

/// Loads best/ of the run in `model_dir`.
/// Errors: ConfigError that names the file, also for vocabularies of another model.
inline TrainedModel load_trained(const std::string& model_dir,
                                 const std::vector<std::filesystem::path>& vocabs,
                                 nmt::Precision precision) {
  const std::string folder = model_dir + "/best";
  const train::Metadata metadata = train::read_manifest(folder);
  const nmt::TransformerOptions sizes = translate::model_of(metadata);
  const auto files = translate::vocab_files(model_dir, vocabs);
  translate::check_vocabularies(metadata, files);
  TrainedModel trained{nmt::Transformer(sizes, precision),
                       translate::load_tokenizers(files, sizes)};
  train::load_checkpoint(folder, *trained.model);
  trained.model->eval();
  return trained;
}
inline TrainedModel load_trained(const ModelPlace& place) {
  const at::Device device = comm::init_accelerator(place.device, {});
  nmt::check_precision(place.precision, device.is_cpu());
  TrainedModel trained = load_trained(place.model_dir, place.vocabs, place.precision);
  trained.model->to(device);
  return trained;
}

}  // namespace cohort::cli
