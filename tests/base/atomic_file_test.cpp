#include "cohort/base/atomic_file.h"

#include <gtest/gtest.h>
#include <iterator>
#include <stdexcept>
#include <sys/stat.h>

#include "cohort/base/error.h"

#include "tests/base/temporary_folder.h"

namespace cohort {
namespace {

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

}  // namespace
}  // namespace cohort
