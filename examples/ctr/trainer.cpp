// SPDX-License-Identifier: Apache-2.0
#include "examples/ctr/trainer.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <sys/resource.h>
#include <sys/stat.h>
#include <torch/nn/functional/loss.h>
#include <torch/types.h>
#include <torch/utils.h>
#include <unistd.h>
#include <utility>

#include "cohort/base/atomic_file.h"
#include "cohort/base/env.h"
#include "cohort/base/error.h"
#include "cohort/cli/counted.h"
#include "cohort/cli/security_flags.h"
#include "cohort/ps/endpoints.h"
#include "cohort/ps/module/host_ranks.h"
#include "cohort/ps/role.h"

#include "examples/ctr/click_generator.h"
#include "examples/ctr/interruption.h"

namespace ctr {
namespace {

using cohort::ConfigError;
using cohort::cli::counted;
using cohort::ps::Training;
using Clock = std::chrono::steady_clock;
namespace fs = std::filesystem;

double cpu_seconds() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

Training training_of(const Options& options) {
  if (!options.mode.empty()) return cohort::ps::training_named(options.mode);
  return cohort::ps::role_from_environment() ? Training::kSync : Training::kLocal;
}

bool names_files(const Options& options) {
  return !options.train.empty() || !options.test.empty();
}

std::vector<std::string> files_or(const std::vector<std::string>& files, const Options& options,
                                  const std::string& name) {
  if (!files.empty()) return files;
  // Training on files of one's own with the made-up test set would be no test.
  if (names_files(options)) return {};
  return {options.data + "/" + name};
}

std::string joined(const std::vector<std::string>& files) {
  std::string text;
  for (const std::string& file : files) text += (text.empty() ? "" : " ") + file;
  return text;
}

// Each trainer reads its share of the lines, by their numbers. Contents would take as long to compare as an epoch.
void check_same_sizes(const std::string& flag, const std::vector<std::string>& files,
                      const cohort::comm::ProcessGroup& group) {
  std::string sizes;
  for (const std::string& file : files) sizes += std::to_string(fs::file_size(file)) + " ";
  const auto all = group.all_gather_object(sizes);
  for (size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank] != all[0])
      throw ConfigError(flag + ": expected the same files on all trainers, trainers 0 and " +
                        std::to_string(rank) + " have files of different sizes");
  }
}

// Refuses files that cannot be read, are empty or do not begin with an example at the start, not
// after an hour's epoch.
void check_files(const std::string& flag, const std::vector<std::string>& files,
                 bool skip_damaged) {
  bool all_empty = !files.empty();
  Batch first_lines;
  for (const std::string& file : files) {
    ExampleReader reader({.files = {file}});
    if (!skip_damaged) reader.next(first_lines);
    all_empty = all_empty && std::filesystem::file_size(file) == 0;
  }
  if (all_empty)
    throw ConfigError(flag + " " + joined(files) + ": expected examples, got an empty file");
}

// Takes away again, when it goes, what was made of the way to `folder` since it came.
class FoldersOnTrial {
 public:
  explicit FoldersOnTrial(fs::path folder) {
    std::error_code ignored;
    for (; !folder.empty() && !fs::exists(folder, ignored); folder = folder.parent_path())
      absent_.push_back(folder);
  }
  ~FoldersOnTrial() {
    std::error_code ignored;
    for (const fs::path& folder : absent_) fs::remove(folder, ignored);
  }
  FoldersOnTrial(const FoldersOnTrial&) = delete;
  FoldersOnTrial& operator=(const FoldersOnTrial&) = delete;

 private:
  std::vector<fs::path> absent_;  // The innermost first.
};

// A folder that takes no checkpoint is named now, not after an epoch. None is left: there may never
// be a checkpoint.
void check_writable(const std::string& folder) {
  const FoldersOnTrial trial(folder);
  try {
    cohort::make_writable_folder(folder);
  } catch (const ConfigError& error) {
    throw ConfigError("--save " + cohort::one_line(error));
  }
}

bool is_standard_output(const std::string& path) {
  struct stat of_path {};
  struct stat of_output {};
  return ::stat(path.c_str(), &of_path) == 0 && ::fstat(STDOUT_FILENO, &of_output) == 0 &&
         of_path.st_dev == of_output.st_dev && of_path.st_ino == of_output.st_ino;
}

void refuse_same_file(const std::string& input, const std::string& output) {
  std::error_code ignored;  // One of them is not there.
  if (!fs::equivalent(input, output, ignored)) return;
  throw ConfigError("--output " + output + ": expected another file than --input's");
}

// Whether the processes that write checkpoints certainly run on this host.
bool saves_here(Training training) {
  if (training == Training::kLocal) return true;
  const auto role = cohort::ps::role_from_environment();
  return role &&
         std::all_of(role->servers.begin(), role->servers.end(), [](const std::string& server) {
           return cohort::ps::unix_path(server) || cohort::ps::is_loopback(server);
         });
}

// The job that a launcher starts trainers of, and starts them again.
std::string job_id() {
  return cohort::env_string("COHORT_JOB_ID").value_or("");
}

// Beside a checkpoint: which one it is, whose, and after which epoch.
std::string epoch_file(const std::string& folder) {
  return folder + "/epoch.json";
}

std::string read_file(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

DeepFm seeded_network(const Options& options) {
  torch::manual_seed(options.seed);
  return DeepFm(
      DeepFmOptions{.product_dtype = options.precision == "bfloat16" ? at::kBFloat16 : at::kFloat});
}

int64_t epoch_of(int64_t step, int64_t num_steps) {
  return (step - 1) / num_steps + 1;
}

}  // namespace

Trainer::Trainer(const Options& options, const cohort::comm::ProcessGroup& group)
    : options_(options),
      group_(group),
      training_(training_of(options)),
      session_options_(session_options()),
      share_(share_of(session_options_)),
      session_(session_options_),
      rows_(session_.embedding(
          with_limits({.name = "categories",
                       .width = DeepFmOptions().width,
                       .seed = options.seed,
                       .rule = {.rule = cohort::ps::Rule::kRowwiseAdagrad,
                                .learning_rate = static_cast<float>(options.row_learning_rate)},
                       .wire_dtype = cohort::ps::wire_dtype_named(options.wire_dtype)},
                      options.table),
          {.device = group.device()})),
      network_(seeded_network(options)) {
  train_files_ = files_or(options.train, options, "train.tsv");
  test_files_ = files_or(options.test, options, "test.tsv");
  network_->to(group_.device());
  session_.add("net", *network_);
}

// Trainer 0 alone sends servers back to a checkpoint, before the others join.
void Trainer::start() {
  if (std::exchange(is_started_, true)) return;
  const bool goes_first = session_options_.client.restore && group_.size() > 1;
  if (!goes_first || group_.rank() == 0) session_.start();
  if (!goes_first) return;
  group_.barrier("ctr servers begin");
  if (group_.rank() > 0) session_.start();
}

// Servers know how far trainers of sync and async have come. What the others push are no steps:
// once they are started again they go back to the epoch that was saved last, or to the beginning.
void Trainer::go_back(cohort::ps::SessionOptions& session) {
  const bool counts = training_ == Training::kSync || training_ == Training::kAsync;
  // A round that another node's coming or going began is no restart.
  const bool again = cohort::env_int("COHORT_RESTART_COUNT").value_or(0) > 0 ||
                     cohort::env_int("COHORT_ROUND").value_or(1) > 1;
  if (counts || !again) return;
  std::string checkpoint;
  try {
    const auto saved = nlohmann::json::parse(read_file(epoch_file(options_.save)));
    if (!job_id().empty() && saved.at("job") == job_id()) {
      // A trainer may have ended between its checkpoint and this file, which then is of the epoch before.
      const auto which = saved.find("save");
      const bool is_newer =
          which != saved.end() && *which != read_file(options_.save + "/checkpoint");
      epochs_before_ = saved.at("epoch").get<int64_t>() + (is_newer ? 1 : 0);
      checkpoint = options_.save;
    }
  } catch (const nlohmann::json::exception&) {
    // There is none, or it is another job's: from the beginning.
  }
  if (training_ == Training::kLocal) {
    if (!checkpoint.empty()) session.load = checkpoint;
  } else {
    session.client.restore = checkpoint;
  }
}

cohort::ps::SessionOptions Trainer::session_options() {
  if (options_.max_staleness >= 0 && training_ != Training::kAsync) {
    throw ConfigError("--max-staleness " + std::to_string(options_.max_staleness) +
                      ": expected with --mode async alone");
  }
  if (options_.max_merge && training_ != Training::kHalfAsync) {
    throw ConfigError("--max-merge " + std::to_string(*options_.max_merge) +
                      ": expected with --mode half-async alone");
  }
  if (options_.geo_steps && training_ != Training::kGeo) {
    throw ConfigError("--geo-steps " + std::to_string(*options_.geo_steps) +
                      ": expected with --mode geo alone");
  }
  cohort::ps::SessionOptions session;
  if (training_ == Training::kLocal) {
    cohort::cli::refuse_security(options_.security, "another --mode than local");
    if (options_.table.at_cap == "spill")
      throw ConfigError("--at-cap spill: expected servers, which have a folder for rows on disk");
    if (group_.size() > 1) {
      throw ConfigError("--mode local: expected one process, got " + std::to_string(group_.size()) +
                        ": several train through servers, cohort run --servers N --trainers M");
    }
    session.load = options_.load;
  } else {
    if (!options_.load.empty()) {
      throw ConfigError(
          "--load: with servers, the servers load it: cohort run --server-arg=--load=" +
          options_.load);
    }
    if (group_.size() > 1) {
      session =
          cohort::ps::trainer_info_from_environment(group_, training_, options_.security).session;
    } else {
      if (training_ == Training::kHalfAsync || training_ == Training::kGeo) {
        if (cohort::ps::role_from_environment() &&
            cohort::ps::role_from_environment()->trainers > 1)
          throw ConfigError("--mode " + options_.mode +
                            ": expected sync or async where trainers start again, or are lost, one "
                            "by one: servers do not know how far it has come");
      }
      session = cohort::ps::with_environment({.training = training_});
      session.client.security = options_.security;
    }
  }
  session.training = training_;
  session.dense_rule.learning_rate = static_cast<float>(options_.learning_rate);
  session.dense_wire_dtype = cohort::ps::wire_dtype_named(options_.wire_dtype);
  session.max_staleness = options_.max_staleness;
  session.batch_size = options_.batch_size;
  session.error_if_nonfinite = options_.error_if_nonfinite;
  session.max_merge = options_.max_merge.value_or(session.max_merge);
  session.geo_steps = options_.geo_steps.value_or(session.geo_steps);
  go_back(session);
  return session;
}

Trainer::Share Trainer::share_of(const cohort::ps::SessionOptions& session) {
  return {.number = session.trainer, .count = session.trainers};
}

bool Trainer::is_ungrouped() const {
  return group_.size() == 1 && share_.count > 1;
}

// Whether this trainer does what is done once: rank 0, or the first that the servers know.
bool Trainer::is_first() {
  if (!is_ungrouped()) return group_.rank() == 0;
  const auto status = nlohmann::json::parse(session_.client().status().front());
  for (const auto& trainer : status.at("trainers")) {
    if (trainer.at("trainer") < share_.number && trainer.at("member")) return false;
  }
  return true;
}

ReaderOptions Trainer::reader_options(const std::vector<std::string>& files,
                                      const Share& share) const {
  return {.files = files,
          .share = share.number,
          .shares = share.count,
          .batch_size = options_.batch_size,
          .skip_damaged = options_.skip_damaged};
}

// Shares differ by a few lines. All trainers take as many steps, or some would wait for a step that
// never comes.
int64_t Trainer::agreed_steps() const {
  const int64_t most = options_.max_steps > 0 ? options_.max_steps : INT64_MAX;
  const auto steps_of = [&](const Share& share) {
    return count_lines(reader_options(train_files_, share)) / options_.batch_size;
  };
  if (is_ungrouped()) {
    int64_t least = most;
    for (int number = 0; number < share_.count; ++number)
      least = std::min(least, steps_of({number, share_.count}));
    return least;
  }
  if (group_.size() == 1 && session_.steps_before() == 0) return most;
  if (group_.size() == 1) {  // Its last batch may be smaller, and malformed lines make none.
    ExampleReader reader(reader_options(train_files_, share_));
    Batch batch;
    int64_t steps = 0;
    while (steps < most && reader.next(batch)) ++steps;
    return steps;
  }
  at::Tensor steps = at::full({1}, steps_of(share_), at::kLong);
  group_.all_reduce(steps, cohort::comm::ReduceOp::kMin);
  return std::min(most, steps.item<int64_t>());
}

// The epoch in which the trainers resume: the last one whose end is not reached. A trainer that was
// killed before it reached the common end of an epoch is one behind, and resumes with the others.
int64_t Trainer::first_epoch(int64_t num_steps) const {
  const int64_t before = session_.steps_before();
  const int64_t epoch =
      before == 0 || num_steps == 0 ? epochs_before_ + 1 : epoch_of(before, num_steps);
  if (group_.size() == 1) return epoch;
  at::Tensor latest = at::full({1}, epoch, at::kLong);
  group_.all_reduce(latest, cohort::comm::ReduceOp::kMax);
  return latest.item<int64_t>();
}

// Servers may have more steps of an earlier run than this one makes. All trainers refuse, or none:
// in async each counts its own steps, and one without a group learns of the others' from servers.
void Trainer::check_steps_before(int64_t num_steps) {
  if (num_steps == 0) return;
  int64_t before = session_.steps_before();
  if (is_ungrouped() && training_ == Training::kAsync) {
    std::map<int, int64_t> pushed;  // by trainer: what all servers have
    for (const std::string& status : session_.client().status()) {
      const auto server = nlohmann::json::parse(status);
      for (const auto& trainer : server.at("trainers")) {
        const auto last = trainer.at("last_push").get<int64_t>();
        const auto [entry, is_new] = pushed.try_emplace(trainer.at("trainer").get<int>(), last);
        if (!is_new) entry->second = std::min(entry->second, last);
      }
    }
    for (const auto& [trainer, last] : pushed) before = std::max(before, last);
  }
  if (group_.size() > 1) {
    at::Tensor most = at::full({1}, before, at::kLong);
    group_.all_reduce(most, cohort::comm::ReduceOp::kMax);
    before = most.item<int64_t>();
  }
  const int64_t epochs = before == 0 ? 0 : epoch_of(before, num_steps);
  if (epochs <= options_.epochs) return;
  throw ConfigError("--epochs " + std::to_string(options_.epochs) + ": expected " +
                    std::to_string(epochs) + " or more: the servers' trainers have come to step " +
                    std::to_string(before) + ", and this run, of " + counted(num_steps, "step") +
                    " in an epoch, ends at step " + std::to_string(options_.epochs * num_steps) +
                    "; to train from the beginning, start the servers with other folders; to score "
                    "a checkpoint, run ctr evaluate");
}

std::optional<Trainer::Tensors> Trainer::next_tensors(ExampleReader& reader, Batch& batch) const {
  if (!reader.next(batch)) return std::nullopt;
  Tensors tensors;
  const at::Device device = group_.device();
  const auto host = at::TensorOptions(at::kFloat).pinned_memory(!device.is_cpu());
  tensors.labels_B = at::empty({batch.size}, host);
  tensors.numbers_BN = at::zeros({batch.size, kNumbersWidth}, host);
  tensors.ids_BS = at::empty({batch.size, kCategories}, at::kLong);
  std::copy(batch.labels.begin(), batch.labels.end(), tensors.labels_B.mutable_data_ptr<float>());
  std::copy(batch.ids.begin(), batch.ids.end(), tensors.ids_BS.mutable_data_ptr<int64_t>());
  float* numbers = tensors.numbers_BN.mutable_data_ptr<float>();
  for (int64_t i = 0; i < batch.size; ++i) {
    std::copy_n(&batch.numbers[static_cast<size_t>(i * kNumbers)], kNumbers,
                numbers + i * kNumbersWidth);
  }
  for (at::Tensor* tensor : {&tensors.labels_B, &tensors.numbers_BN})
    *tensor = tensor->to(device, at::kFloat, /*non_blocking=*/!device.is_cpu());
  return tensors;
}

at::Tensor Trainer::logits_of(const Tensors& tensors) {
  return network_->forward(tensors.numbers_BN, rows_->forward(tensors.ids_BS));
}

// Returns the sum of the examples' losses.
double Trainer::learn(const Tensors& tensors) {
  const auto forward = [&] {
    const cohort::ProfileScope scope("forward");
    return at::binary_cross_entropy_with_logits(logits_of(tensors), tensors.labels_B);
  };
  const at::Tensor loss = forward();
  {
    const cohort::ProfileScope scope("backward");
    loss.backward();
  }
  const cohort::ProfileScope scope("push");
  session_.push();
  return loss.item<double>() * static_cast<double>(tensors.labels_B.size(0));
}

// Resumes behind the first `done` steps.
EpochReport Trainer::train_epoch(int64_t epoch, int64_t done, int64_t num_steps) {
  rows_->train();
  network_->train();
  // Rows may travel while the batch before is computed on, where steps need not see each other.
  const bool overlaps = training_ == Training::kAsync || training_ == Training::kHalfAsync;
  EpochReport report;
  const auto begin = Clock::now();
  const double cpu_begin = cpu_seconds();
  const auto finish = [&](const ExampleReader& reader) {
    report.damaged = reader.counts().damaged;
    report.seconds = std::chrono::duration<double>(Clock::now() - begin).count();
    report.cpu_us = 1e6 * (cpu_seconds() - cpu_begin);
  };
  ExampleReader reader(reader_options(train_files_, share_));
  Batch batch;
  for (; report.steps < done; ++report.steps) reader.next(batch);
  auto now = report.steps < num_steps ? next_tensors(reader, batch) : std::nullopt;
  if (now) {
    rows_->prefetch(now->ids_BS);
    session_.pull();
  }
  for (; now && report.steps < num_steps; ++report.steps) {
    auto next = report.steps + 1 < num_steps ? next_tensors(reader, batch) : std::nullopt;
    const auto ask = [&] {
      rows_->prefetch(next->ids_BS);
      session_.start_pull();
    };
    profiler_.step();
    if (next && overlaps) ask();
    report.loss += learn(*now);
    report.examples += now->labels_B.size(0);
    if (next && !overlaps) ask();
    if (next) session_.pull();
    now = std::move(next);
    if ((report.steps + 1) % options_.print_freq != 0) continue;
    finish(reader);
    const auto examples = static_cast<double>(report.examples);
    console_.print(
        "epoch %lld step %lld: log-loss %.4f, %.0f examples/s of this trainer, %.1f us CPU an "
        "example\n",
        static_cast<long long>(epoch), static_cast<long long>(report.steps + 1),
        report.loss / examples, examples / report.seconds, report.cpu_us / examples);
  }
  // A share from which damaged lines were left out ends early: others count on its steps.
  for (; share_.count > 1 && report.steps < num_steps; ++report.steps) {
    session_.push();
    session_.pull();
  }
  finish(reader);
  return report;
}

// Made up once, by rank 0, where no files are named and the folder has no data, or parts of data
// whose making was interrupted. A folder that was named without --rows may be misspelt.
void Trainer::ensure_data() {
  const bool absent =
      !names_files(options_) && !std::filesystem::exists(options_.data + "/train.tsv");
  if (absent && !options_.makes_data) {
    throw ConfigError("--data " + options_.data +
                      ": expected train.tsv there, or --rows N to make up so many examples");
  }
  if (share_.number == 0 && absent) {
    console_.print("making up %lld examples in %s\n", static_cast<long long>(options_.rows),
                   options_.data.c_str());
    generate_clicks(
        {.rows = options_.rows, .seed = options_.seed, .overwrite = is_unfinished(options_.data)},
        options_.data);
  }
  if (group_.size() > 1) group_.barrier("ctr data");
}

// Servers elsewhere save where they are, which cannot be tried from here.
void Trainer::check_output() const {
  if (!options_.save.empty() && share_.number == 0 && saves_here(training_))
    check_writable(options_.save);
}

void Trainer::check_input() const {
  if (train_files_.empty()) throw ConfigError("--train: expected files to train on, got none");
  check_files("--train", train_files_, options_.skip_damaged);
  check_files("--test", test_files_, options_.skip_damaged);
  check_same_sizes("--train", train_files_, group_);
  check_same_sizes("--test", test_files_, group_);
}

// `sums` are over the trainers of the group. All trainers refuse, or none: one without a group,
// whose share has malformed lines alone, looks for examples that the others learn from.
void Trainer::check_learned(EpochReport sums) const {
  if (sums.examples > 0) return;
  if (is_ungrouped() && sums.damaged > 0) {
    ExampleReader all({.files = train_files_, .batch_size = 1, .skip_damaged = true});
    Batch first;
    if (all.next(first)) return;
    sums.damaged = all.counts().damaged;
  }
  std::string text = "--train " + joined(train_files_) + ": expected examples, got ";
  if (sums.damaged > 0) {
    text += std::to_string(sums.damaged) + " malformed lines alone";
  } else if (share_.count > 1) {
    text += "fewer lines than one --batch " + std::to_string(options_.batch_size) +
            " for each of " + std::to_string(share_.count) + " trainers";
  } else {
    text += "none";
  }
  throw ConfigError(text);
}

void Trainer::train() {
  check_output();
  ensure_data();
  start();  // Trainers that do not meet come behind the first one, which has made the data.
  check_input();
  const int64_t num_steps = agreed_steps();
  check_steps_before(num_steps);
  const int64_t first = first_epoch(num_steps);
  for (int64_t epoch = first; epoch <= options_.epochs; ++epoch) {
    int64_t done = 0;
    if (epoch == first && session_.steps_before() > 0)
      done = std::max<int64_t>(0, session_.steps_before() - (epoch - 1) * num_steps);
    if (done > 0)
      console_.print(done < num_steps ? "epoch %lld resumes after step %lld\n"
                                      : "epoch %lld is complete after step %lld\n",
                     static_cast<long long>(epoch), static_cast<long long>(done));
    const EpochReport report = train_epoch(epoch, done, num_steps);
    tell_damaged(report.damaged, "");
    std::array<double, 4> sums{static_cast<double>(report.examples),
                               static_cast<double>(report.damaged), report.cpu_us, report.loss};
    at::Tensor total = at::tensor(at::ArrayRef<double>(sums));
    group_.all_reduce(total);
    const double examples = total[0].item<double>();
    if (done == 0)
      check_learned({.examples = total[0].item<int64_t>(), .damaged = total[1].item<int64_t>()});
    if (examples > 0)
      console_.print(
          "epoch %lld: %.0f examples, log-loss %.4f while learning, %.0f examples/s of %s, %.1f us "
          "CPU an example in trainers\n",
          static_cast<long long>(epoch), examples, total[3].item<double>() / examples,
          examples / report.seconds, is_ungrouped() ? "this trainer" : "all trainers",
          total[2].item<double>() / examples);
    wait_for_updates();
    const bool first_here = is_first();
    // First what was learnt: the test files may have a line that ends the run.
    if (!options_.save.empty() && first_here) save(epoch);
    if (!test_files_.empty() && (!is_ungrouped() || first_here)) print_evaluation();
    if (group_.size() > 1) group_.barrier("ctr epoch");
  }
}

void Trainer::save(int64_t epoch) {
  session_.save(options_.save);
  if (job_id().empty() || !saves_here(training_)) return;
  const nlohmann::json saved{
      {"job", job_id()}, {"epoch", epoch}, {"save", read_file(options_.save + "/checkpoint")}};
  cohort::write_atomically(epoch_file(options_.save), saved.dump() + "\n");
}

void Trainer::tell_damaged(int64_t lines, const char* where) const {
  if (lines > 0)
    console_.force_print("left out %s%s\n", counted(lines, "malformed line").c_str(), where);
}

// Waits until the servers have what all trainers pushed.
void Trainer::wait_for_updates() {
  session_.flush();
  if (group_.size() > 1) group_.barrier("ctr updates");
}

std::optional<Metrics> Trainer::evaluate() {
  if (test_files_.empty()) throw ConfigError("--test: expected files to evaluate on, got none");
  start();
  wait_for_updates();
  session_.pull();
  rows_->eval();
  network_->eval();
  const at::NoGradGuard no_gradients;
  ExampleReader reader(reader_options(test_files_, {group_.rank(), group_.size()}));
  ScoreSet scores;
  Batch batch;
  while (const auto tensors = next_tensors(reader, batch)) {
    const at::Tensor logits_B = logits_of(*tensors).cpu().contiguous();
    scores.add({logits_B.const_data_ptr<float>(), static_cast<size_t>(logits_B.numel())},
               batch.labels);
  }
  tell_damaged(reader.counts().damaged, " of the test");
  if (group_.all_reduce_sum(reader.counts().examples) == 0) {
    const bool damaged = group_.all_reduce_sum(reader.counts().damaged) > 0;
    throw ConfigError("--test " + joined(test_files_) + ": expected examples, got " +
                      (damaged ? "malformed lines alone" : "none"));
  }
  if (group_.size() == 1) return scores.metrics();
  ScoreSet all;
  for (const std::string& bytes : group_.gather_object(scores.to_bytes())) {
    all.merge(ScoreSet::from_bytes(bytes));
  }
  if (group_.rank() != 0) return std::nullopt;
  return all.metrics();
}

void Trainer::print_evaluation() {
  const auto evaluated = evaluate();
  if (!evaluated) return;
  const Metrics& metrics = *evaluated;
  const double attainable = options_.test.empty() ? attainable_auc(options_.data) : -1;
  char suffix[32] = "";
  if (attainable >= 0 && !std::isnan(metrics.auc))
    std::snprintf(suffix, sizeof(suffix), " of %.5f attainable", attainable);
  console_.print(
      "test: AUC %s%s, log-loss %.5f, mean prediction %.4f for %.4f clicks, %lld examples\n",
      auc_text(metrics).c_str(), suffix, metrics.log_loss, metrics.mean_prediction,
      static_cast<double>(metrics.clicks) / static_cast<double>(metrics.count),
      static_cast<long long>(metrics.count));
}

void Trainer::predict(const std::string& input, const std::string& output) {
  if (group_.size() > 1) {
    throw ConfigError("predict: expected one process, got " + std::to_string(group_.size()));
  }
  refuse_same_file(input, output);
  start();
  rows_->eval();
  network_->eval();
  const at::NoGradGuard no_gradients;
  const cohort::StopRequest stop;
  ExampleReader reader(
      {.files = {input}, .batch_size = options_.batch_size, .labels = labels_of(input)});
  cohort::write_atomically(output, [&](cohort::FileWriter& file) {
    Batch batch;
    while (const auto tensors = next_tensors(reader, batch)) {
      check_interruption(stop);
      const at::Tensor probabilities_B = at::sigmoid(logits_of(*tensors)).cpu().contiguous();
      std::string text;
      for (int64_t i = 0; i < batch.size; ++i) {
        char line[32];
        std::snprintf(line, sizeof(line), "%.6f\n",
                      static_cast<double>(probabilities_B.const_data_ptr<float>()[i]));
        text += line;
      }
      file.write(std::string_view(text));
    }
  });
  std::fprintf(is_standard_output(output) ? stderr : stdout, "%s in %s\n",
               counted(reader.counts().examples, "prediction").c_str(), output.c_str());
}

void Trainer::finish() {
  session_.finish();
  profiler_.finish();
}

}  // namespace ctr
