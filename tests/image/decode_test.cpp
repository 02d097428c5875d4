// SPDX-License-Identifier: Apache-2.0
#include "cohort/image/decode.h"

#include <algorithm>
#include <cmath>
#include <gtest/gtest.h>

#include "cohort/base/error.h"
#include "cohort/data/random.h"

#include "tests/base/temporary_folder.h"
#include "tests/image/drawn_images.h"
#include "tests/support/message_of.h"

namespace cohort::image {
namespace decode_test {

using test::JpegColors;
using test::PngColors;

Image decoded(const std::string& path) {
  return EncodedImage::read(path).decode();
}

double mean_difference(const Image& a, const Image& b) {
  EXPECT_EQ(a.height, b.height);
  EXPECT_EQ(a.width, b.width);
  EXPECT_EQ(a.pixels.size(), b.pixels.size());
  double sum = 0;
  for (size_t i = 0; i < a.pixels.size(); ++i) sum += std::abs(int{a.pixels[i]} - int{b.pixels[i]});
  return sum / static_cast<double>(a.pixels.size());
}

Image green_as_gray(Image picture) {
  for (size_t i = 0; i < picture.pixels.size(); i += 3) {
    picture.pixels[i] = picture.pixels[i + 2] = picture.pixels[i + 1];
  }
  return picture;
}

void expect_unreadable(const std::string& path, const std::string& text) {
  const std::string message = test::message_of<ConfigError>([&] { decoded(path); });
  EXPECT_TRUE(message.starts_with(path)) << message;
  EXPECT_NE(message.find(text), std::string::npos) << message;
}

TEST(DecodeTest, PngComesBackBitEqualAndTransparencyIsLeftOut) {
  const TemporaryFolder folder;
  const Image picture = test::draw_shape(37, 53, 0, 1);
  test::write_png(folder / "rgb.png", picture);
  EXPECT_EQ(decoded(folder / "rgb.png").pixels, picture.pixels);
  test::write_png(folder / "rgba.png", picture, PngColors::kRgba);
  EXPECT_EQ(decoded(folder / "rgba.png").pixels, picture.pixels);
  test::write_png(folder / "gray.png", picture, PngColors::kGray);
  EXPECT_EQ(decoded(folder / "gray.png").pixels, green_as_gray(picture).pixels);
}

TEST(DecodeTest, JpegOfEveryColourSpaceComesBack) {
  const TemporaryFolder folder;
  const Image picture = test::draw_shape(61, 83, 1, 2);
  const std::string path = folder / "a.jpg";
  for (const JpegColors colors : {JpegColors::kYcc444, JpegColors::kCmyk, JpegColors::kYcc420}) {
    for (const bool progressive : {false, true}) {
      test::write_jpeg(path, picture,
                       {.quality = 100, .colors = colors, .progressive = progressive});
      // Coefficients and colours are rounded to whole numbers: about 1; chroma at half the size
      // loses what the noise of 10 levels has between neighbours.
      EXPECT_LT(mean_difference(decoded(path), picture), colors == JpegColors::kYcc420 ? 4 : 2);
    }
  }
  test::write_jpeg(path, picture, {.quality = 100, .colors = JpegColors::kGray});
  EXPECT_LT(mean_difference(decoded(path), green_as_gray(picture)), 2);
}

TEST(DecodeTest, ProgressiveIsBitEqualToBaseline) {
  const TemporaryFolder folder;
  const Image picture = test::draw_shape(64, 90, 2, 3);
  test::write_jpeg(folder / "a.jpg", picture);
  test::write_jpeg(folder / "b.jpg", picture, {.progressive = true});
  EXPECT_EQ(decoded(folder / "a.jpg").pixels, decoded(folder / "b.jpg").pixels);
}

TEST(DecodeTest, TheContentDecidesWhatAFileIs) {
  const TemporaryFolder folder;
  const Image picture = test::draw_shape(10, 12, 0, 1);
  test::write_png(folder / "really_png.jpg", picture);
  EXPECT_EQ(decoded(folder / "really_png.jpg").pixels, picture.pixels);
}

TEST(DecodeTest, PartIsBitEqualToTheSamePixelsOfTheWhole) {
  const TemporaryFolder folder;
  const Image picture = test::draw_shape(97, 131, 1, 4);
  test::write_jpeg(folder / "a.jpg", picture);
  test::write_jpeg(folder / "b.jpg", picture, {.progressive = true});
  test::write_jpeg(folder / "c.jpg", picture, {.colors = JpegColors::kCmyk});
  test::write_jpeg(folder / "d.jpg", picture, {.colors = JpegColors::kGray});
  test::write_png(folder / "e.png", picture);
  data::SplitMix64 random(5);
  for (const char* name : {"a.jpg", "b.jpg", "c.jpg", "d.jpg", "e.png"}) {
    const EncodedImage encoded = EncodedImage::read(folder / name);
    const Image whole = encoded.decode();
    for (int i = 0; i < 50; ++i) {
      Rect part{.height = static_cast<int64_t>(1 + random.below(97)),
                .width = static_cast<int64_t>(1 + random.below(131))};
      part.top = static_cast<int64_t>(random.below(static_cast<uint64_t>(98 - part.height)));
      part.left = static_cast<int64_t>(random.below(static_cast<uint64_t>(132 - part.width)));
      const Region region = encoded.decode(part, 1);
      ASSERT_EQ(region.image.height, part.height);
      ASSERT_EQ(region.image.width, part.width);
      for (int64_t y = 0; y < part.height; ++y) {
        for (int64_t k = 0; k < part.width * 3; ++k) {
          const auto at = static_cast<size_t>(((part.top + y) * 131 + part.left) * 3 + k);
          ASSERT_EQ(region.image.pixels[static_cast<size_t>(y * part.width * 3 + k)],
                    whole.pixels[at])
              << name << ", row " << y << " of " << part.height << " at " << part.top << ", number "
              << k << " of " << part.width << " x 3 at " << part.left;
        }
      }
    }
  }
}

TEST(DecodeTest, ShrunkPartCoversItAndShowsTheSame) {
  const TemporaryFolder folder;
  Image ramp{.height = 160, .width = 240};
  for (int64_t y = 0; y < ramp.height; ++y) {
    for (int64_t x = 0; x < ramp.width; ++x) {
      for (int c = 0; c < 3; ++c) ramp.pixels.push_back(static_cast<uint8_t>(x / 2 + y / 2));
    }
  }
  test::write_jpeg(folder / "a.jpg", ramp);
  const EncodedImage encoded = EncodedImage::read(folder / "a.jpg");
  const Rect part{.top = 33, .left = 50, .height = 71, .width = 101};
  for (const int shrink : {2, 4, 8}) {
    const Region region = encoded.decode(part, shrink);
    const Box& covers = region.covers;
    EXPECT_LE(covers.top, 33);
    EXPECT_GT(covers.top, 33 - shrink);
    EXPECT_GE(covers.top + covers.height, 33 + 71);
    EXPECT_LT(covers.left + covers.width, 50 + 101 + shrink);
    EXPECT_EQ(region.image.height, std::llround(covers.height) / shrink);
    // The centre of each shrunken pixel lies on the ramp; JPEG's rounding may be off by 2.
    for (int64_t y = 0; y < region.image.height; ++y) {
      for (int64_t x = 0; x < region.image.width; ++x) {
        const double at_y = covers.top + (static_cast<double>(y) + 0.5) * shrink - 0.5;
        const double at_x = covers.left + (static_cast<double>(x) + 0.5) * shrink - 0.5;
        ASSERT_NEAR(region.image.pixels[static_cast<size_t>((y * region.image.width + x) * 3)],
                    at_x / 2 + at_y / 2 - 0.5, 3)
            << "shrink " << shrink << " at " << y << ", " << x;
      }
    }
  }
}

TEST(DecodeTest, DamagedFilesAreNamed) {
  const TemporaryFolder folder;
  const Image picture = test::draw_shape(50, 60, 0, 1);
  const std::string jpeg = folder / "a.jpg";
  const std::string png = folder / "a.png";
  for (const bool progressive : {false, true}) {
    test::write_jpeg(jpeg, picture, {.progressive = progressive});
    std::string bytes = read_file(jpeg);
    write_file(jpeg, bytes.substr(0, bytes.size() * 2 / 3));
    expect_unreadable(jpeg, "no readable JPEG");
    write_file(jpeg, bytes.substr(0, 20));
    expect_unreadable(jpeg, "no readable JPEG");
  }
  test::write_png(png, picture);
  std::string bytes = read_file(png);
  write_file(png, bytes.substr(0, bytes.size() / 2));
  expect_unreadable(png, "no readable PNG");
  bytes[bytes.size() / 2] = static_cast<char>(bytes[bytes.size() / 2] ^ 0x55);
  write_file(png, bytes);
  expect_unreadable(png, "no readable PNG");
  write_file(png, "");
  expect_unreadable(png, "neither JPEG nor PNG (0 bytes)");
  write_file(png, "GIF89a and more");
  expect_unreadable(png, "neither JPEG nor PNG");
  expect_unreadable(folder / "absent.jpg", "No such file");
  expect_unreadable(folder.path().string(), "Is a directory");
}

// Some damage is a picture like any other; some fits no code.
TEST(DecodeTest, DamagedArithmeticCodingIsRefused) {
  const TemporaryFolder folder;
  const std::string jpeg = folder / "a.jpg";
  Image picture = test::draw_shape(150, 160, 0, 1);
  data::SplitMix64 random(1);
  for (uint8_t& value : picture.pixels) value = static_cast<uint8_t>(random.below(256));
  test::write_jpeg(jpeg, picture, {.arithmetic = true});
  EXPECT_EQ(decoded(jpeg).pixels.size(), picture.pixels.size());
  const std::string bytes = read_file(jpeg);
  int num_refused = 0;
  // Up to 0xff, which would begin a marker: that is refused in every coding.
  for (int fill = 1; fill < 0xff; fill += 4) {
    std::string damaged = bytes;
    std::fill(damaged.begin() + static_cast<std::ptrdiff_t>(bytes.size() / 2), damaged.end() - 2,
              static_cast<char>(fill));
    write_file(jpeg, damaged);
    const std::string message = test::message_of<ConfigError>([&] { decoded(jpeg); });
    num_refused += message == jpeg + ": no readable JPEG: Corrupt JPEG data: bad arithmetic code";
  }
  EXPECT_GT(num_refused, 0);
}

TEST(DecodeTest, PartOutsideThePictureIsRefused) {
  const TemporaryFolder folder;
  test::write_png(folder / "a.png", test::draw_shape(10, 12, 0, 1));
  const EncodedImage encoded = EncodedImage::read(folder / "a.png");
  EXPECT_THROW(encoded.decode({.top = 5, .height = 6, .width = 12}, 1), c10::ValueError);
  EXPECT_THROW(encoded.decode({.height = 0, .width = 12}, 1), c10::ValueError);
  EXPECT_THROW(encoded.decode({.height = 10, .width = 12}, 3), c10::ValueError);
}

}  // namespace decode_test
}  // namespace cohort::image
