#include "cohort/translate/training.h"

#include <ATen/Parallel.h>
#include <chrono>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <torch/types.h>

#include "cohort/base/env.h"
#include "cohort/base/error.h"
#include "cohort/base/log.h"
#include "cohort/base/stop_request.h"
#include "cohort/data/prefetch.h"
#include "cohort/train/early_stopping.h"
#include "cohort/train/progress.h"
#include "cohort/translate/batch_fit.h"
#include "cohort/translate/prepare.h"
#include "cohort/translate/run_folder.h"
#include "cohort/translate/run_record.h"
#include "cohort/translate/run_state.h"
#include "cohort/translate/updater.h"

namespace cohort::translate {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

enum class Start { kFresh, kResume };

std::string run_id() {
  return env_string("TORCHELASTIC_RUN_ID").value_or("");
}

// Whether this process is the launcher's second attempt at the run that wrote these facts.
bool is_restart_of(const train::Facts& facts) {
  const auto found = facts.find("run_id");
  return env_int("TORCHELASTIC_RESTART_COUNT", 0).value_or(0) > 0 && found != facts.end() &&
         found->second == run_id();
}

// Makes the folder; refuses one with a run in it that can be neither continued nor replaced.
Start prepare_folder(const TrainingOptions& options) {
  std::error_code error;
  fs::create_directories(options.model_dir, error);
  if (!fs::is_directory(options.model_dir)) {
    throw ConfigError("--model-dir " + options.model_dir + " cannot be made: " + error.message());
  }
  const fs::path folder = options.model_dir;
  if (fs::exists(folder / "last" / "manifest.json") &&
      (!options.overwrite || is_restart_of(train::read_manifest(folder / "last")))) {
    return Start::kResume;
  }
  if (!options.overwrite && (fs::exists(folder / "history.jsonl") || fs::exists(folder / "best"))) {
    throw ConfigError("--model-dir " + options.model_dir +
                      " holds a run without last/, so it cannot go on: name another folder, or "
                      "pass --overwrite");
  }
  return Start::kFresh;
}

void remove_earlier_run(const fs::path& folder) {
  for (const char* made : {"last", "best", "checkpoints", "history.jsonl", "tensorboard",
                           "result-dev.txt", "report.html"})
    fs::remove_all(folder / made);
}

// Validation keeps every sentence, so one that the model cannot hold is refused before training.
void check_lengths(const Corpus& corpus, int64_t max_positions) {
  for (int64_t i = 0; i < corpus.size(); ++i) {
    const auto [source, target] = corpus.lengths()[static_cast<size_t>(i)];
    const int64_t tokens = std::max(source, target);
    if (tokens > max_positions) {
      throw ConfigError("--valid-sets: pair " + std::to_string(i + 1) + " has " +
                        std::to_string(tokens) + " tokens: expected at most " +
                        std::to_string(max_positions));
    }
  }
}

// Text as the run uses it.
struct RunData {
  Tokenizers tokenizers;
  FreshFiles fresh;
  TrainingText train;
  Corpus valid;
  text::ParallelText valid_text;
  double seconds = 0;  // that it took to get here
};

// Everything that is wrong with the text is found here. Collective.
RunData prepare_data(const TrainingOptions& options, text::ParallelText valid_text, Start start,
                     comm::ProcessGroup& group) {
  const auto begin = Clock::now();
  const bool anew = start == Start::kFresh && options.overwrite && options.vocabs.empty();
  MadeTokenizers made = prepare_vocabularies(options, anew, group);
  Corpus valid = tokenize(valid_text, made.tokenizers.source, made.tokenizers.target);
  check_lengths(valid, options.model.max_positions);
  TrainingText train = prepare_tokens(options, made, group);
  return {std::move(made.tokenizers), std::move(made.fresh), std::move(train),
          std::move(valid),           std::move(valid_text), seconds_since(begin)};
}

// From here on the run has its vocabularies: a folder can be moved, and later runs find them.
void keep_vocabularies(const TrainingOptions& options, FreshFiles& fresh) {
  fresh.keep();
  const auto files = vocab_files_of(options);
  const auto own = vocab_files(options.model_dir, {});
  for (size_t side = 0; side < 2; ++side) {
    if (fs::exists(own[side]) && fs::equivalent(files[side], own[side])) continue;
    fs::copy_file(files[side], own[side], fs::copy_options::overwrite_existing);
  }
}

train::EarlyStoppingOptions stopping_options(const TrainingOptions& options) {
  return {.patience = options.early_stopping, .better = better_of(options.valid_metrics.front())};
}

// A rank waits for rank 0 to have written some gigabytes.
constexpr std::chrono::minutes kSaveLimit{30};

// One run on one rank; `loop` below is its outline.
class Run {
 public:
  Run(const TrainingOptions& options, Start start, RunData data, comm::ProcessGroup& group);
  TrainingResult loop();

 private:
  struct Update {
    std::vector<nmt::Batch> batches;
    std::vector<int64_t> sentences;  // of all batches, by number in data_.train
  };

  bool train_epoch();  // whether it came to the end
  void update(const Update& update, int64_t step, int64_t num_steps);
  void report_skipped(const Update& update, const UpdateReport& own);
  void validate();
  bool is_valid_update() const;
  void check_goals();
  void resume();
  void write(const std::string& folder, const train::Parts& parts, const train::Facts& facts);
  void save();
  void save_and_keep();
  train::Facts model_facts() const;
  train::Facts facts() const;
  double seconds() const { return state_.seconds + seconds_since(start_); }
  void decide_to_stop(const std::string& reason) {
    if (stop_reason_.empty()) stop_reason_ = reason;
  }
  Log make_log() const;
  void report_start() const;
  std::vector<int64_t> find_batch_fit();

  const TrainingOptions& options_;
  comm::ProcessGroup& group_;
  Log log_;
  RunData data_;
  std::vector<int64_t> fit_rows_;  // of data::BatchOptions
  nmt::Transformer model_{nullptr};
  std::optional<Updater> updater_;
  train::EarlyStopping early_stopping_;
  std::optional<RunRecord> record_;  // rank 0
  train::Progress progress_;

  train::CheckpointWriter writer_;  // rank 0 uses it
  train::Facts data_facts_;         // rank 0: what text and vocabularies the run rests on
  StopRequest stop_request_;

  RunState state_;
  Clock::time_point start_;  // of this process's training, after tokenisation and set-up
  Clock::time_point saved_;
  std::string stop_reason_;
  bool was_asked_to_stop_ = false;
};

Log Run::make_log() const {
  return Log({.rank = group_.rank(),
              .world_size = group_.size(),
              .file = options_.model_dir + "/logs/rank" + std::to_string(group_.rank()) + ".log",
              .level = options_.log_level});
}

Run::Run(const TrainingOptions& options, Start start, RunData data, comm::ProcessGroup& group)
    : options_(options),
      group_(group),
      log_(make_log()),
      data_(std::move(data)),
      early_stopping_(stopping_options(options)) {
  model_ = nmt::Transformer(options.model, options.precision);
  model_->initialise(options.seed);
  if (options.mini_batch_fit) fit_rows_ = find_batch_fit();
  updater_.emplace(model_, group,
                   UpdaterOptions{.schedule = {.factor = options.noam_factor,
                                               .width = options.model.dim_emb,
                                               .warmup = options.lr_warmup},
                                  .clip_norm = options.clip_norm,
                                  .exponential_smoothing = options.exponential_smoothing,
                                  .seed = options.seed});
  if (group.rank() == 0) {
    data_facts_["train_sets_sha256"] = data_.train.sha256;
    if (start == Start::kFresh) {
      remove_earlier_run(options.model_dir);
      keep_vocabularies(options, data_.fresh);
    }
    data_facts_.merge(vocabulary_facts(options.model_dir));
  }
  if (start == Start::kResume) resume();
  const auto machines = group.gather_text(describe_machine());
  if (group.rank() == 0) {
    record_.emplace(options,
                    RunStart{.update = state_.updates,
                             .num_parameters = nmt::count_parameters(*model_),
                             .train_pairs = data_.train.corpus.size(),
                             .pairs = data_.train.counts,
                             .machines = machines},
                    data_.valid_text, log_);
  }
  report_start();
}

// Before there is an Updater: the trials' gradients are nobody's.
std::vector<int64_t> Run::find_batch_fit() {
  const auto begin = Clock::now();
  int64_t longest = 1;
  for (const auto& [source, target] : data_.train.corpus.lengths())
    longest = std::max<int64_t>({longest, source, target});
  model_->train();
  BatchFit fit = fit_batches(model_,
                             {.workspace_bytes = options_.workspace_mib << 20,
                              .longest = longest,
                              .most_rows = data_.train.corpus.size()},
                             group_);
  for (const BatchFit::Trial& trial : fit.trials) {
    log_.info("batch fits", {{"tokens_per_sentence", trial.width},
                             {"sentences", trial.rows},
                             {"mib", static_cast<double>(trial.peak_bytes) / (1 << 20)},
                             {"workspace_mib", options_.workspace_mib}});
  }
  log_.info("batches were fitted", {{"seconds", seconds_since(begin)}});
  return std::move(fit.rows);
}

void Run::report_start() const {
  log_.info("start", {{"ranks", group_.size()},
                      {"found_by", group_.place().source},
                      {"threads_per_rank", at::get_num_threads()},
                      {"precision", nmt::to_string(options_.precision)},
                      {"parameters", nmt::count_parameters(*model_)}});
  const PairCounts& pairs = data_.train.counts;
  log_.info("data", {{"train_pairs", data_.train.corpus.size()},
                     {"dropped_empty", pairs.dropped_empty},
                     {"dropped_long", pairs.dropped_long},
                     {"cropped", pairs.cropped},
                     {"kept_whole", pairs.kept},
                     {"read", pairs.read},
                     {"valid_pairs", data_.valid.size()},
                     {"valid_dropped_empty", data_.valid_text.num_dropped_empty}});
  log_.write(data_.train.was_bad ? LogLevel::kWarn : LogLevel::kInfo, "token cache",
             {{"state", data_.train.origin},
              {"file", data_.train.file.string()},
              {"seconds", data_.seconds}});
}

train::Facts Run::model_facts() const {
  train::Facts facts = facts_of(options_.model);
  facts["precision"] = nmt::to_string(options_.precision);
  facts["update"] = std::to_string(state_.updates);
  for (const auto& [name, value] : data_facts_) {
    if (name.starts_with("vocabulary.")) facts[name] = value;
  }
  return facts;
}

train::Facts Run::facts() const {
  train::Facts facts = model_facts();
  facts.insert(data_facts_.begin(), data_facts_.end());
  facts["run_id"] = run_id();
  facts["valid_metric"] = to_string(options_.valid_metrics.front());
  RunState now = state_;
  now.seconds = seconds();
  now.early_stopping = early_stopping_.state();
  write_facts(now, facts);
  return facts;
}

// Rank 0 copies the tensors and trains on while they are written. A save that fails is said to have
// failed, and its occasion comes again: the checkpoint before is still there.
void Run::write(const std::string& folder, const train::Parts& parts, const train::Facts& facts) {
  try {
    writer_.wait();
  } catch (const std::exception& error) {
    log_.error("a checkpoint was not written", {{"why", one_line(error)}});
  }
  writer_.save(folder, parts, state_.updates, facts);
}

void Run::save() {
  if (group_.rank() != 0) return;
  write(options_.model_dir + "/last", updater_->parts(), facts());
  saved_ = Clock::now();
}

// The weights alone, smoothed if there is an average, beside those of earlier updates.
void Run::save_and_keep() {
  if (group_.rank() != 0) return;
  const train::Parts parts = updater_->parts();
  const auto average = parts.find("average");
  write(kept_folder(options_.model_dir, state_.updates),
        {{"weights", average == parts.end() ? parts.at("weights") : average->second}},
        model_facts());
  if (options_.keep_interval_updates == 0) return;
  auto kept = kept_updates(options_.model_dir);
  std::erase(kept, state_.updates);  // it may be there already
  const auto earlier = static_cast<size_t>(options_.keep_interval_updates - 1);
  while (kept.size() > earlier) {
    fs::remove_all(kept_folder(options_.model_dir, kept.front()));
    kept.erase(kept.begin());
  }
}

// Rank 0 reads; the others need not see its folder.
void Run::resume() {
  const std::string folder = options_.model_dir + "/last";
  train::Parts parts = updater_->parts();
  nlohmann::json told;
  if (group_.rank() == 0) {
    train::Facts found = train::read_manifest(folder);
    found.merge(facts_of(model_of(found)));  // what manifests of earlier versions take for granted
    train::Facts expected = facts_of(options_.model);
    expected.insert(data_facts_.begin(), data_facts_.end());
    expected["valid_metric"] = to_string(options_.valid_metrics.front());
    for (const auto& [name, value] : expected) {
      const auto there = found.find(name);
      if (there == found.end() || there->second != value) {
        throw ConfigError("--model-dir " + options_.model_dir + " holds a run with " + name + " " +
                          (there == found.end() ? "missing" : there->second) + ", now it is " +
                          value + ": name another folder, or pass --overwrite");
      }
    }
    train::load_checkpoint(folder, parts);
    told = found;
  }
  const train::Facts facts =
      nlohmann::json::parse(group_.broadcast_text(told.dump())).get<train::Facts>();
  for (auto& [part, tensors] : parts) {
    for (auto& [name, tensor] : tensors) group_.broadcast(tensor, 0);
  }
  state_ = read_state(facts);
  updater_->set_num_updates(state_.updates);
  early_stopping_ = train::EarlyStopping(stopping_options(options_), state_.early_stopping);
  log_.info("resumed", {{"epoch", state_.epoch + 1}, {"update", state_.updates}});
}

// Whether --valid-freq wants a validation after the update that was made last, and it has not been.
bool Run::is_valid_update() const {
  return options_.valid_freq_updates > 0 && state_.updates % options_.valid_freq_updates == 0 &&
         state_.token_sum > 0;
}

// Every rank comes to the same conclusion, for they hold the same state.
void Run::check_goals() {
  if (options_.after_epochs > 0 && state_.epoch >= options_.after_epochs)
    decide_to_stop("reached --after-epochs " + std::to_string(options_.after_epochs));
  if (options_.after_batches > 0 && state_.updates >= options_.after_batches)
    decide_to_stop("reached --after-batches " + std::to_string(options_.after_batches));
  if (early_stopping_.should_stop()) {
    decide_to_stop("no better " + to_string(options_.valid_metrics.front()) + " in " +
                   std::to_string(options_.early_stopping) + " validations");
  }
}

TrainingResult Run::loop() {
  start_ = saved_ = Clock::now();
  model_->train();
  if (state_.updates == 0) {
    if (options_.valid_on_start) validate();
    save();
  } else if (is_valid_update()) {
    validate();  // the run was asked to stop before it could
  }
  for (check_goals(); stop_reason_.empty(); check_goals()) {
    const int64_t done = state_.epoch + (train_epoch() ? 1 : 0);  // not one that was cut short
    const bool last =
        !stop_reason_.empty() || (options_.after_epochs > 0 && done >= options_.after_epochs);
    const bool due = options_.valid_freq_epochs > 0 && done % options_.valid_freq_epochs == 0;
    if ((due || last) && !was_asked_to_stop_ && state_.token_sum > 0) validate();
    if (done > state_.epoch) state_.trained.clear();
    state_.epoch = done;
  }
  save();
  if (group_.rank() == 0) writer_.wait();
  group_.barrier("last checkpoint", kSaveLimit);
  log_.info("end", {{"reason", stop_reason_},
                    {"epochs", state_.epoch},
                    {"updates", state_.updates},
                    {"best_bleu", state_.best.bleu},
                    {"minutes", seconds() / 60}});
  const TrainingResult result{.stop_reason = stop_reason_,
                              .was_asked_to = was_asked_to_stop_,
                              .epochs = state_.epoch,
                              .updates = state_.updates,
                              .best = state_.best};
  if (group_.rank() == 0) record_->ended(result, seconds());
  return result;
}

bool Run::train_epoch() {
  const data::BatchOptions batch_options{.mini_batch = options_.mini_batch,
                                         .mini_batch_words = options_.mini_batch_words,
                                         .fit_rows = fit_rows_,
                                         .maxi_batch = options_.maxi_batch,
                                         .optimizer_delay = options_.optimizer_delay,
                                         .seed = options_.seed,
                                         .rank = group_.rank(),
                                         .world_size = group_.size()};
  const auto plan =
      data::plan_rest(data_.train.corpus.lengths(), batch_options, state_.epoch, state_.trained);
  if (state_.trained.empty() || !data::same_plan(state_.trained.back().options, batch_options))
    state_.trained.push_back({.options = batch_options});
  auto& num_trained = state_.trained.back().num_batches;
  const int64_t delay = options_.optimizer_delay;
  int64_t step = num_trained / delay;
  const int64_t num_steps = step + std::ssize(plan.batches) / delay;
  if (state_.updates == 0) {
    log_.info("batches", {{"updates_per_epoch", num_steps},
                          {"padding_share", plan.padding_share},
                          {"dropped", plan.num_dropped}});
  }
  size_t next = 0;
  data::Prefetcher<Update> loader([&]() -> std::optional<Update> {
    if (next >= plan.batches.size()) return std::nullopt;
    Update update;
    for (int64_t i = 0; i < delay; ++i, ++next) {
      const auto& sentences = plan.batches[next];
      update.batches.push_back(make_batch(data_.train.corpus, sentences));
      update.sentences.insert(update.sentences.end(), sentences.begin(), sentences.end());
    }
    return update;
  });
  while (const auto next_update = loader.next()) {
    num_trained += std::ssize(next_update->batches);
    update(*next_update, ++step, num_steps);
    if (is_valid_update() && !was_asked_to_stop_) validate();
    if (options_.save_interval_updates > 0 && !state_.skipped_in_a_row &&
        state_.updates % options_.save_interval_updates == 0) {
      save_and_keep();
    }
    if (!stop_reason_.empty()) {
      progress_.finish();  // before anything else is said
      // One that was asked to stop ends the epoch when it goes on: with its validation.
      return step == num_steps && !was_asked_to_stop_;
    }
    if (options_.save_freq_min > 0 && seconds_since(saved_) > 60 * options_.save_freq_min &&
        !writer_.busy()) {
      save();
    }
  }
  progress_.finish();
  return true;
}

// Each rank says of itself what it knows; after too many in a row the run ends, and last/ is what
// it was before the first of them or between two.
void Run::report_skipped(const Update& update, const UpdateReport& own) {
  constexpr int64_t kMostInARow = 10;
  std::string sentences;
  if (!std::isfinite(own.nll_sum)) {
    for (const int64_t i : update.sentences) {
      if (sentences.size() > 200) break;
      sentences += (sentences.empty() ? "" : " | ") +
                   data_.tokenizers.source.decode(data_.train.corpus.source(i));
    }
  }
  progress_.clear();
  log_.warn("skipped an update: a number is not finite", {{"after_update", state_.updates},
                                                          {"own_loss", own.nll_sum},
                                                          {"gradient", own.bad_gradient},
                                                          {"sentences", sentences}});
  TORCH_CHECK(++state_.skipped_in_a_row < kMostInARow, "diverged: the loss or the gradient of ",
              own.bad_gradient, " was no finite number ", kMostInARow,
              " times in a row after update ", state_.updates,
              "; last/ holds finite parameters (a lower --learn-rate may help)");
}

void Run::update(const Update& update, int64_t step, int64_t num_steps) {
  const auto start = Clock::now();
  const int world = group_.size();
  const UpdateReport own = updater_->update(update.batches);
  state_.updates = updater_->num_updates();

  // One exchange of small numbers: the loss, who wants to stop, each rank's speed.
  enum Fact { kLoss, kTimeIsUp, kAsked, kSpeeds };
  at::Tensor facts = at::zeros({kSpeeds + world}, at::kDouble);
  double* fact = facts.data_ptr<double>();
  fact[kLoss] = own.nll_sum;
  const bool time_is_up = options_.time_limit_min > 0 && seconds() > 60 * options_.time_limit_min;
  fact[kTimeIsUp] = group_.rank() == 0 && time_is_up ? 1 : 0;
  fact[kAsked] = stop_request_.signal() != 0 ? 1 : 0;
  fact[kSpeeds + group_.rank()] = static_cast<double>(own.own_tokens) / own.compute_seconds;
  group_.all_reduce(facts);
  const auto tokens = static_cast<double>(own.num_tokens);
  const double loss = fact[kLoss] / tokens;
  const double update_seconds = seconds_since(start);
  state_.train_seconds += update_seconds;
  if (own.skipped) {
    report_skipped(update, own);
  } else {
    state_.skipped_in_a_row = 0;
    state_.loss_sum += fact[kLoss];
    state_.token_sum += own.num_tokens;
  }
  if (fact[kTimeIsUp] > 0) decide_to_stop("reached the time limit");
  check_goals();
  if (fact[kAsked] > 0 && stop_reason_.empty()) {
    decide_to_stop("asked to stop by a signal; the same command goes on");
    was_asked_to_stop_ = true;
  }
  if (group_.rank() != 0) return;
  const std::vector<double> rank_speeds(fact + kSpeeds, fact + kSpeeds + world);
  record_->trained({.epoch = state_.epoch + 1,
                    .update = state_.updates,
                    .run_seconds = seconds(),
                    .skipped = own.skipped,
                    .loss_sum = fact[kLoss],
                    .tokens = own.num_tokens,
                    .gradient_norm = own.gradient_norm,
                    .learning_rate = updater_->learning_rate(),
                    .own_seconds = update_seconds,
                    .rank_tokens_per_s = rank_speeds});
  if (options_.quiet) return;
  progress_.update({.epoch = state_.epoch + 1,
                    .step = step,
                    .num_steps = num_steps,
                    .loss = loss,
                    .learning_rate = updater_->learning_rate(),
                    .rank_tokens_per_s = rank_speeds,
                    .tokens_per_s = tokens / update_seconds});
}

void Run::validate() {
  const auto start = Clock::now();
  progress_.clear();
  // Not a number before the first update: 0 / 0.
  const double train_loss = state_.loss_sum / static_cast<double>(state_.token_sum);
  const double tokens_per_s = static_cast<double>(state_.token_sum) / state_.train_seconds;
  state_.loss_sum = 0;
  state_.token_sum = 0;
  state_.train_seconds = 0;
  const optim::AveragesInPlace smoothed(
      updater_->average());  // scored and saved as they are used later
  const Evaluation evaluation = evaluate(model_, data_.valid, data_.valid_text.target,
                                         data_.tokenizers.target, group_, options_.evaluation);
  const ValidScores scores{
      .loss = evaluation.loss, .bleu = evaluation.bleu.score, .chrf = evaluation.chrf.score};
  // Rank 0's number decides: another CPU's logarithm might differ in the last bit.
  at::Tensor decisive = at::tensor({value_of(scores, options_.valid_metrics.front())}, at::kDouble);
  group_.broadcast(decisive);
  const bool improved = early_stopping_.update(decisive.item<double>());
  if (improved) state_.best = scores;
  log_.info("valid", {{"epoch", state_.epoch + 1},
                      {"update", state_.updates},
                      {"train_loss", train_loss},
                      {"valid_loss", scores.loss},
                      {"valid_bleu", scores.bleu},
                      {"valid_chrf", scores.chrf},
                      {"best_bleu", state_.best.bleu},
                      {"tgt_tokens_per_s", tokens_per_s}});
  if (group_.rank() == 0) {
    if (improved) {
      train::Facts facts = model_facts();
      facts["valid_loss"] = std::to_string(scores.loss);
      facts["valid_bleu"] = std::to_string(scores.bleu);
      facts["valid_chrf"] = std::to_string(scores.chrf);
      write(options_.model_dir + "/best", {{"weights", train::state_of(*model_)}}, facts);
    }
    record_->validated({.epoch = state_.epoch + 1,
                        .update = state_.updates,
                        .seconds = seconds(),
                        .train_loss = train_loss,
                        .scores = scores,
                        .best = improved,
                        .learning_rate = updater_->learning_rate(),
                        .tgt_tokens_per_s = tokens_per_s,
                        .own_seconds = seconds_since(start)},
                       evaluation.translations);
  }
  group_.barrier("validation");
}

}  // namespace

TrainingResult train(const TrainingOptions& options, comm::ProcessGroup& group) {
  // Bad text is found before anything is written.
  auto valid_text = text::read_parallel_text(options.valid_sets);
  const auto decide = [&] {
    return prepare_folder(options) == Start::kResume ? "resume" : "fresh";
  };
  const std::string decision = group.broadcast_text(group.rank() == 0 ? decide() : "");
  const Start start = decision == "resume" ? Start::kResume : Start::kFresh;
  RunData data = prepare_data(options, std::move(valid_text), start, group);
  return Run(options, start, std::move(data), group).loop();
}

}  // namespace cohort::translate
