// SPDX-License-Identifier: Apache-2.0
// Refuses JSON in which a key occurs twice. For the readers of this folder's files.
#pragma once
#include <functional>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <utility>

namespace cohort {

/// A callback for nlohmann::json::parse, which by itself keeps the last of two equal keys without a
/// word. For objects of at most three levels: those below the top follow one another.
class UniqueKeys {
 public:
  /// `fail` throws; it gets what is wrong.
  explicit UniqueKeys(std::function<void(const std::string&)> fail) : fail_(std::move(fail)) {}

  bool operator()(int depth, nlohmann::json::parse_event_t event, nlohmann::json& value) {
    using Event = nlohmann::json::parse_event_t;
    if (depth > 3) fail_("an object is nested too deeply");
    if (event == Event::key) {
      auto& seen = depth == 1 ? names_ : fields_;
      const auto& key = value.get_ref<const std::string&>();
      if (!seen.insert(key).second) fail_("\"" + key + "\" occurs twice");
    } else if (event == Event::object_start) {
      fields_.clear();
    }
    return true;
  }

 private:
  std::function<void(const std::string&)> fail_;
  std::set<std::string> names_;
  std::set<std::string> fields_;
};

}  // namespace cohort
