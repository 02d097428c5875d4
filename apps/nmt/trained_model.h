// A run's best model with its tokenizers, as evaluate and translate load it.
#pragma once
#include <filesystem>
#include <string>
#include <vector>

#include "cohort/nmt/transformer.h"
#include "cohort/translate/run_folder.h"

namespace cohort::apps {

struct TrainedModel {
  nmt::Transformer model;
  translate::Tokenizers tokenizers;
};

/// Loads best/ of `model_dir`. Errors: ConfigError that names the file.
inline TrainedModel load_trained(const std::string& model_dir,
                                 const std::vector<std::filesystem::path>& vocabs,
                                 nmt::Precision precision) {
  const std::string folder = model_dir + "/best";
  const auto files = translate::vocab_files(model_dir, vocabs);
  const nmt::TransformerOptions sizes = translate::model_of(train::read_manifest(folder));
  TrainedModel trained{nmt::Transformer(sizes, precision),
                       translate::load_tokenizers(files, sizes)};
  train::load_checkpoint(folder, *trained.model);
  trained.model->eval();
  return trained;
}

}  // namespace cohort::apps
