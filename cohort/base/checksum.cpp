// SPDX-License-Identifier: Apache-2.0
#include "cohort/base/checksum.h"

#include <array>
#include <cerrno>
#include <fcntl.h>
#include <openssl/evp.h>
#include <system_error>
#include <unistd.h>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/base/hex.h"

namespace cohort {
namespace {

void check(int succeeded) {
  TORCH_CHECK(succeeded == 1, "SHA-256: OpenSSL refuses");
}

}  // namespace

void Sha256::Free::operator()(evp_md_ctx_st* context) const {
  EVP_MD_CTX_free(context);
}

Sha256::Sha256() : context_(EVP_MD_CTX_new()) {
  check(EVP_DigestInit_ex(context_.get(), EVP_sha256(), nullptr));
}

void Sha256::update(std::span<const std::byte> bytes) {
  check(EVP_DigestUpdate(context_.get(), bytes.data(), bytes.size()));
}

std::string Sha256::hex() const {
  Sha256 last;  // Finishing it leaves this one open.
  check(EVP_MD_CTX_copy_ex(last.context_.get(), context_.get()));
  std::array<unsigned char, 32> sum{};
  check(EVP_DigestFinal_ex(last.context_.get(), sum.data(), nullptr));
  return cohort::hex(sum);
}

std::string sha256_of_file(const std::string& path) {
  const auto fail = [&path](int error) -> void {
    throw ConfigError(path +
                      ": expected a readable file: " + std::generic_category().message(error));
  };
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) fail(errno);
  Sha256 sum;
  std::vector<std::byte> chunk(size_t{1} << 20);
  ssize_t count = 0;
  do {
    count = ::read(file, chunk.data(), chunk.size());
    if (count > 0) sum.update(std::span(chunk).first(static_cast<size_t>(count)));
  } while (count > 0 || (count < 0 && errno == EINTR));
  const int error = errno;
  ::close(file);
  if (count < 0) fail(error);
  return sum.hex();
}

}  // namespace cohort
