// SPDX-License-Identifier: Apache-2.0
// A file that the system does not let a program read, which says nothing about its content.
#pragma once
#include "cohort/base/error.h"

namespace cohort::image {

class UnreadableFile : public ConfigError {
 public:
  using ConfigError::ConfigError;
};

}  // namespace cohort::image
