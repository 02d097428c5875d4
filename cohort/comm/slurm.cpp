// SPDX-License-Identifier: Apache-2.0
#include "cohort/comm/slurm.h"

#include <charconv>
#include <cstdint>

#include "cohort/base/error.h"

namespace cohort::comm {
namespace {

constexpr size_t kMaxItems = 65'536;

// Carries the whole list for the error.
struct Reader {
  const std::string& list;
  const std::string& variable;

  [[noreturn]] void fail(const std::string& expected) const {
    throw ConfigError(variable + "=" + list + ": expected " + expected);
  }

  int number(const std::string& text) const {
    int value = 0;
    const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || stop != text.data() + text.size() || value < 0)
      fail("a number in place of \"" + text + "\"");
    return value;
  }

  // Cuts at commas outside of brackets.
  std::vector<std::string> split(const std::string& text) const {
    std::vector<std::string> items(1);
    int depth = 0;
    for (const char c : text) {
      depth += (c == '[') - (c == ']');
      if (depth < 0) fail("an opening [");
      if (c == ',' && depth == 0) {
        items.emplace_back();
      } else {
        items.back() += c;
      }
    }
    if (depth > 0) fail("a closing ]");
    return items;
  }

  // "08-11" or "7" inside of brackets.
  std::vector<std::string> range(const std::string& item) const {
    const size_t dash = item.find('-');
    if (dash == std::string::npos) {
      number(item);
      return {item};
    }
    const std::string first = item.substr(0, dash);
    const int begin = number(first);
    const int end = number(item.substr(dash + 1));
    if (end < begin || static_cast<size_t>(end - begin) >= kMaxItems)
      fail("a rising range in place of \"" + item + "\"");
    std::vector<std::string> numbers;
    for (int i = begin; i <= end; ++i) {
      const std::string digits = std::to_string(i);
      numbers.push_back(
          std::string(first.size() > digits.size() ? first.size() - digits.size() : 0, '0') +
          digits);
    }
    return numbers;
  }

  std::vector<std::string> bracket(const std::string& content) const {
    std::vector<std::string> all;
    for (const std::string& item : split(content)) {
      const bool nested = item.find('[') != std::string::npos;
      const auto some = nested ? host(item) : range(item);
      all.insert(all.end(), some.begin(), some.end());
    }
    return all;
  }

  // One item of the list: text and brackets in any order; every bracket multiplies.
  std::vector<std::string> host(const std::string& item) const {
    const size_t open = item.find('[');
    if (open == std::string::npos) return {item};
    size_t close = open;
    for (int depth = 0; close < item.size(); ++close) {
      depth += (item[close] == '[') - (item[close] == ']');
      if (depth == 0) break;
    }
    const auto middles = bracket(item.substr(open + 1, close - open - 1));
    const auto tails = host(item.substr(close + 1));
    if (middles.size() * tails.size() > kMaxItems) fail("at most 65536 hosts");
    std::vector<std::string> hosts;
    for (const std::string& middle : middles) {
      for (const std::string& tail : tails) hosts.push_back(item.substr(0, open) + middle + tail);
    }
    return hosts;
  }
};

}  // namespace

std::vector<std::string> expand_node_list(const std::string& list, const std::string& variable) {
  const Reader reader{list, variable};
  std::vector<std::string> hosts;
  for (const std::string& item : reader.split(list)) {
    if (item.empty()) reader.fail("a host before each comma and at the end");
    const auto some = reader.host(item);
    hosts.insert(hosts.end(), some.begin(), some.end());
    if (hosts.size() > kMaxItems) reader.fail("at most 65536 hosts");
  }
  return hosts;
}

std::vector<int> expand_task_counts(const std::string& list, const std::string& variable) {
  const Reader reader{list, variable};
  std::vector<int> counts;
  for (const std::string& item : reader.split(list)) {
    const size_t times = item.find("(x");
    int repeat = 1;
    if (times != std::string::npos) {
      if (!item.ends_with(")")) reader.fail("a form like 2(x3),1");
      repeat = reader.number(item.substr(times + 2, item.size() - times - 3));
    }
    if (counts.size() + static_cast<size_t>(repeat) > kMaxItems) reader.fail("at most 65536 nodes");
    counts.insert(counts.end(), static_cast<size_t>(repeat), reader.number(item.substr(0, times)));
  }
  return counts;
}

}  // namespace cohort::comm
