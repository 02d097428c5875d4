// Certificates and keys from files.
#pragma once
#include <fstream>
#include <iterator>
#include <string>

#include "cohort/base/error.h"

namespace cohort::ps {

/// Errors: ConfigError that names `what` and the file.
inline std::string read_pem(const std::string& what, const std::string& path) {
  if (path.empty()) throw ConfigError("TLS: the " + what + " is missing: name all three files");
  std::ifstream file(path, std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(file), {}};
  if (!file || text.find("-----BEGIN ") == std::string::npos)
    throw ConfigError(path + ": expected the " + what + " in PEM form");
  return text;
}

}  // namespace cohort::ps
