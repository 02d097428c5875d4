#include "cohort/text/text_file.h"

#include <cerrno>
#include <fstream>
#include <istream>
#include <iterator>
#include <sstream>
#include <system_error>

#include "cohort/base/error.h"
#include "cohort/text/utf8.h"

namespace cohort::text {
namespace {

constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";

}  // namespace

std::string read_file(const std::filesystem::path& path) {
  const auto fail = [&path](int error_number) {
    throw ConfigError(path.string() +
                      ": cannot be read: " + std::generic_category().message(error_number));
  };
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored)) fail(EISDIR);
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  if (!file) fail(errno != 0 ? errno : EIO);
  std::ostringstream content;
  content << file.rdbuf();
  if (file.bad()) fail(EIO);
  return std::move(content).str();
}

std::vector<std::string> split_lines(std::string_view content, const std::string& name) {
  if (content.substr(0, kByteOrderMark.size()) == kByteOrderMark) {
    content.remove_prefix(kByteOrderMark.size());
  }
  std::vector<std::string> lines;
  while (!content.empty()) {
    const size_t end = content.find('\n');
    std::string_view line = content.substr(0, end);
    content.remove_prefix(end == std::string_view::npos ? content.size() : end + 1);
    if (!line.empty() && line.back() == '\r') line.remove_suffix(1);
    if (find_invalid_utf8(line)) {
      throw ConfigError(name + ": line " + std::to_string(lines.size() + 1) +
                        " is not valid UTF-8");
    }
    lines.emplace_back(line);
  }
  return lines;
}

std::vector<std::string> read_lines(const std::filesystem::path& path) {
  return split_lines(read_file(path), path.string());
}

std::vector<std::string> read_lines(std::istream& stream, const std::string& name) {
  const std::string content{std::istreambuf_iterator<char>(stream), {}};
  if (stream.bad()) throw ConfigError(name + ": cannot be read");
  return split_lines(content, name);
}

}  // namespace cohort::text
