// SPDX-License-Identifier: Apache-2.0
// What a run's folder tells a person: a page, and a few lines for the terminal.
#pragma once
#include <string>

namespace cohort::translate {

/// Returns the report of the run in `model_dir` as one HTML page that needs no other file and no
/// script: scores, curves, translations of a few sentences over time, machines and configuration.
///
/// Read from history.jsonl and config.json, whether the run still trains, has ended or was killed.
/// Errors: ConfigError if there is no history.
std::string report_html(const std::string& model_dir);

/// Writes it as report.html in `model_dir`, atomically.
/// Errors: those of write_atomically, too.
void write_report(const std::string& model_dir);

struct SummaryOptions {
  size_t width = 80;       ///< Columns, at most.
  bool sparklines = true;  ///< Curves of one line ...
  bool utf8 = true;        ///< ... of block characters, else of ASCII.
};

/// Returns lines, each with its newline, about loss, scores and speed of the run in `model_dir`.
/// Errors: ConfigError if there is no history.
std::string run_summary(const std::string& model_dir, const SummaryOptions& options);

}  // namespace cohort::translate
