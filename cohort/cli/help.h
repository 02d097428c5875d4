// SPDX-License-Identifier: Apache-2.0
// How `--help` looks: the usage with what is required, then flags by topic, two columns, at most
// 100 wide; a flag's default stands in brackets behind its description.
#pragma once
#include <CLI/CLI.hpp>
#include <string>

namespace cohort::cli {

class HelpFormatter : public CLI::FormatterBase {
 public:
  std::string make_help(const CLI::App* app, std::string name,
                        CLI::AppFormatMode mode) const override;
};

}  // namespace cohort::cli
