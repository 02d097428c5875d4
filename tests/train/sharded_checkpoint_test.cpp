// SPDX-License-Identifier: Apache-2.0
// Saving and loading by ranks whose parts of the state differ.
#include "cohort/train/sharded_checkpoint.h"

#include <filesystem>
#include <gtest/gtest.h>
#include <memory>
#include <thread>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include "cohort/base/error.h"
#include "cohort/base/stored_checkpoint.h"
#include "cohort/optim/adam.h"
#include "cohort/parallel/sharding/flat_layout.h"
#include "cohort/parallel/sharding/fully_sharded_data_parallel.h"
#include "cohort/train/stored_tensor.h"

#include "tests/base/temporary_folder.h"
#include "tests/support/message_of.h"
#include "tests/support/ranks.h"
#include "tests/support/resident.h"
#include "tests/support/shared_folder.h"

namespace cohort::train {
namespace sharded_checkpoint_test {

namespace fs = std::filesystem;

// A state with every form: odd sizes, a scalar, an empty tensor, other types.
Parts make_state(double first) {
  const auto counted = [&](const std::vector<int64_t>& shape, at::ScalarType type) {
    int64_t count = 1;
    for (const int64_t size : shape) count *= size;
    return at::arange(count, at::kDouble).add(first).sin().mul(100).to(type).view(shape);
  };
  NamedTensors weights{{"a", counted({3, 5}, at::kFloat)},
                       {"a.b", counted({7}, at::kFloat)},
                       {"empty", at::empty({0, 3})},
                       {"scalar", counted({}, at::kFloat)},
                       {"table", counted({8, 6}, at::kFloat)}};
  NamedTensors optimizer;
  for (const auto& [name, tensor] : weights) {
    optimizer.emplace_back(name + ".exp_avg", tensor.to(at::kDouble).add(1));
    optimizer.emplace_back(name + ".steps", tensor.to(at::kLong));
  }
  return {{"weights", weights}, {"optimizer", optimizer}};
}

Parts zeros_like(const Parts& parts) {
  Parts zeros;
  for (const auto& [part, tensors] : parts) {
    for (const auto& [name, tensor] : tensors)
      zeros[part].emplace_back(name, at::zeros_like(tensor));
  }
  return zeros;
}

void expect_equal(const Parts& found, const Parts& expected, const std::string& what) {
  for (const auto& [part, tensors] : expected) {
    for (size_t i = 0; i < tensors.size(); ++i) {
      EXPECT_TRUE(found.at(part)[i].second.equal(tensors[i].second))
          << what << ": " << tensors[i].first << " of " << part;
    }
  }
}

// How a state is sharded. Shards share its memory.
enum class Cut {
  kFlat,     // as ZeRO and FSDP: one flat buffer for all, cut by elements
  kEach,     // each tensor by itself
  kColumns,  // as tensor parallelism: of matrices with enough columns each row in pieces
};

std::vector<TensorShard> cut(const NamedTensors& tensors, Cut how, int rank, int world_size) {
  if (how == Cut::kEach)
    return share_of({{"all", full_shards(tensors)}}, rank, world_size).at("all");
  std::vector<TensorShard> shards;
  const auto add = [&](const auto& named, int64_t begin, int64_t end) {
    const at::Tensor& tensor = named.second;
    shards.push_back({named.first, tensor.sizes().vec(), begin, end,
                      tensor.view(-1).narrow(0, begin, end - begin)});
  };
  if (how == Cut::kFlat) {
    std::vector<parallel::FlatTensor> flat;
    for (const auto& [name, tensor] : tensors)
      flat.push_back({.name = name, .numel = tensor.numel()});
    for (const auto& slice : parallel::FlatLayout(flat, world_size).slices(rank))
      add(tensors[slice.tensor], slice.begin, slice.end);
    // Nobody's piece of the buffer: rank 0 says that it exists.
    for (const auto& named : tensors) {
      if (named.second.numel() == 0 && rank == 0) add(named, 0, 0);
    }
    return shards;
  }
  for (const auto& named : tensors) {
    const at::Tensor& tensor = named.second;
    const int64_t columns = tensor.dim() == 2 ? tensor.size(1) : 0;
    if (columns < world_size || tensor.numel() == 0) {
      if (rank == 0) add(named, 0, tensor.numel());
      continue;
    }
    for (int64_t row = 0; row < tensor.size(0); ++row) {
      add(named, row * columns + columns * rank / world_size,
          row * columns + columns * (rank + 1) / world_size);
    }
  }
  return shards;
}

ShardedParts cut(const Parts& parts, Cut how, int rank, int world_size) {
  ShardedParts sharded;
  for (const auto& [part, tensors] : parts) sharded[part] = cut(tensors, how, rank, world_size);
  return sharded;
}

// What `world_size` ranks do one after another here, without a group.
void save(const std::string& folder, const Parts& parts, Cut how, int world_size) {
  fs::create_directories(folder);
  Manifest manifest{.update = 5};
  for (int rank = 0; rank < world_size; ++rank) {
    for (const auto& [part, shards] : cut(parts, how, rank, world_size)) {
      manifest.add(write_share(folder, part, stored_shards(on_host(shards)), {5, rank, world_size}),
                   folder);
    }
  }
  commit_manifest(folder, manifest);
}

// 12 ways to save times 13 to load.
TEST(ReshardTest, WhatAnyRanksSavedAnyOthersLoadBitForBit) {
  const TemporaryFolder folder;
  const Parts state = make_state(0.5);
  int num_cases = 0;
  for (const Cut saved_as : {Cut::kFlat, Cut::kEach, Cut::kColumns}) {
    for (const int writers : {1, 2, 3, 4}) {
      const std::string path =
          folder / (std::to_string(static_cast<int>(saved_as)) + "-" + std::to_string(writers));
      save(path, state, saved_as, writers);
      Parts whole = zeros_like(state);
      load_checkpoint(path, whole);
      expect_equal(whole, state, path);
      ++num_cases;
      for (const Cut loaded_as : {Cut::kFlat, Cut::kEach, Cut::kColumns}) {
        for (const int loaders : {1, 2, 3, 4}) {
          Parts found = zeros_like(state);
          for (int rank = 0; rank < loaders; ++rank)
            load_shards(path, cut(found, loaded_as, rank, loaders));
          expect_equal(found, state, path + " by " + std::to_string(loaders));
          ++num_cases;
        }
      }
    }
  }
  EXPECT_EQ(num_cases, 156);
}

TEST(ReshardTest, OfOneRankAreThePlainFiles) {
  const TemporaryFolder folder;
  save(folder / "shards", make_state(1), Cut::kColumns, 1);
  save_checkpoint(folder / "plain", make_state(1), 5, {});
  for (const char* name : {"weights-5.safetensors", "optimizer-5.safetensors", "manifest.json"})
    EXPECT_EQ(read_file(folder / "shards" + "/" + name), read_file(folder / "plain" + "/" + name));
}

TEST(ReshardTest, OnlyTheFilesWithTheShardsElementsAreRead) {
  const TemporaryFolder folder;
  const Parts state = make_state(2);
  save(folder / "last", state, Cut::kFlat, 3);
  for (const auto& [key, file] : Manifest::read(folder / "last").files) {
    if (!key.ends_with("1-of-3")) write_file(folder / "last" + "/" + file.name, "damaged");
  }
  Parts found = zeros_like(state);
  load_shards(folder / "last", cut(found, Cut::kFlat, 1, 3));
  EXPECT_NE(found["weights"][4].second.abs().sum().item<double>(), 0);
  EXPECT_THROW(load_shards(folder / "last", cut(found, Cut::kFlat, 1, 2)), ConfigError);
}

TEST(ReshardTest, ShardsOfAnotherModelAreNamed) {
  const TemporaryFolder folder;
  save(folder / "last", make_state(2), Cut::kFlat, 2);
  const auto text = [&](const TensorShard& shard) {
    return test::message_of<c10::ValueError>([&] {
      load_shards(folder / "last", {{"weights", {shard}}});
    });
  };
  const std::string prefix = folder / "last" + "/manifest.json: a checkpoint of another model: ";
  EXPECT_EQ(text({"table", {6, 8}, 0, 48, at::zeros({6, 8})}),
            prefix + "table is F32 [8, 6], expected F32 [6, 8]");
  EXPECT_EQ(text({"chair", {6, 8}, 0, 48, at::zeros({6, 8})}), prefix + "it has no chair");
  EXPECT_NE(text({"table", {8, 6}, 0, 48, at::zeros({6, 7})}).find("a tensor of 42"),
            std::string::npos);
}

TEST(ShardsLikeTest, OptimizerStateHasThePlaceOfItsParameter) {
  const std::vector<TensorShard> parameters{{"a", {4, 4}, 3, 9, at::zeros(6)},
                                            {"a.b", {5}, 0, 2, at::zeros(2)}};
  const auto shards =
      shards_like(parameters, {{"a.exp_avg", at::ones(6)}, {"a.b.exp_avg", at::ones(2)}});
  EXPECT_EQ(shards[0].shape, (std::vector<int64_t>{4, 4}));
  EXPECT_EQ(shards[0].begin, 3);
  EXPECT_EQ(shards[0].end, 9);
  EXPECT_EQ(shards[1].shape, std::vector<int64_t>{5});
  EXPECT_THROW(shards_like(parameters, {{"c.exp_avg", at::ones(6)}}), c10::ValueError);
  EXPECT_THROW(shards_like(parameters, {{"a.b.exp_avg", at::ones(6)}}), c10::ValueError);
}

TEST(ShardedCheckpointWriterTest, RanksSaveTogetherInTheBackgroundAndLoadTogether) {
  const test::SharedFolder folder;
  const std::string path = folder / "last";
  test::ranks(3, [&](const comm::ProcessGroup& group) {
    ShardedCheckpointWriter writer(group);
    EXPECT_TRUE(writer.done());
    for (const int64_t update : {10, 20}) {
      Parts state = make_state(static_cast<double>(update));
      writer.begin(path, cut(state, Cut::kFlat, group.rank(), group.size()), update,
                   {{"of", std::to_string(update + group.rank())}});
      for (auto& [part, tensors] : state) {
        for (auto& [name, tensor] : tensors) tensor.fill_(-7);
      }
      EXPECT_TRUE(writer.pending());
      EXPECT_THROW(writer.begin(path, {}, update, {}), c10::ValueError);
      writer.commit();
      EXPECT_FALSE(writer.pending());
      EXPECT_EQ(read_manifest(path), (Metadata{{"of", std::to_string(update)}})) << "rank 0's";
      group.barrier("looked");
    }
    const Parts state = make_state(20);
    Parts found = zeros_like(state);
    load_shards(path, cut(found, Cut::kColumns, group.rank(), group.size()), group);
    for (auto& [part, tensors] : found) {
      for (auto& [name, tensor] : tensors) {
        if (tensor.numel() > 0) group.all_reduce(tensor);
      }
    }
    expect_equal(found, state, "sum over ranks of what each loaded");
  });
}

TEST(ShardedCheckpointWriterTest, OneRankAloneWritesPlainFiles) {
  const TemporaryFolder folder;
  const Parts state = make_state(1);
  save_checkpoint(folder / "plain", state, 7, {{"a", "b"}});
  ShardedParts whole;
  for (const auto& [part, tensors] : state) whole[part] = full_shards(tensors);
  comm::ProcessGroup alone{comm::RankInfo{}};
  ShardedCheckpointWriter writer(alone);
  writer.begin(folder / "last", whole, 7, {{"a", "b"}});
  writer.commit();
  for (const char* name : {"weights-7.safetensors", "optimizer-7.safetensors", "manifest.json"})
    EXPECT_EQ(read_file(folder / "last" + "/" + name), read_file(folder / "plain" + "/" + name));
}

TEST(ShardedCheckpointWriterTest, NoCopyStaysOnceItIsWritten) {
  constexpr int64_t kMiB = 1 << 20;
  const TemporaryFolder folder;
  comm::ProcessGroup alone{comm::RankInfo{}};
  ShardedCheckpointWriter writer(alone);
  const at::Tensor weights = at::ones(16 * kMiB);
  const ShardedParts parts{{"weights", {{"w", {16 * kMiB}, 0, 16 * kMiB, weights}}}};
  const int64_t before = test::resident_bytes();
  writer.begin(folder / "copied", parts, 7, {});
  writer.wait_written();
  EXPECT_LT(test::resident_bytes(), before + 32 * kMiB) << "of a copy of 64 MiB";
  writer.commit();
  writer.begin_without_copy(folder / "shared", parts, 7, {});
  EXPECT_THROW(writer.begin_without_copy(folder / "shared", parts, 7, {}), c10::ValueError);
  writer.commit();
  for (const char* name : {"weights-7.safetensors", "manifest.json"})
    EXPECT_EQ(read_file(folder / "shared" + "/" + name), read_file(folder / "copied" + "/" + name));
}

// The files of the checkpoint before go in the background; what a killed save left goes first.
TEST(ShardedCheckpointWriterTest, WhatIsOutdatedIsRemoved) {
  const test::SharedFolder folder;
  const std::string path = folder / "last";
  test::ranks(2, [&](const comm::ProcessGroup& group) {
    const auto names = [&] {
      std::set<std::string> found;
      for (const auto& entry : fs::directory_iterator(path))
        found.insert(entry.path().filename().string());
      return found;
    };
    ShardedParts state;
    for (const auto& [part, tensors] : make_state(1)) state[part] = full_shards(tensors);
    ShardedCheckpointWriter writer(group);
    for (const int64_t update : {7, 8}) {
      if (group.rank() == 0 && update == 8)
        write_file(path + "/weights-9.0-of-2.5c0e1f7a.safetensors", "a killed save's");
      writer.begin(path, share_of(state, group.rank(), 2), update, {});
      writer.commit();
      writer.wait_written();
      EXPECT_TRUE(writer.done());
      group.barrier("removed");
      std::set<std::string> expected{"manifest.json"};
      for (const auto& [key, file] : Manifest::read(path).files) expected.insert(file.name);
      EXPECT_EQ(names(), expected) << update;
      group.barrier("looked");
    }
  });
}

TEST(ShardedCheckpointWriterTest, AnErrorOfOneRankIsEveryRanksAndTheCheckpointStays) {
  const test::SharedFolder folder;
  const std::string path = folder / "last";
  if (folder.is_parent()) write_file(folder / "file", "no folder");
  test::ranks(2, [&](const comm::ProcessGroup& group) {
    ShardedCheckpointWriter writer(group, std::chrono::milliseconds(300));
    const Parts state = make_state(1);
    const auto mine = cut(state, Cut::kFlat, group.rank(), 2);
    const auto commit = [&](const std::string& into, const ShardedParts& shards, int64_t update) {
      writer.begin(into, shards, update, {});
      return test::message_of<ConfigError>([&] { writer.commit(); });
    };
    EXPECT_EQ(commit(path, mine, 1), "nothing was thrown");
    const auto expect_word = [&](const std::string& text, const std::string& word) {
      EXPECT_NE(text.find(word), std::string::npos) << text;
      EXPECT_EQ(Manifest::read(path).update, 1);
      group.barrier("both have tidied up");
      EXPECT_EQ(std::distance(fs::directory_iterator(path), fs::directory_iterator()), 5)
          << "2 parts of 2 ranks and the manifest, but found more after: " << text;
      group.barrier("both have counted");
    };
    const bool second = group.rank() == 1;
    expect_word(commit(second ? folder / "file" + "/x" : path, mine, 2), "rank 1: ");
    expect_word(commit(second ? folder / "elsewhere" : path, mine, 2), "expected one folder");
    expect_word(commit(path, mine, second ? 3 : 2), "rank 1 update 3");
    expect_word(commit(path, second ? ShardedParts{} : mine, 2), "are in no file");
    expect_word(commit(path, cut(state, Cut::kEach, 0, 1), 2), "are in two files");
    // Written by rank 1 to a folder that rank 0 does not see.
    writer.begin(path, mine, 4, {});
    while (!writer.done()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    group.barrier("written");
    if (second) {
      for (const auto& entry : fs::directory_iterator(path)) {
        if (entry.path().filename().string().starts_with("weights-4.1-of-2"))
          fs::remove(entry.path());
      }
    }
    group.barrier("removed");
    expect_word(test::message_of<ConfigError>([&] { writer.commit(); }), "does not see this file");
    expect_word(test::message_of<ConfigError>([&] { writer.commit(); }), "expected begin");

    Parts found = zeros_like(state);
    load_shards(path, cut(found, Cut::kFlat, group.rank(), 2), group);
    EXPECT_EQ(commit(path, mine, 5), "nothing was thrown");
    EXPECT_EQ(Manifest::read(path).update, 5);
  });
}

// Of two writers into one folder the first's save is lost: its commit waits for what it writes, for
// the next save takes its memory, and keeps its error.
TEST(ShardedCheckpointWriterTest, ASaveThatIsLostLeavesNothingToTheNextOne) {
  constexpr int64_t kMiB = 1 << 20;
  const TemporaryFolder folder;
  write_file(folder / "file", "no folder");
  comm::ProcessGroup alone{comm::RankInfo{}};
  ShardedCheckpointWriter first(alone), second(alone);
  const ShardedParts large{{"weights", full_shards({{"w", at::ones(16 * kMiB)}})}};
  const ShardedParts small{{"weights", full_shards({{"w", at::ones(3)}})}};
  for (const std::string into : {"file/x", "last"}) {
    first.begin(folder / into, large, 1, {});
    second.begin(folder / into, small, 2, {});
    EXPECT_NE(test::message_of<ConfigError>([&] { first.commit(); }).find("another save into"),
              std::string::npos);
    EXPECT_TRUE(first.done());
    if (into == "last") {
      second.commit();
    } else {
      EXPECT_THROW(second.commit(), ConfigError);
    }
    first.begin(folder / "other", small, 3, {});
    EXPECT_EQ(test::message_of<c10::Error>([&] { first.commit(); }), "nothing was thrown");
  }
  EXPECT_EQ(read_update(folder / "last"), 2);
}

TEST(ShardedCheckpointWriterTest, WhatARankCouldNotLoadIsRefusedOnEveryRank) {
  const test::SharedFolder folder;
  const std::string path = folder / "last";
  test::ranks(2, [&](const comm::ProcessGroup& group) {
    const bool second = group.rank() == 1;
    ShardedCheckpointWriter writer(group);
    EXPECT_THROW(writer.require_loadable([] { return ShardedParts(); }), c10::ValueError);
    const ShardedParts mine{
        {"weights", second ? std::vector<TensorShard>{} : full_shards({{"w", at::ones(3)}})}};
    const auto save = [&](const at::Tensor& on_second) {
      writer.begin(path, mine, 1, {});
      writer.require_loadable([&] {
        return ShardedParts{{"weights", full_shards({{"w", second ? on_second : at::ones(3)}})}};
      });
      return test::message_of<ConfigError>([&] { writer.commit(); });
    };
    EXPECT_EQ(save(at::ones(3)), "nothing was thrown");
    EXPECT_EQ(save(at::ones(3, at::kDouble)), "nothing was thrown") << "a load converts it";
    const std::string prefix = path +
                               ": ranks do not agree on w of weights: F32 [3] in "
                               "weights.0-of-2, ";
    const auto expect = [&](const at::Tensor& on_second, const std::string& beginning) {
      const std::string text = save(on_second);
      EXPECT_TRUE(text.starts_with(beginning)) << text;
    };
    expect(at::ones({3, 1}), prefix + "F32 [3, 1] on rank 1, which could not load it");
    expect(at::ones(3, at::kLong), prefix + "I64 [3] on rank 1, which could not load it");
    expect(at::ones(3, at::kComplexFloat), "rank 1: checkpoint: tensors of type ");
    EXPECT_EQ(save(at::ones(3)), "nothing was thrown")
        << "the error of a save is not the next one's";
  });
}

TEST(ShardedCheckpointWriterTest, ADamagedFileChangesNoRanksTensors) {
  const test::SharedFolder folder;
  const std::string path = folder / "last";
  if (folder.is_parent()) save(path, make_state(3), Cut::kFlat, 2);
  const std::string file = path + "/" + Manifest::read(path).files.at("weights.1-of-2").name;
  test::ranks(2, [&](const comm::ProcessGroup& group) {
    const auto text = [&](const ShardedParts& parts) {
      return test::message_of<ConfigError>([&] { load_shards(path, parts, group); });
    };
    Parts found = zeros_like(make_state(3));
    auto mine = cut(found, Cut::kFlat, group.rank(), 2);
    std::erase_if(mine["weights"], [](const auto& shard) { return shard.name == "scalar"; });
    const std::string missing = text(mine);
    EXPECT_NE(missing.find("the model has no scalar"), std::string::npos) << missing;
    group.barrier("tried");
    if (group.rank() == 0) write_file(file, "damaged");
    group.barrier("damaged");
    const std::string damaged = text(cut(found, Cut::kFlat, group.rank(), 2));
    EXPECT_NE(damaged.find("rank 1: " + file), std::string::npos) << damaged;
    expect_equal(found, zeros_like(found), "after an error");
  });
}

// The models of a training whose state is sharded, by world size.
struct Training {
  explicit Training(const comm::ProcessGroup& group)
      : sharded(make_model(), group), adam(sharded.named_parameters()) {}

  static torch::nn::Linear make_model() {
    torch::nn::Linear model(5, 3);
    model->to(at::kDouble);
    const at::NoGradGuard no_grad;
    for (auto& parameter : model->parameters())
      parameter.copy_(at::arange(parameter.numel(), at::kDouble).sin().view(parameter.sizes()));
    return model;
  }

  // Every rank has the same batch, so the world size changes nothing but roundings.
  void step() {
    const at::Tensor x = at::arange(20, at::kDouble).cos().view({4, 5});
    sharded(x).square().sum().backward();
    adam.step(1e-2);
    adam.zero_grad();
  }

  ShardedParts local_shards() {
    const std::vector<TensorShard> weights = shards_of(sharded.local_shards());
    return {{"weights", weights}, {"optimizer", shards_like(weights, adam.state())}};
  }

  parallel::FullyShardedDataParallel<torch::nn::Linear> sharded;
  optim::Adam adam;
};

TEST(ShardedCheckpointWriterTest, AShardedTrainingGoesOnWithOtherRanks) {
  const test::SharedFolder folder;
  const std::string path = folder / "last";
  const std::string end = folder / "end";
  const auto begin = [&](const comm::ProcessGroup& group) {
    Training training(group);
    ShardedCheckpointWriter writer(group);
    for (int step = 1; step <= 4; ++step) {
      training.step();
      if (step == 2) writer.begin(path, training.local_shards(), step, {});
    }
    writer.commit();
    writer.begin(end, training.local_shards(), 4, {});
    writer.commit();
  };
  const auto go_on = [&](const comm::ProcessGroup& group) {
    Training training(group);
    load_shards(path, training.local_shards(), group);
    training.adam.set_num_steps(2);
    for (int step = 3; step <= 4; ++step) training.step();
    Training expected(group);
    const ShardedParts wanted = expected.local_shards();
    load_shards(end, wanted, group);
    const ShardedParts found = training.local_shards();
    for (const auto& [part, shards] : wanted) {
      for (size_t i = 0; i < shards.size(); ++i) {
        // float64: the mean over 3 ranks of equal gradients is rounded otherwise than over 2.
        EXPECT_TRUE(found.at(part)[i].tensor.allclose(shards[i].tensor, 1e-12, 1e-12))
            << shards[i].name;
      }
    }
  };
  // A rank comes to the first call in either case.
  const auto body = [&](const comm::ProcessGroup& group) {
    group.size() == 3 ? begin(group) : go_on(group);
  };
  test::ranks(3, body);
  test::ranks(2, body);
}

}  // namespace sharded_checkpoint_test
}  // namespace cohort::train
