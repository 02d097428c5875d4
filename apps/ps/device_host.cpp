// SPDX-License-Identifier: Apache-2.0
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <unistd.h>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/base/system_error.h"

#include "apps/ps/device.h"

namespace cohort::cli {

ps::BlockMaker blocks_on(const std::string& device) {
  if (device == "host") return ps::make_host_block;
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  std::string line((std::istreambuf_iterator<char>(file)), {});
  std::vector<char*> arguments;
  for (size_t begin = 0; begin < line.size(); begin = line.find('\0', begin) + 1)
    arguments.push_back(&line[begin]);
  arguments.push_back(nullptr);
  const auto program =
      std::filesystem::read_symlink("/proc/self/exe").parent_path() / "cohort_ps_tensors";
  ::execv(program.c_str(), arguments.data());
  throw ConfigError("--device " + device + ": needs " + program.string() + ": " +
                    system_reason(errno));
}

}  // namespace cohort::cli
