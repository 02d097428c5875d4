// SPDX-License-Identifier: Apache-2.0
#include "cohort/ps/server/serving_export.h"

#include <algorithm>
#include <fcntl.h>
#include <filesystem>
#include <map>
#include <unistd.h>

#include "cohort/base/fd.h"
#include "cohort/base/safetensors.h"
#include "cohort/ps/server/parameter_state.h"
#include "cohort/ps/server/saved_state.h"
#include "cohort/ps/table/export_rows.h"
#include "cohort/ps/work_folder.h"

namespace cohort::ps {

namespace {

namespace fs = std::filesystem;

ServingFile write_dense(const std::map<std::string, std::vector<float>>& parameters,
                        const std::string& output) {
  const std::string path = output + "/dense.safetensors";
  std::vector<TensorView> views;
  for (const auto& [name, values] : parameters) {
    views.push_back({.name = name,
                     .shape = {static_cast<int64_t>(values.size())},
                     .bytes = std::as_bytes(std::span(values))});
  }
  write_safetensors(path, views);
  return {path, static_cast<int64_t>(views.size()), "parameter"};
}

}  // namespace

std::vector<ServingFile> export_for_serving(const std::string& checkpoint,
                                            const std::string& output, uint32_t pushed_since) {
  const auto folders = saved_folders(checkpoint);
  const WorkFolder scratch(output);
  // All servers' shares as those of one: the way that a job with one server would begin.
  JobOptions job = saved_job(folders.front());
  job.servers = 1;
  for (BlockOptions& block : job.blocks) block.server = 0;
  for (TableOptions& table : job.tables) {
    if (table.at_cap != AtCap::kSpill) table.memory_cap_bytes = 0;
  }
  const std::string text = job.to_json();
  ParameterState state(0, scratch.path() + "/cold");
  state.apply({.kind = RecordKind::kJob, .payload = std::as_bytes(std::span(text))});
  state.load_checkpoint(checkpoint);
  std::vector<ServingFile> written;
  std::map<std::string, std::vector<float>> parameters;
  for (const auto& block : state.shard().blocks()) {
    auto& values = parameters[block.options->parameter];
    values.resize(std::max(values.size(), static_cast<size_t>(block.options->end)));
    std::copy(block.weights.begin(), block.weights.end(), values.begin() + block.options->begin);
  }
  if (!parameters.empty()) written.push_back(write_dense(parameters, scratch.path()));
  for (const auto& table : state.shard().tables()) {
    const std::string path = scratch.path() + "/" + table->options().name + ".safetensors";
    const ExportedRows rows = export_rows(*table, path, pushed_since);
    written.push_back({path, rows.rows, "row"});
  }
  for (ServingFile& file : written) {
    const fs::path place = fs::path(output) / fs::path(file.path).filename();
    fs::rename(file.path, place);
    file.path = place.string();
  }
  const Fd folder(::open(output.c_str(), O_RDONLY | O_CLOEXEC));
  ::fsync(folder.get());  // The names, too, outlive a power cut.
  return written;
}

}  // namespace cohort::ps
