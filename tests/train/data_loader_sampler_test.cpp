// SPDX-License-Identifier: Apache-2.0
#include "cohort/train/data_loader_sampler.h"

#include <algorithm>
#include <gtest/gtest.h>
#include <numeric>
#include <sstream>
#include <torch/data/dataloader.h>
#include <torch/data/datasets/base.h>
#include <torch/data/samplers/serialize.h>
#include <torch/serialize.h>

#include "cohort/base/error.h"

#include "tests/support/message_of.h"

namespace cohort::train {
namespace data_loader_sampler_test {

using data::DistributedSampler;
using data::DistributedSamplerOptions;
using data::Tail;
using Indices = std::vector<int64_t>;

// Example i is i; a batch is what was asked for.
struct Numbers : torch::data::datasets::BatchDataset<Numbers, Indices> {
  explicit Numbers(int64_t n) : num_examples(n) {}
  Indices get_batch(torch::ArrayRef<size_t> batch) override { return {batch.begin(), batch.end()}; }
  std::optional<size_t> size() const override { return static_cast<size_t>(num_examples); }
  int64_t num_examples;
};

constexpr int64_t kBatch = 2;

auto make_loader(const DistributedSamplerOptions& options, const DataLoaderSampler& sampler,
                 size_t workers = 0) {
  return torch::data::make_data_loader(
      Numbers(options.num_examples), sampler,
      torch::data::DataLoaderOptions().batch_size(kBatch).workers(workers));
}

// One pass of the loader.
template <class Loader>
Indices pass(Loader& loader) {
  Indices all;
  for (const Indices& batch : loader) all.insert(all.end(), batch.begin(), batch.end());
  return all;
}

Indices expected(const DistributedSamplerOptions& options, int64_t epoch, int64_t consumed = 0) {
  DistributedSampler sampler(options);
  sampler.set_epoch(epoch);
  sampler.resume(consumed);
  return sampler.indices();
}

TEST(DataLoaderSamplerTest, ALoaderGetsTheSamplersIndicesInTheirOrder) {
  for (int world_size = 1; world_size <= 4; ++world_size) {
    for (const Tail tail : {Tail::kPad, Tail::kDropLast, Tail::kUneven}) {
      DistributedSamplerOptions options{
          .num_examples = 11, .world_size = world_size, .seed = 3, .tail = tail};
      for (int64_t epoch = 0; epoch < 2; ++epoch) {
        Indices all;
        for (options.rank = 0; options.rank < world_size; ++options.rank) {
          DataLoaderSampler sampler(options);
          const auto loader = make_loader(options, sampler);
          sampler.set_epoch(epoch);
          const Indices share = pass(*loader);
          EXPECT_EQ(share, expected(options, epoch));
          EXPECT_EQ(static_cast<int64_t>(share.size()), sampler.size());
          all.insert(all.end(), share.begin(), share.end());
        }
        std::sort(all.begin(), all.end());
        const auto num_different = std::unique(all.begin(), all.end()) - all.begin();
        EXPECT_EQ(num_different, tail == Tail::kDropLast ? 11 / world_size * world_size : 11);
        if (tail != Tail::kPad) {
          EXPECT_EQ(num_different, std::ssize(all)) << "one came twice";
        }
      }
    }
  }
}

TEST(DataLoaderSamplerTest, TheSamplerThatIsKeptControlsTheLoaders) {
  const DistributedSamplerOptions options{.num_examples = 9, .rank = 1, .world_size = 2, .seed = 5};
  DataLoaderSampler sampler(options);
  const auto loader = make_loader(options, sampler, /*workers=*/2);
  EXPECT_EQ(pass(*loader), expected(options, 0));
  EXPECT_EQ(pass(*loader), expected(options, 0)) << "the same epoch until set_epoch";
  sampler.set_epoch(1);
  EXPECT_EQ(sampler.epoch(), 1);
  EXPECT_EQ(pass(*loader), expected(options, 1));
}

TEST(DataLoaderSamplerTest, ItResumesOnAnyNumberOfRanksAfterSaveAndLoad) {
  DistributedSamplerOptions options{
      .num_examples = 26, .world_size = 3, .seed = 11, .tail = Tail::kUneven};
  Indices all;
  std::stringstream file;
  for (options.rank = 0; options.rank < 3; ++options.rank) {
    DataLoaderSampler sampler(options);
    const auto loader = make_loader(options, sampler);
    sampler.set_epoch(2);
    auto batch = loader->begin();
    for (int i = 0; i < 2; ++i) {
      if (i > 0) ++batch;
      all.insert(all.end(), batch->begin(), batch->end());
    }
    if (options.rank == 0) torch::save(sampler, file);
  }
  const std::string saved = file.str();
  options.world_size = 2;
  for (options.rank = 0; options.rank < 2; ++options.rank) {
    DataLoaderSampler sampler(options);
    const auto loader = make_loader(options, sampler);
    std::istringstream copy(saved);
    torch::load(sampler, copy);
    EXPECT_EQ(sampler.epoch(), 2);
    const Indices rest = pass(*loader);
    EXPECT_EQ(rest, expected(options, 2, 12));
    all.insert(all.end(), rest.begin(), rest.end());
    EXPECT_EQ(pass(*loader), expected(options, 2)) << "a further pass is of the whole epoch";
  }
  std::sort(all.begin(), all.end());
  Indices numbers(26);
  std::iota(numbers.begin(), numbers.end(), 0);
  EXPECT_EQ(all, numbers);
}

TEST(DataLoaderSamplerTest, WithWorkersTheNumberOfTrainedExamplesIsWhatCounts) {
  const DistributedSamplerOptions options{.num_examples = 20, .rank = 1, .world_size = 2};
  DataLoaderSampler sampler(options);
  const auto loader = make_loader(options, sampler, /*workers=*/1);
  Indices trained = *loader->begin();
  const int64_t consumed = sampler.consumed_after(kBatch);
  EXPECT_EQ(consumed, 4);
  DataLoaderSampler later(options);
  later.resume(consumed);
  const Indices rest = pass(*make_loader(options, later));
  trained.insert(trained.end(), rest.begin(), rest.end());
  EXPECT_EQ(trained, expected(options, 0));
}

// Of 5 examples on 2 ranks, one has 3 and the other 2.
TEST(DataLoaderSamplerTest, ARankWithTheShorterShareSavesTheSamePlace) {
  const auto left_after = [](int rank, size_t batch, int calls) {
    DataLoaderSampler sampler(
        {.num_examples = 5, .rank = rank, .world_size = 2, .tail = data::Tail::kUneven});
    for (int i = 0; i < calls; ++i) sampler.next(batch);
    std::stringstream file;
    torch::save(sampler, file);
    DataLoaderSampler later({.num_examples = 5, .tail = data::Tail::kUneven});
    torch::load(later, file);
    return later.size();
  };
  for (const int rank : {0, 1}) {
    SCOPED_TRACE(rank);
    EXPECT_EQ(left_after(rank, 3, 1), 0);
    EXPECT_EQ(left_after(rank, 3, 2), 0);
    EXPECT_EQ(left_after(rank, 2, 1), 1);
    EXPECT_EQ(left_after(rank, 2, 2), 0);
    EXPECT_EQ(left_after(rank, 1, 1), 3);
  }
}

TEST(DataLoaderSamplerTest, ItsSizeIsThatOfTheNextPass) {
  DataLoaderSampler sampler({.num_examples = 26});
  sampler.resume(12);
  EXPECT_EQ(sampler.size(), 14);
  sampler.reset();
  EXPECT_EQ(sampler.size(), 26);
  sampler.reset();
  size_t given = 0;
  while (const auto batch = sampler.next(10)) given += batch->size();
  EXPECT_EQ(given, 26U);
}

TEST(DataLoaderSamplerTest, RefusesOtherSizesByName) {
  DataLoaderSampler sampler({.num_examples = 5});
  sampler.reset(5);
  EXPECT_EQ(test::message_of<ConfigError>([&] { sampler.reset(6); }),
            "DataLoaderSampler: expected a data set of 5 examples, got 6");
  EXPECT_EQ(test::message_of<ConfigError>([&] { sampler.next(0); }),
            "DataLoaderSampler: expected a batch size > 0, got 0");
  EXPECT_THROW(DataLoaderSampler({.num_examples = 0}), ConfigError);
}

}  // namespace data_loader_sampler_test
}  // namespace cohort::train
