// SPDX-License-Identifier: Apache-2.0
// The subcommands of `cohort nmt`: each registers itself and, if chosen, sets what is to run.
#pragma once
#include <functional>

namespace CLI {
class App;
}

namespace cohort::cli {

using Action = std::function<int()>;

void add_train_command(CLI::App& app, Action& action);
void add_prepare_command(CLI::App& app, Action& action);
void add_evaluate_command(CLI::App& app, Action& action);
void add_translate_command(CLI::App& app, Action& action);
void add_score_command(CLI::App& app, Action& action);
void add_average_command(CLI::App& app, Action& action);
void add_quantize_command(CLI::App& app, Action& action);
void add_shortlist_command(CLI::App& app, Action& action);
void add_export_command(CLI::App& app, Action& action);
void add_info_command(CLI::App& app, Action& action);
void add_report_command(CLI::App& app, Action& action);

}  // namespace cohort::cli
