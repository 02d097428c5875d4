// SPDX-License-Identifier: Apache-2.0
// Checkpoints of other programs: safetensors files with an index, and files of torch.save.
#include "cohort/base/imported_checkpoint.h"

#include <cstring>
#include <filesystem>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "cohort/base/error.h"
#include "cohort/base/safetensors.h"
#include "cohort/base/stored_checkpoint.h"
#include "cohort/base/torch_file.h"

#include "tests/base/temporary_folder.h"
#include "tests/support/message_of.h"

namespace cohort {
namespace imported_checkpoint_test {

namespace fs = std::filesystem;
using Json = nlohmann::json;

template <class T>
std::vector<T> values_of(std::span<const std::byte> bytes) {
  std::vector<T> values(bytes.size() / sizeof(T));
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

std::string torch_file(const std::string& name) {
  return std::string(COHORT_TORCH_FILES) + "/" + name;
}

// Two shards: a, [2, 3] of 0 to 5, and b, [2] of 0 and 1.
class IndexTest : public testing::Test {
 protected:
  IndexTest() {
    const std::vector<float> values{0, 1, 2, 3, 4, 5};
    const auto bytes = std::as_bytes(std::span(values));
    const std::vector<TensorView> first{{"a", DType::kF32, {2, 3}, bytes}};
    const std::vector<TensorView> second{{"b", DType::kF32, {2}, bytes.first(8)}};
    write_safetensors(folder_ / "1.safetensors", first);
    write_safetensors(folder_ / "2.safetensors", second);
    write({{"a", "1.safetensors"}, {"b", "2.safetensors"}});
  }
  void write(const Json& weight_map) const {
    write_file(path_, Json{{"metadata", {{"total_size", 32}}}, {"weight_map", weight_map}}.dump());
  }
  std::string error() const {
    return test::message_of<ConfigError>([&] { StoredCheckpoint checkpoint(folder_.path()); });
  }
  void expect_error(const std::string& word) const {
    EXPECT_NE(error().find(word), std::string::npos) << error();
  }

  const TemporaryFolder folder_;
  const std::string path_ = folder_ / "model.safetensors.index.json";
};

TEST_F(IndexTest, FolderAndIndexAreReadAsOneCheckpoint) {
  for (const std::string& path : {folder_.path().string(), path_}) {
    StoredCheckpoint checkpoint(path);
    EXPECT_TRUE(checkpoint.is_imported());
    EXPECT_EQ(checkpoint.parts(), std::vector<std::string>{"weights"});
    EXPECT_EQ(checkpoint.part("weights").at("a").shape, (std::vector<int64_t>{2, 3}));
    const auto spans = checkpoint.elements("weights", "a", {2, 5});
    ASSERT_EQ(spans.size(), 1U);
    EXPECT_EQ(values_of<float>(spans[0]), (std::vector<float>{2, 3, 4}));
    EXPECT_EQ(test::message_of<ConfigError>([&] { checkpoint.part("optimizer"); }),
              path_ + ": the checkpoint has no optimizer: expected one of a training run");
  }
  EXPECT_EQ(StoredCheckpoint(folder_ / "1.safetensors").part("weights").size(), 1U);
}

TEST_F(IndexTest, HostileAndDamagedOnesAreRefusedByName) {
  for (const char* name : {"../1.safetensors", "/etc/passwd", "x/1.safetensors", "..", "."}) {
    write({{"a", name}});
    expect_error("tensor a: expected the name of a file beside the index, found " +
                 std::string(name));
  }
  write({{"a", ""}});
  expect_error("tensor a: expected the name of a file beside the index");
  write({{"a", "3.safetensors"}});
  expect_error(folder_ / "3.safetensors" + ": is missing, but " + path_ + " names it");
  write({{"a", "1.safetensors"}, {"b", "1.safetensors"}});
  expect_error(path_ + ": tensor b is not in 1.safetensors");
  write({{"a", 7}});
  expect_error("tensor a: expected the name of its file");
  write(Json::object());
  expect_error("expected tensors in weight_map");
  write_file(path_, R"({"weight_map": {"a": "1.safetensors", "a": "2.safetensors"}})");
  expect_error("\"a\" occurs twice");
  write_file(path_, "[]");
  expect_error("expected an object with weight_map");
  write_file(path_, "{\"weight_map\": {");
  expect_error("it is not JSON");
  write({{"a", "1.safetensors"}});
  write_file(folder_ / "1.safetensors", "damaged");
  expect_error(folder_ / "1.safetensors");
}

TEST_F(IndexTest, ConsolidationMakesACheckpointOfIt) {
  StoredCheckpoint checkpoint(folder_.path());
  consolidate_checkpoint(checkpoint, checkpoint.parts(), folder_ / "new");
  StoredCheckpoint made(folder_ / "new");
  EXPECT_FALSE(made.is_imported());
  EXPECT_EQ(values_of<float>(made.elements("weights", "b", {0, 2}).at(0)),
            (std::vector<float>{0, 1}));
}

TEST(TorchFileTest, StateDictsAreReadWhateverTheirStrides) {
  for (const auto& [name, key] : std::vector<std::pair<std::string, std::string>>{
           {"state_dict", ""}, {"protocol_4", ""}, {"training", "state_dict"}}) {
    const TorchFile file(torch_file(name), key);
    ASSERT_EQ(file.tensors().size(), 5U) << name;
    EXPECT_EQ(file.at("weight").shape, (std::vector<int64_t>{2, 3}));
    EXPECT_EQ(values_of<float>(file.at("weight").bytes), (std::vector<float>{0, 1, 2, 3, 4, 5}));
    EXPECT_EQ(values_of<float>(file.at("bias").bytes), (std::vector<float>{6, 7}));
    EXPECT_EQ(values_of<float>(file.at("turned").bytes),
              (std::vector<float>{10, 40, 20, 50, 30, 60}));
    EXPECT_TRUE(file.at("steps").shape.empty());
    EXPECT_EQ(values_of<int64_t>(file.at("steps").bytes), std::vector<int64_t>{-7});
    EXPECT_EQ(file.at("low").dtype, DType::kBF16);
    EXPECT_EQ(values_of<uint16_t>(file.at("low").bytes),
              (std::vector<uint16_t>{0x3F80, 0x4000, 0xC000}));
  }
}

TEST(TorchFileTest, ModulesHaveTheNamesOfTheirTensors) {
  const TorchFile file(torch_file("module"));
  ASSERT_EQ(file.tensors().size(), 2U);
  EXPECT_EQ(file.at("linear.weight").shape, (std::vector<int64_t>{2, 1}));
  EXPECT_EQ(values_of<float>(file.at("linear.weight").bytes), (std::vector<float>{1, 2}));
  EXPECT_EQ(values_of<int64_t>(file.at("steps").bytes), std::vector<int64_t>{5});
}

TEST(TorchFileTest, WhatIsNoStateDictIsRefusedByName) {
  const auto error = [](const std::string& name, const std::string& key) {
    return test::message_of<ConfigError>([&] { TorchFile file(torch_file(name), key); });
  };
  EXPECT_EQ(error("os_system", ""),
            torch_file("os_system") +
                ": expected a pickled state dict, found the name os.system, which a state dict of "
                "tensors does not have: nothing of it was run");
  EXPECT_EQ(error("training", ""),
            torch_file("training") + ": expected a tensor as epoch, found an integer");
  EXPECT_EQ(error("training", "model"),
            torch_file("training") +
                ": expected a state dict under the key model, found keys: epoch, state_dict, "
                "optimizer");
  EXPECT_NE(error("training", "optimizer").find("expected a tensor as state, found a dict"),
            std::string::npos);
}

TEST(TorchFileTest, DamageIsNamed) {
  const TemporaryFolder folder;
  const std::string good = read_file(torch_file("state_dict"));
  const auto error = [&](const std::string& content) {
    write_file(folder / "file.pt", content);
    return test::message_of<ConfigError>([&] { TorchFile file(folder / "file.pt"); });
  };
  EXPECT_NE(error(good.substr(0, good.size() - 30)).find("it is cut short"), std::string::npos);
  EXPECT_NE(error("no zip").find("expected a file of torch.save"), std::string::npos);
  std::string longer = good;  // The first storage has 8 elements, now it claims 80.
  const size_t at = longer.find("K\x08");
  ASSERT_NE(at, longer.npos);
  longer[at + 1] = 80;
  EXPECT_NE(error(longer).find("tensor weight: its elements are not all in record data/0"),
            std::string::npos)
      << error(longer);
}

}  // namespace imported_checkpoint_test
}  // namespace cohort
