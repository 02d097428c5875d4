// The flags of `train` and `prepare` that say what text is trained on and what becomes of it.
#pragma once
#include <CLI/CLI.hpp>

#include "cohort/translate/training.h"

#include "cohort/cli/parse.h"

namespace cohort::cli {

inline void add_text_flags(CLI::App& app, translate::TrainingOptions& options) {
  const std::string group = "Data";
  app.add_option("--train-sets", options.train_sets,
                 "Source and target text, or one .tsv or .json file")
      ->type_name(kFile)
      ->required()
      ->expected(1, 2)
      ->group(group);
  app.add_option("--vocabs", options.vocabs,
                 "Source and target .spm file; trained on --train-sets if absent "
                 "(default: in --model-dir)")
      ->type_name(kFile)
      ->expected(2)
      ->group(group);
  app.add_flag(
         "--joined-dictionary", options.joined_dictionary,
         "One vocabulary for both sides, trained on both; so does --vocabs with the same file "
         "twice")
      ->group(group);
  app.add_option("--sentencepiece-max-lines", options.sentencepiece_max_lines,
                 "Train vocabularies on a sample of so many pairs at most")
      ->type_name("PAIRS")
      ->capture_default_str()
      ->check(above_zero())
      ->group(group);
  app.add_option("--model-dir", options.model_dir, "The run's folder")
      ->type_name(kFolder)
      ->required()
      ->group(group);
  app.add_option("--cache-dir", options.cache_dir,
                 "Keep the text as tokens here, for several runs (default: in --model-dir)")
      ->type_name(kFolder)
      ->group(group);
  app.add_option("--max-length", options.max_length, "Drop training pairs with more on a side")
      ->type_name(kTokens)
      ->capture_default_str()
      ->check(above_zero())
      ->group(group);
  app.add_flag("--max-length-crop", options.max_length_crop,
               "Cut sides that are longer to --max-length instead")
      ->group(group);
}

}  // namespace cohort::cli
