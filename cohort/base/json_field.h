// SPDX-License-Identifier: Apache-2.0
// Values of JSON on their way into the fields of structs.
#pragma once
#include <concepts>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

namespace cohort {

/// A value of a JSON object. Converts to a field's type as nlohmann::json does,
/// but to a whole number only where it is one that the type holds:
/// nlohmann::json itself makes 2 of 2.5, and anything of 1e300.
///
/// Errors: nlohmann::json::exception: there is no such value, or the type
/// cannot hold it. The message names the value.
class JsonField {
 public:
  JsonField(const nlohmann::json& object, const char* name)
      : name_(name), value_(object.at(name)) {}

  template <class T>
  operator T() const {  // NOLINT(google-explicit-constructor): it stands for the value.
    if constexpr (std::integral<T> && !std::same_as<T, bool>) {
      const bool fits = value_.is_number_unsigned()
                            ? std::in_range<T>(value_.get<uint64_t>())
                            : value_.is_number_integer() && std::in_range<T>(value_.get<int64_t>());
      if (!fits) {
        throw nlohmann::json::type_error::create(
            302,
            std::string(name_) + ": expected a whole number of " + std::to_string(8 * sizeof(T)) +
                " bits, got " + value_.dump(),
            nullptr);
      }
    }
    return value_.get<T>();
  }

 private:
  const char* name_;
  const nlohmann::json& value_;
};

}  // namespace cohort
