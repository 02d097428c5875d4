// SPDX-License-Identifier: Apache-2.0
#include "cohort/text/parallel_text.h"

#include <algorithm>
#include <fstream>
#include <istream>
#include <nlohmann/json.hpp>
#include <random>
#include <string_view>
#include <system_error>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/text/utf8.h"

namespace cohort::text {
namespace {

namespace fs = std::filesystem;

constexpr const char* kJsonForm = ": expected JSON [[\"source\", \"target\"], ...], found ";

// Hands pairs on and counts those that it leaves out.
class Filter {
 public:
  explicit Filter(const TakePair& take) : take_(take) {}
  void operator()(std::string& source, std::string& target) {
    if (trim(source).empty() || trim(target).empty()) {
      ++num_dropped_;
      return;
    }
    ++num_taken_;
    take_(source, target);
  }
  int64_t num_taken() const { return num_taken_; }
  int64_t num_dropped() const { return num_dropped_; }

 private:
  const TakePair& take_;
  int64_t num_taken_ = 0;
  int64_t num_dropped_ = 0;
};

void read_two_files(const fs::path& source_path, const fs::path& target_path, Filter& filter) {
  std::ifstream source_file = open_text(source_path);
  std::ifstream target_file = open_text(target_path);
  LineReader sources(source_file, source_path.string());
  LineReader targets(target_file, target_path.string());
  std::string source;
  std::string target;
  while (true) {
    const bool has_source = sources.next(source);
    const bool has_target = targets.next(target);
    if (!has_source && !has_target) return;
    if (has_source != has_target) break;
    filter(source, target);
  }
  while (sources.next(source)) {
  }
  while (targets.next(target)) {
  }
  throw ConfigError(source_path.string() + " has " + std::to_string(sources.number()) +
                    " lines but " + target_path.string() + " has " +
                    std::to_string(targets.number()) + ": expected as many");
}

void read_tsv(const fs::path& path, Filter& filter) {
  std::ifstream file = open_text(path);
  LineReader lines(file, path.string());
  std::string source;
  std::string target;
  for (std::string line; lines.next(line);) {
    const auto tabs = std::count(line.begin(), line.end(), '\t');
    if (tabs != 1) {
      throw ConfigError(path.string() + ": line " + std::to_string(lines.number()) +
                        ": expected source<TAB>target, found " + std::to_string(tabs) + " tabs");
    }
    const size_t tab = line.find('\t');
    source = line.substr(0, tab);
    target = line.substr(tab + 1);
    filter(source, target);
  }
}

// Checks the form of the JSON text as its parts come, and hands each pair on when it is there. The
// parser itself takes strings only if they are well-formed UTF-8.
class PairHandler : public nlohmann::json_sax<nlohmann::json> {
 public:
  PairHandler(const fs::path& path, Filter& filter) : path_(path), filter_(filter) {}

  bool null() override { return refuse("null"); }
  bool boolean(bool) override { return refuse("boolean"); }
  bool number_integer(number_integer_t) override { return refuse("number"); }
  bool number_unsigned(number_unsigned_t) override { return refuse("number"); }
  bool number_float(number_float_t, const string_t&) override { return refuse("number"); }
  bool binary(binary_t&) override { return refuse("binary"); }
  bool start_object(size_t) override { return refuse("object"); }
  bool key(string_t&) override { return refuse("object"); }
  bool end_object() override { return refuse("object"); }
  bool string(string_t& text) override {
    if (depth_ != 2 || num_sides_ == 2) return refuse("string");
    if (text.find('\n') != std::string::npos) fail_item("expected sentences of one line each");
    if (text.size() > LineReader::kMaxLineBytes) {
      fail_item("expected sentences of at most " + std::to_string(LineReader::kMaxLineBytes >> 20) +
                " MiB");
    }
    sides_[num_sides_++] = std::move(text);
    return true;
  }
  bool start_array(size_t) override {
    if (depth_ == 2) return refuse("array");
    ++depth_;
    num_sides_ = 0;
    return true;
  }
  bool end_array() override {
    if (--depth_ == 0) return true;
    if (num_sides_ != 2) return refuse("array");
    filter_(sides_[0], sides_[1]);
    ++item_;
    return true;
  }
  // "[json.exception.parse_error.101] parse error at line 2, column 3: ...; last read: ..."
  bool parse_error(size_t, const std::string&, const nlohmann::detail::exception& error) override {
    const std::string_view what = error.what();
    const std::string_view why = what.substr(0, what.find("; last read"));
    if (why.find("UTF-8") != std::string_view::npos)
      throw ConfigError(path_.string() + ": item " + std::to_string(item_) + " is not valid UTF-8");
    // A number that no double holds ("out_of_range.406") is told without a place.
    if (why.find(" at line ") == std::string_view::npos) return refuse("number");
    const size_t line = why.find(" at line ") + 3;
    throw ConfigError(path_.string() + ":" + std::string(why.substr(line, why.find(',') - line)) +
                      kJsonForm + "a syntax error");
  }

 private:
  [[noreturn]] void fail_item(const std::string& expected) const {
    throw ConfigError(path_.string() + ": item " + std::to_string(item_) + ": " + expected);
  }
  bool refuse(const char* found) const {
    if (depth_ == 0) throw ConfigError(path_.string() + kJsonForm + found);
    fail_item("expected [\"source\", \"target\"]");
  }

  const fs::path& path_;
  Filter& filter_;
  int depth_ = 0;  // 1: in the list, 2: in a pair
  size_t num_sides_ = 0;
  std::string sides_[2];
  int64_t item_ = 0;
};

void read_json(const fs::path& path, Filter& filter) {
  std::ifstream file = open_text(path);
  PairHandler handler(path, filter);
  try {
    nlohmann::json::sax_parse(file, &handler);
  } catch (const std::ios_base::failure&) {  // The parser reads the stream's buffer itself.
    throw ConfigError(path.string() + ": cannot be read");
  }
}

void read_any(std::span<const fs::path> paths, Filter& filter) {
  for (const fs::path& path : paths) {
    if (path.extension() == ".gz")
      throw ConfigError(path.string() + ": expected unpacked text (gunzip --keep)");
  }
  if (paths.size() == 2) return read_two_files(paths[0], paths[1], filter);
  if (paths.size() != 1) {
    throw ConfigError("parallel text: expected one or two files, got " +
                      std::to_string(paths.size()));
  }
  const std::string extension = paths[0].extension().string();
  if (extension == ".tsv") return read_tsv(paths[0], filter);
  if (extension == ".json") return read_json(paths[0], filter);
  throw ConfigError(paths[0].string() +
                    ": expected a .tsv or .json file, or two files (source, target)");
}

}  // namespace

void check_regular_files(std::span<const fs::path> paths) {
  for (const fs::path& path : paths) {
    std::error_code error;
    const fs::file_status status = fs::status(path, error);
    if (status.type() == fs::file_type::directory)
      error = std::make_error_code(std::errc::is_a_directory);
    if (error) throw ConfigError(path.string() + ": cannot be read: " + error.message());
    if (!fs::is_regular_file(status))
      throw ConfigError(path.string() + ": expected a regular file, for it is read more than once");
  }
}

int64_t for_each_pair(std::span<const fs::path> paths, const TakePair& take) {
  Filter filter(take);
  read_any(paths, filter);
  if (filter.num_taken() == 0) {
    throw ConfigError(paths[0].string() + ": no sentence pair in it, " +
                      std::to_string(filter.num_dropped()) + " dropped as empty");
  }
  return filter.num_dropped();
}

ParallelText read_parallel_text(std::span<const fs::path> paths) {
  ParallelText text;
  text.num_dropped_empty = for_each_pair(paths, [&](std::string& source, std::string& target) {
    text.source.push_back(std::move(source));
    text.target.push_back(std::move(target));
  });
  return text;
}

// Algorithm R: Vitter 1985, "Random sampling with a reservoir".
ParallelText sample_parallel_text(std::span<const fs::path> paths, int64_t most) {
  ParallelText text;
  std::mt19937_64 random(1);  // its numbers are the standard's, on every machine
  uint64_t num_seen = 0;
  text.num_dropped_empty = for_each_pair(paths, [&](std::string& source, std::string& target) {
    ++num_seen;
    if (std::ssize(text.source) < most) {
      text.source.push_back(std::move(source));
      text.target.push_back(std::move(target));
      return;
    }
    const uint64_t place = random() % num_seen;  // as even as 64 bits make it
    if (place >= static_cast<uint64_t>(most)) return;
    text.source[place] = std::move(source);
    text.target[place] = std::move(target);
  });
  return text;
}

}  // namespace cohort::text
