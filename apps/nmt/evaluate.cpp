// SPDX-License-Identifier: Apache-2.0
// `cohort nmt evaluate`: loss, BLEU and chrF of a trained model, on one or many ranks.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>

#include "cohort/base/atomic_file.h"
#include "cohort/base/checksum.h"
#include "cohort/cli/counted.h"
#include "cohort/cli/group_flags.h"
#include "cohort/cli/option_flags.h"
#include "cohort/train/check_same.h"
#include "cohort/train/progress.h"
#include "cohort/translate/precision.h"
#include "cohort/translate/training_options.h"

#include "apps/nmt/commands.h"
#include "apps/nmt/model_flags.h"
#include "apps/nmt/shortlist_flag.h"
#include "apps/nmt/trained_model.h"

namespace cohort::cli {
namespace {

struct EvaluateFlags {
  ModelPlace model;
  std::vector<std::filesystem::path> test_sets;
  std::string output;
  int64_t samples = 0;
  bool json = false;
  ShortlistFlag shortlist;
  translate::EvaluationOptions evaluation = full_search();
  GroupFlags group;
};

double bleu_of_copying(const text::ParallelText& pairs, const text::BleuOptions& options) {
  text::BleuStats copied;
  for (size_t i = 0; i < pairs.source.size(); ++i) {
    copied += text::bleu_statistics(pairs.source[i], std::span(&pairs.target[i], 1), options);
  }
  return text::bleu_score(copied, options).score;
}

void print_samples(const text::ParallelText& pairs, const std::vector<std::string>& translations,
                   int64_t samples) {
  const auto count = std::min<size_t>(static_cast<size_t>(samples), pairs.source.size());
  for (size_t k = 0; k < count; ++k) {
    const size_t i = k * pairs.source.size() / count;
    std::printf("  source     %s\n  translated %s\n  reference  %s\n\n", pairs.source[i].c_str(),
                translations[i].c_str(), pairs.target[i].c_str());
  }
}

TrainedModel load_on_ranks(const ModelPlace& place, const comm::ProcessGroup& group) {
  TrainedModel trained = load_trained(place);
  // The manifest has the checksums of the weights.
  train::check_same_on_ranks(group, "--model-dir", "weights",
                             sha256_of_file(place.model_dir + "/best/manifest.json"));
  return trained;
}

int run(EvaluateFlags& flags, const CLI::App& command) {
  auto options = flags.evaluation;
  options.search.shortlist = flags.shortlist.read(flags.model);
  const auto group = flags.group.connect();
  check_same_flags(group, command, {"--output", "--samples", "--json"});
  flags.model.device = group.device().str();
  auto& precision = flags.model.precision;
  if (!precision && holds_int8(flags.model.model_dir)) precision = nmt::Precision::kInt8;
  precision = translate::agreed_precision(precision, group);
  auto [model, tokenizers] = load_on_ranks(flags.model, group);
  const auto pairs = text::read_parallel_text(flags.test_sets);
  const auto corpus = translate::tokenize(pairs, tokenizers.source, tokenizers.target);
  translate::check_lengths("--test-sets", corpus, model->options().max_positions);
  train::Progress progress;
  if (group.rank() == 0 && train::is_terminal(STDERR_FILENO)) {
    options.on_batch = [&](int64_t done, int64_t total) {
      progress.update({.phase = "evaluation", .step = done, .num_steps = total});
    };
  }
  const auto result =
      translate::evaluate(model, corpus, pairs.target, tokenizers.target, group, options);
  progress.finish();
  group.close();
  if (group.rank() != 0) return 0;
  if (!flags.output.empty()) {
    write_atomically(flags.output, [&](FileWriter& file) {
      for (const auto& line : result.translations) file.write(line + "\n");
    });
  }
  if (const auto why = text::tokenizer_warning(options.bleu.tokenizer, pairs.target))
    std::fprintf(stderr, "cohort nmt evaluate: %s\n", why->c_str());
  const double copied = bleu_of_copying(pairs, options.bleu);
  const std::string signature = text::signature(options.bleu, 1);
  const std::string chrf_signature = text::signature(options.chrf, 1);
  if (flags.json) {
    const nlohmann::ordered_json line = {{"sentences", corpus.size()},
                                         {"dropped_empty", pairs.num_dropped_empty},
                                         {"loss", result.loss},
                                         {"bleu", result.bleu.score},
                                         {"brevity_penalty", result.bleu.bp},
                                         {"bleu_of_copying", copied},
                                         {"signature", signature},
                                         {"chrf", result.chrf.score},
                                         {"chrf_signature", chrf_signature},
                                         {"precision", nmt::to_string(*precision)}};
    std::printf("%s\n", line.dump().c_str());
    return 0;
  }
  print_samples(pairs, result.translations, flags.samples);
  if (pairs.num_dropped_empty > 0) {
    std::printf("left out %s with an empty side\n",
                counted(pairs.num_dropped_empty, "pair").c_str());
  }
  std::printf("loss %.4f over %s, %s, %s\n", result.loss,
              counted(corpus.size(), "sentence").c_str(), counted(group.size(), "rank").c_str(),
              nmt::to_string(*precision).c_str());
  std::printf("%s\n%s\n", text::format(result.bleu, signature).c_str(),
              text::format(result.chrf, chrf_signature).c_str());
  std::printf("copying the source would score %.2f\n", copied);
  return 0;
}

}  // namespace

void add_evaluate_command(CLI::App& app, Action& action) {
  auto* command = app.add_subcommand("evaluate", "Loss, BLEU and chrF of a trained model");
  auto flags = std::make_shared<EvaluateFlags>();
  flags->model.add_to(*command);
  add_options(*command,
              {{"--test-sets",
                &flags->test_sets,
                "Source and target text, or one .tsv or .json file",
                {.unit = kFile, .max_values = 2, .required = true}}},
              "Texts");
  add_options(
      *command,
      {{"--output", &flags->output, "Write the translations to this file", rule(kFile)},
       {"--samples", &flags->samples, "Number of translations to print, with source and reference",
        rule(kZeroOrMore)},
       {"--json", &flags->json, "Print one line of JSON instead", {.excludes = "--samples"}}},
      "Output");
  add_options(*command, translate::evaluation_options(flags->evaluation), "Search and score");
  add_options(*command, {flags->shortlist.option()}, "Search and score");
  flags->group.add_to(*command, GroupFlags::Devices::kAny);
  command->callback(
      [flags, command, &action] { action = [flags, command] { return run(*flags, *command); }; });
}

}  // namespace cohort::cli
