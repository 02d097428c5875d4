// A message between launchers as text; coordinator.h holds the protocol.
#pragma once
#include <nlohmann/json.hpp>
#include <string>

namespace cohort::launch {

/// Returns `message` as one line without its end; bytes that are no UTF-8 are replaced.
inline std::string text_of(const nlohmann::json& message) {
  return message.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace cohort::launch
