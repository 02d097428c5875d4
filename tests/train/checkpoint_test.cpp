// SPDX-License-Identifier: Apache-2.0
#include "cohort/train/checkpoint.h"

#include <atomic>
#include <filesystem>
#include <functional>
#include <gtest/gtest.h>
#include <initializer_list>
#include <set>
#include <thread>
#include <torch/types.h>

#include "cohort/base/error.h"
#include "cohort/base/manifest.h"

#include "tests/base/temporary_folder.h"
#include "tests/support/message_of.h"

namespace cohort::train {
namespace checkpoint_test {

namespace fs = std::filesystem;

Parts make_parts(double value) {
  return {{"weights", {{"w", at::full({3, 2}, value)}}},
          {"optimizer", {{"w.exp_avg", at::full({3, 2}, -value, at::kDouble)}}}};
}

double first(const Parts& parts, const std::string& part) {
  return parts.at(part).front().second.flatten()[0].item<double>();
}

TEST(PartsTest, AreSavedTogetherAndTheOldOnesRemoved) {
  const TemporaryFolder folder;
  const std::string path = folder / "last";
  save_checkpoint(path, make_parts(1), 5, {{"a", "b"}});
  save_checkpoint(path, make_parts(2), 15, {{"a", "c"}});
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(path)) names.insert(entry.path().filename());
  EXPECT_EQ(names, (std::set<std::string>{"manifest.json", "optimizer-15.safetensors",
                                          "weights-15.safetensors"}));
  Parts found = make_parts(0);
  load_checkpoint(path, found);
  EXPECT_EQ(first(found, "weights"), 2);
  EXPECT_EQ(first(found, "optimizer"), -2);
  EXPECT_EQ(read_manifest(path).at("a"), "c");
}

TEST(PartsTest, FilesOfOthersStayAndThoseOfKilledSavesGo) {
  const TemporaryFolder folder;
  const std::string path = folder / "last";
  const std::set<std::string> others = {"model.safetensors", "model-00001-of-00002.safetensors",
                                        "weights.safetensors", "weights-best.safetensors"};
  save_checkpoint(path, make_parts(1), 5, {});
  for (const std::string& name : others) write_file(path + "/" + name, "of another program");
  for (const char* name : {"weights-7.safetensors", "weights-7.0-of-2.65a222b8.safetensors",
                           "optimizer-9.safetensors.tmp-1234"})
    write_file(path + "/" + name, "of a killed save");
  save_checkpoint(path, make_parts(2), 15, {});
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(path)) names.insert(entry.path().filename());
  std::set<std::string> expected = {"manifest.json", "optimizer-15.safetensors",
                                    "weights-15.safetensors"};
  expected.insert(others.begin(), others.end());
  EXPECT_EQ(names, expected);
}

TEST(PartsTest, AnEmptyNameIsNoFolder) {
  Parts parts = make_parts(1);
  for (const auto& call : std::initializer_list<std::function<void()>>{
           [&] { save_checkpoint("", parts, 5, {}); }, [&] { load_checkpoint("", parts); },
           [&] { read_manifest(""); }}) {
    EXPECT_NE(test::message_of<ConfigError>(call).find("got an empty name"), std::string::npos);
  }
}

TEST(PartsTest, NoneIsFilledIfOneIsDamaged) {
  const TemporaryFolder folder;
  const std::string path = folder / "last";
  save_checkpoint(path, make_parts(1), 5, {});
  for (const char* part : {"weights-5.safetensors", "optimizer-5.safetensors"}) {
    const std::string file = path + "/" + part;
    const std::string good = read_file(file);
    std::string flipped = good;
    flipped.back() = static_cast<char>(flipped.back() ^ 1);
    for (const std::string& bad : {flipped, good.substr(0, good.size() - 7), std::string()}) {
      write_file(file, bad);
      Parts parts = make_parts(9);
      const auto text = test::message_of<ConfigError>([&] { load_checkpoint(path, parts); });
      EXPECT_NE(text.find(part), std::string::npos) << text;
      EXPECT_EQ(first(parts, "weights"), 9);
      EXPECT_EQ(first(parts, "optimizer"), -9);
    }
    write_file(file, good);
  }
  Parts more = make_parts(9);
  more["average"] = {{"w", at::zeros({1})}};
  EXPECT_NE(test::message_of<ConfigError>([&] {
              load_checkpoint(path, more);
            }).find("the checkpoint has no average"),
            std::string::npos);
}

TEST(PartsTest, AFileOfTheCheckpointIsNotWrittenToBySavingTheSameUpdateAgain) {
  const TemporaryFolder folder;
  const std::string path = folder / "last";
  save_checkpoint(path, make_parts(1), 5, {});
  const std::string manifest = read_file(path + "/manifest.json");
  save_checkpoint(path, make_parts(1), 5, {});
  EXPECT_EQ(read_file(path + "/manifest.json"), manifest) << "equal content has equal names";
  save_checkpoint(path, make_parts(2), 5, {});
  EXPECT_FALSE(fs::exists(path + "/weights-5.safetensors"));
  Parts found = make_parts(0);
  load_checkpoint(path, found);
  EXPECT_EQ(first(found, "weights"), 2);
}

// What earlier versions wrote: parts, and no word of tensors.
TEST(PartsTest, AManifestOfVersionOneIsRead) {
  const TemporaryFolder folder;
  const std::string path = folder / "last";
  save_checkpoint(path, make_parts(3), 5, {{"a", "b"}});
  const Manifest manifest = Manifest::read(path);
  Manifest old{.version = 1, .metadata = manifest.metadata, .files = manifest.files};
  for (auto& [key, file] : old.files) file.bytes.reset();
  std::string text = old.to_json();
  const std::string version = "  \"version\": 1,\n";
  text.erase(text.find(version), version.size());
  write_file(path + "/manifest.json", text);
  Parts found = make_parts(0);
  load_checkpoint(path, found);
  EXPECT_EQ(first(found, "weights"), 3);
  EXPECT_EQ(first(found, "optimizer"), -3);
  EXPECT_EQ(read_manifest(path).at("a"), "b");
  at::Tensor some = at::zeros(2);
  load_shards(path, {{"weights", {{"w", {3, 2}, 2, 4, some}}}});
  EXPECT_TRUE(some.equal(at::full(2, 3.)));
  found["weights"].emplace_back("more", at::zeros(1));
  EXPECT_NE(test::message_of<ConfigError>([&] {
              load_checkpoint(path, found);
            }).find("weights-5.safetensors: a checkpoint of another model: it has no more"),
            std::string::npos);
}

TEST(PartsTest, TensorsOfEveryFormComeBack) {
  const TemporaryFolder folder;
  const std::string path = folder / "last";
  NamedTensors saved{{"scalar", at::tensor(3.5)},
                     {"empty", at::empty({0, 4})},
                     {"turned", at::arange(6).view({2, 3}).t()},
                     {"a \"name\" \xC3\xA9", at::arange(2).gt(0)},
                     {"half", at::arange(5, at::kBFloat16)}};
  save_checkpoint(path, {{"weights", saved}}, 1, {});
  NamedTensors found;
  for (const auto& [name, tensor] : saved) found.emplace_back(name, at::zeros_like(tensor));
  load_checkpoint(path, {{"weights", found}});
  for (size_t i = 0; i < saved.size(); ++i)
    EXPECT_TRUE(found[i].second.equal(saved[i].second)) << saved[i].first;
}

TEST(PartsTest, AModelWithATensorLessIsAnother) {
  const TemporaryFolder folder;
  const std::string path = folder / "last";
  save_checkpoint(path, {{"weights", {{"v", at::ones(1)}, {"w", at::ones({3, 2})}}}}, 5, {});
  const auto text = [&](const Parts& parts) {
    return test::message_of<ConfigError>([&] { load_checkpoint(path, parts); });
  };
  const std::string prefix = path + "/weights-5.safetensors: a checkpoint of another model: ";
  EXPECT_EQ(text({{"weights", {{"w", at::ones({3, 2})}}}}), prefix + "the model has no v");
  EXPECT_EQ(text({{"weights", {{"v", at::ones(1)}, {"w", at::ones({2, 3})}}}}),
            prefix + "w is F32 [3, 2], expected F32 [2, 3]");
}

TEST(PartsTest, OfASaveThatFailsNothingStays) {
  const TemporaryFolder folder;
  const std::string path = folder / "last";
  save_checkpoint(path, make_parts(1), 5, {});
  Parts parts = make_parts(2);  // "optimizer" is written before "weights"
  parts["weights"].emplace_back("z", at::zeros(2, at::kComplexFloat));
  EXPECT_THROW(save_checkpoint(path, parts, 6, {}), c10::ValueError);
  EXPECT_THROW(save_checkpoint(path, make_parts(2), 7, {{"a", "\xFF"}}), ConfigError);
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(path)) names.insert(entry.path().filename());
  EXPECT_EQ(names, (std::set<std::string>{"manifest.json", "optimizer-5.safetensors",
                                          "weights-5.safetensors"}));
}

// A translator may read best/ while its training saves there.
TEST(PartsTest, WhoLoadsBesideASaveFindsAWholeCheckpoint) {
  const TemporaryFolder folder;
  const std::string path = folder / "last";
  save_checkpoint(path, make_parts(1), 1, {});
  std::atomic<bool> stop = false;
  std::thread writer([&] {
    for (int update = 2; !stop; ++update) save_checkpoint(path, make_parts(update), update, {});
  });
  double last = 1;
  for (int i = 0; i < 200; ++i) {
    Parts found = make_parts(0);
    EXPECT_NO_THROW(load_checkpoint(path, found));
    EXPECT_EQ(first(found, "weights"), -first(found, "optimizer")) << "parts of two saves";
    EXPECT_GE(first(found, "weights"), last);
    last = first(found, "weights");
  }
  stop = true;
  writer.join();
}

}  // namespace checkpoint_test
}  // namespace cohort::train
