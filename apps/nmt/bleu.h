// `cohort nmt bleu`: sacreBLEU's score of translated text.
#pragma once
#include <functional>

namespace CLI {
class App;
}

namespace cohort::apps {

/// Registers subcommand `bleu` on `app`; where it is the one chosen, parsing sets `action` to what
/// runs it and returns the exit code.
///
/// Errors of the action: ConfigError for a file that cannot be read or is not UTF-8, no hypotheses,
/// or a reference with another number of lines than the hypotheses (both numbers named).
void add_bleu_command(CLI::App& app, std::function<int()>& action);

}  // namespace cohort::apps
