// SPDX-License-Identifier: Apache-2.0
// A run's best model with its tokenizers, as the commands that use it find and load it.
#pragma once
#include <CLI/CLI.hpp>
#include <filesystem>
#include <optional>
#include <string>
#include <system_error>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/cli/option_flags.h"
#include "cohort/comm/accelerator.h"
#include "cohort/nmt/transformer.h"
#include "cohort/translate/precision.h"
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
  std::optional<nmt::Precision> precision;  // none: the model's own, or the best for it
  std::string device = "cpu";               // comm::init_accelerator

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
          translate::precision_value(precision, {"auto", "bfloat16", "float32", "int8"}),
          "Precision of matrix products; int8 rounds the weights to 8 bits first, unless they are",
          {.shown_default = "auto"}}},
        "Model");
  }
};

/// Whether best/ of the run in `model_dir` has 8-bit weights.
/// Errors: ConfigError that names the file.
inline bool holds_int8(const std::string& model_dir) {
  return translate::has_int8_weights(train::read_manifest(model_dir + "/best"));
}

struct TrainedModel {
  nmt::Transformer model;
  translate::Tokenizers tokenizers;
};

/// Loads best/ of the run in `model_dir`.
/// Without a precision: int8 if its weights are 8-bit, else the best of this device.
/// Errors: ConfigError that names the file, also for vocabularies of another model; for a precision that the model or the
///         device does not have.
inline TrainedModel load_trained(const std::string& model_dir,
                                 const std::vector<std::filesystem::path>& vocabs,
                                 std::optional<nmt::Precision> asked, bool on_cpu = true) {
  const std::string folder = model_dir + "/best";
  const train::Metadata metadata = train::read_manifest(folder);
  const nmt::TransformerOptions sizes = translate::model_of(metadata);
  const auto files = translate::vocab_files(model_dir, vocabs);
  translate::check_vocabularies(metadata, files);
  const bool stored_int8 = translate::has_int8_weights(metadata);
  const auto precision =
      asked.value_or(stored_int8 ? nmt::Precision::kInt8 : nmt::best_precision(on_cpu));
  const bool int8 = precision == nmt::Precision::kInt8;
  if (stored_int8 && !int8) {
    throw ConfigError(folder + " holds 8-bit weights, which cannot be turned back into " +
                      nmt::to_string(precision) +
                      ": expected int8, or the --model-dir that nmt quantize read");
  }
  nmt::check_precision(precision, on_cpu);
  TrainedModel trained{
      nmt::Transformer(sizes, int8 && !stored_int8 ? nmt::Precision::kFloat32 : precision),
      translate::load_tokenizers(files, sizes)};
  train::load_checkpoint(folder, *trained.model);
  if (stored_int8) nmt::check_scales(trained.model, folder);
  if (int8 && !stored_int8) trained.model = nmt::quantize(trained.model);
  trained.model->eval();
  return trained;
}
inline TrainedModel load_trained(const ModelPlace& place) {
  const at::Device device = comm::init_accelerator(place.device, {});
  TrainedModel trained =
      load_trained(place.model_dir, place.vocabs, place.precision, device.is_cpu());
  trained.model->to(device);
  return trained;
}

/// Errors: ConfigError if `output`, of the flag --output, holds a model.
inline void expect_no_model(const std::string& output) {
  std::error_code error;  // save_model() meets it again.
  // The last file to be written: what a full disk cut short is no model.
  if (std::filesystem::exists(std::filesystem::path(output) / "best/manifest.json", error))
    throw ConfigError("--output " + output + " already holds a model: name another folder");
}

/// Writes a model that was made of the run in `model_dir` as best/ in `output`, with the run's vocabularies,
/// unless those lie elsewhere. best/ comes last.
/// Errors: ConfigError that names the file or folder that cannot be written or read; c10::Error if writing fails.
inline void save_model(const std::string& output, const nmt::Transformer& model, int64_t update,
                       const train::Metadata& metadata, const std::string& model_dir) {
  namespace fs = std::filesystem;
  const auto check = [](const fs::path& path, const std::error_code& error) {
    if (error) throw ConfigError(path.string() + ": " + error.message());
  };
  std::error_code error;
  fs::create_directories(output, error);
  check(output, error);
  for (const char* vocabulary : {"source.spm", "target.spm"}) {
    const fs::path from = fs::path(model_dir) / vocabulary, to = fs::path(output) / vocabulary;
    const bool is_there = fs::exists(from, error);
    check(from, error);
    if (!is_there) continue;
    fs::copy_file(from, to, fs::copy_options::overwrite_existing, error);
    check(to, error);
  }
  // A folder with best/ is a model.
  train::save_checkpoint(output + "/best", *model, update, metadata);
}

}  // namespace cohort::cli
