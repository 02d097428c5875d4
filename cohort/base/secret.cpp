// SPDX-License-Identifier: Apache-2.0
#include "cohort/base/secret.h"

#include <array>
#include <cerrno>
#include <fstream>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <stdexcept>
#include <sys/random.h>
#include <system_error>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/base/hex.h"

namespace cohort {
namespace {

constexpr size_t kLongestSecret = 4096;

}  // namespace

std::string random_hex(size_t bytes) {
  std::vector<unsigned char> random(bytes);
  size_t have = 0;
  while (have < bytes) {
    const ssize_t size = ::getrandom(random.data() + have, bytes - have, 0);
    if (size < 0 && errno == EINTR) continue;
    if (size <= 0) throw std::system_error(errno, std::generic_category(), "getrandom");
    have += static_cast<size_t>(size);
  }
  return hex(random);
}

std::string hmac_sha256(std::string_view key, std::string_view text) {
  std::array<unsigned char, EVP_MAX_MD_SIZE> sum{};
  unsigned size = 0;
  const auto* data = reinterpret_cast<const unsigned char*>(text.data());
  if (!::HMAC(::EVP_sha256(), key.data(), static_cast<int>(key.size()), data, text.size(),
              sum.data(), &size)) {
    throw std::runtime_error("OpenSSL computes no HMAC-SHA256");
  }
  return hex({sum.data(), size});
}

bool equal_secrets(std::string_view a, std::string_view b) {
  return a.size() == b.size() && ::CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

std::string read_secret(const std::string& flag, const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string secret(kLongestSecret + 2, '\0');
  file.read(secret.data(), static_cast<std::streamsize>(secret.size()));
  secret.resize(static_cast<size_t>(file.gcount()));
  const bool readable = file.is_open() && !file.bad();
  while (secret.ends_with('\n') || secret.ends_with('\r')) secret.pop_back();
  if (!readable || secret.empty() || secret.size() > kLongestSecret) {
    throw ConfigError(flag + " " + path + ": expected a file that holds 1 to " +
                      std::to_string(kLongestSecret) + " bytes, got " +
                      (!readable        ? "one that cannot be read"
                       : secret.empty() ? "none"
                                        : "more"));
  }
  return secret;
}

}  // namespace cohort
