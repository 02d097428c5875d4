// `cohort nmt translate`: lines from stdin to stdout, in order.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <iostream>
#include <memory>
#include <system_error>

#include "cohort/base/error.h"
#include "cohort/text/text_file.h"
#include "cohort/translate/evaluation.h"

#include "apps/nmt/commands.h"
#include "apps/nmt/evaluation_flags.h"
#include "apps/nmt/trained_model.h"
#include "apps/parse.h"

namespace cohort::apps {
namespace {

struct TranslateFlags {
  std::string model_dir;
  std::vector<std::filesystem::path> vocabs;
  std::string precision = "auto";
  int64_t mini_batch = 64;
  bool n_best = false;
  EvaluationFlags evaluation{full_search()};
};

// Of a sentence's translations the best, or all as "number ||| text ||| log p ||| score".
void print(int64_t number, const std::vector<translate::Translation>& translations, bool n_best) {
  if (!n_best) {
    std::printf("%s\n", translations.front().text.c_str());
    return;
  }
  for (const auto& t : translations) {
    std::printf("%lld ||| %s ||| Logprob= %.6f ||| %.6f\n", static_cast<long long>(number),
                t.text.c_str(), t.log_prob, t.score);
  }
}

int run(TranslateFlags& flags) {
  const auto options = flags.evaluation.resolve();
  auto [model, tokenizers] =
      load_trained(flags.model_dir, flags.vocabs, nmt::parse_precision(flags.precision));
  // Bounded memory: a window of lines is translated, printed, forgotten.
  const auto window = static_cast<size_t>(flags.mini_batch) * 16;
  std::vector<std::vector<int32_t>> sources;
  int64_t number = 0;
  const auto flush = [&] {
    for (const auto& translations :
         translate::translate_all(model, sources, tokenizers.target, options)) {
      print(number++, translations, flags.n_best);
    }
    if (std::fflush(stdout) != 0)
      throw std::system_error(errno, std::generic_category(), "standard output cannot be written");
    sources.clear();
  };
  text::LineReader lines(std::cin, "standard input");
  for (std::string line; lines.next(line);) {
    sources.push_back(tokenizers.source.encode(line));
    if (std::ssize(sources.back()) + 1 > model->options().max_positions) {
      throw ConfigError("standard input: line " + std::to_string(lines.number()) + " has " +
                        std::to_string(sources.back().size()) + " tokens: expected at most " +
                        std::to_string(model->options().max_positions - 1));
    }
    if (sources.size() == window) flush();
  }
  flush();
  return 0;
}

}  // namespace

void add_translate_command(CLI::App& app, Action& action) {
  auto* command =
      app.add_subcommand("translate", "Translate lines from standard input to standard output");
  auto flags = std::make_shared<TranslateFlags>();
  command->add_option("--model-dir", flags->model_dir, "The run's folder")->required();
  command
      ->add_option("--vocabs", flags->vocabs,
                   "Source and target .spm file (default: in --model-dir)")
      ->expected(2);
  command->add_option("--precision", flags->precision, "auto, bfloat16 or float32")
      ->capture_default_str();
  command->add_option("--mini-batch", flags->mini_batch, "Lines read ahead are 16 times this")
      ->capture_default_str()
      ->check(above_zero());
  command->add_flag("--n-best", flags->n_best,
                    "Print all translations of the beam with their scores, best first");
  flags->evaluation.add_search_to(*command, "Search");
  command->callback([flags, &action] { action = [flags] { return run(*flags); }; });
}

}  // namespace cohort::apps
