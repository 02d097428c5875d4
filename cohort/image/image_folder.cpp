// SPDX-License-Identifier: Apache-2.0
#include "cohort/image/image_folder.h"

#include <algorithm>
#include <filesystem>
#include <utility>

#include "cohort/base/error.h"

namespace cohort::image {
namespace {

namespace fs = std::filesystem;

bool has_extension(const fs::path& path, const std::vector<std::string>& extensions) {
  std::string extension = path.extension().string();
  for (char& c : extension) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  }
  return std::find(extensions.begin(), extensions.end(), extension) != extensions.end();
}

std::string listed(const std::vector<std::string>& words) {
  std::string text;
  for (const auto& word : words) text += (text.empty() ? "" : ", ") + word;
  return text;
}

// Sorted by folder, then by name.
std::vector<std::string> pictures_below(const fs::path& folder,
                                        const std::vector<std::string>& extensions) {
  std::vector<std::pair<std::string, std::string>> found;
  const auto options = fs::directory_options::follow_directory_symlink;
  for (const auto& entry : fs::recursive_directory_iterator(folder, options)) {
    if (entry.is_regular_file() && has_extension(entry.path(), extensions)) {
      found.emplace_back(entry.path().parent_path().string(), entry.path().filename().string());
    }
  }
  std::ranges::sort(found);
  std::vector<std::string> paths;
  for (const auto& [parent, name] : found) paths.push_back((fs::path(parent) / name).string());
  return paths;
}

}  // namespace

ImageFolder::ImageFolder(const std::string& root, const std::vector<std::string>& extensions) try {
  if (!fs::is_directory(root)) throw ConfigError(root + ": expected a folder of classes");
  for (const auto& entry : fs::directory_iterator(root)) {
    if (entry.is_directory()) classes_.push_back(entry.path().filename().string());
  }
  if (classes_.empty()) {
    throw ConfigError(root + ": expected one folder for each class, found none");
  }
  std::sort(classes_.begin(), classes_.end());
  for (size_t label = 0; label < classes_.size(); ++label) {
    const fs::path folder = fs::path(root) / classes_[label];
    const auto paths = pictures_below(folder, extensions);
    if (paths.empty()) {
      throw ConfigError(folder.string() + ": class without images (" + listed(extensions) + ")");
    }
    for (const auto& path : paths) pictures_.push_back({path, static_cast<int64_t>(label)});
  }
} catch (const fs::filesystem_error& error) {
  throw ConfigError(error.path1().string() + ": " + error.code().message());
}

}  // namespace cohort::image
