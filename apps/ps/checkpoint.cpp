#include <cstdio>
#include <ctime>
#include <fcntl.h>
#include <filesystem>
#include <limits>
#include <memory>
#include <string>
#include <system_error>
#include <unistd.h>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/base/fd.h"
#include "cohort/base/program.h"
#include "cohort/ps/server/serving_export.h"

#include "cohort/cli/parse.h"
#include "apps/ps/commands.h"

namespace cohort::cli {

namespace {

struct ExportFlags {
  std::string checkpoint;
  std::string output;
  int64_t pushed_since = 0;
};

namespace fs = std::filesystem;

// Where files are written before they get their places in `output`. With it goes what it made.
class Staging {
 public:
  explicit Staging(const std::string& output)
      : path_(fs::path(output) / (".export-of-" + std::to_string(::getpid()))) {
    std::error_code error;
    for (fs::path folder = output; !folder.empty() && !fs::exists(folder, error) && !error;
         folder = folder.parent_path())
      made_.push_back(folder);
  }
  ~Staging() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
    for (const fs::path& folder : made_) fs::remove(folder, ignored);  // Unless it holds something.
  }
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  std::string path() const { return path_.string(); }

 private:
  fs::path path_;
  std::vector<fs::path> made_;
};

// What is in `output` stays until all of the new files are written.
std::vector<ps::ServingFile> export_whole(const ExportFlags& flags) {
  const Staging staging(flags.output);
  auto files = ps::export_for_serving(flags.checkpoint, staging.path(),
                                      static_cast<uint32_t>(flags.pushed_since));
  for (ps::ServingFile& file : files) {
    const fs::path place = fs::path(flags.output) / fs::path(file.path).filename();
    fs::rename(file.path, place);
    file.path = place.string();
  }
  const Fd folder(::open(flags.output.c_str(), O_RDONLY | O_CLOEXEC));
  ::fsync(folder.get());  // The names, too, outlive a power cut.
  return files;
}

int run_export(const ExportFlags& flags) {
  constexpr int64_t kLatest = std::numeric_limits<uint32_t>::max();
  if (flags.pushed_since > kLatest)
    throw ConfigError("--pushed-since: expected seconds since 1970, at most " +
                      std::to_string(kLatest) + ", got " + std::to_string(flags.pushed_since));
  for (const ps::ServingFile& file : export_whole(flags))
    std::printf("%s  %lld %s\n", file.path.c_str(), static_cast<long long>(file.count),
                file.what.c_str());
  return kExitOk;
}

}  // namespace

void add_export_command(CLI::App& app, PsCommand& command) {
  auto flags = std::make_shared<ExportFlags>();
  CLI::App* const subcommand =
      app.add_subcommand("export", "Makes files for serving from a checkpoint of servers");
  subcommand->add_option("checkpoint", flags->checkpoint, "Folder that Session::save wrote")
      ->required()
      ->type_name(kFolder);
  subcommand
      ->add_option("--output", flags->output, "Folder of dense.safetensors and TABLE.safetensors")
      ->required()
      ->type_name(kFolder);
  subcommand
      ->add_option("--pushed-since", flags->pushed_since,
                   "Only rows pushed to since then (seconds since 1970): a delta")
      ->check(whole_number());
  subcommand->callback([flags, &command] { command.run = [flags] { return run_export(*flags); }; });
}

}  // namespace cohort::cli
