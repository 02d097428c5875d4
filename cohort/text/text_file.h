// SPDX-License-Identifier: Apache-2.0
// Reads text files, whole or line by line; shared by the tokenizer and the readers of parallel
// text.
#pragma once
#include <cstdint>
#include <filesystem>
#include <iosfwd>
#include <string>
#include <utility>
#include <vector>

namespace cohort::text {

/// Opens `path` to be read from its start.
/// Errors: ConfigError that names the file and the reason if it cannot be opened.
std::ifstream open_text(const std::filesystem::path& path);

/// Returns the bytes of `path`.
/// Errors: ConfigError that names the file and the reason if it cannot be read.
std::string read_file(const std::filesystem::path& path);

/// What a byte order mark (U+FEFF) at the start of a text is.
enum class ByteOrderMark { kIsNoText, kIsText };

/// Gives the lines of a stream one by one, without line ends.
///
/// Lines end at "\n" or "\r\n" only; the last line's end is optional. A byte order mark at the
/// start is removed, unless it is text. `name` stands for the stream in errors. Memory is bounded
/// whatever comes.
/// Errors: ConfigError that names `name` and the line (from 1) if a line is not valid UTF-8 or has
///         more than kMaxLineBytes, or if reading fails.
class LineReader {
 public:
  static constexpr size_t kMaxLineBytes = size_t{16} << 20;

  /// `stream` must outlive the reader.
  LineReader(std::istream& stream, std::string name, ByteOrderMark mark = ByteOrderMark::kIsNoText)
      : stream_(stream), name_(std::move(name)), mark_(mark) {}
  /// Puts the next line into `line`; returns whether there was one. May block on the stream.
  bool next(std::string& line);
  int64_t number() const { return number_; }  ///< Of the last line, from 1; 0 before the first.

 private:
  bool read(std::string& line);

  std::istream& stream_;
  std::string name_;
  ByteOrderMark mark_;
  int64_t number_ = 0;
};

/// Returns the lines of `content`, as LineReader gives them.
std::vector<std::string> split_lines(const std::string& content, const std::string& name,
                                     ByteOrderMark mark = ByteOrderMark::kIsNoText);

/// Returns the lines of a file, as LineReader gives them; one whose name ends in ".gz" is unpacked.
/// Errors: ConfigError as read_file and LineReader, and for a damaged ".gz".
std::vector<std::string> read_lines(const std::filesystem::path& path,
                                    ByteOrderMark mark = ByteOrderMark::kIsNoText);

/// Returns the lines of a stream up to its end, as LineReader gives them.
/// Errors: as LineReader.
std::vector<std::string> read_lines(std::istream& stream, const std::string& name,
                                    ByteOrderMark mark = ByteOrderMark::kIsNoText);

}  // namespace cohort::text
