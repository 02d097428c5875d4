// SPDX-License-Identifier: Apache-2.0
// `cohort nmt bleu`: sacreBLEU's scores of translated text, with the arguments and the output of
// the program sacrebleu.
#pragma once
#include <functional>
#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace cohort::cli {

/// Registers subcommand `bleu` on `app`; where it is the one chosen, parsing sets `action` to what
/// runs it. Arguments need spell_out_bleu_names before they are parsed.
///
/// White space at the ends of lines does not count. Unlike sacrebleu, only "\n" and "\r\n" end a
/// line.
/// Errors of the action: ConfigError for a file that cannot be read or is not UTF-8, no hypotheses,
/// several files of hypotheses, a damaged .gz, a language that needs another tokenizer, a tab in
/// hypotheses of standard input (several systems to sacrebleu), or a reference with another number
/// of lines than the hypotheses (both numbers named).
void add_bleu_command(CLI::App& app, std::function<int()>& action);

/// sacrebleu has short names of several letters, CLI11 has none: if `arguments` begin with "bleu",
/// "-tok" among them becomes "--tokenize", and so on.
void spell_out_bleu_names(std::vector<std::string>& arguments);

}  // namespace cohort::cli
