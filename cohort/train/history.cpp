#include "cohort/train/history.h"

#include <cerrno>
#include <cmath>
#include <fcntl.h>
#include <nlohmann/json.hpp>
#include <sys/stat.h>
#include <system_error>
#include <unistd.h>

#include "cohort/base/error.h"

namespace cohort::train {
namespace {

using Json = nlohmann::ordered_json;

std::string reason() {
  return std::generic_category().message(errno);
}

// Returns the length of the file up to and with its last newline.
off_t whole_lines(int file) {
  struct stat facts {};
  if (::fstat(file, &facts) != 0) return 0;
  off_t end = facts.st_size;
  char last = '\n';
  while (end > 0 && ::pread(file, &last, 1, end - 1) == 1 && last != '\n') --end;
  return end;
}

}  // namespace

History::History(const std::string& path)
    : path_(path), file_(::open(path.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0666)) {
  if (file_ < 0 || ::ftruncate(file_, whole_lines(file_)) != 0) {
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
