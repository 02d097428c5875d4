#include "cohort/translate/run_record.h"

#include <nlohmann/json.hpp>

#include "cohort/base/atomic_file.h"
#include "cohort/translate/run_folder.h"

namespace cohort::translate {
namespace {

void write_config(const TrainingOptions& options, int world_size) {
  nlohmann::ordered_json config = {{"world_size", world_size},
                                   {"precision", nmt::to_string(options.precision)},
                                   {"mini_batch", options.mini_batch},
                                   {"mini_batch_words", options.mini_batch_words},
                                   {"maxi_batch", options.maxi_batch},
                                   {"max_length", options.max_length},
                                   {"optimizer_delay", options.optimizer_delay},
                                   {"noam_factor", options.noam_factor},
                                   {"lr_warmup", options.lr_warmup},
                                   {"clip_norm", options.clip_norm},
                                   {"exponential_smoothing", options.exponential_smoothing},
                                   {"seed", options.seed},
                                   {"after_epochs", options.after_epochs},
                                   {"after_batches", options.after_batches},
                                   {"time_limit_min", options.time_limit_min},
                                   {"early_stopping", options.early_stopping},
                                   {"valid_freq_epochs", options.valid_freq_epochs},
                                   {"valid_freq_updates", options.valid_freq_updates},
                                   {"save_freq_min", options.save_freq_min},
                                   {"save_interval_updates", options.save_interval_updates},
                                   {"keep_interval_updates", options.keep_interval_updates},
                                   {"tokenize", text::to_string(options.evaluation.bleu.tokenizer)},
                                   {"beam_size", options.evaluation.search.beam_size},
                                   {"normalize", options.evaluation.search.normalize},
                                   {"word_penalty", options.evaluation.search.word_penalty},
                                   {"max_output_length", options.evaluation.search.max_length}};
  for (const auto& [name, value] : facts_of(options.model)) config[name] = value;
  for (const auto& path : options.train_sets) config["train_sets"].push_back(path.string());
  for (const auto& path : options.valid_sets) config["valid_sets"].push_back(path.string());
  for (const auto& path : options.vocabs) config["vocabs"].push_back(path.string());
  write_atomically(options.model_dir + "/config.json", config.dump(2) + "\n");
}

void write_translations(const std::string& path, const text::ParallelText& text,
                        const std::vector<std::string>& translations) {
  write_atomically(path, [&](FileWriter& file) {
    for (size_t i = 0; i < translations.size(); ++i) {
      file.write("S " + text.source[i] + "\nH " + translations[i] + "\nR " + text.target[i] +
                 "\n\n");
    }
  });
}

}  // namespace

RunRecord::RunRecord(const TrainingOptions& options, int world_size,
                     const text::ParallelText& valid_text, int64_t last_update)
    : options_(options),
      valid_text_(valid_text),
      history_(options.model_dir + "/history.jsonl", last_update) {
  write_config(options, world_size);
}

void RunRecord::validated(const Validation& validation,
                          const std::vector<std::string>& translations) {
  if (!translations.empty())
    write_translations(options_.model_dir + "/result-dev.txt", valid_text_, translations);
  history_.append({{"epoch", validation.epoch},
                   {"update", validation.update},
                   {"wall_s", validation.seconds},
                   {"train_loss", validation.train_loss},
                   {"valid_loss", validation.scores.loss},
                   {"valid_bleu", validation.scores.bleu},
                   {"valid_chrf", validation.scores.chrf},
                   {"best", validation.best},
                   {"learning_rate", validation.learning_rate},
                   {"tgt_tokens_per_s", validation.tgt_tokens_per_s},
                   {"valid_s", validation.own_seconds}});
}

}  // namespace cohort::translate
