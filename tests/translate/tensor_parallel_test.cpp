// SPDX-License-Identifier: Apache-2.0
// A tensor-parallel Transformer against the unsharded one, in float64 and with dropout: the same
// results and gradients, and the same checkpoints.
#include "cohort/parallel/tensor_parallel.h"

#include <filesystem>
#include <gtest/gtest.h>
#include <map>
#include <torch/types.h>
#include <torch/utils.h>

#include "cohort/nmt/search.h"
#include "cohort/optim/adam.h"
#include "cohort/parallel/tensor_parallel_layout.h"
#include "cohort/train/sharded_checkpoint.h"
#include "cohort/translate/layer_runner.h"
#include "cohort/translate/tensor_parallel_context.h"
#include "cohort/translate/updater.h"

#include "tests/base/temporary_folder.h"
#include "tests/support/hosts.h"
#include "tests/support/ranks.h"
#include "tests/support/sentences.h"

namespace cohort::translate {
namespace tensor_parallel_test {

// Some hundred roundings of 1e-16 of numbers below 10, and gradients that are sums over 100 tokens.
constexpr double kRounding = 1e-12;
constexpr double kGradientRounding = 5e-12;
constexpr nmt::DropoutStream kDropout{.seed = 11, .call = 7};

// Words that come out uneven on 2 and 4 ranks.
nmt::TransformerOptions options_of(const std::string& tied) {
  nmt::TransformerOptions options = test::tiny_options();
  options.dim_vocab_source = tied == "all" ? 43 : 41;
  options.dim_vocab_target = 43;
  options.heads = 4;
  options.dropout = 0.3;
  options.tied_embeddings = tied == "target";
  options.tied_embeddings_all = tied == "all";
  return options;
}

nmt::Transformer make_model(const nmt::TransformerOptions& options,
                            std::shared_ptr<const nmt::TensorParallelContext> tensor_parallel) {
  nmt::Transformer model(options, nmt::Precision::kFloat32, at::kCPU, std::move(tensor_parallel));
  model->initialise(7);
  model->to(at::kDouble);
  model->set_dropout_stream(kDropout);
  return model;
}

// The whole model, and this rank's part of it.
struct Pair {
  Pair(const nmt::TransformerOptions& options, const comm::ProcessGroup& group)
      : whole(make_model(options, std::make_shared<nmt::TensorParallelContext>())),
        part(make_model(options, make_tensor_parallel_context(group))),
        layout(*part, tensor_parallel_plan(*part), group) {}
  nmt::Transformer whole, part;
  parallel::TensorParallelLayout layout;
};

nmt::Batch make_batch() {
  return test::make_test_batch(test::make_sentences(9, 5));
}

double difference(const at::Tensor& a, const at::Tensor& b) {
  return (a - b).abs().max().item<double>();
}

// NaN if one is: std::max would lose it.
double greater(double a, double b) {
  return std::isnan(a) || a > b ? a : b;
}

// The greatest difference between this part's gradients and those elements of the whole's. Nobody's
// may be missing: `only` names whose there are.
double gradient_difference(Pair& pair, const std::string& only = "") {
  double largest = 0;
  for (const auto& item : pair.part->named_parameters()) {
    const std::string& name = item.key();
    const at::Tensor expected = pair.whole->named_parameters()[name].grad();
    if (name.find(only) == std::string::npos) continue;
    const at::Tensor& own = item.value().grad();
    EXPECT_TRUE(own.defined() && expected.defined()) << name;
    if (!own.defined() || !expected.defined()) continue;
    const auto shards = pair.layout.full_model_shards(
        {{name, own.sizes().vec(), 0, own.numel(), own}}, Replicated::kEverywhere);
    for (const train::TensorShard& shard : shards) {
      const at::Tensor elements =
          expected.reshape({-1}).narrow(0, shard.begin, shard.end - shard.begin);
      largest = greater(largest, difference(shard.tensor, elements));
    }
  }
  return largest;
}

void expect_encoder(const comm::ProcessGroup& group) {
  Pair pair(options_of("none"), group);
  const nmt::Batch batch = make_batch();
  torch::manual_seed(1);
  at::Tensor weight;
  at::Tensor outputs[2];
  for (auto* model : {&pair.whole, &pair.part}) {
    at::Tensor& output = outputs[model == &pair.part ? 1 : 0];
    output = (*model)->encode(batch.source_BS, batch.source_lengths_B);
    if (!weight.defined()) weight = at::randn_like(output);
    (output * weight).sum().backward();
  }
  EXPECT_LE(difference(outputs[0], outputs[1]), kRounding);
  EXPECT_LE(gradient_difference(pair, "encoder."), kGradientRounding);
  EXPECT_LE(gradient_difference(pair, "source_embedding"), kGradientRounding);
}

TEST(TensorParallelTransformerTest, TheEncoderOnTwoRanksIsTheWholeOne) {
  test::ranks(2, expect_encoder);
}

TEST(TensorParallelTransformerTest, TheEncoderOnFourRanksIsTheWholeOne) {
  test::ranks(4, expect_encoder);
}

// Encoder, decoder, loss, and log p of every label, with the same elements dropped.
void expect_whole_models(const nmt::TransformerOptions& options, const comm::ProcessGroup& group,
                         bool recompute = false) {
  Pair pair(options, group);
  const nmt::Batch batch = make_batch();
  set_up_layers(pair.part, recompute);
  const auto [loss, nll] = pair.whole->forward(batch);
  loss.backward();
  const auto [own_loss, own_nll] = pair.part->forward(batch);
  own_loss.backward();
  // Sums over 60 tokens.
  EXPECT_LE(difference(own_loss, loss), 60 * kRounding);
  EXPECT_LE(difference(own_nll, nll), 60 * kRounding);
  EXPECT_LE(gradient_difference(pair), kGradientRounding);

  for (auto* model : {&pair.whole, &pair.part}) (*model)->set_dropout_stream(kDropout);
  EXPECT_LE(difference(pair.part->log_probabilities(batch), pair.whole->log_probabilities(batch)),
            kRounding);
}

void expect_every_option(const comm::ProcessGroup& group) {
  for (const char* tied : {"none", "target", "all"}) {
    SCOPED_TRACE(std::string("tied: ") + tied);
    expect_whole_models(options_of(tied), group);
  }
  for (const auto activation : {nmt::Activation::kGelu, nmt::Activation::kSwish}) {
    SCOPED_TRACE(nmt::to_string(activation));
    auto options = options_of("all");
    options.ffn_activation = activation;
    options.norm = nmt::Norm::kPost;
    expect_whole_models(options, group);
  }
  SCOPED_TRACE("layers computed again in backward");
  expect_whole_models(options_of("target"), group, /*recompute=*/true);
}

TEST(TensorParallelTransformerTest, LossesAndGradientsOnTwoRanksAreTheWholeModels) {
  test::ranks(2, expect_every_option);
}

TEST(TensorParallelTransformerTest, LossesAndGradientsOnFourRanksAreTheWholeModels) {
  test::ranks(4, expect_every_option);
}

TEST(TensorParallelTransformerTest, ScoresAndTranslationsAreTheWholeModels) {
  test::ranks(2, [](const comm::ProcessGroup& group) {
    Pair pair(options_of("target"), group);
    const nmt::Batch batch = make_batch();
    const at::NoGradGuard no_grad;
    std::vector<at::Tensor> scores[2];
    std::vector<std::vector<int32_t>> translations[2];
    for (auto* model : {&pair.whole, &pair.part}) {
      const size_t which = model == &pair.part ? 1 : 0;
      const nmt::InEvaluation evaluating(**model);
      const at::Tensor memory = (*model)->encode(batch.source_BS, batch.source_lengths_B);
      nmt::DecoderState state = (*model)->begin_decoding(memory, batch.source_lengths_B);
      for (int64_t t = 0; t < 3; ++t)
        scores[which].push_back((*model)->decode_step(batch.input_BT.select(1, t), state));
      for (const auto& hypotheses :
           nmt::search(*model, batch.source_BS, batch.source_lengths_B, {.beam_size = 3}))
        translations[which].push_back(hypotheses.front().tokens);
    }
    for (size_t t = 0; t < 3; ++t) {
      EXPECT_EQ(scores[1][t].sizes(), scores[0][t].sizes());
      EXPECT_LE(difference(scores[1][t], scores[0][t]), kRounding);
    }
    EXPECT_EQ(translations[0], translations[1]);
  });
}

// Every parameter but norms and the biases of outputs is cut.
TEST(TensorParallelTransformerTest, ARankHoldsItsPartOfTheParameters) {
  test::ranks(4, [](const comm::ProcessGroup& group) {
    Pair pair(options_of("none"), group);
    int64_t own = 0, expected = 0;
    for (const auto& item : pair.part->named_parameters()) {
      own += static_cast<int64_t>(item.value().storage().nbytes());
      const auto whole = static_cast<int64_t>(pair.whole->named_parameters()[item.key()].nbytes());
      const bool partitioned = pair.layout.is_cut(item.key());
      const bool is_table = item.key().find("embedding") != std::string::npos ||
                            item.key().find("generator") != std::string::npos;
      expected += is_table      ? static_cast<int64_t>(item.value().nbytes())
                  : partitioned ? whole / 4
                                : whole;
      EXPECT_EQ(partitioned, item.key().find("norm") == std::string::npos &&
                                 item.key().find("linear2.bias") == std::string::npos)
          << item.key();
    }
    EXPECT_EQ(own, expected);
    const int64_t all = group.all_reduce_sum(own);
    int64_t whole = 0;
    for (const at::Tensor& each : pair.whole->parameters())
      whole += static_cast<int64_t>(each.nbytes());
    EXPECT_LT(all, whole * 3 / 2);  // the tiny model's norms and biases four times
  });
}

// One update of Adam, so that the moments are no zeros.
optim::Adam adam_of(nmt::Transformer& model, const nmt::Batch& batch) {
  optim::Adam adam(optim::named_parameters(*model));
  std::get<0>(model->forward(batch)).backward();
  adam.step(0.01);
  adam.zero_grad();
  return adam;
}

train::ShardedParts parts_of(const Pair& pair, const optim::Adam& adam, Replicated replicated) {
  const auto shards_of = [&](const train::NamedTensors& tensors) {
    return pair.layout.full_model_shards(train::full_shards(tensors), replicated);
  };
  return {{"weights", shards_of(train::state_of(*pair.part))},
          {"optimizer", shards_of(adam.state())}};
}

void expect_equal(const train::NamedTensors& a, const train::NamedTensors& b, double bound) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(a[i].first, b[i].first);
    EXPECT_LE(difference(a[i].second, b[i].second), bound) << a[i].first;
  }
}

void fill(const train::NamedTensors& tensors, double value) {
  const at::NoGradGuard no_grad;
  for (const auto& [name, tensor] : tensors) tensor.detach().fill_(value);
}

// After an update of both, the parts' checkpoint is the whole model's, and the parts read back what
// the whole model has written.
TEST(TensorParallelTransformerTest, CheckpointsAreThePlainModels) {
  test::ranks(2, [](const comm::ProcessGroup& group) {
    const std::string folder = group.broadcast_object(
        (std::filesystem::temp_directory_path() / ("cohort-tp-" + std::to_string(getpid())))
            .string());
    Pair pair(options_of("target"), group);
    const nmt::Batch batch = make_batch();
    optim::Adam own = adam_of(pair.part, batch), plain = adam_of(pair.whole, batch);

    train::ShardedCheckpointWriter writer(group);
    writer.begin(folder + "/parts", parts_of(pair, own, Replicated::kOnce), 1, {});
    writer.commit();
    auto other = make_model(options_of("target"), std::make_shared<nmt::TensorParallelContext>());
    optim::Adam other_adam(optim::named_parameters(*other));
    train::load_checkpoint(folder + "/parts", {{"weights", train::state_of(*other)},
                                               {"optimizer", other_adam.state()}});
    // Adam divides rounding errors of 1e-15 by gradients as small as they come.
    expect_equal(train::state_of(*other), train::state_of(*pair.whole), 1e-9);
    expect_equal(other_adam.state(), plain.state(), 1e-12);

    if (group.rank() == 0)
      train::save_checkpoint(
          folder + "/plain",
          {{"weights", train::state_of(*other)}, {"optimizer", other_adam.state()}}, 1, {});
    group.barrier("plain checkpoint");
    const auto before = train::state_of(*pair.part);
    train::NamedTensors weights, moments;
    for (const auto& [name, tensor] : before) weights.emplace_back(name, tensor.detach().clone());
    for (const auto& [name, tensor] : own.state()) moments.emplace_back(name, tensor.clone());
    fill(train::state_of(*pair.part), NAN);
    fill(own.state(), NAN);
    train::load_shards(folder + "/plain", parts_of(pair, own, Replicated::kEverywhere), group);
    expect_equal(train::state_of(*pair.part), weights, 0);
    expect_equal(own.state(), moments, 0);
    group.barrier("read");
    if (group.rank() == 0) std::filesystem::remove_all(folder);
  });
}

// The same, trained: models of two ranks each, batches and dropout by the number in the update.

constexpr int kBatches = 4;

UpdaterOptions updater_options(parallel::Strategy strategy, const parallel::DeviceMesh& mesh) {
  return {.mesh = mesh,
          .strategy = strategy,
          .fill = {},
          .gradient_checkpointing = false,
          .adam = {},
          .schedule = {.factor = 0.05, .width = 16, .warmup = 3},
          .clip_norm = 0.8,
          .exponential_smoothing = 0.3};
}

std::vector<UpdateReport> train(Updater& updater, const comm::ProcessGroup& data, int first,
                                int last) {
  std::vector<UpdateReport> reports;
  for (int update = first; update <= last; ++update) {
    const auto sentences = test::make_sentences(2 * kBatches, static_cast<uint32_t>(update));
    std::vector<nmt::Batch> batches;
    for (int number = data.rank(); number < kBatches; number += data.size()) {
      const auto begin = sentences.begin() + 2 * number;
      batches.push_back(test::make_test_batch({begin, begin + 2}));
    }
    reports.push_back(updater.update(batches));
  }
  return reports;
}

// Shards of everything by part, as one process has them.
train::ShardedParts plain_parts(int num_updates, std::vector<UpdateReport>& reports) {
  comm::ProcessGroup alone(comm::RankInfo{});
  Updater updater(make_model(options_of("all"), std::make_shared<nmt::TensorParallelContext>()),
                  alone, updater_options(parallel::Strategy::kDdp, {}));
  reports = train(updater, alone, 1, num_updates);
  return updater.parts();
}

// The greatest difference of shards from those elements of the whole tensors.
double difference(const std::vector<train::TensorShard>& shards,
                  const std::vector<train::TensorShard>& whole) {
  std::map<std::string, at::Tensor> tensors;
  for (const auto& each : whole) tensors[each.name] = each.tensor.detach().reshape({-1});
  double largest = 0;
  for (const auto& shard : shards) {
    if (shard.begin == shard.end) continue;
    const at::Tensor expected =
        tensors.at(shard.name).narrow(0, shard.begin, shard.end - shard.begin);
    largest = greater(largest, difference(shard.tensor.detach().reshape({-1}), expected));
  }
  return largest;
}

void save(Updater& updater, const std::string& folder) {
  const comm::ProcessGroup writers = updater.checkpoint_writers();
  if (!writers) return;
  train::ShardedCheckpointWriter writer(writers);
  writer.begin(folder, updater.parts(Replicated::kOnce), updater.num_updates(), {});
  writer.commit();
}

// Every strategy in turn resumes from the checkpoint of the one before; in between is one process.
void expect_one_processs_training(const comm::ProcessGroup& world,
                                  const std::vector<parallel::Strategy>& strategies) {
  constexpr int kUpdates = 5;
  // Adam divides what 1e-15 is in a gradient by its size; a wrong one moves parameters by 1e-3.
  constexpr double kBound = 1e-8;
  const std::string folder = world.broadcast_object(
      (std::filesystem::temp_directory_path() / ("cohort-tp-" + std::to_string(getpid())))
          .string());
  int done = 0;
  for (const auto strategy : strategies) {
    SCOPED_TRACE(parallel::to_string(strategy));
    const auto mesh = parallel::init_strategy_mesh(world, strategy, 2);
    Updater updater(make_model(options_of("all"), make_tensor_parallel_context(mesh.group("tp"))),
                    world, updater_options(strategy, mesh));
    if (done > 0) train::load_shards(folder, updater.parts(), world);
    updater.set_num_updates(done);
    const auto reports =
        train(updater, parallel::data_axes(mesh).group(), done + 1, done + kUpdates);
    done += kUpdates;
    std::vector<UpdateReport> expected_reports;
    const train::ShardedParts expected = plain_parts(done, expected_reports);
    for (int i = 0; i < kUpdates; ++i) {
      const UpdateReport& report = reports[static_cast<size_t>(i)];
      const UpdateReport& plain = expected_reports[static_cast<size_t>(done - kUpdates + i)];
      EXPECT_EQ(report.num_tokens, plain.num_tokens);
      EXPECT_NEAR(report.gradient_norm, plain.gradient_norm, kBound);
    }
    for (const auto& [part, shards] : updater.parts())
      EXPECT_LE(difference(shards, expected.at(part)), kBound) << part;
    save(updater, folder);
    world.barrier("saved");

    comm::ProcessGroup nobody_else(comm::RankInfo{});
    Updater alone(make_model(options_of("all"), std::make_shared<nmt::TensorParallelContext>()),
                  nobody_else, updater_options(parallel::Strategy::kDdp, {}));
    train::load_shards(folder, alone.parts());
    for (const auto& [part, shards] : alone.parts())
      EXPECT_LE(difference(shards, expected.at(part)), kBound) << part;
  }
  world.barrier("read");
  if (world.rank() == 0) std::filesystem::remove_all(folder);
}

TEST(TensorParallelUpdaterTest, TwoModelsOfTwoRanksTrainAsOneProcess) {
  test::ranks(4, [](const comm::ProcessGroup& world) {
    expect_one_processs_training(world, {parallel::Strategy::kDdp, parallel::Strategy::kZero1,
                                         parallel::Strategy::kZero2, parallel::Strategy::kZero3});
  });
}

// 2 hosts of 4 ranks that are no neighbours: each host's two models of two ranks share their parts
// out, and the hosts hold the same.
TEST(TensorParallelUpdaterTest, HybridOnEightRanksTrainsAsOneProcess) {
  test::ranks(8, [](const comm::ProcessGroup& group) {
    test::on_hosts(
        group, {"a", "b", "b", "a", "a", "b", "a", "b"}, [](const comm::ProcessGroup& world) {
          expect_one_processs_training(
              world,
              {parallel::Strategy::kHybrid, parallel::Strategy::kDdp, parallel::Strategy::kHybrid});
        });
  });
}

// A rank's number that is not finite stops all, and all name the same.
TEST(TensorParallelUpdaterTest, ABadNumberIsNamedAlike) {
  test::ranks(4, [](const comm::ProcessGroup& world) {
    const auto mesh = parallel::init_strategy_mesh(world, parallel::Strategy::kDdp, 2);
    auto model = make_model(options_of("all"), make_tensor_parallel_context(mesh.group("tp")));
    Updater updater(model, world, updater_options(parallel::Strategy::kDdp, mesh));
    if (mesh.coordinate("tp") == 1) {  // one part of both models
      const at::NoGradGuard no_grad;
      model->named_parameters()["encoder.layers.0.linear1.weight"].fill_(NAN);
    }
    const UpdateReport report = train(updater, mesh.group("dp"), 1, 1).front();
    EXPECT_TRUE(report.skipped);
    EXPECT_EQ(updater.num_updates(), 0);
    const std::string said = std::to_string(report.bad.rank) + report.bad.parameter;
    EXPECT_EQ(world.broadcast_object(said), said);
    EXPECT_GE(report.bad.rank, 0);
  });
}

}  // namespace tensor_parallel_test
}  // namespace cohort::translate
