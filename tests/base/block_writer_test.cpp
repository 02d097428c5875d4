// SPDX-License-Identifier: Apache-2.0
#include "cohort/base/block_writer.h"

#include <algorithm>
#include <filesystem>
#include <gtest/gtest.h>
#include <string>
#include <unistd.h>

#include "tests/base/temporary_folder.h"

namespace cohort {
namespace block_writer_test {

std::string letters(size_t count) {
  std::string text(count, ' ');
  for (size_t i = 0; i < count; ++i) text[i] = static_cast<char>('a' + (i / 7 + i / 4096) % 26);
  return text;
}

void write_in_pieces(const std::string& path, const std::string& text, size_t piece) {
  write_atomically(path, [&](FileWriter& file) {
    BlockWriter blocks(file);
    const auto bytes = std::as_bytes(std::span(text));
    for (size_t i = 0; i < bytes.size(); i += piece)
      blocks.write(bytes.subspan(i, std::min(piece, bytes.size() - i)));
    blocks.finish();
  });
}

TEST(BlockWriterTest, WritesWhatItIsGiven) {
  constexpr size_t kMiB = size_t{1} << 20;
  const TemporaryFolder folder;
  for (const size_t count : {size_t{0}, size_t{1}, 4 * kMiB - 1, 4 * kMiB, 9 * kMiB + 123}) {
    const std::string text = letters(count);
    for (const size_t piece : {size_t{100'003}, 16 * kMiB}) {
      write_in_pieces(folder / "f", text, piece);
      EXPECT_TRUE(read_file(folder / "f") == text) << count << " bytes by " << piece;
    }
  }
}

// A file system in memory has nothing but the cache.
TEST(BlockWriterTest, WritesWhereTheCacheCannotBePassedBy) {
  const std::filesystem::path memory = "/dev/shm";
  ASSERT_TRUE(std::filesystem::is_directory(memory));
  const std::string path = memory / ("cohort-test-" + std::to_string(::getpid()));
  const std::string text = letters((size_t{5} << 20) + 5);
  write_in_pieces(path, text, 1 << 20);
  EXPECT_TRUE(read_file(path) == text);
  std::filesystem::remove(path);
}

// Addresses or numbers that the disk does not take: the same by the cache.
TEST(BlockWriterTest, AFileSystemThatWantsLargerUnitsGetsOrdinaryWrites) {
  const TemporaryFolder folder;
  const std::string text = letters(3 * 4096 + 17);
  write_atomically(folder / "f", [&](FileWriter& file) {
    file.write_direct(std::as_bytes(std::span(text)).subspan(1, 5000));
    file.write(std::as_bytes(std::span(text)).subspan(5001));
  });
  EXPECT_EQ(read_file(folder / "f"), text.substr(1));
}

}  // namespace block_writer_test
}  // namespace cohort
