// SPDX-License-Identifier: Apache-2.0
#include "cohort/ps/wire_dtype.h"

#include "cohort/base/error.h"

namespace cohort::ps {

std::string to_string(WireDtype dtype) {
  return dtype == WireDtype::kBfloat16 ? "bfloat16" : "float32";
}

WireDtype wire_dtype_named(const std::string& name) {
  for (const WireDtype dtype : {WireDtype::kFloat32, WireDtype::kBfloat16}) {
    if (name == to_string(dtype)) return dtype;
  }
  throw ConfigError("expected one of float32, bfloat16, got \"" + name + "\"");
}

}  // namespace cohort::ps
