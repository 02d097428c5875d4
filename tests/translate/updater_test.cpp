// SPDX-License-Identifier: Apache-2.0
// Updates of a job of ranks against those of plain autograd and Adam on the union of the batches.
#include "cohort/translate/updater.h"

#include <ATen/record_function.h>
#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <gtest/gtest.h>
#include <numeric>
#include <sstream>
#include <thread>
#include <torch/autograd.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/types.h>
#include <unistd.h>

#include "cohort/base/trace_page.h"
#include "cohort/parallel/gradient_engine.h"
#include "cohort/train/metrics.h"

#include "tests/support/ranks.h"
#include "tests/support/sentences.h"
#include "tests/support/shared_folder.h"

namespace cohort::translate {
namespace updater_test {

using parallel::Strategy;
using Clock = std::chrono::steady_clock;

constexpr int kNumUpdates = 6;
constexpr int kNumSentences = 16;

// Only the order of summation differs, and moves a gradient by some 1e-15: 100 terms below 0.1,
// rounded to 2^-53. Adam divides that by the root of the mean square, here 6e-8 at least where
// there is a gradient at all, and multiplies it by a rate below 0.0075: 1.3e-10 an update. A wrong
// gradient moves parameters by the rate itself.
constexpr double kRounding = 1e-9;

// The rate rises and falls, some updates are clipped and some not, and the average's rate comes to
// its lower end.
const UpdaterOptions kOptions{.schedule = {.factor = 0.05, .width = 16, .warmup = 3},
                              .clip_norm = 0.8,
                              .exponential_smoothing = 0.75};

nmt::Transformer make_model() {
  nmt::Transformer model(test::tiny_options());
  model->initialise(7);
  model->to(at::kDouble);
  return model;
}

// The sentences of one update, short ones first, so that ranks hold different numbers of tokens.
std::vector<test::Sentence> sentences_of(int update) {
  auto sentences = test::make_sentences(kNumSentences, static_cast<uint32_t>(update));
  std::stable_sort(sentences.begin(), sentences.end(),
                   [](const auto& a, const auto& b) { return a.target.size() < b.target.size(); });
  return sentences;
}

// Cuts `sentences` into parts of 1 : 3 : 5 ... and returns the rank's: rank r has counts[r].
std::vector<nmt::Batch> batches_of(const std::vector<test::Sentence>& sentences,
                                   const std::vector<int>& counts, int rank) {
  const int parts = std::reduce(counts.begin(), counts.end());
  const int first = std::reduce(counts.begin(), counts.begin() + rank);
  const auto cut = [&](int part) {
    return sentences.begin() + kNumSentences * part * part / (parts * parts);
  };
  std::vector<nmt::Batch> batches;
  for (int part = first; part < first + counts[static_cast<size_t>(rank)]; ++part)
    batches.push_back(test::make_test_batch({cut(part), cut(part + 1)}));
  return batches;
}

// One process, one batch, every formula written out.
class PlainUpdater {
 public:
  struct Report {
    double nll_sum, gradient_norm;
  };

  PlainUpdater() {
    for (const at::Tensor& p : model->parameters()) {
      moments_.push_back(at::zeros_like(p));
      squares_.push_back(at::zeros_like(p));
      averages.push_back(p.detach().clone());
    }
  }

  Report update(const nmt::Batch& batch) {
    const auto t = static_cast<double>(++num_updates_);
    const auto [loss, nll] = model->forward(batch);
    const auto parameters = model->parameters();
    const auto gradients =
        torch::autograd::grad({loss / static_cast<double>(batch.num_target_tokens)}, parameters);
    double sum = 0;
    for (const at::Tensor& g : gradients) sum += g.square().sum().item<double>();
    const double norm = std::sqrt(sum);
    const double divisor = norm > 0.8 ? norm / 0.8 : 1;
    clipped += divisor > 1 ? 1 : 0;
    const double rate = 0.05 / std::sqrt(16.0) * std::min(1 / std::sqrt(t), t / std::pow(3, 1.5));
    const double share = std::max(0.75, 9 / (t + 9));
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < parameters.size(); ++i) {
      const at::Tensor g = gradients[i] / divisor;
      moments_[i] = 0.9 * moments_[i] + 0.1 * g;
      squares_[i] = 0.98 * squares_[i] + (1 - 0.98) * g * g;
      const at::Tensor root = (squares_[i] / (1 - std::pow(0.98, t))).sqrt() + 1e-9;
      parameters[i].sub_(rate * moments_[i] / (1 - std::pow(0.9, t)) / root);
      averages[i] = averages[i] + share * (parameters[i] - averages[i]);
    }
    return {nll.item<double>(), norm};
  }

  nmt::Transformer model = make_model();
  std::vector<at::Tensor> averages;
  int clipped = 0;

 private:
  std::vector<at::Tensor> moments_, squares_;
  int num_updates_ = 0;
};

// NaN if any is.
double difference(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  std::vector<at::Tensor> largest{at::zeros({}, at::kDouble)};
  for (size_t i = 0; i < a.size(); ++i)
    largest.push_back((a[i] - b[i]).abs().max().to(at::kDouble));
  return at::stack(largest).max().item<double>();
}

TEST(UpdaterTest, TheDifferenceToNaNIsNoNumber) {
  const at::Tensor one = at::ones({2}, at::kDouble), nan = at::tensor({1.0, NAN}, at::kDouble);
  EXPECT_EQ(difference({one, one}, {one, one}), 0);
  EXPECT_TRUE(std::isnan(difference({nan, one}, {one, one})));
}

void expect_plain_updates(const comm::ProcessGroup& group, const std::vector<int>& num_batches) {
  SCOPED_TRACE("batches by rank: " + testing::PrintToString(num_batches));
  auto model = make_model();
  Updater updater(model, group, kOptions);
  PlainUpdater plain;
  for (int update = 1; update <= kNumUpdates; ++update) {
    const auto sentences = sentences_of(update);
    const nmt::Batch whole = test::make_test_batch(sentences);
    const UpdateReport report = updater.update(batches_of(sentences, num_batches, group.rank()));
    const auto expected = plain.update(whole);
    EXPECT_FALSE(report.skipped);
    EXPECT_EQ(report.num_tokens, whole.num_target_tokens);
    if (group.size() > 1) {
      EXPECT_NE(report.own_tokens * group.size(), report.num_tokens) << "equal shares";
    }
    const double nll_sum = train::reduce_sums(group, std::array{report.nll_sum})[0];
    EXPECT_NEAR(nll_sum, expected.nll_sum, kRounding);
    EXPECT_NEAR(report.gradient_norm, expected.gradient_norm, kRounding);
  }
  EXPECT_GT(plain.clipped, 0);
  EXPECT_LT(plain.clipped, kNumUpdates);
  EXPECT_EQ(updater.num_updates(), kNumUpdates);
  EXPECT_LE(difference(model->parameters(), plain.model->parameters()), kRounding);
  const optim::AveragesInPlace smoothed(updater.average());
  EXPECT_LE(difference(model->parameters(), plain.averages), kRounding);
}

TEST(UpdaterTest, OneRankMakesPlainUpdatesWithAnyDelay) {
  comm::ProcessGroup alone(comm::RankInfo{});
  for (const int delay : {1, 2, 4}) expect_plain_updates(alone, {delay});
}

TEST(UpdaterTest, TwoRanksMakePlainUpdatesWithAnyDelay) {
  test::ranks(2, [](const comm::ProcessGroup& group) {
    for (const int delay : {1, 2}) expect_plain_updates(group, {delay, delay});
  });
}

// 3 over the number of tokens has another mantissa than 1 or 2 over it.
TEST(UpdaterTest, ThreeRanksMakePlainUpdates) {
  test::ranks(3, [](const comm::ProcessGroup& group) { expect_plain_updates(group, {1, 1, 1}); });
}

// Of the sharding strategies, too: what they leave of the model is gathered by a forward. And with
// shards of their own in host memory.
TEST(UpdaterTest, EveryStrategyMakesTheSameUpdates) {
  test::ranks(2, [](const comm::ProcessGroup& group) {
    comm::ProcessGroup alone(comm::RankInfo{});
    for (const auto& [strategy, offloads] : {std::pair{Strategy::kZero1, false},
                                             {Strategy::kZero2, false},
                                             {Strategy::kZero3, false},
                                             {Strategy::kZero1, true},
                                             {Strategy::kZero3, true}}) {
      SCOPED_TRACE(to_string(strategy) + (offloads ? ", offloads" : ""));
      auto options = test::tiny_options();
      options.dropout = 0.3;
      const auto make = [&] {
        nmt::Transformer model(options);
        model->initialise(7);
        model->to(at::kDouble);
        return model;
      };
      UpdaterOptions shared = kOptions;
      shared.strategy = strategy;
      shared.cpu_offload = offloads;
      auto plain = make();
      Updater together(make(), group, shared);
      Updater by_itself(plain, alone, kOptions);
      for (int update = 1; update <= kNumUpdates; ++update) {
        const auto all = batches_of(sentences_of(update), {4}, 0);
        const auto rank = static_cast<size_t>(group.rank());
        const auto one = together.update({all[rank], all[rank + 2]});
        const auto expected = by_itself.update(all);
        EXPECT_FALSE(one.skipped || expected.skipped);
        EXPECT_NEAR(one.gradient_norm, expected.gradient_norm, kRounding);
        const double nll_sum = train::reduce_sums(group, std::array{one.nll_sum})[0];
        EXPECT_NEAR(nll_sum, expected.nll_sum, 1e-6) << "of the parameters so far";
      }
    }
  });
}

TEST(UpdaterTest, DropoutHangsOnTheBatchAndNotOnItsRank) {
  test::ranks(2, [](const comm::ProcessGroup& group) {
    comm::ProcessGroup alone(comm::RankInfo{});
    const auto make = [](double dropout) {
      auto options = test::tiny_options();
      options.dropout = dropout;
      nmt::Transformer model(options);
      model->initialise(7);
      model->to(at::kDouble);
      return model;
    };
    auto shared = make(0.3);
    auto single = make(0.3);
    auto without = make(0);
    Updater together(shared, group, kOptions);
    Updater by_itself(single, alone, kOptions);
    Updater undropped(without, alone, kOptions);
    for (int update = 1; update <= kNumUpdates; ++update) {
      const auto all = batches_of(sentences_of(update), {4}, 0);
      const auto rank = static_cast<size_t>(group.rank());
      EXPECT_FALSE(together.update({all[rank], all[rank + 2]}).skipped);
      EXPECT_FALSE(by_itself.update(all).skipped);
      EXPECT_FALSE(undropped.update(all).skipped);
    }
    EXPECT_LE(difference(shared->parameters(), single->parameters()), kRounding);
    EXPECT_GT(difference(single->parameters(), without->parameters()), 1e-3) << "was dropped";
  });
}

// At a learning rate of 0 the same batch has the same loss, but for what dropout takes: in every
// update, in every batch of one and on every rank other elements.
TEST(UpdaterTest, EveryBatchOfEveryUpdateHasADropoutMaskOfItsOwn) {
  test::ranks(2, [](const comm::ProcessGroup& group) {
    auto options = test::tiny_options();
    options.dropout = 0.3;
    nmt::Transformer model(options);
    model->initialise(7);
    model->to(at::kDouble);
    Updater updater(model, group, {.schedule = {.factor = 0, .width = 16, .warmup = 3}});
    const nmt::Batch batch = test::make_test_batch(sentences_of(1));
    const auto nll_sum = [&](int64_t num_updates, size_t num_batches) {
      updater.set_num_updates(num_updates);
      return updater.update(std::vector(num_batches, batch)).nll_sum;
    };
    std::ostringstream own;
    own.precision(12);
    for (const int64_t num_updates : {0, 1, 2}) {
      const double first = nll_sum(num_updates, 1);
      own << first << ' ' << nll_sum(num_updates, 2) - first << ' ';
      EXPECT_EQ(nll_sum(num_updates, 1), first) << "the same mask again";
    }
    std::vector<double> losses;
    for (const std::string& text : group.all_gather_object(own.str())) {
      std::istringstream numbers(text);
      for (double each = 0; numbers >> each;) losses.push_back(each);
    }
    ASSERT_EQ(losses.size(), 12);
    std::ranges::sort(losses);
    for (size_t i = 1; i < losses.size(); ++i)
      EXPECT_GT(losses[i] - losses[i - 1], 1e-6) << "two equal masks; loss " << losses[i];
  });
}

// Only if each rank sends its gradients once, after its last batch, do their calls match.
TEST(UpdaterTest, RanksMayHaveDifferentNumbersOfBatches) {
  const auto ends = test::run_ranks(2,
                                    [](const comm::ProcessGroup& group) {
                                      expect_plain_updates(group, {1, 3});
                                    },
                                    {.timeout = std::chrono::seconds(30)});
  for (const auto& end : ends) EXPECT_EQ(end.exit_code, 0) << end.output;
}

// The parts of a model by first words of names, each where its last one stands.
std::vector<std::string> parts_in_order(const std::vector<std::string>& names) {
  std::vector<std::string> parts;
  for (const std::string& name : names) {
    const std::string part = name.substr(0, name.find('.'));
    std::erase(parts, part);
    parts.push_back(part);
  }
  return parts;
}

// A bucket waits for those before it: one order in which they wait for each other no longer than
// gradients take.
TEST(UpdaterTest, BucketsAreSentAsBackwardMakesTheirGradients) {
  comm::ProcessGroup alone(comm::RankInfo{});
  for (const bool tied : {false, true}) {
    for (const bool tied_all : {false, true}) {
      auto options = test::tiny_options();
      options.tied_embeddings = tied;
      options.tied_embeddings_all = tied_all;
      nmt::Transformer model(options);
      Updater updater(model, alone, {});
      std::vector<std::string> sent, made;
      const auto& engine = dynamic_cast<const parallel::GradientEngine&>(updater.model().engine());
      for (const auto& bucket : engine.bucket_layout())
        sent.insert(sent.end(), bucket.begin(), bucket.end());
      for (const auto& item : model->named_parameters()) {
        torch::autograd::impl::grad_accumulator(item.value())
            ->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(
                [&made, name = item.key()](const auto& outputs, const auto&) {
                  made.push_back(name);
                  return outputs;
                }));
      }
      updater.update(batches_of(sentences_of(1), {1}, 0));
      EXPECT_EQ(sent.size(), made.size());
      EXPECT_EQ(parts_in_order(sent), parts_in_order(made)) << tied << tied_all;
    }
  }
}

// A bucket waits for its last gradient: what lies in no layer is cut where layers lie between.
TEST(UpdaterTest, EmbeddingsAreSentWhileLayersComputeTheirGradients) {
  comm::ProcessGroup alone(comm::RankInfo{});
  auto options = test::tiny_options();
  options.dim_emb = 64;
  options.dim_vocab_source = options.dim_vocab_target = 4200;  // above 1 MiB
  static std::vector<std::string> reduced;
  for (const Strategy strategy : {Strategy::kZero1, Strategy::kZero2, Strategy::kZero3}) {
    nmt::Transformer model(options);
    model->initialise(7);
    Updater updater(model, alone, {.strategy = strategy});
    reduced.clear();
    const auto handle = at::addThreadLocalCallback(
        at::RecordFunctionCallback([](const at::RecordFunction& record)
                                       -> std::unique_ptr<at::ObserverContext> {
          const std::string name = record.name();
          if (name.starts_with("reduce ")) reduced.push_back(name.substr(7, name.find(',') - 7));
          if (name.starts_with("reduce the parameters of no unit, "))
            reduced.back() = name.substr(34, name.find(" and on") - 34);
          return nullptr;
        }).scopes({at::RecordScope::USER_SCOPE}));
    updater.update(batches_of(sentences_of(1), {1}, 0));
    at::removeCallback(handle);
    EXPECT_EQ(reduced, (std::vector<std::string>{"decoder.norm.weight", "unit decoder.layers.1",
                                                 "unit decoder.layers.0", "encoder.norm.weight",
                                                 "unit encoder.layers.1", "unit encoder.layers.0",
                                                 "source_embedding"}))
        << to_string(strategy);
  }
}

// Every rank plans the batches of all.
TEST(UpdaterTest, ANumberOfTokensThatIsKnownChangesNothing) {
  test::ranks(2, [](const comm::ProcessGroup& group) {
    auto told = make_model(), asking = make_model();
    Updater knows(told, group, kOptions), exchanges(asking, group, kOptions);
    for (int update = 1; update <= 2; ++update) {
      const auto sentences = sentences_of(update);
      const auto batches = batches_of(sentences, {1, 1}, group.rank());
      const int64_t num_tokens = test::make_test_batch(sentences).num_target_tokens;
      EXPECT_EQ(knows.update(batches, num_tokens).num_tokens, num_tokens);
      EXPECT_EQ(exchanges.update(batches).num_tokens, num_tokens);
    }
    EXPECT_EQ(difference(told->parameters(), asking->parameters()), 0);
  });
}

// By the trace's numbers: all buckets of DDP are one, and its forward takes one that sends nothing.
// ZeRO has a gather and a reduce_scatter for each bucket.
TEST(UpdaterTest, AnUpdateTakesNoMoreCollectivesThanCounted) {
  const test::SharedFolder folder;
  if (const char* rank = std::getenv("RANK"))
    setenv(kTraceFileVariable, (folder / "trace" + rank).c_str(), 1);
  test::ranks(2, [](const comm::ProcessGroup& group) {
    const auto num_collectives = [&](const comm::ProcessGroup& of) {
      of.barrier("count");
      return TracePage::read(std::getenv(kTraceFileVariable))->sequence;
    };
    for (const auto& [strategy, expected] : {std::pair<Strategy, int64_t>{Strategy::kDdp, 2},
                                             {Strategy::kZero1, 12},
                                             {Strategy::kZero2, 12},
                                             {Strategy::kZero3, 15}}) {
      Updater updater(make_model(), group, {.strategy = strategy});
      const comm::ProcessGroup data = updater.model().ranks().all;
      const auto batches = batches_of(sentences_of(1), {1, 1}, group.rank());
      const int64_t num_tokens = test::make_test_batch(sentences_of(1)).num_target_tokens;
      updater.update(batches, num_tokens);
      const int64_t first = num_collectives(data);
      const int64_t second = num_collectives(data);
      updater.update(batches, num_tokens);
      const int64_t third = num_collectives(data);
      updater.update(batches);
      const int64_t of_barrier = second - first, of_update = third - second;
      EXPECT_EQ(of_update - of_barrier, expected) << to_string(strategy);
      const int64_t fourth = num_collectives(data);
      EXPECT_EQ(fourth - third, of_update + 1) << "that of the number of tokens";
      if (strategy != Strategy::kZero1 && strategy != Strategy::kZero2) continue;
      // What two batches gather and reduce, they do once.
      updater.update(batches_of(sentences_of(1), {2, 2}, group.rank()), num_tokens);
      EXPECT_EQ(num_collectives(data) - fourth, of_update + 1) << "whether gradients wait";
    }
  });
}

TEST(UpdaterTest, OneRanksBadGradientSkipsTheUpdateOnAll) {
  test::ranks(2, [](const comm::ProcessGroup& group) {
    auto model = make_model();
    Updater updater(model, group, kOptions);
    const auto batches = [&](int update) {
      return batches_of(sentences_of(update), {1, 1}, group.rank());
    };
    bool spoil = false;
    model->named_parameters()["encoder.layers.1.linear1.weight"].register_hook(
        [&](const at::Tensor& gradient) { return spoil ? gradient * NAN : gradient; });
    updater.update(batches(1));
    std::vector<at::Tensor> before;
    for (const at::Tensor& p : model->parameters()) before.push_back(p.detach().clone());
    spoil = group.rank() == 1;
    const UpdateReport bad = updater.update(batches(2));
    EXPECT_TRUE(bad.skipped);
    EXPECT_EQ(bad.bad.parameter, "encoder.layers.1.linear1.weight");
    EXPECT_EQ(bad.bad.rank, 1) << "known to all";
    EXPECT_EQ(bad.bad.batch, 0);
    EXPECT_TRUE(std::isfinite(bad.nll_sum));
    EXPECT_GT(bad.compute_seconds, 0) << "a speed is made of it";
    EXPECT_EQ(updater.num_updates(), 1);
    EXPECT_EQ(difference(model->parameters(), before), 0);
    // What follows is as if it had never been.
    spoil = false;
    EXPECT_FALSE(updater.update(batches(3)).skipped);
    auto other = make_model();
    Updater undisturbed(other, group, kOptions);
    EXPECT_FALSE(undisturbed.update(batches(1)).skipped);
    EXPECT_FALSE(undisturbed.update(batches(3)).skipped);
    EXPECT_EQ(difference(model->parameters(), other->parameters()), 0);
  });
}

TEST(UpdaterTest, TheBadBatchOfARankIsFound) {
  test::ranks(2, [](const comm::ProcessGroup& group) {
    for (const Strategy strategy : {Strategy::kDdp, Strategy::kZero2}) {
      auto model = make_model();
      UpdaterOptions options = kOptions;
      options.strategy = strategy;
      Updater updater(model, group, options);
      int calls = 0;  // of the hook, once a batch
      model->named_parameters()["decoder.layers.0.linear1.weight"].register_hook(
          [&](const at::Tensor& gradient) {
            return calls++ % 2 == 1 && group.rank() == 1 ? gradient * INFINITY : gradient;
          });
      const auto bad = updater.update(batches_of(sentences_of(1), {2, 2}, group.rank()));
      EXPECT_TRUE(bad.skipped);
      EXPECT_EQ(bad.bad.parameter, "decoder.layers.0.linear1.weight");
      EXPECT_EQ(bad.bad.rank, 1);
      EXPECT_EQ(bad.bad.batch, 1);
    }
  });
}

// What comes out of the decoder is its last bias alone, which makes piece 5 impossible (log p is
// -1e39, in float32 -inf), and what goes back through it are numbers of no more than 1e19.
TEST(UpdaterTest, ALossThatIsNotFiniteIsNotTrainedOnThoughGradientsAre) {
  comm::ProcessGroup alone(comm::RankInfo{});
  auto options = test::tiny_options();
  options.label_smoothing = 0;
  nmt::Transformer model(options);
  model->initialise(7);
  {
    const at::NoGradGuard no_grad;
    model->named_parameters()["decoder.norm.weight"].zero_();
    model->named_parameters()["decoder.norm.bias"].fill_(8e18);
    model->named_parameters()["generator.weight"].zero_().select(0, 5).fill_(-8e18);
  }
  auto sentences = test::make_sentences(16, 1);
  sentences[1].target[0] = 5;
  const nmt::Batch batch = test::make_test_batch(sentences);
  const auto [loss, nll] = model->forward(batch);
  ASSERT_FALSE(std::isfinite(nll.item<double>()));
  loss.backward(at::full_like(loss, 1.0 / static_cast<double>(batch.num_target_tokens)));
  ASSERT_TRUE(std::isfinite(optim::gradient_norm_squared(model->parameters())));
  for (at::Tensor& parameter : model->parameters()) parameter.mutable_grad().reset();

  Updater updater(model, alone, kOptions);
  const UpdateReport report = updater.update({batch});
  EXPECT_TRUE(report.skipped);
  EXPECT_EQ(report.bad.rank, 0);
  EXPECT_EQ(report.bad.batch, 0);
  EXPECT_FALSE(report.bad.parameter.empty());
  EXPECT_EQ(updater.num_updates(), 0);
}

// Rank 1 comes late; then one of its gradients takes until rank 0 has all of its own, and longer.
// Nothing of that is rank 0's own time, and the latter is rank 1's.
TEST(UpdaterTest, ARanksTimeIsItsOwnWithoutWaitingForOthers) {
  namespace fs = std::filesystem;
  test::ranks(2, [](const comm::ProcessGroup& group) {
    constexpr std::chrono::milliseconds kDelay(250);
    const fs::path rank_0_is_done = group.broadcast_object(
        (fs::temp_directory_path() / ("cohort-updater-" + std::to_string(getpid()))).string());
    auto model = make_model();
    Updater updater(model, group, kOptions);
    const auto parameters = model->parameters();
    size_t num_gradients = 0;
    if (group.rank() == 0) {
      for (const at::Tensor& p : parameters) {
        p.register_hook([&](const at::Tensor&) {
          if (++num_gradients == parameters.size()) std::ofstream(rank_0_is_done) << '.';
        });
      }
    } else {
      // The first gradient of a backward.
      model->named_parameters()["generator.weight"].register_hook([&](const at::Tensor&) {
        while (!fs::exists(rank_0_is_done)) std::this_thread::yield();
        std::this_thread::sleep_for(kDelay);
      });
    }
    const auto start = Clock::now();
    group.barrier("start");
    if (group.rank() == 1) std::this_thread::sleep_for(kDelay);
    const double own =
        updater.update(batches_of(sentences_of(1), {1, 1}, group.rank())).compute_seconds;
    const std::chrono::duration<double> whole = Clock::now() - start;
    if (group.rank() == 0) {
      EXPECT_GE(whole.count() - own, 0.4);
      EXPECT_GT(own, 0);
    } else {
      EXPECT_GE(own, 0.2);
    }
    group.barrier("end");
    fs::remove(rank_0_is_done);
  });
}

}  // namespace updater_test
}  // namespace cohort::translate
