// SPDX-License-Identifier: Apache-2.0
// `cohort checkpoint` as a user runs it.
#include <filesystem>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "tests/base/saving.h"
#include "tests/base/temporary_folder.h"
#include "tests/support/shell.h"

namespace cohort::test {
namespace checkpoint_command_test {

namespace fs = std::filesystem;

Ended checkpoint(const std::string& arguments, const std::string& before = "") {
  return shell(before + bin("cohort") + " checkpoint " + arguments);
}

TEST(CheckpointCommandTest, InspectTellsPartsFilesAndTensors) {
  const TemporaryFolder folder;
  const std::string path = folder / "last";
  Saving(7, 2, 100).save(path);
  const Ended text = checkpoint("inspect --tensors " + path);
  EXPECT_EQ(text.code, 0) << text.output;
  for (const char* line : {"update 7\n",
                           "part  tensors  elements  bytes  files\n"
                           "a           1        24     96      2\n",
                           "a-7.0-of-2.", "w          a   I32  [4, 6]      2\n"}) {
    EXPECT_NE(text.output.find(line), std::string::npos) << line << " in:\n" << text.output;
  }
  const auto json = nlohmann::json::parse(checkpoint("inspect --json " + path).output);
  EXPECT_EQ(json["update"], 7);
  EXPECT_EQ(json["files"].size(), 4U);
  EXPECT_EQ(json["parts"]["b"]["bytes"], 96);
  EXPECT_EQ(json["tensors"]["a"]["w"]["ranges"]["a.1-of-2"],
            nlohmann::json({3, 6, 9, 12, 15, 18, 21, 24}));
}

TEST(CheckpointCommandTest, VerifyEndsWithOneAndNamesWhatIsBad) {
  const TemporaryFolder folder;
  const std::string path = folder / "last";
  Saving(7, 2, 100).save(path);
  const Ended good = checkpoint("verify " + path);
  EXPECT_EQ(good.code, 0) << good.output;
  const std::string name = Manifest::read(path).files.at("b.1-of-2").name;
  EXPECT_NE(good.output.find("ok   " + name + "\n"), std::string::npos) << good.output;
  const auto expect_bad = [&](const std::string& word) {
    const Ended bad = checkpoint("verify " + path);
    EXPECT_EQ(bad.code, 1) << bad.output;
    EXPECT_NE(bad.output.find("bad  " + path + "/" + word), std::string::npos) << bad.output;
  };
  std::string content = read_file(path + "/" + name);
  content.back() ^= 1;
  write_file(path + "/" + name, content);
  expect_bad(name + ": its SHA-256");
  fs::remove(path + "/" + name);
  expect_bad(name + ": is missing");
  EXPECT_NE(checkpoint("verify " + path).output.find("ok   a-7.0-of-2"), std::string::npos);
  Manifest manifest = Manifest::read(path);
  manifest.parts["a"]["w"].ranges.erase("a.1-of-2");
  write_file(path + "/manifest.json", manifest.to_json());
  expect_bad("manifest.json: elements 3 to 6 of w of a are in no file");
  fs::remove(path + "/manifest.json");
  expect_bad("manifest.json: no checkpoint here");
}

TEST(CheckpointCommandTest, ConsolidateWritesWholeTensors) {
  const TemporaryFolder folder;
  Saving(7, 3, 100).save(folder / "three");
  Saving(7, 1, 100).save(folder / "one");
  const Ended ended =
      checkpoint("consolidate " + folder / "three" + " --output " + folder / "whole");
  EXPECT_EQ(ended.code, 0) << ended.output;
  for (const char* name : {"a-7.safetensors", "b-7.safetensors", "manifest.json"})
    EXPECT_EQ(read_file(folder / "whole" + "/" + name), read_file(folder / "one" + "/" + name));
  EXPECT_EQ(checkpoint("verify " + folder / "whole").code, 0);
  const Ended one =
      checkpoint("consolidate " + folder / "three" + " --parts b --output " + folder / "part");
  EXPECT_EQ(one.code, 0) << one.output;
  EXPECT_FALSE(fs::exists(folder / "part" + "/a-7.safetensors"));
  EXPECT_EQ(checkpoint("consolidate " + folder / "three" + " --output " + folder / "three").code,
            2);
  EXPECT_EQ(checkpoint("consolidate " + folder / "nowhere" + " --output " + folder / "x").code, 2);
}

TEST(CheckpointCommandTest, ConsolidateWritesNothingOfADamagedCheckpoint) {
  const TemporaryFolder folder;
  const std::string path = folder / "last";
  Saving(7, 2, 100).save(path);
  fs::remove(path + "/" + Manifest::read(path).files.at("b.1-of-2").name);
  const std::string command = "consolidate " + path + " --output " + folder / "whole";
  const Ended damaged = checkpoint(command);
  EXPECT_EQ(damaged.code, 2);
  EXPECT_NE(damaged.output.find("is missing"), std::string::npos) << damaged.output;
  EXPECT_FALSE(fs::exists(folder / "whole"));
  EXPECT_EQ(checkpoint(command + " --parts a").code, 0);  // That part is there.
}

TEST(CheckpointCommandTest, ConsolidateReplacesACheckpointOnlyIfTold) {
  const TemporaryFolder folder;
  Saving(7, 3, 100).save(folder / "three");
  Saving(5, 1, 200).save(folder / "other");
  const std::string before = read_file(folder / "other/manifest.json");
  const std::string command =
      "consolidate " + folder / "three" + " --parts b --output " + folder / "other";
  const Ended refused = checkpoint(command);
  EXPECT_EQ(refused.code, 2);
  EXPECT_NE(refused.output.find("other: holds a checkpoint, which would be lost (update 5: a, b): "
                                "name another folder, or pass --overwrite"),
            std::string::npos)
      << refused.output;
  EXPECT_EQ(read_file(folder / "other/manifest.json"), before);
  EXPECT_EQ(checkpoint("verify " + folder / "other").code, 0);
  EXPECT_EQ(checkpoint(command + " --overwrite").code, 0);
  EXPECT_EQ(StoredCheckpoint(folder / "other").parts(), std::vector<std::string>{"b"});
  write_file(folder / "other/manifest.json", "{");
  EXPECT_NE(checkpoint(command).output.find("(a damaged one)"), std::string::npos);
}

TEST(CheckpointCommandTest, ImportMakesACheckpointOfATorchFileAndRunsNothing) {
  const TemporaryFolder folder;
  const std::string files = COHORT_TORCH_FILES;
  const std::string to = " --to " + folder / "new";
  const Ended made = checkpoint("import " + files + "/training --key state_dict" + to);
  EXPECT_EQ(made.code, 0) << made.output;
  EXPECT_NE(made.output.find("new: 5 tensors"), std::string::npos) << made.output;
  EXPECT_EQ(checkpoint("verify " + folder / "new").code, 0);
  EXPECT_EQ(StoredCheckpoint(folder / "new").part("weights").at("turned").shape,
            (std::vector<int64_t>{3, 2}));
  const Ended there = checkpoint("import " + files + "/state_dict" + to);
  EXPECT_EQ(there.code, 2);
  EXPECT_NE(there.output.find("holds a checkpoint, which would be lost"), std::string::npos);
  const Ended again = checkpoint("import " + folder / "new" + " --to " + folder / "x");
  EXPECT_EQ(again.code, 2);
  EXPECT_NE(again.output.find("is a checkpoint already: expected another program's weights"),
            std::string::npos)
      << again.output;
  const Ended hostile = checkpoint("import " + files + "/os_system --to " + folder / "x");
  EXPECT_EQ(hostile.code, 2);
  EXPECT_NE(hostile.output.find("the name os.system"), std::string::npos) << hostile.output;
  EXPECT_EQ(hostile.output.find("it runs\n"), std::string::npos) << hostile.output;
  EXPECT_FALSE(fs::exists(folder / "x"));
}

// The process may hold 16 MiB of its own beside mapped files; the tensor has 32.
TEST(CheckpointCommandTest, ConsolidateNeedsNoMemoryForATensor) {
  const TemporaryFolder folder;
  const std::string path = folder / "last";
  fs::create_directories(path);
  const std::vector<int32_t> half(size_t{4} << 20, 7);
  const auto count = static_cast<int64_t>(half.size());
  Manifest manifest{.update = 1};
  for (const int rank : {0, 1}) {
    manifest.add(write_share(path, "weights",
                             {{"w",
                               DType::kI32,
                               {2 * count},
                               {rank * count, (rank + 1) * count},
                               std::as_bytes(std::span(half))}},
                             {1, rank, 2}),
                 path);
  }
  commit_manifest(path, manifest);
  const Ended ended =
      checkpoint("consolidate " + path + " --output " + folder / "whole", "ulimit -d 16384; ");
  EXPECT_EQ(ended.code, 0) << ended.output;
  EXPECT_GT(fs::file_size(folder / "whole" + "/weights-1.safetensors"), 8 * half.size());
}

}  // namespace checkpoint_command_test
}  // namespace cohort::test
