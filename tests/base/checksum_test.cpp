// SPDX-License-Identifier: Apache-2.0
#include "cohort/base/checksum.h"

#include <gtest/gtest.h>

#include "cohort/base/error.h"

#include "tests/base/temporary_folder.h"

namespace cohort {
namespace checksum_test {

std::string sha256(std::string_view text) {
  Sha256 sum;
  sum.update(text);
  return sum.hex();
}

TEST(Sha256Test, EqualsThePublishedExamples) {
  EXPECT_EQ(sha256(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(sha256("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(sha256(std::string(1'000'000, 'a')),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(Sha256Test, IsTheSameInPiecesOfAnySize) {
  const std::string text(200, 'x');
  for (size_t length = 0; length <= text.size(); ++length) {
    const std::string whole = text.substr(0, length);
    Sha256 pieces;
    for (size_t place = 0, size = 1; place < length; place += size, size = size % 7 + 1) {
      pieces.update(std::string_view(whole).substr(place, size));
      EXPECT_EQ(pieces.hex().size(), 64U);  // Asking changes nothing.
    }
    EXPECT_EQ(pieces.hex(), sha256(whole)) << length;
  }
}

TEST(Sha256Test, ReadsFilesAndNamesThoseItCannot) {
  const TemporaryFolder folder;
  write_file(folder / "f", "abc");
  EXPECT_EQ(sha256_of_file(folder / "f"), sha256("abc"));
  EXPECT_THROW(sha256_of_file(folder / "absent"), ConfigError);
  EXPECT_THROW(sha256_of_file(folder / "."), ConfigError);
}

}  // namespace checksum_test
}  // namespace cohort
