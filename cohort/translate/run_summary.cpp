// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "cohort/translate/report.h"
#include "cohort/translate/run_history.h"

namespace cohort::translate {

std::string run_summary(const std::string& model_dir, const SummaryOptions& options) {
  const RunHistory history = read_history(model_dir);
  std::string summary;
  // "loss, training   ____ 6.213 -> 2.140  (lowest 2.101)"
  const auto add = [&](const std::string& name, const train::Points& from, bool low_is_best,
                       int decimals) {
    const auto all = values_of(from);
    if (all.empty()) return;
    const double best = low_is_best ? *std::min_element(all.begin(), all.end())
                                    : *std::max_element(all.begin(), all.end());
    std::string label = name;
    label.resize(18, ' ');
    // Where there is not the room for all figures: the last one is worth most, then the first.
    std::string figures = fixed(all.back(), decimals);
    const auto add_if_it_fits = [&](const std::string& longer) {
      if (label.size() + longer.size() <= options.width) figures = longer;
    };
    add_if_it_fits(fixed(all.front(), decimals) + " -> " + figures);
    if (best != all.back()) {
      add_if_it_fits(figures + (low_is_best ? ", lowest " : ", highest ") + fixed(best, decimals));
    }
    if (label.size() + figures.size() > options.width)
      label.resize(options.width - std::min(options.width, figures.size()));
    std::string line;
    const size_t used = label.size() + figures.size() + 1;
    if (options.sparklines && used + 8 <= options.width) {
      const size_t room = std::min<size_t>(options.width - used, 36);
      const size_t cells = std::min(all.size(), room);
      line = train::sparkline(all, cells, options.utf8) + std::string(room - cells + 1, ' ');
    }
    summary += label + line + figures.substr(0, options.width) + "\n";
  };
  const bool lines = !history.trains.empty();
  add("loss, training",
      lines ? points_of(history.trains, "loss") : points_of(history.validations, "train_loss"),
      true, 3);
  add("loss, validation", points_of(history.validations, "valid_loss"), true, 3);
  add("BLEU", points_of(history.validations, "valid_bleu"), false, 2);
  add("chrF", points_of(history.validations, "valid_chrf"), false, 2);
  add("tokens/s", points_of(lines ? history.trains : history.validations, "tgt_tokens_per_s"),
      false, 0);
  return summary;
}

}  // namespace cohort::translate
