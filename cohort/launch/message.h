// SPDX-License-Identifier: Apache-2.0
// A message between launchers as text; rendezvous_server.h holds the protocol.
#pragma once
#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>

namespace cohort::launch {

/// Returns `text`, which another host sent, without what could steer a terminal: control characters
/// become spaces.
inline std::string printable(std::string text) {
  const auto is_control = [](char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; };
  std::replace_if(text.begin(), text.end(), is_control, ' ');
  // Of UTF-8, U+0080 to U+009F.
  for (size_t at = 0; (at = text.find('\xc2', at)) != std::string::npos; ++at) {
    if (at + 1 < text.size() && static_cast<unsigned char>(text[at + 1]) < 0xa0)
      text.replace(at, 2, " ");
  }
  return text;
}

/// Returns `message` as one line without its end; bytes that are no UTF-8 are replaced.
inline std::string text_of(const nlohmann::json& message) {
  return message.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace cohort::launch
