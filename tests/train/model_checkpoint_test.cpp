// SPDX-License-Identifier: Apache-2.0
// Saving and loading of wrapped models with their optimizers.
#include "cohort/train/model_checkpoint.h"

#include <chrono>
#include <filesystem>
#include <gtest/gtest.h>
#include <memory>
#include <set>
#include <thread>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>

#include "cohort/base/error.h"
#include "cohort/base/safetensors.h"
#include "cohort/base/stored_checkpoint.h"
#include "cohort/optim/adam.h"

#include "tests/support/message_of.h"
#include "tests/support/ranks.h"
#include "tests/support/shared_folder.h"

namespace cohort::checkpoint {
namespace model_checkpoint_test {

using TorchOptimizer = std::unique_ptr<torch::optim::Optimizer>;

// A buffer, and a parameter without a gradient.
struct NetImpl : torch::nn::Module {
  explicit NetImpl(double first = 0.5) {
    to(at::kDouble);
    const at::NoGradGuard no_grad;
    for (auto& parameter : parameters())
      parameter.copy_(
          at::arange(parameter.numel(), at::kDouble).add(first).sin().view(parameter.sizes()));
  }
  at::Tensor forward(const at::Tensor& x) { return head(at::tanh(body(x))); }

  torch::nn::Linear body = register_module("body", torch::nn::Linear(5, 7));
  torch::nn::Linear head = register_module("head", torch::nn::Linear(7, 3));
  at::Tensor steps = register_buffer("steps", at::zeros({}));
  at::Tensor unused = register_parameter("unused", at::ones(3), /*requires_grad=*/false);
};
TORCH_MODULE(Net);

// Every rank has the same batch: the number of ranks changes nothing but roundings.
at::Tensor loss_of(const at::Tensor& output) {
  return output.square().sum();
}
at::Tensor batch() {
  return at::arange(20, at::kDouble).cos().view({4, 5});
}

const std::vector<std::string> kKinds = {"plain sgd", "sgd", "adam", "adamw", "rmsprop", "adagrad"};

TorchOptimizer make_optimizer(const std::string& kind, const std::vector<at::Tensor>& parameters) {
  using namespace torch::optim;
  if (kind == "plain sgd") return std::make_unique<SGD>(parameters, SGDOptions(0.01));
  if (kind == "sgd") return std::make_unique<SGD>(parameters, SGDOptions(0.01).momentum(0.9));
  if (kind == "adam") return std::make_unique<Adam>(parameters, AdamOptions(0.01).amsgrad(true));
  if (kind == "adamw") return std::make_unique<AdamW>(parameters, AdamWOptions(0.01));
  if (kind == "rmsprop")
    return std::make_unique<RMSprop>(parameters, RMSpropOptions(0.01).momentum(0.9).centered(true));
  return std::make_unique<Adagrad>(parameters, AdagradOptions(0.05).lr_decay(0.1));
}

std::vector<at::Tensor> trained(const std::vector<train::TensorShard>& shards) {
  std::vector<at::Tensor> tensors;
  for (const auto& shard : shards)
    if (shard.tensor.requires_grad()) tensors.push_back(shard.tensor);
  return tensors;
}

template <class Model>
void step(Model& model, torch::optim::Optimizer& optimizer) {
  loss_of(model(batch())).backward();
  optimizer.step();
  optimizer.zero_grad();
}

// What one process has after `steps`.
Net plain(const std::string& kind, int steps) {
  Net net;
  const auto optimizer = make_optimizer(kind, trained(parallel::full_shards_of(*net)));
  for (int i = 0; i < steps; ++i) {
    loss_of(net->forward(batch())).backward();
    optimizer->step();
    optimizer->zero_grad();
  }
  return net;
}

void expect_equal(const std::vector<train::TensorShard>& found, const Net& expected,
                  const std::string& what) {
  for (const auto& shard : found) {
    if (shard.name == "steps") continue;
    const at::Tensor whole = expected->named_parameters()[shard.name].detach().view(-1);
    // float64: the mean over ranks of equal gradients is rounded otherwise than one gradient.
    EXPECT_TRUE(shard.tensor.detach().view(-1).allclose(
        whole.narrow(0, shard.begin, shard.end - shard.begin), 1e-11, 1e-11))
        << what << ": " << shard.name;
  }
}

const std::vector<std::string> kWrappers = {"ddp", "sharded", "zero1", "zero2", "zero3"};

template <class Call>
void with_model(const std::string& wrapper, Net net, const comm::ProcessGroup& group,
                const Call& call) {
  if (wrapper == "ddp") {
    parallel::DistributedDataParallel<Net> model(net, group);
    call(model);
  } else if (wrapper == "sharded") {
    parallel::FullyShardedDataParallel<Net> model(net, group);
    call(model);
  } else {
    parallel::ParallelModel<Net> model(net, group, {.strategy = parallel::parse_strategy(wrapper)});
    call(model);
  }
}

TEST(ModelCheckpointTest, AnOptimizerWithoutStateIsSavedAndLoaded) {
  const test::SharedFolder folder;
  test::ranks(2, [&](const comm::ProcessGroup& group) {
    Net net;
    parallel::FullyShardedDataParallel<Net> model(net, group);
    torch::optim::Adam adam(model.parameters());
    save(model, adam, folder / "before the first step");
    save(model, folder / "no optimizer");
    load(model, adam, folder / "before the first step");
    EXPECT_TRUE(adam.state().empty());
    EXPECT_THROW(load(model, adam, folder / "no optimizer"), ConfigError);
  });
}

// Saved by 2 ranks, as two of the wrappers, in the foreground and the background; loaded by 1 and 3
// as every wrapper.
TEST(ModelCheckpointTest, AnyTrainingResumesAsAnyOther) {
  const test::SharedFolder folder;
  const auto path = [&](const std::string& kind, const std::string& wrapper) {
    return folder / (kind + "-" + wrapper);
  };
  const auto begin = [&](const comm::ProcessGroup& group) {
    for (const std::string& kind : kKinds) {
      for (const std::string wrapper : {"ddp", "zero3"}) {
        Net net;
        with_model(wrapper, net, group, [&](auto& model) {
          const auto optimizer = make_optimizer(kind, trained(state_of(model).trained));
          for (int i = 0; i < 2; ++i) step(model, *optimizer);
          net->steps.fill_(2 + group.rank());
          const SaveOptions options{.step = 2};
          if (wrapper == "ddp") {
            save(model, *optimizer, path(kind, wrapper), options);
            step(model, *optimizer);
          } else {
            SaveHandle handle = async_save(model, *optimizer, path(kind, wrapper), options);
            step(model, *optimizer);
            handle.wait();
            EXPECT_TRUE(handle.done());
          }
          EXPECT_EQ(train::read_update(path(kind, wrapper)), 2);
          expect_equal(state_of(model).to_load, plain(kind, 3), "undisturbed " + kind);
        });
      }
    }
  };
  const auto resume = [&](const comm::ProcessGroup& group) {
    for (const std::string& kind : kKinds) {
      const Net expected = plain(kind, 3);
      for (const std::string saved : {"ddp", "zero3"}) {
        for (const std::string& wrapper : kWrappers) {
          Net net(7);
          with_model(wrapper, net, group, [&](auto& model) {
            const auto optimizer = make_optimizer(kind, trained(state_of(model).trained));
            step(model, *optimizer);  // What it has is replaced.
            load(model, *optimizer, path(kind, saved));
            step(model, *optimizer);
            expect_equal(state_of(model).to_load, expected,
                         kind + " of " + saved + " as " + wrapper);
            EXPECT_EQ(net->steps.template item<double>(), 2) << "rank 0's buffers";
          });
        }
      }
    }
  };
  const auto body = [&](const comm::ProcessGroup& group) {
    group.size() == 2 ? begin(group) : resume(group);
  };
  test::ranks(2, body);
  test::ranks(1, body);
  test::ranks(3, body);
}

// Cohort's Adam, with its number of steps, and ZeroRedundancyOptimizer.
TEST(ModelCheckpointTest, AdamOfDdpFsdpAndZeroResumesAsAnyOther) {
  const test::SharedFolder folder;
  const std::string path = folder / "last";
  test::ranks(2, [&](const comm::ProcessGroup& group) {
    const auto named = [](const std::vector<train::TensorShard>& shards) {
      std::vector<std::pair<std::string, at::Tensor>> parameters;
      for (const auto& shard : shards)
        if (shard.tensor.requires_grad()) parameters.emplace_back(shard.name, shard.tensor);
      return parameters;
    };
    const auto make = [&](const auto& shards) { return optim::Adam(named(shards)); };
    const auto make_zero = [](const auto& shards) {
      std::vector<std::pair<std::string, at::Tensor>> parameters;
      for (const auto& shard : shards) parameters.emplace_back(shard.name, shard.tensor);
      return optim::Adam(parameters);
    };
    const auto train_step = [](auto& model, auto& optimizer) {
      loss_of(model(batch())).backward();
      optimizer.step(1e-2);
      optimizer.zero_grad();
    };
    Net expected;
    optim::Adam plain_adam(named(parallel::full_shards_of(*expected)));
    for (int i = 0; i < 4; ++i) {
      loss_of(expected->forward(batch())).backward();
      plain_adam.step(1e-2);
      plain_adam.zero_grad();
    }
    // DDP with Zero, then FSDP, then DDP: each resumes from the checkpoint of the one before.
    {
      Net net;
      parallel::DistributedDataParallel<Net> model(net, group);
      parallel::ZeroRedundancyOptimizer<optim::Adam> zero(optim::named_parameters(*net), group,
                                                          make_zero);
      train_step(model, zero);
      save(model, zero, path);
      EXPECT_THROW(save(model, zero, path, {.step = 7}), c10::ValueError);
    }
    {
      Net net(3);
      parallel::FullyShardedDataParallel<Net> model(net, group);
      optim::Adam adam = make(model.local_shards());
      load(model, adam, path);
      EXPECT_EQ(adam.num_steps(), 1);
      train_step(model, adam);
      save(model, adam, path, {.metadata = {{"of", std::to_string(group.rank())}}});
      EXPECT_EQ(train::read_manifest(path).at("of"), "0");
    }
    {
      Net net(4);
      parallel::DistributedDataParallel<Net> model(net, group);
      parallel::ZeroRedundancyOptimizer<optim::Adam> zero(optim::named_parameters(*net), group,
                                                          make_zero);
      load(model, zero, path);
      train_step(model, zero);
      save(model, zero, path);
    }
    Net net(5);
    parallel::DistributedDataParallel<Net> model(net, group);
    optim::Adam adam = make(parallel::full_shards_of(*net));
    load(model, adam, path);
    EXPECT_EQ(adam.num_steps(), 3);
    train_step(model, adam);
    expect_equal(state_of(model).to_load, expected, "after four steps");
  });
}

// A table that is input and output, a parameter without elements, and an ignored one with two names.
struct TiedImpl : torch::nn::Module {
  explicit TiedImpl(double value)
      : table(register_parameter("table", at::full({6, 5}, value, at::kDouble))),
        bias(register_parameter("bias", at::full({7}, value, at::kDouble))) {
    register_parameter("tied", table);
    register_parameter("none", at::empty({0, 5}, at::kDouble));
    register_parameter("tied_bias", bias);
  }
  at::Tensor forward(const at::Tensor& x) {
    return at::matmul(at::matmul(x, table.t()), table).sum() * bias.sum();
  }
  at::Tensor table, bias;
};
TORCH_MODULE(Tied);

TEST(ModelCheckpointTest, SharedAndEmptyParametersPassBetweenWrappers) {
  const test::SharedFolder folder;
  const auto body = [&](const comm::ProcessGroup& group) {
    const auto path = [&](const std::string& kind) {
      return folder / (kind + std::to_string(group.size()));
    };
    for (const std::string kind : {"ddp", "sharded", "ignoring"}) {
      const auto with = [&](const std::string& wrapper, double value, const auto& call) {
        Tied net(value);
        if (wrapper == "ddp") {
          parallel::DistributedDataParallel<Tied> model(net, group);
          call(model);
        } else {
          parallel::ShardingOptions options;
          if (wrapper == "ignoring") options.ignored = {"bias"};
          parallel::FullyShardedDataParallel<Tied> model(net, group, options);
          call(model);
        }
      };
      const auto adam_of = [](auto& model) {
        std::vector<std::pair<std::string, at::Tensor>> named;
        for (const auto& shard : state_of(model).trained)
          named.emplace_back(shard.name, shard.tensor);
        return optim::Adam(named);
      };
      with(kind, 0.25, [&](auto& model) {
        optim::Adam adam = adam_of(model);
        save(model, adam, path(kind));
      });
      for (const std::string other : {"ddp", "sharded"}) {
        SCOPED_TRACE(kind + " as " + other);
        with(other, 0.5, [&](auto& model) {
          optim::Adam adam = adam_of(model);
          if (kind == "ignoring") {
            load(model, path(kind));  // The optimizer did not have all parameters.
          } else {
            load(model, adam, path(kind));
          }
          for (const auto& shard : state_of(model).to_load)
            EXPECT_TRUE(shard.tensor.eq(0.25).all().template item<bool>()) << shard.name;
        });
      }
      if (group.rank() == 0) {
        std::set<std::string> names;
        StoredCheckpoint stored(path(kind));
        for (const auto& [name, tensor] : stored.part("weights")) names.insert(name);
        EXPECT_TRUE(names.contains("table") && names.contains("tied") && names.contains("bias") &&
                    names.contains("tied_bias"))
            << kind << ": as a PyTorch program expects them";
      }
    }
  };
  test::ranks(2, body);
  test::ranks(3, body);
}

// docs/checkpoints.md, "What each rank writes".
TEST(ModelCheckpointTest, UnderDdpRank0WritesAloneAndWholeElseEachRankItsShards) {
  using Zero = parallel::ZeroRedundancyOptimizer<torch::optim::AdamW>;
  const test::SharedFolder folder;
  test::ranks(2, [&](const comm::ProcessGroup& group) {
    const auto files = [&](const std::string& path) {
      std::set<std::string> keys;
      for (const auto& [key, file] : Manifest::read(path).files) keys.insert(key);
      return keys;
    };
    using Keys = std::set<std::string>;
    for (const std::string& wrapper : kWrappers) {
      with_model(wrapper, Net(), group, [&](auto& model) {
        const auto adam = make_optimizer("adam", trained(state_of(model).trained));
        step(model, *adam);
        save(model, *adam, folder / wrapper);
      });
      const Keys first{"optimizer.0-of-2", "weights.0-of-2"};
      const Keys all{"optimizer.0-of-2", "optimizer.1-of-2", "weights.0-of-2", "weights.1-of-2"};
      EXPECT_EQ(files(folder / wrapper), wrapper == "ddp" ? first : all) << wrapper;
    }
    const std::string name = Manifest::read(folder / "ddp").files.at("weights.0-of-2").name;
    EXPECT_TRUE(name.starts_with("weights-0.0-of-2.")) << name;
    const SafetensorsFile stored(folder / "ddp" + "/" + name);
    EXPECT_EQ(stored.at("body.weight").shape, (std::vector<int64_t>{7, 5})) << "whole";

    Net net;
    parallel::DistributedDataParallel<Net> model(net, group);
    Zero zero(optim::named_parameters(*net), group, [](const auto& shards) {
      std::vector<at::Tensor> parameters;
      for (const auto& shard : shards) parameters.push_back(shard.tensor);
      return torch::optim::AdamW(parameters, torch::optim::AdamWOptions(0.01));
    });
    loss_of(model(batch())).backward();
    zero.step();
    save(model, zero, folder / "zero");
    EXPECT_EQ(files(folder / "zero"),
              (Keys{"optimizer.0-of-2", "optimizer.1-of-2", "weights.0-of-2"}));
  });
}

// What is ignored is each rank's own.
struct UnevenImpl : torch::nn::Module {
  explicit UnevenImpl(int64_t size) : own(register_parameter("own", at::ones(size))) {}
  at::Tensor forward(const at::Tensor& x) { return body(x) * own.sum(); }
  torch::nn::Linear body = register_module("body", torch::nn::Linear(5, 7));
  at::Tensor own;
};
TORCH_MODULE(Uneven);

TEST(ModelCheckpointTest, AnIgnoredTensorOfAnotherShapeOnARankIsRefusedAtTheSave) {
  const test::SharedFolder folder;
  test::ranks(2, [&](const comm::ProcessGroup& group) {
    const auto expect_refused = [&](const auto& model, const std::string& path) {
      const auto expect_text = [&](const std::string& text) {
        EXPECT_TRUE(text.starts_with(path + ": ranks do not agree on own of weights: F32 [3] in "
                                            "weights.0-of-2, F32 [4] on rank 1"))
            << text;
      };
      expect_text(test::message_of<ConfigError>([&] { save(model, path, {.step = 2}); }));
      SaveHandle handle = async_save(model, path, {.step = 3});
      expect_text(test::message_of<ConfigError>([&] { handle.wait(); }));
      EXPECT_EQ(train::read_update(path), 1) << "the checkpoint before";
    };
    for (const std::string wrapper : {"ddp", "sharded"}) {
      const std::string path = folder / wrapper;
      for (const int64_t more : {0, 1}) {
        const Uneven net(3 + more * group.rank());
        const auto call = [&](const auto& model) {
          if (more > 0) return expect_refused(model, path);
          save(model, path, {.step = 1});
          load(model, path);
        };
        if (wrapper == "ddp") {
          parallel::DistributedDataParallelOptions options;
          options.ignored = {"own"};
          call(parallel::DistributedDataParallel<Uneven>(net, group, options));
        } else {
          parallel::ShardingOptions options;
          options.ignored = {"own"};
          call(parallel::FullyShardedDataParallel<Uneven>(net, group, options));
        }
      }
    }
  });
}

TEST(ModelCheckpointTest, WhatDoesNotFitIsNamedOnEveryRankAndChangesNothing) {
  const test::SharedFolder folder;
  const std::string path = folder / "last";
  test::ranks(2, [&](const comm::ProcessGroup& group) {
    Net net;
    parallel::FullyShardedDataParallel<Net> model(net, group);
    const auto leaves = trained(model.local_shards());
    const auto sgd = make_optimizer("sgd", leaves);
    step(model, *sgd);
    save(model, *sgd, path);
    const auto adam = make_optimizer("adam", leaves);
    const auto error = [&](auto call) { return test::message_of<ConfigError>(call); };
    const std::string other = error([&] { load(model, *adam, path); });
    EXPECT_NE(
        other.find("manifest.json: it has the state of torch::optim::SGD, and the optimizer to "
                   "load is torch::optim::Adam: load it into one of the same class, or the "
                   "weights alone, by checkpoint::load(model, path)"),
        std::string::npos)
        << other;
    EXPECT_TRUE(adam->state().empty());
    const IncompatibleKeys keys = load(model, *adam, path, {.strict = false});
    EXPECT_EQ(keys.unexpected.size(), 4U);
    EXPECT_TRUE(keys.missing.empty());
    const std::string adams = folder / "adam";
    step(model, *adam);
    save(model, *adam, adams);
    const std::string either = error([&] { load(model, *sgd, adams); });
    EXPECT_NE(
        either.find("the state of torch::optim::Adam or torch::optim::AdamW, and the optimizer "
                    "to load is torch::optim::SGD:"),
        std::string::npos)
        << either;
    std::vector<std::pair<std::string, at::Tensor>> named;
    for (const auto& shard : model.local_shards())
      if (shard.tensor.requires_grad()) named.emplace_back(shard.name, shard.tensor);
    optim::Adam own(named);
    EXPECT_NE(error([&] { load(model, own, adams); }).find("to load is cohort::optim::Adam:"),
              std::string::npos);
    torch::optim::LBFGS lbfgs(leaves);
    EXPECT_THROW(save(model, lbfgs, path), c10::ValueError);
    const auto strange = make_optimizer("sgd", {at::ones(3).requires_grad_()});
    EXPECT_THROW(save(model, *strange, path), c10::ValueError);
    EXPECT_NE(
        error([&] { load(model, *strange, path); })
            .find("the optimizer, torch::optim::SGD, updates a tensor of shape [3] that is none of "
                  "the wrapped model's parameters(): make it from those, after wrapping"),
        std::string::npos);
  });
}

struct KeepWarnings : c10::WarningHandler {
  void process(const c10::Warning& warning) override { messages.push_back(warning.msg()); }
  std::vector<std::string> messages;
};

TEST(ModelCheckpointTest, OneSaveAtATimeGoesIntoAFolder) {
  const test::SharedFolder folder;
  test::ranks(2, [&](const comm::ProcessGroup& group) {
    parallel::DistributedDataParallel<Net> model(Net(), group);
    SaveHandle first = async_save(model, folder / "last", {.step = 1});
    SaveHandle second = async_save(model, folder / "other/../last", {.step = 2});
    EXPECT_NE(test::message_of<c10::ValueError>([&] {
                first.wait();
              }).find("last has begun: expected wait() for this one before; it is lost"),
              std::string::npos);
    second.wait();
    EXPECT_EQ(train::read_update(folder / "last"), 2);
    // Of a name that is there only once it is saved.
    std::filesystem::current_path(folder / "last");
    SaveHandle third = async_save(model, "relative", {.step = 3});
    while (!third.done()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    third.wait();
    EXPECT_EQ(train::read_update(folder / "last/relative"), 3);
    EXPECT_NE(test::message_of<ConfigError>([&] { save(model, ""); }).find("got an empty name"),
              std::string::npos);
  });
}

// The checkpoint before stays, and a line says why.
TEST(ModelCheckpointTest, ASaveWithoutWaitIsLostWithAWarning) {
  const test::SharedFolder folder;
  const comm::ProcessGroup alone(comm::RankInfo{});
  parallel::DistributedDataParallel<Net> model(Net(), alone);
  save(model, folder / "last", {.step = 1});
  KeepWarnings warnings;
  {
    const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
    SaveHandle handle = async_save(model, folder / "last", {.step = 2});
    SaveHandle other = std::move(handle);
    other = async_save(model, folder / "last", {.step = 3});
    EXPECT_EQ(warnings.messages.size(), 1U);
    other.wait();
  }
  EXPECT_EQ(train::read_update(folder / "last"), 3);
  { SaveHandle dropped = async_save(model, folder / "last", {.step = 4}); }
  EXPECT_EQ(
      warnings.messages,
      std::vector<std::string>{"checkpoint: a SaveHandle goes without wait(): its save is lost"});
  EXPECT_EQ(train::read_update(folder / "last"), 3);
}

TEST(ModelCheckpointTest, ANegativeStepIsRefused) {
  const test::SharedFolder folder;
  const comm::ProcessGroup alone(comm::RankInfo{});
  const parallel::DistributedDataParallel<Net> model(Net(), alone);
  EXPECT_EQ(test::message_of<c10::ValueError>([&] { save(model, folder / "last", {.step = -7}); }),
            "checkpoint: step: expected 0 or more, got -7");
  EXPECT_FALSE(std::filesystem::exists(folder / "last"));
}

// The masters come back with the backward.
TEST(ModelCheckpointTest, WeightsOfALowerPrecisionAreNeitherSavedNorLoaded) {
  const test::SharedFolder folder;
  test::ranks(2, [&](const comm::ProcessGroup& group) {
    parallel::StrategyOptions options;
    options.ddp.mixed_precision.param_dtype = at::kBFloat16;
    parallel::ParallelModel<torch::nn::Linear> model(torch::nn::Linear(4, 4), group, options);
    save(model, folder / "last");
    const std::string before = Manifest::read(folder / "last").to_json();
    const at::Tensor loss = model(at::ones({2, 4})).sum();
    EXPECT_THROW(save(model, folder / "last"), c10::ValueError);
    EXPECT_THROW(static_cast<void>(async_save(model, folder / "last")), c10::ValueError);
    EXPECT_THROW(load(model, folder / "last"), c10::ValueError);
    EXPECT_EQ(Manifest::read(folder / "last").to_json(), before);
    loss.backward();
    load(model, folder / "last");
    EXPECT_EQ(model->weight.scalar_type(), at::kFloat);
  });
}

// What unsharded() shows would stay as it was, and with write_back undo the load.
TEST(ModelCheckpointTest, NothingIsLoadedBehindUnsharded) {
  const test::SharedFolder folder;
  test::ranks(2, [&](const comm::ProcessGroup& group) {
    for (const std::string& wrapper : kWrappers) {
      with_model(wrapper, Net(0.25), group, [&](auto& model) {
        save(model, folder / wrapper);
        const auto adam = make_optimizer("adam", trained(state_of(model).trained));
        step(model, *adam);
        {
          const auto whole = model.unsharded({.write_back = true});
          save(model, folder / "other");
          if (wrapper == "ddp") {
            load(model, folder / wrapper);
            expect_equal(state_of(model).trained, Net(0.25), wrapper);
            return;
          }
          const auto before = state_of(model).trained.at(0).tensor.clone();
          EXPECT_THROW(load(model, folder / wrapper), c10::ValueError) << wrapper;
          EXPECT_TRUE(state_of(model).trained.at(0).tensor.equal(before)) << wrapper;
        }
        load(model, folder / wrapper);
        expect_equal(state_of(model).trained, Net(0.25), wrapper);
      });
    }
  });
}

// Each rank reads its part; the names that do not fit are the same on all.
TEST(ModelCheckpointTest, RanksImportWhatOtherProgramsWrote) {
  const test::SharedFolder folder;
  const std::string path = folder / "model.safetensors.index.json";
  if (folder.is_parent()) {
    std::string map;
    std::vector<at::Tensor> kept;
    for (const auto& [name, tensor] : train::state_of(*Net(2))) {
      kept.push_back(tensor.to(at::kBFloat16));
      const std::vector<TensorView> one{
          {"model." + name,
           DType::kBF16,
           tensor.sizes().vec(),
           {static_cast<const std::byte*>(kept.back().data_ptr()), kept.back().nbytes()}}};
      if (name == "unused") continue;
      write_safetensors(folder / (name + ".safetensors"), one);
      map += (map.empty() ? "" : ", ") + ("\"model." + name + "\": \"" + name + ".safetensors\"");
    }
    write_file(path, "{\"weight_map\": {" + map + "}}");
  }
  test::ranks(3, [&](const comm::ProcessGroup& group) {
    for (const std::string& wrapper : kWrappers) {
      Net net;
      with_model(wrapper, net, group, [&](auto& model) {
        const auto rename = train::rename_prefixes({{"model.", ""}});
        const std::string error = test::message_of<ConfigError>(
            [&] { load(model, path, {.rename = rename, .convert_dtype = true}); });
        EXPECT_NE(error.find("it has no unused"), std::string::npos) << error;
        expect_equal(state_of(model).to_load, Net(), "after an error");
        const auto keys =
            load(model, path, {.strict = false, .rename = rename, .convert_dtype = true});
        EXPECT_EQ(keys.missing, std::vector<std::string>{"unused"});
        EXPECT_TRUE(keys.unexpected.empty());
        Net expected(2);
        const at::NoGradGuard no_grad;
        for (auto& parameter : expected->parameters())
          parameter.copy_(parameter.to(at::kBFloat16).to(at::kDouble));
        expected->unused.copy_(Net()->unused);
        expect_equal(state_of(model).to_load, expected, wrapper);
      });
    }
  });
}

}  // namespace model_checkpoint_test
}  // namespace cohort::checkpoint
