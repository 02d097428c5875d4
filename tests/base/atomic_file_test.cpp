// SPDX-License-Identifier: Apache-2.0
#include "cohort/base/atomic_file.h"

#include <array>
#include <fcntl.h>
#include <filesystem>
#include <gtest/gtest.h>
#include <iterator>
#include <stdexcept>
#include <sys/stat.h>

#include "cohort/base/error.h"
#include "cohort/base/fd.h"

#include "tests/base/temporary_folder.h"

namespace cohort {
namespace atomic_file_test {

ptrdiff_t num_files(const TemporaryFolder& folder) {
  return std::distance(std::filesystem::directory_iterator(folder.path()), {});
}

TEST(AtomicFileTest, ReplacesTheWholeFileAndLeavesNothingElse) {
  const TemporaryFolder folder;
  write_atomically(folder / "f", "a long first content");
  write_atomically(folder / "f", "second");
  EXPECT_EQ(read_file(folder / "f"), "second");
  EXPECT_EQ(num_files(folder), 1);
}

TEST(AtomicFileTest, HasTheModeOfAnyOtherNewFile) {
  const TemporaryFolder folder;
  write_atomically(folder / "f", "x");
  write_file(folder / "g", "x");
  struct stat f {};
  struct stat g {};
  ASSERT_EQ(::stat((folder / "f").c_str(), &f), 0);
  ASSERT_EQ(::stat((folder / "g").c_str(), &g), 0);
  EXPECT_EQ(f.st_mode, g.st_mode);
}

TEST(AtomicFileTest, KeepsTheOldFileIfTheWriterThrows) {
  const TemporaryFolder folder;
  write_atomically(folder / "f", "old");
  const auto body = [](FileWriter& writer) {
    writer.write("half");
    throw std::logic_error("stop");
  };
  EXPECT_THROW(write_atomically(folder / "f", body), std::logic_error);
  EXPECT_EQ(read_file(folder / "f"), "old");
  EXPECT_EQ(num_files(folder), 1);
}

TEST(AtomicFileTest, NamesThePathAndTheReason) {
  const TemporaryFolder folder;
  const std::string missing = folder / "absent/f";
  try {
    write_atomically(missing, "x");
    FAIL() << "no exception";
  } catch (const ConfigError& error) {
    EXPECT_NE(one_line(error).find(missing), std::string::npos) << one_line(error);
    EXPECT_NE(one_line(error).find("No such file or directory"), std::string::npos);
  }
  std::filesystem::create_directory(folder / "d");  // A rename over a folder is refused.
  try {
    write_atomically(folder / "d", "x");
    FAIL() << "no exception";
  } catch (const c10::Error& error) {
    EXPECT_NE(one_line(error).find(folder / "d"), std::string::npos) << one_line(error);
    EXPECT_NE(one_line(error).find("Is a directory"), std::string::npos) << one_line(error);
  }
  EXPECT_EQ(num_files(folder), 1);
}

TEST(AtomicFileTest, WritesStraightIntoWhatIsThereAndNoFile) {
  const TemporaryFolder folder;
  const std::string pipe = folder / "pipe";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  const Fd reader(::open(pipe.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  ASSERT_TRUE(reader);
  std::filesystem::create_symlink(pipe, folder / "link");
  write_atomically(pipe, "one ");
  write_atomically(folder / "link", "two");
  std::array<char, 16> got{};
  ASSERT_EQ(::read(reader.get(), got.data(), got.size()), 7);
  EXPECT_EQ(std::string(got.data(), 7), "one two");
  std::filesystem::create_symlink("/dev/null", folder / "null");
  write_atomically(folder / "null", "x");
  EXPECT_TRUE(std::filesystem::is_fifo(pipe));
  EXPECT_TRUE(std::filesystem::is_symlink(folder / "link"));
  EXPECT_TRUE(std::filesystem::is_symlink(folder / "null"));
  EXPECT_EQ(num_files(folder), 3);
}

// /dev/stdout of a program whose output goes to a file: the file is there already, and others write
// to it, too.
TEST(AtomicFileTest, ANameOfAnOpenDescriptorIsThatDescriptor) {
  const TemporaryFolder folder;
  const Fd file(::open((folder / "f").c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
  ASSERT_EQ(::write(file.get(), "before ", 7), 7);
  const std::string number = std::to_string(file.get());
  std::filesystem::create_symlink("/dev/fd/" + number, folder / "link");
  write_atomically("/proc/self/fd/" + number, "one ");
  write_atomically(folder / "link", [](FileWriter& writer) {
    alignas(FileWriter::kDirectUnit) static const std::array<std::byte, 4> kTwo = {
        std::byte{'t'}, std::byte{'w'}, std::byte{'o'}, std::byte{' '}};
    writer.write_direct(kTwo);
  });
  ASSERT_EQ(::write(file.get(), "after", 5), 5);
  EXPECT_EQ(read_file(folder / "f"), "before one two after");
  EXPECT_TRUE(std::filesystem::is_symlink(folder / "link"));
  EXPECT_EQ(num_files(folder), 2);
  std::filesystem::create_symlink("/proc/self/fd/1000000", folder / "closed");
  EXPECT_THROW(write_atomically(folder / "closed", "x"), ConfigError);
  EXPECT_TRUE(std::filesystem::is_symlink(folder / "closed"));
}

TEST(AtomicFileTest, ALinkToAFileIsReplaced) {
  const TemporaryFolder folder;
  write_file(folder / "f", "old");
  std::filesystem::create_symlink(folder / "f", folder / "link");
  write_atomically(folder / "link", "new");
  EXPECT_EQ(read_file(folder / "f"), "old");
  EXPECT_EQ(read_file(folder / "link"), "new");
  EXPECT_FALSE(std::filesystem::is_symlink(folder / "link"));
}

TEST(MakeFolderTest, MakesWhatIsNotThere) {
  const TemporaryFolder folder;
  make_folder(folder / "a/b/c");
  make_folder(folder / "a/b/c");
  make_folder(folder / "a/d/");
  make_folder("");
  EXPECT_TRUE(std::filesystem::is_directory(folder / "a/b/c"));
  EXPECT_TRUE(std::filesystem::is_directory(folder / "a/d"));
  write_file(folder / "f", "x");
  for (const char* path : {"f", "f/g"}) {
    try {
      make_folder(folder / path);
      FAIL() << "no exception";
    } catch (const ConfigError& error) {
      EXPECT_TRUE(one_line(error).starts_with(folder / "f" + ": expected a folder"))
          << one_line(error);
    }
  }
}

}  // namespace atomic_file_test
}  // namespace cohort
