#include "cohort/text/parallel_text.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/text/utf8.h"

namespace cohort::text {
namespace {

void add_pair(std::string source, std::string target, ParallelText& text) {
  if (trim(source).empty() || trim(target).empty()) {
    ++text.num_dropped_empty;
    return;
  }
  text.source.push_back(std::move(source));
  text.target.push_back(std::move(target));
}

ParallelText read_two_files(const std::filesystem::path& source_path,
                            const std::filesystem::path& target_path) {
  std::vector<std::string> source = read_lines(source_path);
  std::vector<std::string> target = read_lines(target_path);
  if (source.size() != target.size()) {
    throw ConfigError(source_path.string() + " has " + std::to_string(source.size()) +
                      " lines but " + target_path.string() + " has " +
                      std::to_string(target.size()) + ": expected as many");
  }
  ParallelText text;
  for (size_t i = 0; i < source.size(); ++i) {
    add_pair(std::move(source[i]), std::move(target[i]), text);
  }
  return text;
}

ParallelText read_tsv(const std::filesystem::path& path) {
  ParallelText text;
  int64_t number = 0;
  for (const std::string& line : read_lines(path)) {
    ++number;
    const auto tabs = std::count(line.begin(), line.end(), '\t');
    if (tabs != 1) {
      throw ConfigError(path.string() + ": line " + std::to_string(number) +
                        ": expected source<TAB>target, found " + std::to_string(tabs) + " tabs");
    }
    const size_t tab = line.find('\t');
    add_pair(line.substr(0, tab), line.substr(tab + 1), text);
  }
  return text;
}

ParallelText read_json(const std::filesystem::path& path) {
  const std::string content = read_file(path);
  split_lines(content, path.string());  // For the line number of bytes that are not UTF-8.
  nlohmann::json items;
  try {
    items = nlohmann::json::parse(content);
  } catch (const nlohmann::json::parse_error& error) {
    const auto end =
        content.begin() + static_cast<std::ptrdiff_t>(std::min(error.byte, content.size()));
    throw ConfigError(path.string() + ": line " +
                      std::to_string(1 + std::count(content.begin(), end, '\n')) +
                      ": expected JSON [[\"source\", \"target\"], ...], found a syntax error");
  }
  if (!items.is_array()) {
    throw ConfigError(path.string() + ": expected JSON [[\"source\", \"target\"], ...], found " +
                      items.type_name());
  }
  ParallelText text;
  for (size_t i = 0; i < items.size(); ++i) {
    nlohmann::json& item = items[i];
    if (!item.is_array() || item.size() != 2 || !item[0].is_string() || !item[1].is_string()) {
      throw ConfigError(path.string() + ": item " + std::to_string(i) +
                        ": expected [\"source\", \"target\"]");
    }
    for (const auto& side : item) {
      if (side.get_ref<const std::string&>().find('\n') != std::string::npos) {
        throw ConfigError(path.string() + ": item " + std::to_string(i) +
                          ": expected sentences of one line each");
      }
    }
    add_pair(std::move(item[0].get_ref<std::string&>()), std::move(item[1].get_ref<std::string&>()),
             text);
  }
  return text;
}

ParallelText read_any(std::span<const std::filesystem::path> paths) {
  if (paths.size() == 2) return read_two_files(paths[0], paths[1]);
  if (paths.size() != 1) {
    throw ConfigError("parallel text: expected one or two files, found " +
                      std::to_string(paths.size()));
  }
  const std::string extension = paths[0].extension().string();
  if (extension == ".tsv") return read_tsv(paths[0]);
  if (extension == ".json") return read_json(paths[0]);
  throw ConfigError(paths[0].string() +
                    ": expected a .tsv or .json file, or two files (source, target)");
}

}  // namespace

ParallelText read_parallel_text(std::span<const std::filesystem::path> paths) {
  ParallelText text = read_any(paths);
  if (text.source.empty()) {
    throw ConfigError(paths[0].string() + ": no sentence pair in it, " +
                      std::to_string(text.num_dropped_empty) + " dropped as empty");
  }
  return text;
}

}  // namespace cohort::text
