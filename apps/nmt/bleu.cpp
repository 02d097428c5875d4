// SPDX-License-Identifier: Apache-2.0
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
#include "cohort/cli/parse.h"
#include "cohort/text/bleu.h"
#include "cohort/text/chrf.h"
#include "cohort/text/text_file.h"
#include "cohort/text/utf8.h"

namespace cohort::cli {
namespace {

struct BleuCommand {
  std::vector<std::string> references;
  std::vector<std::string> hypotheses;
  std::vector<std::string> metrics{"bleu"};
  std::string tokenize = text::to_string(text::BleuOptions{}.tokenizer);
  std::string language_pair;
  std::string smooth_method = "exp";
  text::BleuOptions bleu;
  text::ChrfOptions chrf;
  bool sentence_level = false;
  std::string format = "text";
  int width = 1;
  bool score_only = false;
  bool short_signature = false;
  bool quiet = false;
  bool confidence = false;
  int confidence_n = 1000;

  // As sacrebleu: sentences are always text.
  bool json() const { return format == "json" && !sentence_level; }
  std::optional<text::BootstrapOptions> bootstrap() const {
    if (!confidence) return std::nullopt;
    return text::BootstrapOptions{.num_samples = confidence_n};
  }
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
constexpr std::array<ShortName, 9> kShortNames{{
    {"-sl", "--sentence-level"},
    {"-sv", "--smooth-value"},
    {"-tok", "--tokenize"},
    {"-lc", "--lowercase"},
    {"-cc", "--chrf-char-order"},
    {"-cw", "--chrf-word-order"},
    {"-ci", "--confidence"},
    {"-cin", "--confidence-n"},
    {"-sh", "--short"},
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
  // To sacreBLEU a byte order mark is a character like others.
  constexpr auto kMark = text::ByteOrderMark::kIsText;
  result.hypotheses =
      from_file ? text::read_lines(name, kMark) : text::read_lines(std::cin, name, kMark);
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
    const std::vector<std::string> lines = text::read_lines(path, kMark);
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

// On stderr, as sacrebleu's own messages.
void warn_of_tokenizer(const Segments& segments, text::BleuTokenizer tokenizer) {
  std::vector<std::string> all;
  for (const auto& references : segments.references)
    all.insert(all.end(), references.begin(), references.end());
  if (const auto why = text::tokenizer_warning(tokenizer, all))
    std::cerr << "cohort nmt bleu: " << *why << std::endl;
}

// Returns what is printed of a metric: one text for all segments, or one for each.
template <typename Count, typename Score, typename Confidence>
std::vector<std::string> results(const Segments& segments, const BleuCommand& command,
                                 const std::string& signature, Count count, Score score,
                                 Confidence confidence) {
  std::vector<std::string> result;
  const auto add = [&](const auto& found) {
    if (command.score_only) {
      result.push_back(text::format_score(found, command.width));
    } else if (command.json()) {
      result.push_back(text::format_json(found, signature, command.width));
    } else {
      result.push_back(text::format(
          found, command.short_signature ? text::short_signature(signature) : signature,
          command.width));
    }
  };
  decltype(count(segments.hypotheses[0], segments.references[0])) all;
  std::vector<decltype(all)> each;
  for (size_t i = 0; i < segments.hypotheses.size(); ++i) {
    each.push_back(count(segments.hypotheses[i], segments.references[i]));
    all += each.back();
    if (command.sentence_level) add(score(each.back()));
  }
  if (command.sentence_level) return result;
  auto found = score(all);
  if (const auto bootstrap = command.bootstrap()) found.confidence = confidence(each, *bootstrap);
  add(found);
  return result;
}

std::vector<std::string> bleu_results(const Segments& segments, const BleuCommand& command) {
  text::BleuOptions options = command.bleu;
  options.effective_order = command.sentence_level;
  return results(
      segments, command,
      text::signature(options, static_cast<int>(command.references.size()), command.bootstrap()),
      [&](const std::string& hypothesis, const std::vector<std::string>& references) {
        return text::bleu_statistics(hypothesis, references, options);
      },
      [&](const text::BleuStats& stats) { return text::bleu_score(stats, options); },
      [&](const std::vector<text::BleuStats>& each, const text::BootstrapOptions& bootstrap) {
        return text::bleu_confidence(each, options, bootstrap);
      });
}

std::vector<std::string> chrf_results(const Segments& segments, const BleuCommand& command) {
  const text::ChrfOptions& options = command.chrf;
  return results(
      segments, command,
      text::signature(options, static_cast<int>(command.references.size()), command.bootstrap()),
      [&](const std::string& hypothesis, const std::vector<std::string>& references) {
        return text::chrf_statistics(hypothesis, references, options);
      },
      [&](const text::ChrfStats& stats) { return text::chrf_score(stats, options); },
      [&](const std::vector<text::ChrfStats>& each, const text::BootstrapOptions& bootstrap) {
        return text::chrf_confidence(each, options, bootstrap);
      });
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

// sacreBLEU's choice for a target language, "zh" of "en-zh".
std::string tokenizer_for(const std::string& language_pair) {
  const size_t dash = language_pair.find('-');
  const std::string target = dash == std::string::npos ? "" : language_pair.substr(dash + 1);
  const std::string prefix = "--language-pair " + language_pair + ": expected ";
  if (dash == 0 || target.empty()) throw ConfigError(prefix + "source-target, en-zh say");
  if (target == "ja" || target == "ko") {
    throw ConfigError(prefix + "--tokenize with it, for sacreBLEU's " + target +
                      "-mecab is not here");
  }
  return target == "zh" ? "zh" : "13a";
}

int run(BleuCommand& command, const CLI::App& app) {
  if (!command.language_pair.empty() && app.get_option("--tokenize")->count() == 0)
    command.tokenize = tokenizer_for(command.language_pair);
  command.bleu.tokenizer = text::parse_bleu_tokenizer(command.tokenize);
  command.bleu.smoothing = text::parse_bleu_smoothing(command.smooth_method);
  if (command.hypotheses.size() > 1) {
    throw ConfigError("--input: expected one file, got " +
                      std::to_string(command.hypotheses.size()) +
                      " (references stand before it, or behind --ref)");
  }
  const auto wanted = [&command](const char* metric) {
    return std::find(command.metrics.begin(), command.metrics.end(), metric) !=
           command.metrics.end();
  };
  if (command.sentence_level && wanted("bleu") && wanted("chrf")) {
    throw ConfigError("--sentence-level: expected one of --metrics, got bleu and chrf");
  }
  if (command.sentence_level && command.confidence)
    throw ConfigError("--confidence: expected a corpus's score, not --sentence-level");
  const Segments segments = read(command);
  if (wanted("bleu") && !command.quiet) warn_of_tokenizer(segments, command.bleu.tokenizer);
  std::vector<std::string> lines;
  if (wanted("bleu")) lines = bleu_results(segments, command);
  if (wanted("chrf")) {
    for (std::string& line : chrf_results(segments, command)) lines.push_back(std::move(line));
  }
  print(std::move(lines), command);
  return kExitOk;
}

void add_bleu_options(CLI::App& app, BleuCommand& command) {
  const auto group = "BLEU";
  app.add_option("--tokenize", command.tokenize, "-tok: Tokenizer")
      ->check(one_of({"13a", "intl", "zh", "char", "none"}))
      ->capture_default_str()
      ->group(group);
  app.add_option(
         "-l,--language-pair", command.language_pair,
         "Source and target language, such as en-zh; chooses --tokenize: zh for Chinese, else 13a")
      ->type_name("TEXT")
      ->group(group);
  app.add_flag("--lowercase", command.bleu.lowercase, "-lc: Compare in lower case")->group(group);
  app.add_option("-s,--smooth-method", command.smooth_method,
                 "Smoothing of n-gram orders without a match")
      ->check(one_of({"exp", "floor", "add-k", "none"}))
      ->capture_default_str()
      ->group(group);
  app.add_option("--smooth-value", command.bleu.smoothing_value,
                 "-sv: Value of the methods floor (default: 0.1) and add-k (default: 1)")
      ->check(zero_or_more())
      ->group(group);
}

void add_chrf_options(CLI::App& app, text::ChrfOptions& options) {
  const auto group = "chrF";
  app.add_option("--chrf-char-order", options.char_order, "-cc: Longest n-gram of characters")
      ->check(CLI::Range(1, text::kMaxChrfCharOrder))
      ->capture_default_str()
      ->group(group);
  app.add_option("--chrf-word-order", options.word_order,
                 "-cw: Longest n-gram of words; 2 makes it chrF++")
      ->check(CLI::Range(0, text::kMaxChrfWordOrder))
      ->capture_default_str()
      ->group(group);
  app.add_option("--chrf-beta", options.beta, "Weight of recall relative to precision")
      ->check(CLI::Range(0, 1000))
      ->capture_default_str()
      ->group(group);
  app.add_flag("--chrf-lowercase", options.lowercase, "Compare in lower case")->group(group);
  app.add_flag("--chrf-whitespace", options.whitespace, "Count white space as characters")
      ->group(group);
  app.add_flag("--chrf-eps-smoothing", options.eps_smoothing,
               "Count orders without n-grams, with a tiny value")
      ->group(group);
}

void add_options(CLI::App& app, BleuCommand& command) {
  app.add_option("references,--ref", command.references, "Files of references, one a line")
      ->type_name(kFile)
      ->required()
      ->group("Texts");
  app.add_option("-i,--input,--hyp", command.hypotheses,
                 "File of translations, one a line; standard input if absent")
      ->type_name(kFile)
      ->group("Texts");
  app.add_option("-m,--metrics", command.metrics, "One or both")
      ->check(one_of({"bleu", "chrf"}))
      ->capture_default_str()
      ->group("Output");
  app.add_flag("--sentence-level", command.sentence_level,
               "-sl: Print a line for each sentence, of one metric")
      ->group("Output");
  app.add_option("-f,--format", command.format, "Format of a score")
      ->check(one_of({"text", "json"}))
      ->capture_default_str()
      ->group("Output");
  app.add_option("-w,--width", command.width, "Decimals of a score")
      ->check(CLI::Range(0, 17))
      ->capture_default_str()
      ->group("Output");
  app.add_flag("-b,--score-only", command.score_only, "Print the score alone")->group("Output");
  app.add_flag("--short", command.short_signature, "-sh: Short names in the signature")
      ->group("Output");
  app.add_flag("-q,--quiet", command.quiet, "No warnings")->group("Output");
  auto* confidence = app.add_flag("--confidence", command.confidence,
                                  "-ci: Print mean and 95 % range of the score over resampled "
                                  "corpora, with sacrebleu's seed 12345")
                         ->group("Output");
  app.add_option("--confidence-n", command.confidence_n, "-cin: Number of resampled corpora")
      ->check(CLI::Range(2, 1'000'000))
      ->needs(confidence)
      ->capture_default_str()
      ->group("Output");
  add_bleu_options(app, command);
  add_chrf_options(app, command.chrf);
}

}  // namespace

void add_bleu_command(CLI::App& app, std::function<int()>& action) {
  auto command = std::make_shared<BleuCommand>();
  CLI::App* bleu = app.add_subcommand(
      "bleu", "Score translations as the program sacrebleu 2.6.0 does, with BLEU and chrF");
  bleu->footer(
      "Arguments and output are sacrebleu's, but for this: the format is text unless json is asked "
      "for (sacrebleu's is json), --input takes one file, and there are no test sets, no TER, no "
      "comparison of systems and no other tokenizers. Files whose names end in .gz are unpacked.");
  add_options(*bleu, *command);
  bleu->callback(
      [command, bleu, &action] { action = [command, bleu] { return run(*command, *bleu); }; });
}

void spell_out_bleu_names(std::vector<std::string>& arguments) {
  if (arguments.empty() || arguments.front() != "bleu") return;
  for (std::string& argument : arguments) argument = spell_out(argument);
}

}  // namespace cohort::cli
