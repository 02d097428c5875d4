#include "apps/nmt/bleu.h"

#include <CLI/CLI.hpp>
#include <iostream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/base/program.h"
#include "cohort/text/bleu.h"
#include "cohort/text/text_file.h"

namespace cohort::apps {
namespace {

struct BleuCommand {
  std::vector<std::string> references;
  std::string hypotheses;
  text::BleuOptions options;
  int width = 1;
  bool score_only = false;
};

int run(const BleuCommand& command) {
  const std::string name = command.hypotheses.empty() ? "standard input" : command.hypotheses;
  const std::vector<std::string> hypotheses = command.hypotheses.empty()
                                                  ? text::read_lines(std::cin, name)
                                                  : text::read_lines(command.hypotheses);
  if (hypotheses.empty()) throw ConfigError(name + ": expected hypotheses, found no line");
  // references[i]: all references of sentence i.
  std::vector<std::vector<std::string>> references(hypotheses.size());
  for (const std::string& path : command.references) {
    std::vector<std::string> lines = text::read_lines(path);
    if (lines.size() != hypotheses.size()) {
      throw ConfigError(path + " has " + std::to_string(lines.size()) + " references but " + name +
                        " has " + std::to_string(hypotheses.size()) +
                        " hypotheses: expected as many");
    }
    for (size_t i = 0; i < lines.size(); ++i) references[i].push_back(std::move(lines[i]));
  }
  text::BleuStats stats;
  for (size_t i = 0; i < hypotheses.size(); ++i) {
    stats += text::bleu_statistics(hypotheses[i], references[i], command.options);
  }
  text::BleuScore score = text::bleu_score(stats, command.options);
  const std::string signature =
      text::signature(command.options, static_cast<int>(command.references.size()));
  std::cout << (command.score_only ? text::format_score(score, command.width)
                                   : text::format(score, signature, command.width))
            << std::endl;
  return kExitOk;
}

}  // namespace

void add_bleu_command(CLI::App& app, std::function<int()>& action) {
  auto command = std::make_shared<BleuCommand>();
  CLI::App* bleu = app.add_subcommand(
      "bleu", "Score translations, one a line on standard input, with sacreBLEU 2.6.0's BLEU");
  bleu->add_option("--ref", command->references, "Reference translations, one a line; repeatable")
      ->required();
  bleu->add_option("--hyp", command->hypotheses, "Translations to score [standard input]");
  bleu->add_option_function<std::string>(
      "--tokenize",
      [command](const std::string& name) {
        command->options.tokenizer = text::parse_bleu_tokenizer(name);
      },
      "13a, zh, char or none [13a]");
  bleu->add_flag("--lowercase", command->options.lowercase, "Compare in lower case");
  bleu->add_option("--width", command->width, "Decimals of the score [1]")
      ->check(CLI::Range(0, 17));
  bleu->add_flag("--score-only", command->score_only, "Print the score alone");
  bleu->callback([command, &action] { action = [command] { return run(*command); }; });
}

}  // namespace cohort::apps
