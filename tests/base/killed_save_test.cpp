// SPDX-License-Identifier: Apache-2.0
// A save that is killed before each of its system calls, and in the middle of each write.
#include <filesystem>
#include <gtest/gtest.h>
#include <optional>
#include <set>
#include <sstream>

#include "cohort/base/error.h"

#include "tests/base/saving.h"
#include "tests/base/temporary_folder.h"
#include "tests/support/kill_at.h"
#include "tests/support/shell.h"

namespace cohort {
namespace killed_save_test {

namespace fs = std::filesystem;

struct Save {
  int64_t update;
  int num_ranks;
  int first;  // number in the tensors

  Saving saving() const { return {update, num_ranks, first}; }
};

test::Ended save_in_process(const std::string& folder, const Save& save, int kill_at) {
  const fs::path program = fs::read_symlink("/proc/self/exe").parent_path() / "killed_save";
  std::ostringstream command;
  command << program.string() << " " << folder << " " << save.update << " " << save.num_ranks << " "
          << save.first << " " << kill_at;
  return test::shell(command.str());
}

// The number with which all tensors begin: the same in every file.
int whole_content(const std::string& folder) {
  StoredCheckpoint checkpoint(folder);
  std::set<int> firsts;
  for (const char* part : {"a", "b"}) {
    const auto values = read(checkpoint, part, {0, 24});
    EXPECT_EQ(values, numbers(values.front()));
    firsts.insert(values.front());
  }
  for (const auto& [key, file] : checkpoint.manifest().files) checkpoint.file(key);
  EXPECT_EQ(firsts.size(), 1U) << "parts of two saves";
  return *firsts.begin();
}

// Returns how many kills there were. Afterwards the next save must find a clean place.
int kill_everywhere(const std::optional<Save>& before, const Save& save) {
  for (int kill_at = 1;; ++kill_at) {
    const TemporaryFolder temporary;
    const std::string folder = temporary / "last";
    test::kill_at(temporary.path(), 0);  // for the pace of it
    if (before) before->saving().save(folder);
    const test::Ended ended = save_in_process(folder, save, kill_at);
    if (ended.code == 0) {
      EXPECT_EQ(whole_content(folder), save.first);
      return kill_at - 1;
    }
    EXPECT_EQ(ended.code, 128 + 9) << ended.output;
    SCOPED_TRACE("killed before call " + std::to_string(kill_at));
    if (!before && !fs::exists(folder + "/manifest.json")) {
      EXPECT_THROW(StoredCheckpoint{folder}, ConfigError);
    } else {
      const int found = whole_content(folder);
      EXPECT_TRUE(found == save.first || (before && found == before->first)) << found;
    }
    Saving(save.update + 1, 2, 500).save(folder);
    EXPECT_EQ(whole_content(folder), 500);
    const auto entries = fs::directory_iterator(folder);
    EXPECT_EQ(std::distance(begin(entries), end(entries)), 5) << "what the killed save left stays";
    if (testing::Test::HasFailure()) return kill_at;
  }
}

TEST(KilledSaveTest, TheCheckpointBeforeOrTheNewOneLoads) {
  // 4 files and the manifest: open, a write (two kills), fsync, close, rename, and the folder's
  // open, fsync, close; then 4 files are removed.
  EXPECT_GE(kill_everywhere(Save{1, 2, 100}, {2, 2, 200}), 5 * 9 + 4);
}

TEST(KilledSaveTest, AlsoIfItIsOfTheSameUpdate) {
  EXPECT_GE(kill_everywhere(Save{2, 2, 100}, {2, 2, 200}), 5 * 9 + 4);
  EXPECT_GE(kill_everywhere(Save{2, 1, 100}, {2, 1, 200}), 3 * 9 + 2);
}

TEST(KilledSaveTest, AlsoIfTheNumberOfRanksChanges) {
  EXPECT_GE(kill_everywhere(Save{1, 1, 100}, {1, 3, 200}), 7 * 9 + 2);
  EXPECT_GE(kill_everywhere(Save{1, 3, 100}, {1, 1, 200}), 3 * 9 + 6);
}

TEST(KilledSaveTest, OfAFirstSaveThereIsNoneOrAll) {
  // The folder is made, and the one around it opened, synced and closed.
  EXPECT_GE(kill_everywhere({}, {1, 2, 200}), 4 + 5 * 9);
}

// What a power cut would need: file and folder are synced around every rename, the manifest's last.
TEST(KilledSaveTest, FilesAreSyncedBeforeTheManifestNamesThem) {
  const TemporaryFolder temporary;
  const std::string folder = temporary / "last";
  Save{1, 2, 100}.saving().save(folder);
  std::istringstream calls(save_in_process(folder, {2, 2, 200}, 0).output);
  std::string line, kinds;
  std::vector<std::string> renamed;
  for (std::string call, path; std::getline(calls, line);) {
    std::istringstream(line) >> call >> path;
    kinds += call.front();
    if (call == "rename") renamed.push_back(path);
    if (call == "unlink") {
      EXPECT_EQ(renamed.size(), 5U) << "removed before the manifest was there";
    }
  }
  ASSERT_EQ(renamed.size(), 5U);
  EXPECT_EQ(renamed.back(), "manifest.json");
  for (size_t at = kinds.find('r'); at != std::string::npos; at = kinds.find('r', at + 1)) {
    EXPECT_EQ(kinds.substr(at - 3, 7), "wfcrofc") << "write, fsync, close, rename, and the folder";
  }
}

}  // namespace killed_save_test
}  // namespace cohort
