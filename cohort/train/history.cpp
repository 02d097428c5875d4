#include "cohort/train/history.h"

#include <cerrno>
#include <cmath>
#include <fcntl.h>
#include <fstream>
#include <nlohmann/json.hpp>
#include <system_error>
#include <unistd.h>

#include "cohort/base/error.h"

namespace cohort::train {
namespace {

using Json = nlohmann::ordered_json;

std::string reason() {
  return std::generic_category().message(errno);
}

// Returns the length of the whole lines up to `last_update`.
off_t kept_length(const std::string& path, int64_t last_update) {
  std::ifstream file(path, std::ios::binary);
  off_t length = 0;
  for (std::string line; std::getline(file, line) && !file.eof();
       length += static_cast<off_t>(line.size()) + 1) {
    const auto json = Json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (json.is_object() && json.contains("update") && json["update"].is_number_integer() &&
        json["update"].get<int64_t>() > last_update) {
      break;
    }
  }
  return length;
}

}  // namespace

History::History(const std::string& path, int64_t last_update)
    : path_(path), file_(::open(path.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0666)) {
  if (file_ < 0 || ::ftruncate(file_, kept_length(path, last_update)) != 0) {
    const std::string why = reason();
    if (file_ >= 0) ::close(file_);
    throw ConfigError("history " + path + ": expected a writable file: " + why);
  }
}

History::~History() {
  ::close(file_);
}

void History::append(std::initializer_list<Field> fields) {
  Json json = Json::object();
  for (const auto& [key, value] : fields) {
    std::visit([&, name = std::string(key)](const auto& content) { json[name] = content; },
               value.get());
  }
  // The JSON library writes null for NaN and infinities by itself.
  std::string line = json.dump(-1, ' ', false, Json::error_handler_t::replace) + '\n';
  std::string_view rest = line;
  while (!rest.empty()) {
    const ssize_t written = ::write(file_, rest.data(), rest.size());
    if (written < 0 && errno == EINTR) continue;
    TORCH_CHECK(written >= 0, "history ", path_, ": cannot write: ", reason());
    rest.remove_prefix(static_cast<size_t>(written));
  }
}

}  // namespace cohort::train
