// SPDX-License-Identifier: Apache-2.0
#include "cohort/text/text_file.h"

#include <array>
#include <cerrno>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <istream>
#include <memory>
#include <sstream>
#include <system_error>
#include <zlib.h>

#include "cohort/base/error.h"
#include "cohort/text/utf8.h"

namespace cohort::text {
namespace {

constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";

[[noreturn]] void fail(const std::filesystem::path& path, int error_number) {
  throw ConfigError(path.string() +
                    ": cannot be read: " + std::generic_category().message(error_number));
}

// The content of a file in gzip's form, and of no other: zlib would hand that out as it is.
std::string unpack(const std::filesystem::path& path) {
  open_text(path);  // For its words about what cannot be read.
  const std::unique_ptr<gzFile_s, int (*)(gzFile)> file(::gzopen(path.c_str(), "rb"), ::gzclose_r);
  std::string content;
  std::array<char, 1 << 16> buffer{};
  int error = Z_DATA_ERROR;
  if (file != nullptr && ::gzdirect(file.get()) == 0) {
    int count = 0;
    while ((count = ::gzread(file.get(), buffer.data(), buffer.size())) > 0)
      content.append(buffer.data(), static_cast<size_t>(count));
    ::gzerror(file.get(), &error);  // Also of a file that ends too soon.
  }
  if (error != Z_OK) throw ConfigError(path.string() + ": expected a whole gzip file");
  return content;
}

}  // namespace

std::ifstream open_text(const std::filesystem::path& path) {
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored)) fail(path, EISDIR);
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  if (!file) fail(path, errno != 0 ? errno : EIO);
  return file;
}

std::string read_file(const std::filesystem::path& path) {
  std::ifstream file = open_text(path);
  std::string content;
  std::array<char, 1 << 16> buffer{};
  while (file.read(buffer.data(), buffer.size()) || file.gcount() > 0) {
    content.append(buffer.data(), static_cast<size_t>(file.gcount()));
  }
  if (file.bad()) fail(path, EIO);
  return content;
}

bool LineReader::read(std::string& line) {
  std::array<char, 1 << 14> part{};
  line.clear();
  while (true) {
    stream_.getline(part.data(), part.size());
    const auto count = static_cast<size_t>(stream_.gcount());
    if (stream_.bad()) return false;
    const bool ended = stream_.eof();
    const bool whole = !stream_.fail() && !ended;  // The line's end has been read, and counted.
    if (!whole && !ended && count == 0) return false;
    line.append(part.data(), whole ? count - 1 : count);
    if (line.size() > kMaxLineBytes) {
      throw ConfigError(name_ + ": line " + std::to_string(number_ + 1) + " has more than " +
                        std::to_string(kMaxLineBytes >> 20) + " MiB: expected sentences");
    }
    if (whole) return true;
    if (ended) return !line.empty();
    stream_.clear();
  }
}

bool LineReader::next(std::string& line) {
  if (!read(line)) {
    // Standard input's own buffer takes an error for the end.
    const bool failed = stream_.bad() || (&stream_ == &std::cin && std::ferror(stdin) != 0);
    if (failed) throw ConfigError(name_ + ": cannot be read");
    return false;
  }
  if (++number_ == 1 && mark_ == ByteOrderMark::kIsNoText && line.starts_with(kByteOrderMark))
    line.erase(0, kByteOrderMark.size());
  if (line.ends_with('\r')) line.pop_back();
  if (find_invalid_utf8(line)) {
    throw ConfigError(name_ + ": line " + std::to_string(number_) + " is not valid UTF-8");
  }
  return true;
}

std::vector<std::string> read_lines(std::istream& stream, const std::string& name,
                                    ByteOrderMark mark) {
  LineReader reader(stream, name, mark);
  std::vector<std::string> lines;
  for (std::string line; reader.next(line);) lines.push_back(line);
  return lines;
}

std::vector<std::string> split_lines(const std::string& content, const std::string& name,
                                     ByteOrderMark mark) {
  std::istringstream stream(content);
  return read_lines(stream, name, mark);
}

std::vector<std::string> read_lines(const std::filesystem::path& path, ByteOrderMark mark) {
  const bool packed = path.extension() == ".gz";
  return split_lines(packed ? unpack(path) : read_file(path), path.string(), mark);
}

}  // namespace cohort::text
