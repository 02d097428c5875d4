// SPDX-License-Identifier: Apache-2.0
#include "cohort/image/image_loader.h"

#include <filesystem>
#include <gtest/gtest.h>
#include <torch/types.h>

#include "cohort/base/error.h"
#include "cohort/image/unreadable_file.h"

#include "tests/base/temporary_folder.h"
#include "tests/image/drawn_images.h"
#include "tests/support/message_of.h"

namespace cohort::image {
namespace image_loader_test {

using Batches = std::vector<std::vector<int64_t>>;

class ImageLoaderTest : public testing::Test {
 protected:
  void SetUp() override {
    test::draw_image_folders(folder_.path().string(), 6, 1, 40, 50);
    pictures_.emplace(folder_ / "train");
    ASSERT_EQ(pictures_->size(), 18);
  }

  ImageLoaderOptions options(int num_threads = 4) const {
    ImageLoaderOptions result{.num_threads = num_threads, .seed = 7, .epoch = 2};
    result.transforms.size = 16;
    result.transforms.resize = 18;
    return result;
  }

  std::vector<ImageBatch> load(const Batches& batches, const ImageLoaderOptions& options) const {
    ImageLoader loader(*pictures_, batches, options);
    std::vector<ImageBatch> loaded;
    while (auto batch = loader.next()) loaded.push_back(std::move(*batch));
    EXPECT_FALSE(loader.next().has_value()) << "the end stays the end";
    return loaded;
  }

  std::string damage(int64_t number) const {
    const std::string path = pictures_->at(number).path;
    write_file(path, read_file(path).substr(0, 60));
    return path;
  }

  const TemporaryFolder folder_;
  std::optional<ImageFolder> pictures_;
};

const Batches kBatches = {{3, 17, 0, 5}, {}, {8, 8, 1}, {2, 4, 6, 7, 9, 10, 11}, {12}};

TEST_F(ImageLoaderTest, BatchesComeInOrderAndBitEqualWhateverTheNumberOfThreads) {
  const auto expected = load(kBatches, options(1));
  ASSERT_EQ(expected.size(), kBatches.size());
  for (const int num_threads : {2, 7}) {
    auto others = options(num_threads);
    others.batches_ahead = num_threads == 7 ? 1 : 3;
    const auto loaded = load(kBatches, others);
    ASSERT_EQ(loaded.size(), kBatches.size());
    for (size_t i = 0; i < loaded.size(); ++i) {
      EXPECT_TRUE(loaded[i].images_BCHW.equal(expected[i].images_BCHW)) << "batch " << i;
      EXPECT_TRUE(loaded[i].labels_B.equal(expected[i].labels_B)) << "batch " << i;
    }
  }
  for (size_t i = 0; i < kBatches.size(); ++i) {
    EXPECT_EQ(expected[i].images_BCHW.sizes(),
              (std::vector<int64_t>{std::ssize(kBatches[i]), 3, 16, 16}));
    for (size_t row = 0; row < kBatches[i].size(); ++row) {
      EXPECT_EQ(expected[i].labels_B[static_cast<int64_t>(row)].item<int64_t>(),
                kBatches[i][row] / 6);
    }
  }
}

TEST_F(ImageLoaderTest, ChoicesDependOnSeedEpochAndPictureAlone) {
  const at::Tensor first = load({{4, 5}}, options())[0].images_BCHW;
  EXPECT_TRUE(load({{5, 9, 4}}, options())[0].images_BCHW[2].equal(first[0]));
  auto other = options();
  other.epoch = 3;
  EXPECT_FALSE(load({{4, 5}}, other)[0].images_BCHW.equal(first));
  other = options();
  other.seed = 8;
  EXPECT_FALSE(load({{4, 5}}, other)[0].images_BCHW.equal(first));
  other = options();
  other.transform = Transform::kEvaluation;
  const at::Tensor evaluated = load({{4, 5}}, other)[0].images_BCHW;
  other.epoch = 3;
  EXPECT_TRUE(load({{4, 5}}, other)[0].images_BCHW.equal(evaluated));
}

TEST_F(ImageLoaderTest, DamagedPictureIsNamedAtItsBatch) {
  const std::string path = damage(6);
  damage(9);
  ImageLoader loader(*pictures_, kBatches, options());
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(loader.next().has_value());
  try {
    loader.next();
    FAIL() << "a damaged picture was delivered";
  } catch (const ConfigError& error) {
    EXPECT_TRUE(one_line(error).starts_with(path)) << one_line(error);
  }
}

TEST_F(ImageLoaderTest, DamagedPicturesAreSkippedAndCounted) {
  const auto expected = load({{4, 7}}, options())[0];
  damage(6);
  damage(9);
  auto skipping = options();
  skipping.on_damage = OnDamage::kSkip;
  ImageLoader loader(*pictures_, {{4, 6, 7}, {9}, {1}}, skipping);
  const auto batch = loader.next();
  EXPECT_TRUE(batch->images_BCHW.equal(expected.images_BCHW));
  EXPECT_TRUE(batch->labels_B.equal(expected.labels_B));
  EXPECT_EQ(loader.num_skipped(), 1);
  EXPECT_EQ(loader.next()->images_BCHW.size(0), 0);
  EXPECT_EQ(loader.next()->images_BCHW.size(0), 1);
  EXPECT_EQ(loader.num_skipped(), 2);
}

TEST_F(ImageLoaderTest, APictureThatCannotBeReadIsNotSkipped) {
  const std::string path = pictures_->at(6).path;
  std::filesystem::remove(path);
  auto skipping = options();
  skipping.on_damage = OnDamage::kSkip;
  ImageLoader loader(*pictures_, {{4, 6, 7}}, skipping);
  EXPECT_EQ(test::message_of<UnreadableFile>([&] { loader.next(); }),
            path + ": No such file or directory");
}

TEST_F(ImageLoaderTest, CanBeLeftBeforeTheEnd) {
  const Batches many(200, {0, 1, 2, 3});
  for (int taken : {0, 1, 3}) {
    ImageLoader loader(*pictures_, many, options());
    for (int i = 0; i < taken; ++i) EXPECT_TRUE(loader.next().has_value());
  }
}

TEST_F(ImageLoaderTest, RefusesBadOptionsAndNumbers) {
  EXPECT_THROW(ImageLoader(*pictures_, {}, options(0)), c10::ValueError);
  auto larger = options();
  larger.transforms.size = 20;
  EXPECT_THROW(ImageLoader(*pictures_, {}, larger), c10::ValueError);
  ImageLoader loader(*pictures_, {{18}}, options());
  EXPECT_THROW(loader.next(), std::out_of_range);
}

}  // namespace image_loader_test
}  // namespace cohort::image
