// SPDX-License-Identifier: Apache-2.0
#include "cohort/launch/message_channel.h"

#include <charconv>
#include <string_view>
#include <utility>

namespace cohort::launch {
namespace {

// Takes a number and the space after it from the front of `text`.
std::optional<int64_t> take_number(std::string_view& text) {
  int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  const auto size = static_cast<size_t>(end - text.data());
  if (error != std::errc() || number < 0 || size == text.size() || text[size] != ' ')
    return std::nullopt;
  text.remove_prefix(size + 1);
  return number;
}

}  // namespace

void MessageChannel::attach(LineSocket line, int64_t acknowledged) {
  line_ = std::move(line);
  acknowledge(acknowledged);
  int64_t number = sent_ - static_cast<int64_t>(unacknowledged_.size());
  for (const std::string& text : unacknowledged_) put(++number, text);
}

void MessageChannel::send(std::string text) {
  unacknowledged_.push_back(std::move(text));
  put(++sent_, unacknowledged_.back());
}

void MessageChannel::send_heartbeat() {
  put(0, "");
}

void MessageChannel::put(int64_t number, const std::string& text) {
  line_.send(std::to_string(number) + " " + std::to_string(received_) + " " + text);
}

void MessageChannel::acknowledge(int64_t number) {
  while (!unacknowledged_.empty() &&
         sent_ - static_cast<int64_t>(unacknowledged_.size()) < number) {
    unacknowledged_.pop_front();
  }
}

std::optional<std::string> MessageChannel::next() {
  while (const auto line = line_.next()) {
    std::string_view text(*line);
    const auto number = take_number(text);
    const auto acknowledged = number ? take_number(text) : std::nullopt;
    if (!acknowledged || *acknowledged > sent_ || *number > received_ + 1) {
      line_.close();
      return std::nullopt;
    }
    acknowledge(*acknowledged);
    if (*number <= received_) continue;  // A heartbeat, or a duplicate.
    received_ = *number;
    return std::string(text);
  }
  return std::nullopt;
}

}  // namespace cohort::launch
