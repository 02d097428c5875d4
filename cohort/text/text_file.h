// Reads text files whole; shared by the tokenizer and the readers of parallel text.
#pragma once
#include <filesystem>
#include <iosfwd>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::text {

/// Returns the bytes of `path`.
/// Errors: ConfigError that names the file and the reason if it cannot be read.
std::string read_file(const std::filesystem::path& path);

/// Returns the lines of `content`, without line ends.
///
/// Lines end at "\n" or "\r\n" only; the last line's end is optional. A byte order mark at the
/// start is removed. `name` stands for the content in errors.
/// Errors: ConfigError that names `name` and the line (from 1) if a line is not valid UTF-8.
std::vector<std::string> split_lines(std::string_view content, const std::string& name);

/// Returns the lines of a file, as split_lines gives them.
/// Errors: ConfigError as read_file and split_lines.
std::vector<std::string> read_lines(const std::filesystem::path& path);

/// Returns the lines of a stream up to its end, as split_lines gives them.
/// Errors: ConfigError as split_lines, or if reading fails.
std::vector<std::string> read_lines(std::istream& stream, const std::string& name);

}  // namespace cohort::text
