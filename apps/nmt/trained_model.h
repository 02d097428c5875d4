// A run's best model with its tokenizers, as the commands that use it find and load it.
#pragma once
#include <CLI/CLI.hpp>
#include <filesystem>
#include <string>
#include <vector>

#include "cohort/nmt/transformer.h"
#include "cohort/translate/run_folder.h"

#include "cohort/cli/parse.h"

namespace cohort::cli {

/// Which model, as flags.
struct ModelPlace {
  std::string model_dir;
  std::vector<std::filesystem::path> vocabs;
  std::string precision = "auto";

  void add_to(CLI::App& app) {
    const char* group = "Model";
    app.add_option("--model-dir", model_dir, "The run's folder")
        ->required()
        ->type_name(kFolder)
        ->group(group);
    app.add_option("--vocabs", vocabs,
                   "Source and target vocabulary, .spm (default: in --model-dir)")
        ->expected(2)
        ->type_name(kFile)
        ->group(group);
    app.add_option("--precision", precision, "Of matrix products")
        ->check(one_of({"auto", "bfloat16", "float32"}))
        ->capture_default_str()
        ->group(group);
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
  return load_trained(place.model_dir, place.vocabs, nmt::parse_precision(place.precision));
}

}  // namespace cohort::cli
