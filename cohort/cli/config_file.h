// SPDX-License-Identifier: Apache-2.0
// Flags from files: --config and --dump-config. The files are YAML, as Marian's: a flag's name
// without its dashes, and its value; lists for flags of several values, true or false for those of
// none.
//
//   train-sets: [corpus.en, corpus.zh]
//   mini-batch-words: 4096
//   overwrite: true
#pragma once
#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace cohort::cli {

/// Adds --config (repeatable) and --dump-config. parse() acts on them.
void add_config_flags(CLI::App& command);

/// Where a flag's value comes from.
struct FlagOrigin {
  std::string name;      ///< "--clip-norm".
  std::string location;  ///< "run.yaml: line 3".
};

/// Puts the values of the files that `arguments` (without program and commands) name into
/// `arguments`, but for what the command line or a later file beats: a flag that is given there,
/// one that a flag there excludes, and one that needs a flag which is false there. Does nothing for
/// a command without --config.
/// Errors: ConfigError, one line that names file, line and key: cannot be read; no YAML map;
///         several documents; a key that is no flag of `command`, or twice there; a value of
///         another form.
std::vector<FlagOrigin> add_config_values(CLI::App& command, std::vector<std::string>& arguments);

/// The flags of `command`, which has been parsed, by topic, as a file that --config reads. Those
/// given, on the command line or by files, are entries; the others are comments with their
/// defaults, so that none of them acts as given when the file is read (--mini-batch limits batches
/// beside
/// --mini-batch-words only if it is given). Without value: flags that have no default, and those
/// that a given one excludes (--noam-factor with --learn-rate).
std::string dump_config(const CLI::App& command);

}  // namespace cohort::cli
