#include "cohort/translate/training.h"

#include <ATen/Parallel.h>
#include <chrono>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <torch/types.h>

#include "cohort/base/atomic_file.h"
#include "cohort/base/error.h"
#include "cohort/base/log.h"
#include "cohort/data/prefetch.h"
#include "cohort/train/early_stopping.h"
#include "cohort/train/history.h"
#include "cohort/train/progress.h"
#include "cohort/translate/run_folder.h"
#include "cohort/translate/updater.h"

namespace cohort::translate {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Makes the folder; refuses one with a run in it, unless that is to be overwritten.
void prepare_folder(const TrainingOptions& options) {
  std::error_code error;
  fs::create_directories(options.model_dir, error);
  if (!fs::is_directory(options.model_dir)) {
    throw ConfigError("--model-dir " + options.model_dir + " cannot be made: " + error.message());
  }
  const fs::path folder = options.model_dir;
  if (!options.overwrite && (fs::exists(folder / "history.jsonl") || fs::exists(folder / "best"))) {
    throw ConfigError("--model-dir " + options.model_dir +
                      " already holds a run: name another folder, or pass --overwrite");
  }
}

void remove_earlier_run(const fs::path& folder) {
  for (const char* made : {"best", "history.jsonl", "result-dev.txt"})
    fs::remove_all(folder / made);
}

// Validation keeps every sentence, so one that the model cannot hold is refused before training.
void check_lengths(const Corpus& corpus, int64_t max_positions) {
  for (size_t i = 0; i < corpus.source.size(); ++i) {
    const auto tokens =
        static_cast<int64_t>(std::max(corpus.source[i].size(), corpus.target[i].size())) + 1;
    if (tokens > max_positions) {
      throw ConfigError("--valid-sets: pair " + std::to_string(i + 1) + " has " +
                        std::to_string(tokens) + " tokens: expected at most " +
                        std::to_string(max_positions));
    }
  }
}

// One run's state on one rank; `train` below is its outline.
class Run {
 public:
  Run(const TrainingOptions& options, text::ParallelText train_text, text::ParallelText valid_text,
      comm::ProcessGroup& group);
  TrainingResult loop();

 private:
  using Update = std::vector<nmt::Batch>;

  bool train_epoch(int64_t epoch);  // whether it came to the end
  void update(const Update& batches, int64_t step, int64_t num_steps);
  void validate();
  void decide_to_stop(const std::string& reason) {
    if (stop_reason_.empty()) stop_reason_ = reason;
  }
  Log make_log() const;
  void report_start(const text::ParallelText& train_text) const;
  void write_config() const;
  void write_translations(const std::vector<std::string>& translations) const;

  const TrainingOptions& options_;
  comm::ProcessGroup& group_;
  Log log_;
  Corpus train_;
  Corpus valid_;
  text::ParallelText valid_text_;
  std::optional<Tokenizers> tokenizers_;
  nmt::Transformer model_{nullptr};
  std::optional<Updater> updater_;
  train::EarlyStopping early_stopping_;
  std::optional<train::History> history_;  // rank 0
  train::Progress progress_;

  Clock::time_point start_;  // of training, after tokenisation and set-up
  int64_t epoch_ = 0;
  int64_t updates_ = 0;
  double loss_sum_ = 0;  // since the last validation, over all ranks
  int64_t token_sum_ = 0;
  double train_seconds_ = 0;
  std::string stop_reason_;
  TrainingResult result_;
};

Log Run::make_log() const {
  return Log({.rank = group_.rank(),
              .world_size = group_.size(),
              .file = options_.model_dir + "/logs/rank" + std::to_string(group_.rank()) + ".log"});
}

Run::Run(const TrainingOptions& options, text::ParallelText train_text,
         text::ParallelText valid_text, comm::ProcessGroup& group)
    : options_(options),
      group_(group),
      log_(make_log()),
      valid_text_(std::move(valid_text)),
      early_stopping_({.patience = options.early_stopping, .better = train::Better::kHigher}) {
  tokenizers_ = make_tokenizers(vocab_files(options.model_dir, options.vocabs), train_text,
                                options.model, options.overwrite && options.vocabs.empty(), group);
  train_ = tokenize(train_text, tokenizers_->source, tokenizers_->target, options.max_length);
  valid_ = tokenize(valid_text_, tokenizers_->source, tokenizers_->target, /*max_length=*/0);
  if (train_.size() == 0) {
    throw ConfigError("--max-length " + std::to_string(options.max_length) +
                      ": every training pair is longer");
  }
  check_lengths(valid_, options.model.max_positions);
  model_ = nmt::Transformer(options.model, options.precision);
  model_->initialise(options.seed);
  updater_.emplace(model_, group,
                   UpdaterOptions{.schedule = {.factor = options.noam_factor,
                                               .width = options.model.dim_emb,
                                               .warmup = options.lr_warmup},
                                  .clip_norm = options.clip_norm,
                                  .exponential_smoothing = options.exponential_smoothing,
                                  .seed = options.seed});
  if (group.rank() == 0) {
    remove_earlier_run(options.model_dir);
    write_config();
    history_.emplace(options.model_dir + "/history.jsonl");
  }
  report_start(train_text);
  train_text = {};  // The parameter would live as long as the run.
}

void Run::report_start(const text::ParallelText& train_text) const {
  log_.info("start", {{"ranks", group_.size()},
                      {"found_by", group_.place().source},
                      {"threads_per_rank", at::get_num_threads()},
                      {"precision", nmt::to_string(options_.precision)},
                      {"parameters", nmt::count_parameters(*model_)}});
  log_.info("data", {{"train_pairs", train_.size()},
                     {"dropped_empty", train_text.num_dropped_empty},
                     {"dropped_long", train_.num_dropped_long},
                     {"valid_pairs", valid_.size()},
                     {"valid_dropped_empty", valid_text_.num_dropped_empty}});
}

void Run::write_config() const {
  nlohmann::ordered_json config = {{"world_size", group_.size()},
                                   {"precision", nmt::to_string(options_.precision)},
                                   {"mini_batch", options_.mini_batch},
                                   {"mini_batch_words", options_.mini_batch_words},
                                   {"maxi_batch", options_.maxi_batch},
                                   {"max_length", options_.max_length},
                                   {"optimizer_delay", options_.optimizer_delay},
                                   {"noam_factor", options_.noam_factor},
                                   {"lr_warmup", options_.lr_warmup},
                                   {"clip_norm", options_.clip_norm},
                                   {"exponential_smoothing", options_.exponential_smoothing},
                                   {"seed", options_.seed},
                                   {"early_stopping", options_.early_stopping}};
  for (const auto& [name, value] : facts_of(options_.model)) config[name] = value;
  for (const auto& path : options_.train_sets) config["train_sets"].push_back(path.string());
  for (const auto& path : options_.valid_sets) config["valid_sets"].push_back(path.string());
  write_atomically(options_.model_dir + "/config.json", config.dump(2) + "\n");
}

TrainingResult Run::loop() {
  start_ = Clock::now();
  model_->train();
  while (stop_reason_.empty()) {
    const int64_t done = epoch_ + (train_epoch(epoch_) ? 1 : 0);  // not one that was cut short
    if (options_.after_epochs > 0 && done >= options_.after_epochs) {
      decide_to_stop("reached --after-epochs " + std::to_string(options_.after_epochs));
    }
    const bool due = options_.valid_freq_epochs > 0 && done % options_.valid_freq_epochs == 0;
    if ((due || !stop_reason_.empty()) && token_sum_ > 0) validate();
    epoch_ = done;
  }
  result_.stop_reason = stop_reason_;
  result_.epochs = epoch_;
  result_.updates = updates_;
  log_.info("end", {{"reason", stop_reason_},
                    {"epochs", epoch_},
                    {"updates", updates_},
                    {"best_bleu", result_.best_bleu},
                    {"minutes", seconds_since(start_) / 60}});
  return result_;
}

bool Run::train_epoch(int64_t epoch) {
  const auto plan = data::plan_batches(train_.lengths(),
                                       {.mini_batch = options_.mini_batch,
                                        .mini_batch_words = options_.mini_batch_words,
                                        .maxi_batch = options_.maxi_batch,
                                        .seed = options_.seed,
                                        .rank = group_.rank(),
                                        .world_size = group_.size()},
                                       epoch);
  if (epoch == 0) {
    log_.info("batches", {{"updates_per_epoch", (static_cast<int64_t>(plan.batches.size()) +
                                                 options_.optimizer_delay - 1) /
                                                    options_.optimizer_delay},
                          {"padding_share", plan.padding_share},
                          {"dropped", plan.num_dropped}});
  }
  const auto delay = static_cast<size_t>(options_.optimizer_delay);
  const auto num_steps = static_cast<int64_t>((plan.batches.size() + delay - 1) / delay);
  size_t next = 0;
  data::Prefetcher<Update> loader([&]() -> std::optional<Update> {
    if (next >= plan.batches.size()) return std::nullopt;
    Update batches;
    for (size_t i = 0; i < delay && next < plan.batches.size(); ++i, ++next) {
      batches.push_back(make_batch(train_, plan.batches[next]));
    }
    return batches;
  });
  int64_t step = 0;
  while (auto batches = loader.next()) {
    update(*batches, ++step, num_steps);
    if (options_.valid_freq_updates > 0 && updates_ % options_.valid_freq_updates == 0) validate();
    if (!stop_reason_.empty()) return step == num_steps;
  }
  progress_.finish();
  return true;
}

void Run::update(const Update& batches, int64_t step, int64_t num_steps) {
  const auto start = Clock::now();
  const int world = group_.size();
  const UpdateReport own = updater_->update(batches);
  updates_ = updater_->num_updates();

  // One exchange of small numbers: loss, rank 0's decision on time, each rank's speed.
  at::Tensor facts = at::zeros({2 + world}, at::kDouble);
  double* fact = facts.data_ptr<double>();
  fact[0] = own.nll_sum;
  const bool time_is_up =
      options_.time_limit_min > 0 && seconds_since(start_) > 60 * options_.time_limit_min;
  fact[1] = group_.rank() == 0 && time_is_up ? 1 : 0;
  fact[2 + group_.rank()] = static_cast<double>(own.own_tokens) / own.compute_seconds;
  group_.all_reduce(facts);
  const auto tokens = static_cast<double>(own.num_tokens);
  const double loss = fact[0] / tokens;
  TORCH_CHECK(std::isfinite(loss) && std::isfinite(own.gradient_norm), "update ", updates_,
              ": the loss is ", loss, " and the gradient norm ", own.gradient_norm,
              ": expected finite numbers (a lower learning rate may help)");
  const double seconds = seconds_since(start);
  loss_sum_ += fact[0];
  token_sum_ += own.num_tokens;
  train_seconds_ += seconds;
  if (fact[1] > 0) decide_to_stop("reached the time limit");
  if (options_.after_batches > 0 && updates_ >= options_.after_batches) {
    decide_to_stop("reached --after-batches " + std::to_string(options_.after_batches));
  }
  if (group_.rank() == 0 && !options_.quiet) {
    progress_.update({.epoch = epoch_ + 1,
                      .step = step,
                      .num_steps = num_steps,
                      .loss = loss,
                      .learning_rate = updater_->learning_rate(),
                      .rank_tokens_per_s = std::vector<double>(fact + 2, fact + 2 + world),
                      .tokens_per_s = tokens / seconds});
  }
}

void Run::validate() {
  const auto start = Clock::now();
  progress_.clear();
  const double train_loss = loss_sum_ / static_cast<double>(token_sum_);
  const double tokens_per_s = static_cast<double>(token_sum_) / train_seconds_;
  loss_sum_ = 0;
  token_sum_ = 0;
  train_seconds_ = 0;
  const optim::AveragesInPlace smoothed(
      updater_->average());  // scored and saved as they are used later
  const Evaluation evaluation = evaluate(model_, valid_, valid_text_.target, tokenizers_->target,
                                         group_, options_.evaluation);
  const double bleu = evaluation.bleu.score;
  // Every rank holds the same score, but the decision is rank 0's alone.
  const bool improved = early_stopping_.update(bleu);
  const bool stop =
      group_.broadcast_text(early_stopping_.should_stop() ? "stop" : "go on") == "stop";
  if (stop) {
    decide_to_stop("no better BLEU in " + std::to_string(options_.early_stopping) + " validations");
  }
  if (improved) {
    result_.best_bleu = bleu;
    result_.best_loss = evaluation.loss;
  }
  log_.info("valid", {{"epoch", epoch_ + 1},
                      {"update", updates_},
                      {"train_loss", train_loss},
                      {"valid_loss", evaluation.loss},
                      {"valid_bleu", bleu},
                      {"best_bleu", result_.best_bleu},
                      {"tgt_tokens_per_s", tokens_per_s}});
  if (group_.rank() == 0) {
    history_->append({{"epoch", epoch_ + 1},
                      {"update", updates_},
                      {"wall_s", seconds_since(start_)},
                      {"train_loss", train_loss},
                      {"valid_loss", evaluation.loss},
                      {"valid_bleu", bleu},
                      {"best", improved},
                      {"learning_rate", updater_->learning_rate()},
                      {"tgt_tokens_per_s", tokens_per_s},
                      {"valid_s", seconds_since(start)}});
    write_translations(evaluation.translations);
    if (improved) {
      train::Facts facts = facts_of(options_.model);
      facts["update"] = std::to_string(updates_);
      facts["valid_bleu"] = std::to_string(bleu);
      facts["precision"] = nmt::to_string(options_.precision);
      train::save_checkpoint(options_.model_dir + "/best", *model_, updates_, facts);
    }
  }
  group_.barrier("validation");
}

void Run::write_translations(const std::vector<std::string>& translations) const {
  write_atomically(options_.model_dir + "/result-dev.txt", [&](FileWriter& file) {
    for (size_t i = 0; i < translations.size(); ++i) {
      file.write("S " + valid_text_.source[i] + "\nH " + translations[i] + "\nR " +
                 valid_text_.target[i] + "\n\n");
    }
  });
}

}  // namespace

TrainingResult train(const TrainingOptions& options, comm::ProcessGroup& group) {
  // Bad text is found before anything is written.
  auto train_text = text::read_parallel_text(options.train_sets);
  auto valid_text = text::read_parallel_text(options.valid_sets);
  if (group.rank() == 0) prepare_folder(options);
  group.barrier("run folder");
  return Run(options, std::move(train_text), std::move(valid_text), group).loop();
}

}  // namespace cohort::translate
