// A data set of pictures as a folder of folders: ROOT/<class>/.../<picture>.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace cohort::image {

/// One picture of the set.
struct LabelledPath {
  std::string path{};
  int64_t label = 0;  ///< The place of its class in classes().
};

/// Lists the pictures below `root`. Classes are the names of its folders, sorted by bytes; within
/// a class, paths are sorted likewise: the same numbers on every machine, and torchvision's.
///
/// Threads: immutable after construction.
class ImageFolder {
 public:
  /// `extensions` in small letters with their dot; capitals count as small ones.
  /// Errors: ConfigError that names the folder: missing, without folders, or a class without
  ///         pictures.
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
