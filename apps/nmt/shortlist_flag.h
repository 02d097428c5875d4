// SPDX-License-Identifier: Apache-2.0
// The flag --shortlist of commands that search.
#pragma once
#include <algorithm>
#include <charconv>
#include <memory>
#include <string>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/base/option.h"
#include "cohort/nmt/shortlist.h"
#include "cohort/translate/lexical_table.h"
#include "cohort/translate/run_folder.h"

#include "apps/nmt/trained_model.h"

namespace cohort::cli {

/// A file of `cohort nmt shortlist`, and what is taken of it.
struct ShortlistFlag {
  std::string file;  ///< Empty: none.
  nmt::ShortlistOptions taken;

  Option option() {
    return {
        "--shortlist",
        TextValue{{},
                  [this] { return file.empty() ? std::vector<std::string>{} : std::vector{file}; },
                  [this](const auto& given) { set(given); }},
        "Search only among the FIRST (100) most frequent target pieces and the BEST (100, or all "
        "that FILE has) of each source piece that have at least the probability PRUNE (0); FILE is "
        "of cohort nmt shortlist",
        {.unit = "FILE [FIRST [BEST [PRUNE]]]", .max_values = 4, .shown_default = "none"}};
  }

  /// Errors: ConfigError for a file that is no shortlist of the model's vocabularies, or holds fewer pieces than BEST.
  std::shared_ptr<const nmt::Shortlist> read(const ModelPlace& model) const {
    if (file.empty()) return nullptr;
    const auto table =
        translate::read_lexical_table(file, translate::vocab_files(model.model_dir, model.vocabs));
    nmt::ShortlistOptions used = taken;
    if (!is_best_given_) used.best = std::min(used.best, table.best);
    if (used.best > table.best) {
      throw ConfigError(
          "--shortlist " + file + ": expected BEST to be at most " + std::to_string(table.best) +
          ", which were kept of each source piece (cohort nmt shortlist --best), got " +
          std::to_string(used.best));
    }
    return std::make_shared<const nmt::Shortlist>(table, used);
  }

 private:
  bool is_best_given_ = false;

  void set(const std::vector<std::string>& given) {
    file = given.at(0);
    is_best_given_ = given.size() > 2;
    const auto number = [&](size_t at, auto& value, double most, const char* expected) {
      if (at >= given.size()) return;
      const std::string& text = given[at];
      const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
      if (error != std::errc() || end != text.data() + text.size() ||
          !(value >= 0 && static_cast<double>(value) <= most))
        throw ConfigError("--shortlist: " + text + ": expected " + expected);
    };
    number(1, taken.first, 1e9, "a whole number of most frequent pieces");
    number(2, taken.best, 1e9, "a whole number of pieces for each source piece");
    number(3, taken.prune, 1, "a probability");
  }
};

}  // namespace cohort::cli
