#include "cohort/text/text_file.h"

#include <array>
#include <cerrno>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <istream>
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
  std::string content;
  std::array<char, 1 << 16> buffer{};
  while (file.read(buffer.data(), buffer.size()) || file.gcount() > 0) {
    content.append(buffer.data(), static_cast<size_t>(file.gcount()));
  }
  if (file.bad()) fail(EIO);
  return content;
}

bool LineReader::next(std::string& line) {
  if (!std::getline(stream_, line)) {
    // Standard input's own buffer takes an error for the end.
    const bool failed = stream_.bad() || (&stream_ == &std::cin && std::ferror(stdin) != 0);
    if (failed) throw ConfigError(name_ + ": cannot be read");
    return false;
  }
  if (++number_ == 1 && line.starts_with(kByteOrderMark)) line.erase(0, kByteOrderMark.size());
  if (line.ends_with('\r')) line.pop_back();
  if (find_invalid_utf8(line)) {
    throw ConfigError(name_ + ": line " + std::to_string(number_) + " is not valid UTF-8");
  }
  return true;
}

std::vector<std::string> read_lines(std::istream& stream, const std::string& name) {
  LineReader reader(stream, name);
  std::vector<std::string> lines;
  for (std::string line; reader.next(line);) lines.push_back(line);
  return lines;
}

std::vector<std::string> split_lines(const std::string& content, const std::string& name) {
  std::istringstream stream(content);
  return read_lines(stream, name);
}

std::vector<std::string> read_lines(const std::filesystem::path& path) {
  return split_lines(read_file(path), path.string());
}

}  // namespace cohort::text
