// SPDX-License-Identifier: Apache-2.0
// `cohort nmt shortlist`: the file from which a search takes its candidates.
#include <CLI/CLI.hpp>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <system_error>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/base/fd.h"
#include "cohort/base/system_error.h"
#include "cohort/cli/counted.h"
#include "cohort/cli/option_flags.h"
#include "cohort/comm/process_group.h"
#include "cohort/translate/lexical_table.h"
#include "cohort/translate/run_folder.h"
#include "cohort/translate/token_cache.h"

#include "apps/nmt/commands.h"

namespace cohort::cli {
namespace {

namespace fs = std::filesystem;

struct ShortlistFlags {
  std::string model_dir;
  std::vector<fs::path> vocabs;
  std::vector<fs::path> train_sets;
  std::string lexical_table;
  std::string output;
  translate::LexicalOptions options;
};

// A file of its own beside `output`, while this lives.
class TemporaryFile {
 public:
  explicit TemporaryFile(const std::string& output) : file_(output + ".XXXXXX") {
    const Fd made(::mkstemp(file_.data()));
    if (!made)
      throw ConfigError("--output " + output + " cannot be written: " + system_reason(errno));
  }
  ~TemporaryFile() {
    std::error_code ignored;
    fs::remove(file_, ignored);
  }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  const std::string& file() const { return file_; }

 private:
  std::string file_;
};

nmt::LexicalTable learn(const ShortlistFlags& flags, const std::vector<fs::path>& vocabularies) {
  const text::Tokenizer source(vocabularies[0]), target(vocabularies[1]);
  const TemporaryFile tokens(flags.output);
  translate::build_token_cache(
      tokens.file(), {.text = flags.train_sets, .vocabularies = vocabularies, .lengths = {}},
      source, target);
  const translate::Corpus corpus(std::make_shared<const SafetensorsFile>(tokens.file()));
  auto options = flags.options;
  options.on_round = [&](int64_t round, double log_prob) {
    std::printf("round %lld of %lld: log p of a target piece %.4f\n", static_cast<long long>(round),
                static_cast<long long>(options.rounds), log_prob);
    std::fflush(stdout);
  };
  return translate::learn_lexical_table(corpus, source.num_pieces(), target.num_pieces(), options);
}

nmt::LexicalTable read(const ShortlistFlags& flags, const std::vector<fs::path>& vocabularies) {
  auto [table, num_unknown] =
      translate::read_lexical_text(flags.lexical_table, text::Tokenizer(vocabularies[0]),
                                   text::Tokenizer(vocabularies[1]), flags.options.best);
  if (num_unknown > 0) {
    std::printf("left out %s with pieces that the vocabularies lack\n",
                counted(num_unknown, "line").c_str());
  }
  return table;
}

int run(const ShortlistFlags& flags) {
  if (flags.train_sets.empty() == flags.lexical_table.empty())
    throw ConfigError("expected either --train-sets or --lexical-table");
  const auto vocabularies = translate::vocab_files(flags.model_dir, flags.vocabs);
  const nmt::LexicalTable table =
      flags.train_sets.empty() ? read(flags, vocabularies) : learn(flags, vocabularies);
  translate::write_lexical_table(flags.output, table, vocabularies);
  std::printf("%s of %s in %s\n", counted(table.targets.size(), "translation").c_str(),
              counted(table.offsets.size() - 1, "source piece").c_str(), flags.output.c_str());
  return 0;
}

}  // namespace

void add_shortlist_command(CLI::App& app, Action& action) {
  auto* command = app.add_subcommand(
      "shortlist",
      "Learn which target pieces each source piece may become, for faster translation");
  auto flags = std::make_shared<ShortlistFlags>();
  add_options(
      *command,
      {{"--model-dir", &flags->model_dir, "The run's folder", {.unit = kFolder, .required = true}},
       {"--vocabs",
        &flags->vocabs,
        "Source and target vocabulary, .spm (default: in --model-dir)",
        {.unit = kFile, .min_values = 2, .max_values = 2}},
       {"--train-sets",
        &flags->train_sets,
        "Learn from this text: source and target, or one .tsv or .json file",
        {.unit = kFile, .max_values = 2}},
       {"--lexical-table",
        &flags->lexical_table,
        "Read lines of target piece, source piece and probability instead, as Marian's lex.s2t",
        {.unit = kFile, .excludes = "--train-sets"}},
       {"--output", &flags->output, "The shortlist's file", {.unit = kFile, .required = true}},
       {"--best", &flags->options.best, "Keep this many target pieces of each source piece",
        rule({[](double n) { return n >= 1 && n <= 1e6; }, "1 to 1000000"})},
       {"--rounds",
        &flags->options.rounds,
        "Rounds of expectation maximisation",
        {.limits = {[](double n) { return n >= 1 && n <= 1000; }, "1 to 1000"},
         .needs = "--train-sets"}},
       {"--workspace",
        &flags->options.workspace_mib,
        "Memory for counts of pairs of pieces; the rarest that do not fit are given up",
        {.unit = kMebibytes,
         .limits = {[](double n) { return n >= 1 && n <= 40960; }, "1 to 40960"},
         .needs = "--train-sets"}}});
  command->callback([flags, &action] { action = [flags] { return run(*flags); }; });
}

}  // namespace cohort::cli
