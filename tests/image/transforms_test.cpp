// SPDX-License-Identifier: Apache-2.0
#include "cohort/image/transforms.h"

#include <cmath>
#include <gtest/gtest.h>
#include <torch/types.h>

#include "tests/base/temporary_folder.h"
#include "tests/image/drawn_images.h"

namespace cohort::image {
namespace transforms_test {

// Values in [0, 1] from sums of at most 100 float32 products, in two passes: 200 eps = 2.4e-5.
constexpr double kBound = 2.4e-5;

at::Tensor as_tensor(const Image& image) {
  at::Tensor pixels = torch::tensor(at::ArrayRef<uint8_t>(image.pixels), at::kByte);
  return pixels.view({image.height, image.width, 3}).permute({2, 0, 1}).to(at::kFloat) / 255;
}

at::Tensor torch_resize(const at::Tensor& image_CHW, int64_t height, int64_t width) {
  return at::_upsample_bilinear2d_aa(image_CHW.unsqueeze(0).contiguous(), {height, width},
                                     /*align_corners=*/false)
      .squeeze(0);
}

Region whole(Image image) {
  const Box covers{.height = static_cast<double>(image.height),
                   .width = static_cast<double>(image.width)};
  return {.image = std::move(image), .covers = covers};
}

at::Tensor own_resize(const Region& region, const Box& source, int64_t height, int64_t width,
                      Flip flip = Flip::kNo, const Normalisation& normalisation = {}) {
  at::Tensor out = torch::full({3, height, width}, NAN);
  resize(region, source, height, width, flip, normalisation,
         {out.mutable_data_ptr<float>(), static_cast<size_t>(out.numel())});
  return out;
}

double difference(const at::Tensor& a, const at::Tensor& b) {
  return (a - b).abs().max().item<double>();
}

at::Tensor evaluated(const std::string& path, const TransformOptions& options) {
  at::Tensor out = torch::full({3, options.size, options.size}, NAN);
  transform_for_evaluation(EncodedImage::read(path), options,
                           {out.mutable_data_ptr<float>(), static_cast<size_t>(out.numel())});
  return out;
}

at::Tensor trained(const std::string& path, const TransformOptions& options, uint64_t seed) {
  data::SplitMix64 random(seed);
  at::Tensor out = torch::full({3, options.size, options.size}, NAN);
  transform_for_training(EncodedImage::read(path), options, random,
                         {out.mutable_data_ptr<float>(), static_cast<size_t>(out.numel())});
  return out;
}

TEST(ResizeTest, EqualsTorchsAntialiasedBilinear) {
  struct Case {
    int64_t height, width, new_height, new_width;
  };
  for (const Case& c : {Case{40, 60, 20, 30}, Case{41, 67, 13, 50}, Case{9, 7, 30, 40},
                        Case{100, 90, 7, 3}, Case{32, 32, 32, 32}, Case{1, 5, 4, 1}}) {
    const Region region = whole(test::draw_shape(c.height, c.width, 1, 8));
    EXPECT_LE(difference(own_resize(region, region.covers, c.new_height, c.new_width),
                         torch_resize(as_tensor(region.image), c.new_height, c.new_width)),
              kBound)
        << c.height << " x " << c.width << " to " << c.new_height << " x " << c.new_width;
  }
}

TEST(ResizeTest, FlipMirrorsAndNormalisationIsByChannel) {
  const Region region = whole(test::draw_shape(40, 60, 0, 8));
  const at::Tensor plain = own_resize(region, region.covers, 20, 25);
  EXPECT_TRUE(
      own_resize(region, region.covers, 20, 25, Flip::kHorizontal).equal(torch::flip(plain, {2})));
  const Normalisation normalisation{.mean = {0.1F, 0.2F, 0.3F}, .deviation = {0.5F, 0.25F, 2.0F}};
  const at::Tensor mean = torch::tensor({0.1F, 0.2F, 0.3F}).view({3, 1, 1});
  const at::Tensor deviation = torch::tensor({0.5F, 0.25F, 2.0F}).view({3, 1, 1});
  EXPECT_LE(difference(own_resize(region, region.covers, 20, 25, Flip::kNo, normalisation),
                       (plain - mean) / deviation),
            4 * kBound);
}

TEST(TransformsTest, EvaluationEqualsTorchsResizeAndCentreCrop) {
  const TemporaryFolder folder;
  TransformOptions options{.size = 56, .resize = 64};
  options.normalisation = {};
  for (const auto& [height, width] :
       {std::pair<int64_t, int64_t>{90, 133}, {133, 90}, {64, 64}, {30, 200}, {201, 201}}) {
    const Image picture = test::draw_shape(height, width, 2, 5);
    test::write_png(folder / "a.png", picture);
    const int64_t shorter = std::min(height, width);
    const int64_t new_height = 64 * height / shorter;
    const int64_t new_width = 64 * width / shorter;
    const auto offset = [](int64_t all) {
      return static_cast<int64_t>(std::nearbyint(static_cast<double>(all - 56) / 2));
    };
    const at::Tensor expected = torch_resize(as_tensor(picture), new_height, new_width)
                                    .narrow(1, offset(new_height), 56)
                                    .narrow(2, offset(new_width), 56);
    EXPECT_LE(difference(evaluated(folder / "a.png", options), expected), kBound)
        << height << " x " << width;
  }
}

TEST(TransformsTest, ReducedDecodingShowsAboutTheSame) {
  const TemporaryFolder folder;
  const Image picture = test::draw_shape(400, 500, 0, 5);
  test::write_jpeg(folder / "a.jpg", picture);
  test::write_png(folder / "a.png", picture);
  TransformOptions options{.size = 40, .resize = 45};  // A JPEG is decoded at an eighth.
  options.normalisation = {};
  const auto mean = [](const at::Tensor& t) { return t.abs().mean().item<double>(); };
  // The noise has 10 levels, averaged over 100 pixels and more; edges blur by another filter.
  EXPECT_LT(mean(evaluated(folder / "a.jpg", options) - evaluated(folder / "a.png", options)),
            0.01);
  for (uint64_t seed = 0; seed < 10; ++seed) {
    EXPECT_LT(
        mean(trained(folder / "a.jpg", options, seed) - trained(folder / "a.png", options, seed)),
        0.015)
        << "seed " << seed;
  }
}

TEST(TransformsTest, TrainingCutsThenResizesAsTorchDoes) {
  const TemporaryFolder folder;
  const Image picture = test::draw_shape(70, 90, 1, 5);
  test::write_png(folder / "a.png", picture);
  TransformOptions options{.size = 32};
  options.normalisation = {};
  int num_flipped = 0;
  for (uint64_t seed = 0; seed < 40; ++seed) {
    data::SplitMix64 random(seed);
    const Rect crop = random_resized_crop(70, 90, options, random);
    const bool flipped = random.uniform() < 0.5;
    num_flipped += flipped;
    const at::Tensor cut =
        as_tensor(picture).narrow(1, crop.top, crop.height).narrow(2, crop.left, crop.width);
    const at::Tensor expected = torch_resize(cut, 32, 32);
    EXPECT_LE(difference(trained(folder / "a.png", options, seed),
                         flipped ? torch::flip(expected, {2}) : expected),
              kBound);
  }
  // Binomial of 40: deviation 3.2, four of them.
  EXPECT_NEAR(num_flipped, 20, 13);
}

TEST(TransformsTest, CropsLieInsideAndVaryInAreaAndAspect) {
  const TransformOptions options;
  data::SplitMix64 random(3);
  double area = 0;
  double smallest = 1;
  constexpr int kDraws = 2000;
  for (int i = 0; i < kDraws; ++i) {
    const Rect crop = random_resized_crop(375, 500, options, random);
    ASSERT_GE(crop.top, 0);
    ASSERT_GE(crop.left, 0);
    ASSERT_LE(crop.top + crop.height, 375);
    ASSERT_LE(crop.left + crop.width, 500);
    const double aspect = static_cast<double>(crop.width) / static_cast<double>(crop.height);
    EXPECT_GT(aspect, 0.74);  // Rounding to whole pixels.
    EXPECT_LT(aspect, 1.35);
    const double share = static_cast<double>(crop.height * crop.width) / (375 * 500);
    area += share / kDraws;
    smallest = std::min(smallest, share);
  }
  // A crop of aspect a fits if its share is at most m = 3/4 a; shares are uniform up to there and
  // ln m is uniform in [ln 9/16, 0]. The mean is that of (m^2 - 0.08^2) / 2 over that of m - 0.08,
  // which is 0.432; the deviation of 2000 draws' mean is 0.005, five of them.
  EXPECT_NEAR(area, 0.432, 0.025);
  EXPECT_GE(smallest, 0.075);
  EXPECT_LT(smallest, 0.1);
  // Nothing fits: the centre, with the nearest aspect.
  const Rect wide = random_resized_crop(10, 1000, {.min_area = 0.9}, random);
  EXPECT_EQ(wide.height, 10);
  EXPECT_EQ(wide.width, 13);
  EXPECT_EQ(wide.left, 493);
}

}  // namespace transforms_test
}  // namespace cohort::image
