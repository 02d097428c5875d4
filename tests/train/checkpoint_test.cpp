#include "cohort/train/checkpoint.h"

#include <filesystem>
#include <gtest/gtest.h>
#include <set>
#include <torch/types.h>

#include "cohort/base/error.h"

#include "tests/base/temporary_folder.h"
#include "tests/support/message_of.h"

namespace cohort::train {
namespace {

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

TEST(CheckpointWriterTest, WritesWhatTheTensorsHeldWhenItWasAsked) {
  const TemporaryFolder folder;
  const std::string path = folder / "last";
  CheckpointWriter writer;
  Parts parts = make_parts(1);
  for (int update = 1; update <= 5; ++update) {
    for (auto& [part, tensors] : parts) tensors.front().second.fill_(update);
    writer.save(path, parts, update, {});
    for (auto& [part, tensors] : parts) tensors.front().second.fill_(-100);
  }
  writer.wait();
  EXPECT_FALSE(writer.busy());
  load_checkpoint(path, parts);
  EXPECT_EQ(first(parts, "weights"), 5);
}

TEST(CheckpointWriterTest, AFailureIsToldOnceAndTheEarlierCheckpointStays) {
  const TemporaryFolder folder;
  write_file(folder / "file", "no folder");
  CheckpointWriter writer;
  writer.save(folder / "good", make_parts(3), 1, {});
  writer.save(folder / "file", make_parts(4), 2, {});
  EXPECT_NE(test::message_of<ConfigError>([&] { writer.wait(); }).find(folder / "file"),
            std::string::npos);
  writer.wait();
  Parts parts = make_parts(0);
  load_checkpoint(folder / "good", parts);
  EXPECT_EQ(first(parts, "weights"), 3);
}

}  // namespace
}  // namespace cohort::train
