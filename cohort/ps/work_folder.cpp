// SPDX-License-Identifier: Apache-2.0
#include "cohort/ps/work_folder.h"

#include <cerrno>
#include <cstdlib>
#include <system_error>

#include "cohort/base/atomic_file.h"
#include "cohort/base/error.h"
#include "cohort/base/system_error.h"

namespace cohort::ps {

namespace fs = std::filesystem;

WorkFolder::WorkFolder(const std::string& parent) : path_(parent + "/.work-XXXXXX") {
  std::error_code error;
  for (fs::path folder = parent; !folder.empty() && !fs::exists(folder, error) && !error;
       folder = folder.parent_path())
    made_.push_back(folder);
  make_folder(parent);
  if (::mkdtemp(path_.data()) == nullptr)
    throw_without_stack(path_ + ": cannot make this folder: " + system_reason(errno));
}

WorkFolder::~WorkFolder() {
  std::error_code ignored;
  fs::remove_all(path_, ignored);
  for (const fs::path& folder : made_) fs::remove(folder, ignored);  // Unless it holds something.
}

}  // namespace cohort::ps
