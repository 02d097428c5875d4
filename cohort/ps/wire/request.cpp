// SPDX-License-Identifier: Apache-2.0
#include "cohort/ps/wire/request.h"

namespace cohort::ps {

const char* to_string(Code code) {
  switch (code) {
    case Code::kOk:
      return "ok";
    case Code::kNotYet:
      return "not yet";
    case Code::kBusy:
      return "busy";
    case Code::kRestarted:
      return "restarted";
    case Code::kReplaced:
      return "replaced";
    case Code::kInvalid:
      return "invalid";
    case Code::kFailed:
      return "failed";
    case Code::kLost:
      return "lost";
    case Code::kNotWritten:
      return "not written";
  }
  return "unknown";
}

}  // namespace cohort::ps
