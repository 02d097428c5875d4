// SPDX-License-Identifier: Apache-2.0
// Session and Embedding: a libtorch program as a trainer.
#include "cohort/ps/module/session.h"

#include <array>
#include <barrier>
#include <functional>
#include <gtest/gtest.h>
#include <optional>
#include <thread>
#include <torch/nn/functional/embedding.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>

#include "cohort/base/error.h"
#include "cohort/base/log.h"
#include "cohort/ps/rpc/rpc_server.h"
#include "cohort/ps/server/server.h"

#include "tests/ps/scratch_folder.h"
#include "tests/support/message_of.h"

namespace cohort::ps {
namespace session_test {

// Servers of a job on loopback, without a log.
class Servers {
 public:
  explicit Servers(int count, const std::string& load = {}) {
    for (int server = 0; server < count; ++server) {
      servers_.push_back(std::make_unique<Server>(ServerOptions{.server = server,
                                                                .servers = count,
                                                                .load = load,
                                                                .durability = Durability::kApplied,
                                                                .snapshot_log_bytes = 0},
                                                  log_));
      rpc_.push_back(std::make_unique<RpcServer>(*servers_.back(), RpcServerOptions{}));
      endpoints_.push_back("127.0.0.1:" + std::to_string(rpc_.back()->port()));
    }
  }
  const std::vector<std::string>& endpoints() const { return endpoints_; }

 private:
  Log log_{LogOptions{.console = LogConsole::kNever}};
  std::vector<std::unique_ptr<Server>> servers_;
  std::vector<std::unique_ptr<RpcServer>> rpc_;
  std::vector<std::string> endpoints_;
};

const TableOptions kTable{.name = "ids",
                          .width = 4,
                          .seed = 7,
                          .rule = {.rule = Rule::kSgd, .learning_rate = 0.5f},
                          .initializer = {.scale = 0.5f}};

SessionOptions local_options() {
  return {.training = Training::kLocal, .dense_rule = {.rule = Rule::kSgd, .learning_rate = 0.25f}};
}

SessionOptions server_options(const Servers& servers, Training training, int trainer,
                              int trainers) {
  SessionOptions options = local_options();
  options.training = training;
  options.servers = servers.endpoints();
  options.trainer = trainer;
  options.trainers = trainers;
  options.min_block_size = 3;
  return options;
}

// Rows of ids through a linear layer to one number each.
struct Model {
  explicit Model(Session& session, const EmbeddingOptions& options = {},
                 const TableOptions& table = kTable)
      : rows(session.embedding(table, options)), linear(4, 1) {
    const torch::NoGradGuard guard;
    linear->weight.copy_(at::arange(4, at::kFloat).div(10).view({1, 4}));
    linear->bias.fill_(0.5);
    session.add("linear", *linear);
  }

  at::Tensor loss(const at::Tensor& ids) {
    return (linear->forward(rows->forward(ids)) - 1).square().mean();
  }

  Embedding rows;
  torch::nn::Linear linear;
};

at::Tensor ids_of(int64_t step, int64_t count = 6) {
  return at::arange(count).mul(3 + step).remainder(11);
}

void train(Session& session, Model& model, int64_t steps, int64_t first = 0, int64_t stride = 1) {
  for (int64_t step = 0; step < steps; ++step) {
    const at::Tensor ids = ids_of(first + step * stride);
    model.rows->prefetch(ids);
    session.pull();
    model.loss(ids).backward();
    session.push();
  }
}

TEST(SessionTest, LocalTrainingIsLibtorchsWithAnOrdinaryTable) {
  Session session(local_options());
  Model model(session);
  session.start();
  // The same rows as an ordinary parameter: what the table begins with.
  model.rows->eval();
  model.rows->train();
  const at::Tensor all = at::arange(11);
  at::Tensor weight = model.rows->forward(all).detach().clone().requires_grad_();
  torch::nn::Linear linear(4, 1);
  {
    const torch::NoGradGuard guard;
    linear->weight.copy_(model.linear->weight);
    linear->bias.copy_(model.linear->bias);
  }
  torch::optim::SGD dense(linear->parameters(), torch::optim::SGDOptions(0.25));
  torch::optim::SGD sparse({weight}, torch::optim::SGDOptions(0.5));
  for (int64_t step = 0; step < 5; ++step) {
    dense.zero_grad();
    sparse.zero_grad();
    const at::Tensor rows = torch::embedding(weight, ids_of(step));
    (linear->forward(rows) - 1).square().mean().backward();
    dense.step();
    sparse.step();
  }
  train(session, model, 5);
  session.pull();
  EXPECT_TRUE(at::allclose(model.linear->weight, linear->weight, 1e-6, 1e-7));
  EXPECT_TRUE(at::allclose(model.rows->forward(all), weight, 1e-6, 1e-7));
  EXPECT_FALSE(at::allclose(weight, at::zeros_like(weight)));
}

TEST(SessionTest, PoolingAndPaddingAreLibtorchsEmbeddingBag) {
  for (const Pooling pooling : {Pooling::kSum, Pooling::kMean}) {
    Session session(local_options());
    Embedding rows = session.embedding(kTable, {.pooling = pooling, .padding_id = 3});
    session.start();
    const at::Tensor all = at::arange(11);
    at::Tensor weight = at::empty({11, 4});
    for (int64_t id = 0; id < 11; ++id)
      weight[id] = rows->forward(at::tensor({id}, at::kLong)).detach();
    EXPECT_EQ(weight[3].abs().sum().item<float>(), 0) << "the padding's row";
    weight.requires_grad_();
    const at::Tensor ids = at::tensor({1, 2, 3, 2, 5, 3, 3, 3, 7, 7, 7, 1}, at::kLong).view({4, 3});
    namespace F = torch::nn::functional;
    auto options = F::EmbeddingBagFuncOptions().padding_idx(3);
    if (pooling == Pooling::kSum) {
      options.mode(torch::kSum);
    } else {
      options.mode(torch::kMean);
    }
    const at::Tensor expected = F::embedding_bag(ids, weight, options);
    const at::Tensor output = rows->forward(ids);
    EXPECT_TRUE(at::allclose(output, expected, 1e-6, 1e-7));
    const at::Tensor factor = at::arange(16, at::kFloat).view({4, 4});
    (expected * factor).sum().backward();
    (output * factor).sum().backward();
    session.push();
    session.pull();
    for (int64_t id = 0; id < 11; ++id) {
      if (id == 3) continue;
      const at::Tensor now = rows->forward(at::tensor({id}, at::kLong)).detach();
      EXPECT_TRUE(at::allclose(now, weight[id] - 0.5 * weight.grad()[id], 1e-6, 1e-6)) << id;
    }
  }
}

TEST(SessionTest, EmptyBagsAreZeros) {
  for (const Pooling pooling : {Pooling::kSum, Pooling::kMean}) {
    Session session(local_options());
    Embedding rows = session.embedding(kTable, {.pooling = pooling});
    session.start();
    const at::Tensor filled = rows->forward(at::arange(6).view({2, 3})).detach();
    EXPECT_GT(filled.abs().sum().item<float>(), 0);
    // Of memory that has had other values.
    for (int time = 0; time < 3; ++time) {
      at::full({2, 4}, 7.0f);
      const at::Tensor none = rows->forward(at::empty({2, 0}, at::kLong));
      EXPECT_TRUE(none.equal(at::zeros({2, 4})));
      none.sum().backward();
    }
    session.push();
  }
}

TEST(SessionTest, CountsBelowOneAreRefused) {
  const auto refusal = [](auto change) {
    return test::message_of<ConfigError>([&] {
      SessionOptions options = local_options();
      change(options);
      const Session session(options);
    });
  };
  EXPECT_EQ(refusal([](SessionOptions& o) { o.max_merge = 0; }),
            "session: max_merge: expected 1 or more, got 0");
  EXPECT_EQ(refusal([](SessionOptions& o) { o.geo_steps = 0; }),
            "session: geo_steps: expected 1 or more, got 0");
}

// Runs `trainers` trainers as threads; returns the first one's parameters and rows at the end.
std::vector<at::Tensor> run(const Servers& servers, Training training, int trainers,
                            int64_t steps) {
  std::vector<at::Tensor> result;
  std::vector<std::jthread> threads;
  std::barrier done(trainers);
  for (int trainer = 0; trainer < trainers; ++trainer) {
    threads.emplace_back([&, trainer] {
      SessionOptions options = server_options(servers, training, trainer, trainers);
      if (training == Training::kGeo) options.geo_steps = 4;
      Session session(options);
      Model model(session);
      session.start();
      train(session, model, steps, trainer, trainers);
      session.finish();
      done.arrive_and_wait();
      if (trainer > 0) return;
      Session reader(server_options(servers, training, trainer, trainers));
      Model last(reader);
      reader.start();
      result = {last.linear->weight.clone(), last.linear->bias.clone(),
                last.rows->forward(at::arange(11)).detach().clone()};
      reader.finish();
    });
  }
  threads.clear();
  return result;
}

TEST(SessionTest, SyncTrainersOnSeveralServersAreOneProcessOnAllTheirBatches) {
  const Servers servers(2);
  const auto together = run(servers, Training::kSync, 2, 6);
  // One process: each step's gradient is the mean of both batches'.
  Session session(local_options());
  Model model(session);
  session.start();
  for (int64_t step = 0; step < 6; ++step) {
    session.pull();
    (model.loss(ids_of(2 * step)) / 2 + model.loss(ids_of(2 * step + 1)) / 2).backward();
    session.push();
  }
  session.pull();
  ASSERT_EQ(together.size(), 3u);
  EXPECT_TRUE(at::allclose(together[0], model.linear->weight, 1e-5, 1e-6));
  EXPECT_TRUE(at::allclose(together[1], model.linear->bias, 1e-5, 1e-6));
  EXPECT_TRUE(at::allclose(together[2], model.rows->forward(at::arange(11)), 1e-5, 1e-6));
}

// Elements of a gradient are taken in the order of the weight's, however they lie in memory. Halves
// and quarters are exact, so the bits are those of one subtraction.
TEST(SessionTest, ChannelsLastImagesAndGradientsUpdateTheSameElements) {
  for (const auto format : {at::MemoryFormat::Contiguous, at::MemoryFormat::ChannelsLast}) {
    for (const int trainers : {1, 2}) {
      SCOPED_TRACE(c10::str(format, ", trainers: ", trainers));
      const Servers servers(2);
      std::vector<at::Tensor> updated(static_cast<size_t>(trainers));
      const at::Tensor begun = at::arange(8 * 5 * 3 * 3, at::kFloat).sin().view({8, 5, 3, 3});
      std::vector<at::Tensor> gradients(updated);
      std::vector<std::jthread> threads;
      for (int trainer = 0; trainer < trainers; ++trainer) {
        threads.emplace_back([&, trainer] {
          Session session(server_options(servers, Training::kSync, trainer, trainers));
          torch::nn::Conv2d conv(torch::nn::Conv2dOptions(5, 8, 3).bias(false));
          conv->weight.set_data(begun.clone());
          session.add("conv", *conv);
          session.start();
          const at::Tensor images = at::arange(2 * 5 * 6 * 6, at::kFloat).mul(1 + trainer).cos();
          conv(images.view({2, 5, 6, 6}).contiguous(format)).square().mean().backward();
          at::Tensor& gradient = conv->weight.mutable_grad();
          gradients[static_cast<size_t>(trainer)] = gradient.clone();
          gradient = gradient.contiguous(format);
          session.push();
          session.pull();
          updated[static_cast<size_t>(trainer)] = conv->weight.detach().clone();
          session.finish();
        });
      }
      threads.clear();
      at::Tensor mean = gradients[0];
      if (trainers == 2) mean = (mean + gradients[1]) / 2;
      for (const at::Tensor& each : updated) EXPECT_TRUE(at::equal(each, begun - 0.25 * mean));
      EXPECT_FALSE(at::equal(updated[0], begun));
    }
  }
}

TEST(SessionTest, EveryTrainingOfOneTrainerIsLocalTraining) {
  Session session(local_options());
  Model model(session);
  session.start();
  train(session, model, 8);
  session.pull();
  const at::Tensor rows = model.rows->forward(at::arange(11)).detach();
  for (const Training training : {Training::kSync, Training::kAsync, Training::kGeo}) {
    const Servers servers(2);
    const auto other = run(servers, training, 1, 8);
    // Geo sends differences, which round.
    const double bound = training == Training::kGeo ? 1e-6 : 0;
    EXPECT_TRUE(at::allclose(other[0], model.linear->weight, 0, bound));
    EXPECT_TRUE(at::allclose(other[1], model.linear->bias, 0, bound));
    EXPECT_TRUE(at::allclose(other[2], rows, 0, bound));
  }
}

// However late gradients come (two are sent as one, two wait, some are on their way), steps are so
// small that they do not overshoot.
TEST(SessionTest, HalfAsyncLearnsToo) {
  const Servers servers(2);
  SessionOptions options = server_options(servers, Training::kHalfAsync, 0, 1);
  options.dense_rule.learning_rate = 0.05f;
  options.max_merge = 2;
  Session session(options);
  Model model(session);
  session.start();
  model.rows->prefetch(ids_of(0));
  session.pull();
  const float before = model.loss(ids_of(0)).item<float>();
  train(session, model, 40);
  session.finish();
  Session reader(options);
  Model last(reader);
  reader.start();
  EXPECT_LT(last.loss(ids_of(0)).item<float>(), before / 2);
}

// Rows that begin with zeros and learn at rate 1: a gradient of -1 adds 1.
const TableOptions kCounts{.name = "counts",
                           .width = 2,
                           .rule = {.rule = Rule::kSgd, .learning_rate = 1},
                           .initializer = {.kind = Initializer::Kind::kZeros}};

TEST(SessionTest, EveryStepsGradientsReachTheirRowsPrefetchedOrNot) {
  const at::Tensor ids = at::tensor({1, 2, 3}, at::kLong);
  for (const int prefetched_steps : {0, 1, 3}) {
    Session session(local_options());
    Embedding rows = session.embedding(kCounts);
    session.start();
    for (int step = 0; step < 3; ++step) {
      if (step < prefetched_steps) rows->prefetch(ids);
      session.pull();
      const at::Tensor output = rows->forward(ids);
      EXPECT_EQ(output[0][0].item<float>(), step) << prefetched_steps << " steps prefetched";
      (-output.sum()).backward();
      session.push();
    }
    EXPECT_EQ(rows->forward(ids)[0][0].item<float>(), 3) << prefetched_steps << " steps prefetched";
  }
}

TEST(SessionTest, AGraphThatOutlivesAPushCountsInTheNextOne) {
  const at::Tensor ids = at::tensor({1, 2, 3}, at::kLong);
  Session session(local_options());
  Embedding rows = session.embedding(kCounts);
  session.start();
  rows->prefetch(ids);
  session.pull();
  const at::Tensor loss = -rows->forward(ids).sum();
  for (int step = 0; step < 3; ++step) {
    loss.backward({}, /*retain_graph=*/true);
    session.push();
  }
  session.pull();
  EXPECT_EQ(rows->forward(ids)[0][0].item<float>(), 3);
}

TEST(SessionTest, ABoundOnStalenessIsAsyncsAlone) {
  for (const Training training :
       {Training::kLocal, Training::kSync, Training::kHalfAsync, Training::kGeo}) {
    SessionOptions options = local_options();
    options.training = training;
    options.max_staleness = 2;
    EXPECT_EQ(test::message_of<ConfigError>([&] {
                const Session session(options);
              }).find("session: max_staleness 2: expected -1, only async has a bound, got "),
              0U);
  }
}

// What the chosen training does not read would be a wish without an effect.
TEST(SessionTest, OptionsOfAnotherTrainingAreRefusedByName) {
  const auto refusal = [](const std::function<void(SessionOptions&)>& set) {
    SessionOptions options = local_options();
    set(options);
    return test::message_of<ConfigError>([&] { const Session session(options); });
  };
  for (const Training training : {Training::kLocal, Training::kSync, Training::kAsync,
                                  Training::kHalfAsync, Training::kGeo}) {
    const auto refused = [&](const std::string& member, bool reads, const auto& set) {
      const std::string text = refusal([&](SessionOptions& options) {
        options.training = training;
        set(options);
      });
      EXPECT_EQ(text.starts_with("session: " + member + ": only "), !reads) << text;
    };
    refused("max_merge 3", training == Training::kHalfAsync,
            [](SessionOptions& options) { options.max_merge = 3; });
    refused("geo_steps 3", training == Training::kGeo,
            [](SessionOptions& options) { options.geo_steps = 3; });
    refused("reduce sum", training == Training::kSync || training == Training::kLocal,
            [](SessionOptions& options) { options.reduce = Reduce::kSum; });
  }
  EXPECT_EQ(refusal([](SessionOptions& options) {
              options.trainer = 1;
              options.trainers = 4;
            }),
            "session: local training is of one trainer, got trainer 1 of 4");
}

TEST(SessionTest, ItSaysForWhomItWaits) {
  const Servers servers(1);
  SessionOptions options = server_options(servers, Training::kSync, 0, 2);
  options.client.link.trainer_timeout = std::chrono::seconds(5);
  options.client.link.heartbeat_period = std::chrono::milliseconds(100);
  options.client.link.notice_period = std::chrono::milliseconds(300);
  Session session(options);
  Model model(session);
  session.start();
  session.push();
  testing::internal::CaptureStderr();
  EXPECT_THROW(session.pull(), c10::DistError);
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_NE(
      said.find("server 0 (" + servers.endpoints()[0] + "): waiting: step 1 waits for trainer 1"),
      std::string::npos)
      << said;
}

TEST(SessionTest, PredictionsMakeNoRows) {
  const Servers servers(1);
  Session session(server_options(servers, Training::kSync, 0, 1));
  Model model(session);
  session.start();
  model.rows->eval();
  EXPECT_EQ(model.rows->forward(at::tensor({99}, at::kLong)).abs().sum().item<float>(), 0);
  EXPECT_NE(session.client().status().front().find("\"rows\":0"), std::string::npos);
}

// Ranks of a host as threads.
class HostOfThreads {
 public:
  explicit HostOfThreads(int size) : sent_(static_cast<size_t>(size)), barrier_(size) {}

  HostRanks of(int rank) {
    HostRanks host{.rank = rank, .size = static_cast<int>(sent_.size())};
    host.gather = [this, rank](const std::vector<std::byte>& own) {
      sent_[static_cast<size_t>(rank)] = own;
      barrier_.arrive_and_wait();
      auto all = rank == 0 ? sent_ : std::vector<std::vector<std::byte>>();
      barrier_.arrive_and_wait();
      return all;
    };
    host.broadcast = [this, rank](std::vector<std::byte>& bytes) {
      if (rank == 0) sent_[0] = bytes;
      barrier_.arrive_and_wait();
      bytes = sent_[0];
      barrier_.arrive_and_wait();
    };
    return host;
  }

  // All of them as trainer 0 of 1, each with a session of its own.
  void run(const Servers& servers, const std::function<void(int rank, Session& session)>& body) {
    std::vector<std::jthread> ranks;
    for (int rank = 0; rank < static_cast<int>(sent_.size()); ++rank) {
      ranks.emplace_back([&, rank] {
        SessionOptions options = server_options(servers, Training::kSync, 0, 1);
        options.host = of(rank);
        Session session(options);
        body(rank, session);
      });
    }
  }

 private:
  std::vector<std::vector<std::byte>> sent_;
  std::barrier<> barrier_;
};

TEST(SessionTest, RanksOfAHostAreOneTrainer) {
  const Servers servers(2);
  HostOfThreads host(2);
  std::vector<at::Tensor> weights(2);
  host.run(servers, [&](int rank, Session& session) {
    Model model(session);
    session.start();
    train(session, model, 6, rank, 2);
    session.pull();
    weights[static_cast<size_t>(rank)] = model.linear->weight.detach().clone();
    session.finish();
  });
  EXPECT_TRUE(at::equal(weights[0], weights[1]));
  const Servers others(2);
  const auto apart = run(others, Training::kSync, 2, 6);
  EXPECT_TRUE(at::allclose(weights[0], apart[0], 1e-5, 1e-6));
}

TEST(SessionTest, RanksOfAHostResumeFromOneStep) {
  const Servers servers(2);
  std::vector<int64_t> before(2), after(2);
  HostOfThreads(2).run(servers, [&](int rank, Session& session) {
    Model model(session);
    session.start();
    EXPECT_EQ(session.steps_before(), 0);
    train(session, model, 4, rank, 2);
  });
  HostOfThreads(2).run(servers, [&](int rank, Session& session) {
    Model model(session);
    session.start();
    before[static_cast<size_t>(rank)] = session.steps_before();
    train(session, model, 2, rank, 2);
    session.pull();
    after[static_cast<size_t>(rank)] = session.step();
    session.finish();
  });
  EXPECT_GE(before[0], 3);
  EXPECT_EQ(before[1], before[0]);
  EXPECT_EQ(after[0], before[0] + 2);
  EXPECT_EQ(after[1], after[0]);
}

TEST(SessionTest, RanksOfAHostCountTheStepsOfALoadedCheckpoint) {
  const ScratchFolder folder;
  const std::string saved = folder.path("saved");
  HostOfThreads(2).run(Servers(2), [&](int rank, Session& session) {
    Model model(session);
    session.start();
    train(session, model, 3, rank, 2);
    if (rank == 0) session.save(saved);
    session.finish();
  });
  std::vector<std::array<int64_t, 2>> steps(2);
  HostOfThreads(2).run(Servers(2, saved), [&](int rank, Session& session) {
    Model model(session);
    session.start();
    const int64_t first = session.step();
    train(session, model, 2, rank, 2);
    steps[static_cast<size_t>(rank)] = {first, session.step()};
    session.finish();
  });
  EXPECT_EQ(steps[0], (std::array<int64_t, 2>{3, 5}));
  EXPECT_EQ(steps[1], steps[0]);
}

TEST(SessionTest, IdsMayBeWrittenAnewInTheSameMemory) {
  Session session(local_options());
  Model model(session);
  session.start();
  const at::Tensor ids = at::tensor({1, 2}, at::kLong);
  model.rows->prefetch(ids);
  session.pull();
  model.rows->forward(ids);
  ids.copy_(at::tensor({7, 8}, at::kLong));
  const at::Tensor rows = model.rows->forward(ids).detach().clone();
  EXPECT_TRUE(at::equal(rows, model.rows->forward(at::tensor({7, 8}, at::kLong)).detach()));
  EXPECT_FALSE(at::equal(rows, model.rows->forward(at::tensor({1, 2}, at::kLong)).detach()));
}

// What is rounded, and how, does not depend on the way to the server.
TEST(SessionTest, OneTrainerOverBfloat16IsLocalTrainingOverBfloat16) {
  TableOptions table = kTable;
  table.wire_dtype = WireDtype::kBfloat16;
  const Servers servers(2);
  std::vector<at::Tensor> rows, weights;
  for (const bool is_local : {true, false}) {
    SessionOptions options =
        is_local ? local_options() : server_options(servers, Training::kSync, 0, 1);
    options.dense_wire_dtype = WireDtype::kBfloat16;
    Session session(options);
    Model model(session, {}, table);
    session.start();
    train(session, model, 6);
    session.pull();
    weights.push_back(model.linear->weight.detach().clone());
    rows.push_back(model.rows->forward(at::arange(11)).detach().clone());
    session.finish();
  }
  EXPECT_TRUE(at::equal(weights[0], weights[1]));
  EXPECT_TRUE(at::equal(rows[0], rows[1]));
  for (const at::Tensor& value : {weights[0], rows[0]})
    EXPECT_TRUE(at::equal(value, value.to(at::kBFloat16).to(at::kFloat)));
  Session plain(local_options());
  Model model(plain);
  plain.start();
  train(plain, model, 6);
  plain.pull();
  EXPECT_FALSE(at::equal(model.linear->weight, weights[0]));
  // A weight is rounded by 2^-8 of it at most, a gradient by 2^-7; six steps add up.
  EXPECT_TRUE(at::allclose(model.linear->weight, weights[0], 0.05, 0.02));
}

TEST(SessionTest, RanksOfAHostPredictTogether) {
  const Servers servers(1);
  HostOfThreads host(2);
  std::vector<at::Tensor> predicted(2);
  std::string status;
  host.run(servers, [&](int rank, Session& session) {
    Embedding rows = session.embedding(kTable);
    session.start();
    rows->eval();
    predicted[static_cast<size_t>(rank)] = rows->forward(at::arange(rank, 4));
    if (rank == 0) status = session.client().status().front();
    session.finish();
  });
  for (int64_t rank = 0; rank < 2; ++rank)
    EXPECT_TRUE(at::equal(predicted[static_cast<size_t>(rank)], at::zeros({4 - rank, 4}))) << rank;
  EXPECT_NE(status.find("\"rows\":0"), std::string::npos);
}

TEST(SessionTest, WhatDoesNotFitIsNamed) {
  const auto message_of = [](const std::function<void()>& call) -> std::string {
    try {
      call();
    } catch (const std::exception& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_NE(message_of([] { training_named("asynch"); }).find("half-async"), std::string::npos);
  Session session(local_options());
  torch::nn::Linear doubles(2, 2);
  doubles->to(at::kDouble);
  EXPECT_NE(message_of([&] { session.add("net", *doubles); }).find("net.weight"),
            std::string::npos);
  torch::nn::Conv2d turned(torch::nn::Conv2dOptions(3, 4, 2));
  turned->weight.set_data(turned->weight.detach().contiguous(at::MemoryFormat::ChannelsLast));
  EXPECT_NE(message_of([&] { session.add("net", *turned); })
                .find("'net.weight': expected contiguous float32, got CPUFloatType of strides [12, "
                      "1, 6, 3]"),
            std::string::npos);
  for (const auto& early : std::initializer_list<std::function<void()>>{
           [&] { session.push(); }, [&] { session.flush(); }, [&] { session.save("folder"); }})
    EXPECT_NE(message_of(early).find("start() comes first"), std::string::npos);
  EXPECT_EQ(message_of([&] { session.finish(); }), "");
  Model model(session);
  session.start();
  std::vector<float> one(1);
  EXPECT_NE(message_of([&] {
              session.client().pull({}, {one, one});
            }).find("'linear.weight' has 4 elements, got 1"),
            std::string::npos);
  EXPECT_NE(message_of([&] { model.rows->forward(at::arange(3, at::kInt)); }).find("int64"),
            std::string::npos);
  // What was refused leaves nothing behind.
  EXPECT_NE(message_of([&] { model.rows->prefetch(at::arange(3, at::kInt)); }).find("int64"),
            std::string::npos);
  session.pull();
  EXPECT_EQ(message_of([&] { model.rows->forward(at::arange(3)); }), "");
}

}  // namespace session_test
}  // namespace cohort::ps
