// SPDX-License-Identifier: Apache-2.0
// Private to log.cpp: the part of opening a log file that throws our own errors. It is apart
// because log.cpp cannot include error.h, which needs libtorch's headers.
#pragma once
#include <string>

namespace cohort {

/// Makes the folder of `path` and checks that the file can be appended to.
/// Errors: ConfigError that names the file and says why not.
void prepare_log_file(const std::string& path);

}  // namespace cohort
