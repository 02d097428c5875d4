// SPDX-License-Identifier: Apache-2.0
#include "cohort/base/stored_checkpoint.h"

#include <filesystem>
#include <gtest/gtest.h>

#include "cohort/base/error.h"

#include "tests/base/saving.h"
#include "tests/base/temporary_folder.h"
#include "tests/support/message_of.h"

namespace cohort {
namespace stored_checkpoint_test {

namespace fs = std::filesystem;

TEST(StoredCheckpointTest, WhatIsNotThereIsNamed) {
  const TemporaryFolder folder;
  EXPECT_EQ(test::message_of<ConfigError>([&] { StoredCheckpoint(folder / "best.pt"); }),
            folder / "best.pt: there is no such file or folder");
  EXPECT_EQ(test::message_of<ConfigError>([&] { StoredCheckpoint(folder / "best"); }),
            folder / "best/manifest.json: no checkpoint here");
}

TEST(StoredCheckpointTest, AnyElementsAreReadFromAnyShares) {
  const TemporaryFolder folder;
  for (const int world_size : {1, 2, 3, 4}) {
    const std::string path = folder / std::to_string(world_size);
    Saving(9, world_size, 100).save(path);
    StoredCheckpoint checkpoint(path);
    EXPECT_EQ(checkpoint.parts(), (std::vector<std::string>{"a", "b"}));
    const auto all = numbers(100);
    for (int64_t begin = 0; begin <= 24; ++begin) {
      for (int64_t end = begin; end <= 24; ++end) {
        EXPECT_EQ(read(checkpoint, "b", {begin, end}),
                  std::vector<int32_t>(all.begin() + begin, all.begin() + end));
      }
    }
  }
}

TEST(StoredCheckpointTest, FilesOfAnEarlierSaveAndOfAKilledOneGo) {
  const TemporaryFolder folder;
  const std::string path = folder / "last";
  Saving(1, 3, 0).save(path);
  write_file(path + "/a-2.1-of-3.safetensors.tmp-77-0", "cut");
  write_file(path + "/manifest.json.tmp-77-0", "cut");
  write_file(path + "/a-2.1-of-3.00000000.safetensors", "never committed");
  write_file(path + "/notes.txt", "the user's");
  Saving(2, 2, 1).save(path);
  size_t num_files = 0;
  for (const auto& entry : fs::directory_iterator(path)) {
    ++num_files;
    const std::string name = entry.path().filename();
    EXPECT_TRUE(name == "manifest.json" || name == "notes.txt" || name.find("-2.") == 1) << name;
  }
  EXPECT_EQ(num_files, 6U);
}

// What may happen to a file, and what the error says after its path.
TEST(StoredCheckpointTest, ADamagedMissingOrForeignFileIsNamed) {
  const TemporaryFolder folder;
  const std::string path = folder / "last";
  Saving(1, 2, 0).save(folder / "other");
  Saving(2, 2, 50).save(path);
  const std::string name = Manifest::read(path).files.at("a.1-of-2").name;
  const std::string file = path + "/" + name;
  const std::string good = read_file(file);
  const std::string other = read_file(folder / "other" + "/" +
                                      Manifest::read(folder / "other").files.at("a.1-of-2").name);
  Saving(2, 2, 0).save(folder / "another run's");
  const std::string namesake =
      read_file(folder / "another run's" + "/" +
                Manifest::read(folder / "another run's").files.at("a.1-of-2").name);
  ASSERT_EQ(other.size(), good.size());
  ASSERT_EQ(namesake.size(), good.size());
  std::string flipped = good;
  flipped.back() = static_cast<char>(flipped.back() ^ 1);
  const auto text = [&] {
    StoredCheckpoint checkpoint(path);
    EXPECT_EQ(read(checkpoint, "b", {0, 24}), numbers(50)) << "the other files are good";
    const std::string of_range = test::message_of<ConfigError>([&] {
      StoredCheckpoint(path).elements("a", "w", {20, 24});
    });
    EXPECT_EQ(of_range,
              test::message_of<ConfigError>([&] { StoredCheckpoint(path).file("a.1-of-2"); }));
    EXPECT_EQ(StoredCheckpoint(path).elements("a", "w", {0, 3}).size(), 1U) << "rank 0's";
    return of_range;
  };
  write_file(file, flipped);
  EXPECT_TRUE(text().starts_with(file + ": its SHA-256 is not the one in manifest.json")) << text();
  write_file(file, good.substr(0, good.size() - 1));
  EXPECT_TRUE(text().starts_with(file + ": expected " + std::to_string(good.size()) + " bytes"))
      << text();
  write_file(file, other);
  EXPECT_NE(text().find("another save's: it says it is a.1-of-2 of update 1"), std::string::npos)
      << text();
  write_file(file, namesake);
  EXPECT_TRUE(text().starts_with(file + ": its SHA-256 is not the one in manifest.json")) << text();
  for (size_t i = 0; i < good.size(); ++i) {
    flipped = good;
    flipped[i] = static_cast<char>(flipped[i] ^ (1 << i % 8));
    write_file(file, flipped);
    EXPECT_TRUE(test::message_of<ConfigError>([&] {
                  StoredCheckpoint(path).file("a.1-of-2");
                }).starts_with(file + ": its SHA-256"))
        << "byte " << i;
  }
  fs::remove(file);
  EXPECT_EQ(text(), file + ": is missing, but manifest.json names it");
  write_file(file, good);
  EXPECT_EQ(text(), "nothing was thrown");

  // A manifest that was tampered with: files are good, but hold other ranges.
  Manifest manifest = Manifest::read(path);
  auto& ranges = manifest.parts["a"]["w"].ranges;
  std::swap(ranges["a.0-of-2"], ranges["a.1-of-2"]);
  ranges["a.1-of-2"].front().end += 1;
  ranges["a.0-of-2"].front().begin += 1;
  write_file(path + "/manifest.json", manifest.to_json());
  EXPECT_TRUE(test::message_of<ConfigError>([&] {
                StoredCheckpoint(path).file("a.1-of-2");
              }).starts_with(file + ": does not hold w as manifest.json says"));
}

TEST(StoredCheckpointTest, ConsolidationGivesTheFilesOfOneRank) {
  const TemporaryFolder folder;
  Saving(9, 1, 100).save(folder / "one");
  Saving(9, 4, 100).save(folder / "four");
  StoredCheckpoint four(folder / "four");
  consolidate_checkpoint(four, four.parts(), folder / "whole");
  for (const char* name : {"manifest.json", "a-9.safetensors", "b-9.safetensors"}) {
    EXPECT_EQ(read_file(folder / "whole" + "/" + name), read_file(folder / "one" + "/" + name))
        << name;
  }
  EXPECT_THROW(consolidate_checkpoint(four, four.parts(), folder / "four"), ConfigError);
  consolidate_checkpoint(four, {"b"}, folder / "part");
  EXPECT_FALSE(fs::exists(folder / "part" + "/a-9.safetensors"));
  EXPECT_THROW(consolidate_checkpoint(four, {"c"}, folder / "none"), ConfigError);
}

TEST(StoredCheckpointTest, ACheckpointIsMadeWholeInItsOwnFolder) {
  const TemporaryFolder folder;
  Saving(9, 1, 100).save(folder / "one");
  Saving(9, 4, 100).save(folder / "four");
  for (int time = 0; time < 2; ++time) {
    make_checkpoint_whole(folder / "four");
    EXPECT_EQ(std::distance(fs::directory_iterator(folder / "four"), fs::directory_iterator()), 3);
    for (const char* name : {"manifest.json", "a-9.safetensors", "b-9.safetensors"}) {
      EXPECT_EQ(read_file(folder / "four" + "/" + name), read_file(folder / "one" + "/" + name))
          << name;
    }
  }
}

TEST(StoredCheckpointTest, ConsolidationLeavesFilesOfOthersAlone) {
  const TemporaryFolder folder;
  Saving(9, 2, 100).save(folder / "two");
  StoredCheckpoint two(folder / "two");
  fs::create_directory(folder / "models");
  write_file(folder / "models/mine.safetensors", "the user's");
  EXPECT_EQ(test::message_of<ConfigError>(
                [&] { consolidate_checkpoint(two, two.parts(), folder / "models"); }),
            folder / "models" + ": expected no folder yet, an empty one, or that of a checkpoint");
  EXPECT_EQ(read_file(folder / "models/mine.safetensors"), "the user's");
  consolidate_checkpoint(two, two.parts(), folder / "new/and/deep");
  consolidate_checkpoint(two, two.parts(), folder / "new/and/deep", CheckpointThere::kIsReplaced);
  EXPECT_EQ(StoredCheckpoint(folder / "new/and/deep").manifest().files.size(), 2U);
}

TEST(StoredCheckpointTest, WhoReadsBesideASaveHearsOfIt) {
  const TemporaryFolder folder;
  const std::string path = folder / "last";
  Saving(1, 2, 0).save(path);
  StoredCheckpoint checkpoint(path);
  EXPECT_FALSE(checkpoint.is_replaced());
  Saving(2, 2, 50).save(path);
  EXPECT_TRUE(checkpoint.is_replaced());
  EXPECT_NE(test::message_of<ConfigError>([&] {
              checkpoint.elements("a", "w", {0, 24});
            }).find("is gone, for a later save took its place"),
            std::string::npos);
}

TEST(StoredCheckpointTest, ADiscardedShareGoesButNotTheCheckpointsFiles) {
  const TemporaryFolder folder;
  const std::string path = folder / "last";
  const auto num_files = [&] {
    return std::distance(fs::directory_iterator(path), fs::directory_iterator());
  };
  discard_share(path, Saving(1, 2, 0).share(path, 0));
  EXPECT_EQ(num_files(), 0);
  Saving(1, 2, 0).save(path);
  const Manifest same = Saving(1, 2, 0).share(path, 1);
  const Manifest other = Saving(1, 2, 50).share(path, 1);
  EXPECT_EQ(num_files(), 5 + 2);
  discard_share(path, same);
  discard_share(path, other);
  EXPECT_EQ(num_files(), 5);
  StoredCheckpoint checkpoint(path);
  EXPECT_EQ(read(checkpoint, "a", {0, 24}), numbers(0));
}

TEST(StoredCheckpointTest, AShareMissingFromACommitLeavesTheCheckpointBefore) {
  const TemporaryFolder folder;
  const std::string path = folder / "last";
  Saving(1, 2, 0).save(path);
  const Manifest share = Saving(2, 2, 50).share(path, 0);
  EXPECT_NE(test::message_of<ConfigError>([&] {
              commit_manifest(path, share);
            }).find("elements 3 to 6 of w of a are in no file"),
            std::string::npos);
  StoredCheckpoint checkpoint(path);
  EXPECT_EQ(read(checkpoint, "a", {0, 24}), numbers(0));
}

// A manifest that anybody wrote.
TEST(StoredCheckpointTest, AManifestGivesNoPowerOverOtherFiles) {
  const TemporaryFolder folder;
  const std::string path = folder / "last";
  const std::string kept = path + "/train.py";
  Saving(1, 1, 0).save(path);
  write_file(kept, "the user's");
  Manifest hostile = Manifest::read(path);
  hostile.files["c"] = {"train.py", "00", 10U};
  hostile.files["d"] = {"manifest.json", "00", 10U};
  write_file(path + "/manifest.json", hostile.to_json());
  Saving(2, 1, 0).save(path);
  EXPECT_TRUE(fs::exists(kept));
  EXPECT_EQ(Manifest::read(path).update, 2);
  EXPECT_FALSE(fs::exists(path + "/a-1.safetensors"));

  Manifest outside = Manifest::read(path);
  outside.parts["../a"] = outside.parts["a"];
  outside.parts.erase("a");
  write_file(path + "/manifest.json", outside.to_json());
  StoredCheckpoint checkpoint(path);
  EXPECT_EQ(test::message_of<ConfigError>(
                [&] { consolidate_checkpoint(checkpoint, {"../a"}, folder / "to/plain"); }),
            "checkpoint: expected a part's name without a slash, got ../a");
  EXPECT_FALSE(fs::exists(folder / "to/a-2.safetensors"));
}

TEST(StoredCheckpointTest, ADeviceIsNoFile) {
  const TemporaryFolder folder;
  const std::string path = folder / "last";
  Saving(1, 1, 0).save(path);
  fs::remove(path + "/a-1.safetensors");
  fs::create_symlink("/dev/zero", path + "/a-1.safetensors");
  const std::string text = test::message_of<ConfigError>([&] { StoredCheckpoint(path).file("a"); });
  EXPECT_TRUE(text.starts_with(path + "/a-1.safetensors: expected a file: ")) << text;
  fs::remove(path + "/manifest.json");
  fs::create_symlink("/dev/zero", path + "/manifest.json");
  EXPECT_EQ(test::message_of<ConfigError>([&] { Manifest::read(path); }),
            path + "/manifest.json: no checkpoint here");
}

TEST(StoredCheckpointTest, APartIsNoFolder) {
  const TemporaryFolder folder;
  for (const char* part : {"", "a/b"}) {
    EXPECT_THROW(write_share(folder.path().string(), part, {}, {1, 0, 1}), ConfigError) << part;
  }
  EXPECT_TRUE(fs::is_empty(folder.path()));
}

TEST(StoredCheckpointTest, ShardsThatOverlapOrDoNotFitAreRefused) {
  const TemporaryFolder folder;
  const auto values = numbers(0);
  const auto shard = [&](int64_t begin, int64_t end, size_t count) {
    return StoredShard{
        "w", DType::kI32, {4, 6}, {begin, end}, std::as_bytes(std::span(values).first(count))};
  };
  const auto refused = [&](const std::vector<StoredShard>& shards) {
    return test::message_of<ConfigError>([&] {
      write_share(folder.path().string(), "a", shards, {1, 0, 2});
    });
  };
  EXPECT_NE(refused({shard(0, 4, 4), shard(3, 5, 2)}).find("overlap"), std::string::npos);
  EXPECT_NE(refused({shard(0, 4, 3)}).find("12 bytes"), std::string::npos);
  EXPECT_NE(refused({shard(22, 26, 4)}).find("22 to 26"), std::string::npos);
  EXPECT_NE(refused({shard(4, 2, 0)}).find("4 to 2"), std::string::npos);
  EXPECT_TRUE(fs::is_empty(folder.path()));
}

}  // namespace stored_checkpoint_test
}  // namespace cohort
