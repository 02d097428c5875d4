#include "cohort/base/checksum.h"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <system_error>
#include <unistd.h>
#include <vector>

#include "cohort/base/error.h"

namespace cohort {
namespace {

constexpr std::array<uint32_t, 64> kRoundConstants = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

uint32_t big_endian(const std::byte* bytes) {
  return std::to_integer<uint32_t>(bytes[0]) << 24 | std::to_integer<uint32_t>(bytes[1]) << 16 |
         std::to_integer<uint32_t>(bytes[2]) << 8 | std::to_integer<uint32_t>(bytes[3]);
}

}  // namespace

void Sha256::consume(const std::byte* block) {
  std::array<uint32_t, 64> w;
  for (size_t t = 0; t < 16; ++t) w[t] = big_endian(block + 4 * t);
  for (size_t t = 16; t < 64; ++t) {
    const uint32_t s0 = std::rotr(w[t - 15], 7) ^ std::rotr(w[t - 15], 18) ^ (w[t - 15] >> 3);
    const uint32_t s1 = std::rotr(w[t - 2], 17) ^ std::rotr(w[t - 2], 19) ^ (w[t - 2] >> 10);
    w[t] = w[t - 16] + s0 + w[t - 7] + s1;
  }
  auto [a, b, c, d, e, f, g, h] = state_;
  for (size_t t = 0; t < 64; ++t) {
    const uint32_t sum1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
    const uint32_t t1 = h + sum1 + ((e & f) ^ (~e & g)) + kRoundConstants[t] + w[t];
    const uint32_t sum0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
    const uint32_t t2 = sum0 + ((a & b) ^ (a & c) ^ (b & c));
    h = g;
    g = f;
    f = e;
    e = d + t1;
    d = c;
    c = b;
    b = a;
    a = t1 + t2;
  }
  const std::array<uint32_t, 8> added = {a, b, c, d, e, f, g, h};
  for (size_t i = 0; i < 8; ++i) state_[i] += added[i];
}

void Sha256::update(std::span<const std::byte> bytes) {
  if (bytes.empty()) return;
  const size_t filled = num_bytes_ % 64;
  num_bytes_ += bytes.size();
  if (filled != 0) {
    const size_t taken = std::min(bytes.size(), 64 - filled);
    std::memcpy(buffer_.data() + filled, bytes.data(), taken);
    bytes = bytes.subspan(taken);
    if (filled + taken < 64) return;
    consume(buffer_.data());
  }
  for (; bytes.size() >= 64; bytes = bytes.subspan(64)) consume(bytes.data());
  if (!bytes.empty()) std::memcpy(buffer_.data(), bytes.data(), bytes.size());
}

std::string Sha256::hex() const {
  Sha256 last = *this;
  std::array<std::byte, 72> padding{};
  padding[0] = std::byte{0x80};
  const size_t filled = num_bytes_ % 64;
  const size_t zeros_end = (filled < 56 ? 56 : 120) - filled;
  for (size_t i = 0; i < 8; ++i) {
    padding[zeros_end + i] = static_cast<std::byte>(num_bytes_ * 8 >> (56 - 8 * i));
  }
  last.update(std::span(padding).first(zeros_end + 8));
  std::string text;
  for (uint32_t word : last.state_) {
    for (int shift = 28; shift >= 0; shift -= 4) text += "0123456789abcdef"[word >> shift & 15];
  }
  return text;
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
