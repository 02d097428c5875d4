// SPDX-License-Identifier: Apache-2.0
// A data set of images as a folder of folders: ROOT/<class>/.../<image>.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace cohort::image {

/// One image of the set.
struct LabelledPath {
  std::string path{};
  int64_t label = 0;  ///< The index of its class in classes().
};

/// Lists the images below `root`. Classes are the names of its folders, sorted by bytes; within
/// a class, images are sorted by their folder, then by their name: the same numbers on every machine
/// and in torchvision.
///
/// Threads: immutable after construction.
class ImageFolder {
 public:
  /// `extensions` in lower case with their dot; the case of a file's extension is ignored.
  /// Errors: ConfigError with the folder's name: missing, without folders, or a class without
  ///         images.
  explicit ImageFolder(const std::string& root,
                       const std::vector<std::string>& extensions = {".jpg", ".jpeg", ".png"});

  const std::vector<std::string>& classes() const { return classes_; }
  int64_t size() const { return static_cast<int64_t>(pictures_.size()); }
  /// `number` in [0, size()).
  const LabelledPath& at(int64_t number) const { return pictures_.at(static_cast<size_t>(number)); }

 private:
  std::vector<std::string> classes_;
  std::vector<LabelledPath> pictures_;
};

}  // namespace cohort::image
