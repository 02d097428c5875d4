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

/// Loads best/ of `model_dir`. Errors: ConfigError that names the file, also for vocabularies of
/// another model.
inline TrainedModel load_trained(const std::string& model_dir,
                                 const std::vector<std::filesystem::path>& vocabs,
                                 nmt::Precision precision) {
  const std::string folder = model_dir + "/best";
  const auto files = translate::vocab_files(model_dir, vocabs);
  const train::Facts facts = train::read_manifest(folder);
  const nmt::TransformerOptions sizes = translate::model_of(facts);
  translate::check_vocabularies(facts, files);
  TrainedModel trained{nmt::Transformer(sizes, precision),
                       translate::load_tokenizers(files, sizes)};
  train::load_checkpoint(folder, *trained.model);
  trained.model->eval();
  return trained;
}

}  // namespace cohort::apps
