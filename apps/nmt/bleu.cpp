#include "apps/nmt/bleu.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/base/program.h"
#include "cohort/text/bleu.h"
#include "cohort/text/chrf.h"
#include "cohort/text/text_file.h"
#include "cohort/text/utf8.h"

#include "apps/parse.h"

namespace cohort::apps {
namespace {

struct BleuCommand {
  std::vector<std::string> references;
  std::vector<std::string> hypotheses;
  std::vector<std::string> metrics{"bleu"};
  text::BleuOptions bleu;
  text::ChrfOptions chrf;
  bool sentence_level = false;
  std::string format = "text";
  int width = 1;
  bool score_only = false;

  // As sacrebleu: sentences are always text.
  bool json() const { return format == "json" && !sentence_level; }
};

struct Segments {
  std::vector<std::string> hypotheses;
  std::vector<std::vector<std::string>> references;  // [i]: all references of sentence i.
};

// The command line of sacrebleu has short names of several letters; CLI11 has none.
struct ShortName {
  std::string_view name;
  std::string_view option;
};
constexpr std::array<ShortName, 6> kShortNames{{
    {"-sl", "--sentence-level"},
    {"-sv", "--smooth-value"},
    {"-tok", "--tokenize"},
    {"-lc", "--lowercase"},
    {"-cc", "--chrf-char-order"},
    {"-cw", "--chrf-word-order"},
}};

// Spells out a short name, alone or before "=value"; any other argument stays as it is.
std::string spell_out(const std::string& argument) {
  const std::string_view name = std::string_view(argument).substr(0, argument.find('='));
  for (const ShortName& known : kShortNames) {
    if (name == known.name) return std::string(known.option) + argument.substr(name.size());
  }
  return argument;
}

Segments read(const BleuCommand& command) {
  const bool from_file = !command.hypotheses.empty();
  const std::string name = from_file ? command.hypotheses.front() : "standard input";
  Segments result;
  result.hypotheses = from_file ? text::read_lines(name) : text::read_lines(std::cin, name);
  if (result.hypotheses.empty()) throw ConfigError(name + ": expected hypotheses, found no line");
  for (size_t i = 0; i < result.hypotheses.size(); ++i) {
    std::string& line = result.hypotheses[i];
    line.resize(text::trim_right(line).size());
    if (!from_file && line.find('\t') != std::string::npos) {
      throw ConfigError(name + ": line " + std::to_string(i + 1) +
                        " has a tab, behind which sacreBLEU reads another system: give the file "
                        "by --input");
    }
  }
  result.references.resize(result.hypotheses.size());
  for (const std::string& path : command.references) {
    const std::vector<std::string> lines = text::read_lines(path);
    if (lines.size() != result.hypotheses.size()) {
      throw ConfigError(path + " has " + std::to_string(lines.size()) + " references but " + name +
                        " has " + std::to_string(result.hypotheses.size()) +
                        " hypotheses: expected as many");
    }
    for (size_t i = 0; i < lines.size(); ++i) {
      result.references[i].emplace_back(text::trim_right(lines[i]));
    }
  }
  return result;
}

// Returns what is printed of a metric: one text for all segments, or one for each.
template <typename Count, typename Score>
std::vector<std::string> results(const Segments& segments, const BleuCommand& command,
                                 const std::string& signature, Count count, Score score) {
  std::vector<std::string> result;
  const auto add = [&](const auto& found) {
    if (command.score_only) {
      result.push_back(text::format_score(found, command.width));
    } else if (command.json()) {
      result.push_back(text::format_json(found, signature, command.width));
    } else {
      result.push_back(text::format(found, signature, command.width));
    }
  };
  decltype(count(segments.hypotheses[0], segments.references[0])) all;
  for (size_t i = 0; i < segments.hypotheses.size(); ++i) {
    const auto one = count(segments.hypotheses[i], segments.references[i]);
    all += one;
    if (command.sentence_level) add(score(one));
  }
  if (!command.sentence_level) add(score(all));
  return result;
}

std::vector<std::string> bleu_results(const Segments& segments, const BleuCommand& command) {
  text::BleuOptions options = command.bleu;
  options.effective_order = command.sentence_level;
  return results(
      segments, command, text::signature(options, static_cast<int>(command.references.size())),
      [&](const std::string& hypothesis, const std::vector<std::string>& references) {
        return text::bleu_statistics(hypothesis, references, options);
      },
      [&](const text::BleuStats& stats) { return text::bleu_score(stats, options); });
}

std::vector<std::string> chrf_results(const Segments& segments, const BleuCommand& command) {
  const text::ChrfOptions& options = command.chrf;
  return results(
      segments, command, text::signature(options, static_cast<int>(command.references.size())),
      [&](const std::string& hypothesis, const std::vector<std::string>& references) {
        return text::chrf_statistics(hypothesis, references, options);
      },
      [&](const text::ChrfStats& stats) { return text::chrf_score(stats, options); });
}

// Moves the lines to the right until their first "=" stand below each other.
void align(std::vector<std::string>& lines) {
  size_t column = 0;
  for (const std::string& line : lines) column = std::max(column, line.find('='));
  for (std::string& line : lines) line.insert(0, column - line.find('='), ' ');
}

void print(std::vector<std::string> lines, const BleuCommand& command) {
  const bool list = command.json() && lines.size() > 1;
  if (!command.json() && !command.sentence_level && !command.score_only) align(lines);
  if (list) std::cout << "[\n";
  for (size_t i = 0; i < lines.size(); ++i) {
    std::cout << lines[i] << (list && i + 1 < lines.size() ? ",\n" : "\n");
  }
  if (list) std::cout << "]\n";
  std::cout << std::flush;
}

int run(const BleuCommand& command) {
  if (command.hypotheses.size() > 1) {
    throw ConfigError("--input: expected one file, found " +
                      std::to_string(command.hypotheses.size()) +
                      " (references stand before it, or behind --ref)");
  }
  const auto wanted = [&command](const char* metric) {
    return std::find(command.metrics.begin(), command.metrics.end(), metric) !=
           command.metrics.end();
  };
  if (command.sentence_level && wanted("bleu") && wanted("chrf")) {
    throw ConfigError("--sentence-level: expected one of --metrics, found bleu and chrf");
  }
  const Segments segments = read(command);
  std::vector<std::string> lines;
  if (wanted("bleu")) lines = bleu_results(segments, command);
  if (wanted("chrf")) {
    for (std::string& line : chrf_results(segments, command)) lines.push_back(std::move(line));
  }
  print(std::move(lines), command);
  return kExitOk;
}

void add_bleu_options(CLI::App& app, text::BleuOptions& options) {
  const auto group = "BLEU";
  app.add_option_function<std::string>(
         "--tokenize",
         [&options](const std::string& name) {
           options.tokenizer = text::parse_bleu_tokenizer(name);
         },
         "-tok: 13a, intl, zh, char or none [13a]")
      ->group(group);
  app.add_flag("--lowercase", options.lowercase, "-lc: Compare in lower case")->group(group);
  app.add_option_function<std::string>(
         "-s,--smooth-method",
         [&options](const std::string& name) {
           options.smoothing = text::parse_bleu_smoothing(name);
         },
         "exp, floor, add-k or none [exp]")
      ->group(group);
  app.add_option("--smooth-value", options.smoothing_value, "-sv: Of floor [0.1] and add-k [1]")
      ->check(zero_or_more())
      ->group(group);
}

void add_chrf_options(CLI::App& app, text::ChrfOptions& options) {
  const auto group = "chrF";
  app.add_option("--chrf-char-order", options.char_order, "-cc: Longest n-gram of characters [6]")
      ->check(CLI::Range(1, text::kMaxChrfCharOrder))
      ->group(group);
  app.add_option("--chrf-word-order", options.word_order,
                 "-cw: Longest n-gram of words [0]; 2 makes it chrF++")
      ->check(CLI::Range(0, text::kMaxChrfWordOrder))
      ->group(group);
  app.add_option("--chrf-beta", options.beta, "Recall weighs so many times as precision [2]")
      ->check(CLI::Range(0, 1000))
      ->group(group);
  app.add_flag("--chrf-lowercase", options.lowercase, "Compare in lower case")->group(group);
  app.add_flag("--chrf-whitespace", options.whitespace, "White space counts as characters")
      ->group(group);
  app.add_flag("--chrf-eps-smoothing", options.eps_smoothing,
               "Orders without n-grams count, as next to nothing")
      ->group(group);
}

void add_options(CLI::App& app, BleuCommand& command) {
  app.add_option("references,--ref", command.references, "Files of references, one a line")
      ->required();
  app.add_option("-i,--input,--hyp", command.hypotheses,
                 "File of translations, one a line [standard input]");
  app.add_option("-m,--metrics", command.metrics, "bleu, chrf or both [bleu]")
      ->check(CLI::IsMember({"bleu", "chrf"}));
  app.add_flag("--sentence-level", command.sentence_level,
               "-sl: A line for each sentence, of one metric");
  app.add_option("-f,--format", command.format, "text or json [text]")
      ->check(CLI::IsMember({"text", "json"}));
  app.add_option("-w,--width", command.width, "Decimals of the score [1]")
      ->check(CLI::Range(0, 17));
  app.add_flag("-b,--score-only", command.score_only, "Print the score alone");
  add_bleu_options(app, command.bleu);
  add_chrf_options(app, command.chrf);
}

}  // namespace

void add_bleu_command(CLI::App& app, std::function<int()>& action) {
  constexpr const char* kDescription =
      "Score translations as the program sacrebleu 2.6.0 does, with BLEU and chrF";
  auto command = std::make_shared<BleuCommand>();
  auto parser = std::make_shared<CLI::App>(kDescription, "cohort nmt bleu");
  parser->footer(
      "Arguments and output are sacrebleu's, but for this: the format is text unless json is "
      "asked\n"
      "for (sacrebleu's is json), --input takes one file, and there are no test sets, no TER, no\n"
      "confidence intervals and no other tokenizers.");
  add_options(*parser, *command);

  // The subcommand takes every argument as it is; `parser` reads them with short names spelled out.
  CLI::App* bleu = app.add_subcommand("bleu", kDescription);
  bleu->prefix_command();
  bleu->set_help_flag();
  bleu->callback([bleu, parser, command, &action] {
    std::vector<std::string> arguments{bleu->get_name()};
    for (const std::string& argument : bleu->remaining()) arguments.push_back(spell_out(argument));
    std::vector<char*> argv;
    for (std::string& argument : arguments) argv.push_back(argument.data());
    const std::optional<int> ended = parse(*parser, static_cast<int>(argv.size()), argv.data(),
                                           "cohort nmt bleu --help lists arguments");
    action = [ended, command] { return ended ? *ended : run(*command); };
  });
}

}  // namespace cohort::apps
