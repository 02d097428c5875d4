// SPDX-License-Identifier: Apache-2.0
#include "cohort/translate/run_record.h"

#include <ATen/Parallel.h>
#include <algorithm>
#include <array>
#include <cmath>
#include <ctime>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <torch/version.h>

#include "cohort/base/atomic_file.h"
#include "cohort/base/error.h"
#include "cohort/base/machine.h"
#include "cohort/translate/gpu_watch.h"
#include "cohort/translate/report.h"
#include "cohort/translate/run_folder.h"

namespace cohort::translate {
namespace {

// As JSON: null for what is not given.
struct ToJson {
  using Json = nlohmann::ordered_json;
  template <class T>
  Json operator()(const T* value) const {
    return *value;
  }
  Json operator()(const std::optional<double>* value) const {
    return *value ? Json(**value) : Json();
  }
  Json operator()(const std::vector<std::filesystem::path>* paths) const {
    return std::vector<std::string>(paths->begin(), paths->end());
  }
  Json operator()(const TextValue& value) const { return value.get(); }
};

void write_config(const TrainingOptions& options, const RunStart& start) {
  nlohmann::ordered_json config = {{"world_size", start.machines.size()}};
  TrainingOptions values = options;  // The tables are for flags: they may write.
  for (const auto& group : {data_options(values), optimization_options(values),
                            validation_options(values), output_options(values)}) {
    for (const Option& option : group) {
      nlohmann::ordered_json value = std::visit(ToJson(), option.value);
      const bool is_word =
          std::holds_alternative<TextValue>(option.value) && option.rule.max_values == 1;
      config[record_name(option)] = is_word ? value.front() : value;
    }
  }
  for (const auto& [name, value] : metadata_of(options.model)) config[name] = value;
  visit_counts(start.pairs,
               [&](const char* name, int64_t count) { config["train_pairs"][name] = count; });
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

constexpr size_t kNumSamples = 5;
constexpr std::chrono::seconds kReportInterval{2};

std::string utc_now() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  ::gmtime_r(&now, &parts);
  std::array<char, 32> text{};
  std::strftime(text.data(), text.size(), "%Y-%m-%dT%H:%M:%SZ", &parts);
  return text.data();
}

std::string joined(const std::vector<std::string>& words) {
  std::string all;
  for (const auto& word : words) all += (all.empty() ? "" : " ") + word;
  return all;
}

double gib(double bytes) {
  return bytes / (1 << 30);
}

}  // namespace

std::string describe_machine() {
  const Machine machine = this_machine();
  auto gpus = nlohmann::json::array();
  for (const GpuUse& gpu : machine.gpus)
    gpus.push_back({{"name", gpu.name}, {"memory_gib", gib(gpu.memory_bytes)}});
  return nlohmann::json{{"host", machine.host},
                        {"cpu", machine.cpu},
                        {"cores", machine.cores},
                        {"threads", at::get_num_threads()},
                        {"memory_gib", gib(static_cast<double>(machine.memory_bytes))},
                        {"instructions", joined(machine.instructions)},
                        {"gpus", gpus}}
      .dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
}

RunRecord::RunRecord(const TrainingOptions& options, const RunStart& start,
                     const text::ParallelText& valid_text, const Log& log)
    : options_(options),
      valid_text_(valid_text),
      log_(log),
      history_(options.model_dir + "/history.jsonl", start.update,
               start.is_validated ? std::nullopt : std::optional<std::string>("valid")),
      events_(options.model_dir + "/tensorboard", start.update + 1) {
  write_config(options, start);
  write_start(start);
}

void RunRecord::attempt(const std::string& file, const std::function<void()>& write) {
  try {
    write();
    failing_.erase(file);
  } catch (const std::exception& error) {
    if (failing_.insert(file).second) {
      log_.error("a file of the record was not written; training continues",
                 {{"file", file}, {"why", one_line(error)}});
    }
  }
}

// Evenly spread over the validation text, and the same ones every time.
std::vector<std::string> RunRecord::samples_of(const std::vector<std::string>& lines) const {
  std::vector<std::string> samples;
  const size_t count = std::min(kNumSamples, lines.size());
  for (size_t i = 0; i < count; ++i) samples.push_back(lines[i * lines.size() / count]);
  return samples;
}

void RunRecord::write_start(const RunStart& start) {
  std::vector<double> cores, threads, memory, gpu_memory;
  std::vector<std::string> hosts, cpus, instructions, gpus, gpu_hosts;
  for (const std::string& text : start.machines) {
    const auto machine = nlohmann::json::parse(text);
    const std::string host = machine.at("host");
    if (std::ranges::find(hosts, host) == hosts.end()) {  // Its ranks all see the same GPUs.
      gpus_of_hosts_.emplace_back(hosts.size(), machine.at("gpus").size());
      for (const auto& gpu : machine.at("gpus")) {
        const auto& total = gpu.at("memory_gib");  // null: the driver does not say
        gpu_hosts.push_back(host);
        gpus.push_back(gpu.at("name"));
        gpu_memory.push_back(total.is_number() ? total.get<double>() : std::nan(""));
      }
    }
    hosts.push_back(host);
    cpus.push_back(machine.at("cpu"));
    cores.push_back(machine.at("cores"));
    threads.push_back(machine.at("threads"));
    memory.push_back(machine.at("memory_gib"));
    instructions.push_back(machine.at("instructions"));
  }
  history_.append({{"type", "start"},
                   {"update", start.update},
                   {"time", utc_now()},
                   {"ranks", start.machines.size()},
                   {"precision", nmt::to_string(*options_.precision)},
                   {"parameters", start.num_parameters},
                   {"libtorch", TORCH_VERSION},
                   {"train_pairs", start.train_pairs},
                   {"pairs_read", start.pairs.read},
                   {"pairs_kept", start.pairs.kept},
                   {"pairs_cropped", start.pairs.cropped},
                   {"pairs_dropped_long", start.pairs.dropped_long},
                   {"pairs_dropped_empty", start.pairs.dropped_empty},
                   {"valid_pairs", valid_text_.source.size()},
                   {"hosts", hosts},
                   {"cpus", cpus},
                   {"cores", cores},
                   {"threads", threads},
                   {"memory_gib", memory},
                   {"instructions", instructions},
                   {"gpus", gpus},
                   {"gpu_hosts", gpu_hosts},
                   {"gpu_total_gib", gpu_memory},
                   {"sample_sources", samples_of(valid_text_.source)},
                   {"sample_references", samples_of(valid_text_.target)}});
}

void RunRecord::trained(const TrainedUpdate& update) {
  window_.last = update;
  window_.seconds += update.own_seconds;
  if (update.skipped) {
    ++window_.num_skipped;
  } else {
    ++window_.num_updates;
    window_.loss_sum += update.loss_sum;
    window_.tokens += update.tokens;
    window_.gradient_norm += update.gradient_norm;
  }
  window_.rank_tokens_per_s.resize(update.rank_tokens_per_s.size());
  for (size_t rank = 0; rank < update.rank_tokens_per_s.size(); ++rank)
    window_.rank_tokens_per_s[rank] += update.rank_tokens_per_s[rank];
  const bool due =
      options_.disp_freq_updates > 0
          ? !update.skipped && update.update % options_.disp_freq_updates == 0
          : Clock::now() - line_time_ >= std::chrono::duration<double>(options_.disp_freq_s);
  if (due) write_train_line();
}

void RunRecord::trained_elsewhere(double loss_sum, int64_t tokens, double seconds) {
  window_.loss_sum += loss_sum;
  window_.tokens += tokens;
  window_.seconds += seconds;
}

void RunRecord::write_train_line() {
  line_time_ = Clock::now();
  if (window_.num_updates + window_.num_skipped == 0) return;
  Window window;
  std::swap(window, window_);
  const auto updates = static_cast<double>(window.num_updates);
  const auto tokens = static_cast<double>(window.tokens);
  for (double& speed : window.rank_tokens_per_s)
    speed /= updates + static_cast<double>(window.num_skipped);
  const double loss = window.loss_sum / tokens;  // Not a number if all were skipped: 0 / 0.
  const double norm = window.gradient_norm / updates;
  const double speed = tokens / window.seconds;
  std::vector<train::History::Field> line = {{"type", "train"},
                                             {"epoch", window.last.epoch},
                                             {"update", window.last.update},
                                             {"wall_s", window.last.run_seconds},
                                             {"updates", window.num_updates},
                                             {"skipped", window.num_skipped},
                                             {"loss", loss},
                                             {"gradient_norm", norm},
                                             {"learning_rate", window.last.learning_rate},
                                             {"tgt_tokens_per_s", speed},
                                             {"rank_tokens_per_s", window.rank_tokens_per_s}};
  train::EventFile::Scalars scalars = {{"train/loss", loss},
                                       {"train/gradient_norm", norm},
                                       {"train/learning_rate", window.last.learning_rate},
                                       {"speed/tgt_tokens_per_s", speed}};
  for (size_t rank = 0; rank < window.rank_tokens_per_s.size(); ++rank) {
    scalars.emplace_back("speed/rank" + std::to_string(rank) + "_tokens_per_s",
                         window.rank_tokens_per_s[rank]);
  }
  if (const auto gpus = gpus_.sample(); !gpus.empty()) {
    std::vector<double> busy, memory;
    for (const GpuUse& gpu : gpus) {
      const std::string name = "gpu/" + std::to_string(busy.size());
      busy.push_back(gpu.busy_percent);
      memory.push_back(gib(gpu.memory_used_bytes));
      scalars.emplace_back(name + "_percent", busy.back());
      scalars.emplace_back(name + "_memory_gib", memory.back());
    }
    line.emplace_back("gpu_percent", busy);
    line.emplace_back("gpu_memory_gib", memory);
  }
  attempt("history.jsonl", [&] { history_.append(line); });
  attempt("tensorboard", [&] { events_.add_scalars(window.last.update, scalars); });
}

// In the order of the start's "gpus".
void RunRecord::add_gpu_use(const std::vector<std::string>& gpu_use,
                            std::vector<train::History::Field>& line) const {
  std::vector<double> percent, percent_peak, memory, memory_peak;
  for (const auto& [rank, count] : gpus_of_hosts_) {
    std::vector<GpuUseSummary> host;
    if (rank < gpu_use.size()) host = parse_gpu_use(gpu_use[rank]);
    const MeanAndPeak unknown{std::nan(""), std::nan("")};
    host.resize(count, {unknown, unknown});
    for (const GpuUseSummary& gpu : host) {
      percent.push_back(gpu.percent.mean);
      percent_peak.push_back(gpu.percent.peak);
      memory.push_back(gpu.memory_gib.mean);
      memory_peak.push_back(gpu.memory_gib.peak);
    }
  }
  if (percent.empty()) return;
  line.insert(line.end(), {{"gpu_percent", percent},
                           {"gpu_percent_peak", percent_peak},
                           {"gpu_memory_gib", memory},
                           {"gpu_memory_gib_peak", memory_peak}});
}

void RunRecord::validated(const Validation& validation,
                          const std::vector<std::string>& translations) {
  write_train_line();
  const double bleu = validation.scores.bleu.value_or(std::nan(""));
  const double chrf = validation.scores.chrf.value_or(std::nan(""));
  const auto samples = samples_of(translations);
  std::vector<train::History::Field> line = {{"type", "valid"},
                                             {"epoch", validation.epoch},
                                             {"update", validation.update},
                                             {"wall_s", validation.seconds},
                                             {"train_loss", validation.train_loss},
                                             {"valid_loss", validation.scores.loss},
                                             {"valid_bleu", bleu},
                                             {"valid_chrf", chrf},
                                             {"best", validation.best},
                                             {"learning_rate", validation.learning_rate},
                                             {"tgt_tokens_per_s", validation.tgt_tokens_per_s},
                                             {"valid_s", validation.own_seconds},
                                             {"samples", samples}};
  add_gpu_use(validation.gpu_use, line);
  attempt("history.jsonl", [&] { history_.append(line); });
  attempt("tensorboard", [&] {
    events_.add_scalars(
        validation.update,
        {{"valid/loss", validation.scores.loss}, {"valid/bleu", bleu}, {"valid/chrf", chrf}});
    const auto sources = samples_of(valid_text_.source);
    const auto references = samples_of(valid_text_.target);
    for (size_t i = 0; i < samples.size(); ++i) {
      events_.add_text(validation.update, "samples/" + std::to_string(i + 1),
                       "source: " + sources[i] + "\n\nreference: " + references[i] + "\n\n**" +
                           samples[i] + "**");
    }
  });
  if (!translations.empty()) {
    attempt("result-dev.txt", [&] {
      write_translations(options_.model_dir + "/result-dev.txt", valid_text_, translations);
    });
  }
  if (!report_time_ || Clock::now() - *report_time_ >= kReportInterval) refresh_report();
}

void RunRecord::refresh_report() {
  attempt("report.html", [&] { write_report(options_.model_dir); });
  report_time_ = Clock::now();
}

void RunRecord::ended(const TrainingResult& result, double run_seconds) {
  write_train_line();
  attempt("history.jsonl", [&] {
    history_.append({{"type", "end"},
                     {"epoch", result.epochs},
                     {"update", result.updates},
                     {"wall_s", run_seconds},
                     {"reason", result.stop_reason}});
  });
  refresh_report();
}

}  // namespace cohort::translate
