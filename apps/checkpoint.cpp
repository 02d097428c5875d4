// SPDX-License-Identifier: Apache-2.0
// `cohort checkpoint`: what a checkpoint holds, whether it is whole, and one file for each part.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/base/program.h"
#include "cohort/base/stored_checkpoint.h"
#include "cohort/cli/counted.h"
#include "cohort/cli/parse.h"

namespace {

using cohort::ConfigError;
using cohort::StoredCheckpoint;
using cohort::StoredTensor;
using cohort::cli::counted;
using Action = std::function<int()>;
using Json = nlohmann::ordered_json;

int64_t elements_of(const StoredTensor& tensor) {
  return cohort::num_elements(tensor.shape).value();
}

struct PartSize {
  int64_t tensors = 0;
  int64_t elements = 0;
  int64_t bytes = 0;
  std::set<std::string> files;  // keys
};

PartSize size_of(const std::map<std::string, StoredTensor>& tensors) {
  PartSize size;
  for (const auto& [name, tensor] : tensors) {
    ++size.tensors;
    size.elements += elements_of(tensor);
    size.bytes += elements_of(tensor) * static_cast<int64_t>(cohort::item_size(tensor.dtype));
    for (const auto& [key, ranges] : tensor.ranges) size.files.insert(key);
  }
  return size;
}

// Rows with columns as wide as their longest cell; all but the first are aligned to the right.
void print_table(const std::vector<std::vector<std::string>>& rows) {
  std::vector<size_t> widths(rows.front().size());
  for (const auto& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  for (const auto& row : rows) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) {
      const std::string padding(widths[i] - row[i].size(), ' ');
      line += (i == 0 ? "" : "  ") + (i == 0 ? row[i] + padding : padding + row[i]);
    }
    std::printf("%s\n", line.c_str());
  }
}

struct InspectFlags {
  std::string folder;
  bool json = false;
  bool tensors = false;
};

int inspect_as_json(StoredCheckpoint& checkpoint) {
  Json json = Json::parse(checkpoint.manifest().to_json());
  for (const std::string& name : checkpoint.parts()) {
    const PartSize size = size_of(checkpoint.part(name));
    json["parts"][name] = {{"tensors", size.tensors},
                           {"elements", size.elements},
                           {"bytes", size.bytes},
                           {"files", size.files}};
  }
  std::printf("%s\n", json.dump(2).c_str());
  return cohort::kExitOk;
}

int inspect(const InspectFlags& flags) {
  StoredCheckpoint checkpoint(flags.folder);
  if (flags.json) return inspect_as_json(checkpoint);
  const auto& manifest = checkpoint.manifest();
  if (manifest.update) std::printf("update %" PRId64 "\n\n", *manifest.update);
  std::vector<std::vector<std::string>> rows{{"part", "tensors", "elements", "bytes", "files"}};
  for (const std::string& name : checkpoint.parts()) {
    const PartSize size = size_of(checkpoint.part(name));
    rows.push_back({name, std::to_string(size.tensors), std::to_string(size.elements),
                    std::to_string(size.bytes), std::to_string(size.files.size())});
  }
  print_table(rows);
  std::printf("\n");
  rows = {{"file", "bytes"}};
  for (const auto& [key, file] : manifest.files)
    rows.push_back({file.name, file.bytes ? std::to_string(*file.bytes) : "-"});
  print_table(rows);
  if (flags.tensors) {
    std::printf("\n");
    rows = {{"tensor", "part", "type", "shape", "files"}};
    for (const std::string& part : checkpoint.parts()) {
      for (const auto& [name, tensor] : checkpoint.part(part)) {
        rows.push_back({name, part, cohort::to_string(tensor.dtype),
                        cohort::to_string(tensor.shape), std::to_string(tensor.ranges.size())});
      }
    }
    print_table(rows);
  }
  if (!manifest.metadata.empty()) std::printf("\n");
  for (const auto& [name, value] : manifest.metadata)
    std::printf("%s = %s\n", name.c_str(), value.c_str());
  return cohort::kExitOk;
}

// One line for each file; what is wrong says which.
int verify(const std::string& folder) {
  const auto complain = [](const ConfigError& error) {
    std::printf("bad  %s\n", cohort::one_line(error).c_str());
    return cohort::kExitFailure;
  };
  try {
    StoredCheckpoint checkpoint(folder);
    int result = cohort::kExitOk;
    for (const auto& [key, file] : checkpoint.manifest().files) {
      try {
        checkpoint.file(key);
        std::printf("ok   %s\n", file.name.c_str());
      } catch (const ConfigError& error) {
        result = complain(error);
      }
    }
    return result;
  } catch (const ConfigError& error) {
    return complain(error);
  }
}

struct ConsolidateFlags {
  std::string folder;
  std::string output;
  std::vector<std::string> parts;
  bool overwrite = false;
};

cohort::CheckpointThere what_becomes(bool overwrite) {
  return overwrite ? cohort::CheckpointThere::kIsReplaced : cohort::CheckpointThere::kStays;
}

int consolidate(const ConsolidateFlags& flags) {
  StoredCheckpoint checkpoint(flags.folder);
  const auto parts = flags.parts.empty() ? checkpoint.parts() : flags.parts;
  cohort::consolidate_checkpoint(checkpoint, parts, flags.output, what_becomes(flags.overwrite));
  std::printf("%s: %s\n", flags.output.c_str(), counted(parts.size(), "part").c_str());
  return cohort::kExitOk;
}

struct ImportFlags {
  std::string source;
  std::string output;
  std::string key;
  bool overwrite = false;
};

int import_weights(const ImportFlags& flags) {
  StoredCheckpoint checkpoint(flags.source, flags.key);
  if (!checkpoint.is_imported())
    throw ConfigError(flags.source +
                      ": is a checkpoint already: expected another program's weights (cohort "
                      "checkpoint consolidate copies a checkpoint)");
  cohort::consolidate_checkpoint(checkpoint, checkpoint.parts(), flags.output,
                                 what_becomes(flags.overwrite));
  std::printf("%s: %s\n", flags.output.c_str(),
              counted(checkpoint.part("weights").size(), "tensor").c_str());
  return cohort::kExitOk;
}

void add_folder(CLI::App& command, std::string& folder) {
  command.add_option("folder", folder, "The checkpoint: the folder with manifest.json")
      ->required()
      ->type_name(cohort::kFolder);
}

void add_inspect(CLI::App& app, Action& action) {
  auto* command =
      app.add_subcommand("inspect", "Prints what a checkpoint holds, from its manifest");
  auto flags = std::make_shared<InspectFlags>();
  add_folder(*command, flags->folder);
  command->add_flag("--tensors", flags->tensors, "List every tensor: type, shape, number of files");
  command->add_flag("--json", flags->json, "Print everything as JSON, with ranges and checksums");
  command->callback([flags, &action] { action = [flags] { return inspect(*flags); }; });
}

void add_verify(CLI::App& app, Action& action) {
  auto* command = app.add_subcommand(
      "verify", "Reads every file: sizes, checksums, contents, and that no element is missing");
  auto folder = std::make_shared<std::string>();
  add_folder(*command, *folder);
  command->footer("The exit code is 0 if the checkpoint is complete and intact, else 1.");
  command->callback([folder, &action] { action = [folder] { return verify(*folder); }; });
}

void add_consolidate(CLI::App& app, Action& action) {
  auto* command = app.add_subcommand(
      "consolidate", "Writes whole tensors, one plain safetensors file for each part");
  auto flags = std::make_shared<ConsolidateFlags>();
  add_folder(*command, flags->folder);
  command->add_option("--output", flags->output, "Folder for the new checkpoint")
      ->required()
      ->type_name(cohort::kFolder);
  command
      ->add_option("--parts", flags->parts,
                   "Parts to write, such as weights and optimizer (default: all)")
      ->type_name("PART");
  command->add_flag("--overwrite", flags->overwrite,
                    "Replace a checkpoint in --output, with all of its parts");
  command->callback([flags, &action] { action = [flags] { return consolidate(*flags); }; });
}

void add_import(CLI::App& app, Action& action) {
  auto* command = app.add_subcommand(
      "import",
      "Makes a checkpoint of weights that another program wrote, without executing code in them");
  auto flags = std::make_shared<ImportFlags>();
  command
      ->add_option("source", flags->source,
                   "A safetensors file, a Hugging Face index or folder, or a file of torch.save")
      ->required()
      ->type_name(cohort::kFile);
  command->add_option("--to", flags->output, "Folder for the new checkpoint")
      ->required()
      ->type_name(cohort::kFolder);
  command
      ->add_option("--key", flags->key,
                   "Key of the state dict in a file of torch.save, such as state_dict or model")
      ->type_name("KEY");
  command->add_flag("--overwrite", flags->overwrite,
                    "Replace a checkpoint in --to, with all of its parts");
  command->callback([flags, &action] { action = [flags] { return import_weights(*flags); }; });
}

int run(int argc, char** argv) {
  CLI::App app("Inspects, verifies, consolidates and imports checkpoints", "cohort checkpoint");
  app.require_subcommand(1);
  Action action;
  add_inspect(app, action);
  add_verify(app, action);
  add_consolidate(app, action);
  add_import(app, action);
  if (const auto ended =
          cohort::cli::parse(app, argc, argv, "cohort checkpoint --help lists commands and flags"))
    return *ended;
  return action();
}

}  // namespace

int main(int argc, char** argv) {
  return cohort::run_program("cohort checkpoint", [&] { return run(argc, argv); });
}
