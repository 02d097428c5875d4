// SPDX-License-Identifier: Apache-2.0
// What an error says.
#pragma once
#include <string>

#include "cohort/base/error.h"

namespace cohort::test {

/// Returns, on one line, the text of the Error that `call` throws; "nothing was thrown" if it
/// throws none.
template <class Error, class Call>
std::string message_of(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return one_line(error);
  }
  return "nothing was thrown";
}

}  // namespace cohort::test
