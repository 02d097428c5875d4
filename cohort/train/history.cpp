// SPDX-License-Identifier: Apache-2.0
#include "cohort/train/history.h"

#include <fstream>
#include <nlohmann/json.hpp>

namespace cohort::train {
namespace {

using OrderedJson = nlohmann::ordered_json;

// Returns the length of the whole lines up to where the run resumes.
off_t kept_length(const std::string& path, int64_t last_update,
                  const std::optional<std::string>& later_type, const std::string& counter) {
  std::ifstream file(path, std::ios::binary);
  off_t length = 0;
  for (std::string line; std::getline(file, line) && !file.eof();
       length += static_cast<off_t>(line.size()) + 1) {
    const auto json = OrderedJson::parse(line, nullptr, /*allow_exceptions=*/false);
    if (!json.is_object() || !json.contains(counter) || !json[counter].is_number_integer())
      continue;
    const auto update = json[counter].get<int64_t>();
    if (update > last_update) break;
    if (update == last_update && later_type && json.contains("type") && json["type"] == *later_type)
      break;
  }
  return length;
}

}  // namespace

History::History(const std::string& path, int64_t last_update,
                 const std::optional<std::string>& later_type, const std::string& counter)
    : file_(path) {
  file_.truncate(kept_length(path, last_update, later_type, counter));
}

void History::append(const std::vector<Field>& fields) {
  OrderedJson json = OrderedJson::object();
  for (const auto& [key, value] : fields) {
    std::visit([&, name = std::string(key)](const auto& content) { json[name] = content; },
               value.get());
  }
  // The JSON library writes null for NaN and infinities by itself.
  file_.append(json.dump(-1, ' ', false, OrderedJson::error_handler_t::replace) + '\n');
}

}  // namespace cohort::train
