// SPDX-License-Identifier: Apache-2.0
// Checkpoints whose names and types are not the model's, and those of other programs.
#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>
#include <torch/serialize.h>
#include <torch/types.h>

#include "cohort/base/error.h"
#include "cohort/base/safetensors.h"
#include "cohort/train/checkpoint.h"

#include "tests/base/temporary_folder.h"
#include "tests/support/message_of.h"

namespace cohort::train {
namespace load_options_test {

std::string error_of(const std::string& path, const Parts& parts, const LoadOptions& options = {}) {
  return test::message_of<ConfigError>([&] { load_checkpoint(path, parts, options); });
}

// A checkpoint with tensors of these names, each of two elements.
std::string save(const TemporaryFolder& folder, const std::vector<std::string>& names) {
  NamedTensors tensors;
  for (const std::string& name : names)
    tensors.emplace_back(name, at::full(2, static_cast<double>(name.size())));
  const std::string path = folder / "last";
  save_checkpoint(path, {{"weights", tensors}}, 1, {});
  return path;
}

Parts zeros(const std::vector<std::string>& names) {
  NamedTensors tensors;
  for (const std::string& name : names) tensors.emplace_back(name, at::zeros(2));
  return {{"weights", tensors}};
}

double first(const Parts& parts, size_t i) {
  return parts.at("weights")[i].second[0].item<double>();
}

TEST(StrictTest, NamesTheFirstFewAndCountsTheRest) {
  const TemporaryFolder folder;
  const std::string path = save(folder, {"a", "b", "c", "d", "e"});
  const std::string prefix = path + "/weights-1.safetensors: a checkpoint of another model: ";
  EXPECT_EQ(error_of(path, zeros({"a", "b", "c", "d", "e", "f", "g"})), prefix + "it has no f, g");
  EXPECT_EQ(error_of(path, zeros({"e"})), prefix + "the model has no a, b, c and 1 more");
  const Parts other = zeros({"a", "u", "v", "w", "x", "y"});
  EXPECT_EQ(error_of(path, other),
            prefix + "it has no u, v, w and 2 more; the model has no b, c, d and 1 more");
  EXPECT_EQ(first(other, 0), 0) << "changed by a load that failed";
}

TEST(StrictTest, WithoutItTheNamesAreReturned) {
  const TemporaryFolder folder;
  const std::string path = save(folder, {"a", "b", "longer"});
  const Parts some = zeros({"a", "new"});
  Parts parts = some;
  parts["optimizer"] = {{"a.exp_avg", at::zeros(2)}};
  const IncompatibleKeys keys = load_checkpoint(path, parts, {.strict = false});
  EXPECT_EQ(keys.missing, (std::vector<std::string>{"a.exp_avg", "new"}));
  EXPECT_EQ(keys.unexpected, (std::vector<std::string>{"b", "longer"}));
  EXPECT_EQ(first(some, 0), 1);
  EXPECT_EQ(first(some, 1), 0);
  // A tensor that is there must fit in any case.
  EXPECT_NE(error_of(path, {{"weights", {{"a", at::zeros(3)}}}}, {.strict = false})
                .find("a is F32 [2], expected F32 [3]"),
            std::string::npos);
}

TEST(RenameTest, PrefixesOfTheCheckpointBecomeTheModels) {
  const TemporaryFolder folder;
  const std::string path = save(folder, {"model.a", "model.head.b", "c"});
  const Parts parts = zeros({"a", "out.b", "c"});
  const Rename rename = rename_prefixes({{"model.head.", "out."}, {"model.", ""}});
  EXPECT_TRUE(load_checkpoint(path, parts, {.rename = rename}).missing.empty());
  EXPECT_EQ(first(parts, 0), 7);
  EXPECT_EQ(first(parts, 1), 12);
  EXPECT_EQ(first(parts, 2), 1);
  const auto one = [](const std::string&) { return std::string("x"); };
  EXPECT_NE(
      error_of(path, zeros({"x"}), {.rename = one}).find("c and model.a are both renamed to x"),
      std::string::npos);
  const IncompatibleKeys keys = load_checkpoint(
      path, zeros({"a"}), {.strict = false, .rename = rename_prefixes({{"model.", ""}})});
  EXPECT_EQ(keys.unexpected, (std::vector<std::string>{"c", "model.head.b"}))
      << "the checkpoint's names";
}

TEST(ConvertTest, FloatingPointTypesAreConvertedOnDemand) {
  const TemporaryFolder folder;
  const std::string path = folder / "last";
  save_checkpoint(path, {{"weights", {{"a", at::tensor({1.5, -2.0}).to(at::kBFloat16)}}}}, 1, {});
  const at::Tensor a = at::zeros(2);
  EXPECT_NE(error_of(path, {{"weights", {{"a", a}}}}).find("a is BF16 [2], expected F32 [2]"),
            std::string::npos);
  load_checkpoint(path, Parts{{"weights", {{"a", a}}}}, {.convert_dtype = true});
  EXPECT_TRUE(a.equal(at::tensor({1.5f, -2.f})));
  EXPECT_NE(error_of(path, {{"weights", {{"a", at::zeros(2, at::kLong)}}}}, {.convert_dtype = true})
                .find("a is BF16 [2], expected I64 [2]"),
            std::string::npos);
}

struct NetImpl : torch::nn::Module {
  NetImpl() { to(at::kFloat); }
  torch::nn::Linear linear = register_module("linear", torch::nn::Linear(3, 2));
  torch::nn::BatchNorm1d norm = register_module("norm", torch::nn::BatchNorm1d(2));
};
TORCH_MODULE(Net);

void expect_equal(const NetImpl& found, const NetImpl& expected) {
  const NamedTensors state = state_of(expected);
  const NamedTensors other = state_of(found);
  ASSERT_EQ(state.size(), 7U);
  for (size_t i = 0; i < state.size(); ++i)
    EXPECT_TRUE(other[i].second.equal(state[i].second)) << state[i].first;
}

TEST(TorchSaveTest, AModuleOfTorchSaveIsLoaded) {
  const TemporaryFolder folder;
  Net saved;
  saved->norm->running_mean.fill_(3);
  torch::save(saved, folder / "net.pt");
  Net net;
  load_checkpoint(folder / "net.pt", *net);
  expect_equal(*net, *saved);
}

TEST(TorchSaveTest, ADictOfPickleSaveIsLoaded) {
  const TemporaryFolder folder;
  Net saved;
  c10::Dict<std::string, at::Tensor> dict;
  for (const auto& [name, tensor] : state_of(*saved)) dict.insert(name, tensor);
  const std::vector<char> bytes = torch::pickle_save(dict);
  write_file(folder / "dict.pt", {bytes.begin(), bytes.end()});
  Net net;
  load_checkpoint(folder / "dict.pt", *net);
  expect_equal(*net, *saved);
}

// Files of others may hold elements at any offset.
TEST(SafetensorsTest, ElementsNeedNotBeAligned) {
  const TemporaryFolder folder;
  std::string header = R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                       R"("b":{"dtype":"F32","shape":[2],"data_offsets":[1,9]}})";
  header.resize((header.size() + 7) / 8 * 8, ' ');
  const uint64_t length = header.size();
  std::string content(reinterpret_cast<const char*>(&length), sizeof(length));
  const std::vector<float> values{1.5f, -3};
  content += header + '\7';
  content.append(reinterpret_cast<const char*>(values.data()), 8);
  write_file(folder / "b.safetensors", content);
  const at::Tensor a = at::zeros(1, at::kByte);
  const at::Tensor b = at::zeros(2);
  load_checkpoint(folder / "b.safetensors", Parts{{"weights", {{"a", a}, {"b", b}}}});
  EXPECT_EQ(a.item<int>(), 7);
  EXPECT_TRUE(b.equal(at::tensor({1.5f, -3.f})));
}

}  // namespace load_options_test
}  // namespace cohort::train
