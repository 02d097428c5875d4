// SPDX-License-Identifier: Apache-2.0
#include "tests/image/drawn_images.h"

#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <stdexcept>
#include <vector>
// After cstdio, which it needs and does not include.
#include <jpeglib.h>
#include <png.h>

#include "cohort/data/random.h"

namespace cohort::test {
namespace {

using image::Image;

bool inside(int64_t label, double y, double x) {
  switch (label) {
    case 0:
      return y * y + x * x < 0.4;
    case 1:
      return std::abs(y) < 0.5 && std::abs(x) < 0.5;
    default:
      return static_cast<int64_t>((y + 1) * 4) % 2 == 0;
  }
}

std::vector<uint8_t> jpeg_pixels(const Image& picture, JpegColors colors) {
  std::vector<uint8_t> pixels;
  for (size_t i = 0; i < picture.pixels.size(); i += 3) {
    const uint8_t* rgb = &picture.pixels[i];
    if (colors == JpegColors::kGray) {
      pixels.push_back(rgb[1]);
    } else {
      pixels.insert(pixels.end(), rgb, rgb + 3);
      if (colors == JpegColors::kCmyk) pixels.push_back(255);
    }
  }
  return pixels;
}

}  // namespace

Image draw_shape(int64_t height, int64_t width, int64_t label, uint64_t seed) {
  data::SplitMix64 random(seed, static_cast<uint64_t>(label));
  const double shift_y = random.uniform() * 0.6 - 0.3;
  const double shift_x = random.uniform() * 0.6 - 0.3;
  Image picture{.height = height, .width = width};
  picture.pixels.reserve(static_cast<size_t>(height * width * 3));
  for (int64_t y = 0; y < height; ++y) {
    for (int64_t x = 0; x < width; ++x) {
      const double v = 2.0 * static_cast<double>(y) / static_cast<double>(height) - 1;
      const double u = 2.0 * static_cast<double>(x) / static_cast<double>(width) - 1;
      for (int64_t c = 0; c < 3; ++c) {
        const double shape = inside(label, v - shift_y, u - shift_x) && c == label ? 120 : 0;
        const double ground = 60 + 30 * u + 20 * v;
        picture.pixels.push_back(static_cast<uint8_t>(ground + shape + 10 * random.uniform()));
      }
    }
  }
  return picture;
}

void write_jpeg(const std::string& path, const Image& picture, const JpegOptions& options) {
  const std::unique_ptr<FILE, int (*)(FILE*)> file(std::fopen(path.c_str(), "wb"), std::fclose);
  if (!file) throw std::runtime_error("cannot write " + path);
  std::vector<uint8_t> pixels = jpeg_pixels(picture, options.colors);
  jpeg_compress_struct info{};
  jpeg_error_mgr errors{};
  info.err = jpeg_std_error(&errors);
  jpeg_create_compress(&info);
  jpeg_stdio_dest(&info, file.get());
  info.image_height = static_cast<JDIMENSION>(picture.height);
  info.image_width = static_cast<JDIMENSION>(picture.width);
  const bool gray = options.colors == JpegColors::kGray;
  const bool cmyk = options.colors == JpegColors::kCmyk;
  info.input_components = gray ? 1 : cmyk ? 4 : 3;
  info.in_color_space = gray ? JCS_GRAYSCALE : cmyk ? JCS_CMYK : JCS_RGB;
  jpeg_set_defaults(&info);
  jpeg_set_quality(&info, options.quality, TRUE);
  if (options.colors == JpegColors::kYcc444) {
    info.comp_info[0].h_samp_factor = 1;
    info.comp_info[0].v_samp_factor = 1;
  }
  if (options.progressive) jpeg_simple_progression(&info);
  info.arith_code = options.arithmetic ? TRUE : FALSE;
  jpeg_start_compress(&info, TRUE);
  const auto stride = static_cast<size_t>(picture.width * info.input_components);
  while (info.next_scanline < info.image_height) {
    uint8_t* row = pixels.data() + info.next_scanline * stride;
    jpeg_write_scanlines(&info, &row, 1);
  }
  jpeg_finish_compress(&info);
  jpeg_destroy_compress(&info);
}

void write_png(const std::string& path, const Image& picture, PngColors colors) {
  std::vector<uint8_t> pixels;
  for (size_t i = 0; i < picture.pixels.size(); i += 3) {
    const uint8_t* rgb = &picture.pixels[i];
    if (colors == PngColors::kGray) {
      pixels.push_back(rgb[1]);
    } else {
      pixels.insert(pixels.end(), rgb, rgb + 3);
      if (colors == PngColors::kRgba) pixels.push_back(static_cast<uint8_t>(i % 251));
    }
  }
  png_image png{};
  png.version = PNG_IMAGE_VERSION;
  png.height = static_cast<png_uint_32>(picture.height);
  png.width = static_cast<png_uint_32>(picture.width);
  png.format = colors == PngColors::kGray   ? PNG_FORMAT_GRAY
               : colors == PngColors::kRgba ? PNG_FORMAT_RGBA
                                            : PNG_FORMAT_RGB;
  if (png_image_write_to_file(&png, path.c_str(), 0, pixels.data(), 0, nullptr) == 0) {
    throw std::runtime_error("cannot write " + path + ": " + png.message);
  }
}

void draw_image_folders(const std::string& root, int64_t train_per_class, int64_t val_per_class,
                        int64_t height, int64_t width) {
  constexpr std::array<const char*, 3> kClasses = {"disc", "square", "stripes"};
  for (const auto& [part, count] : {std::pair{"train", train_per_class}, {"val", val_per_class}}) {
    for (int64_t label = 0; label < 3; ++label) {
      const std::string folder =
          root + "/" + part + "/" + kClasses[static_cast<size_t>(label)] + "/";
      std::filesystem::create_directories(folder);
      for (int64_t i = 0; i < count; ++i) {
        const auto seed = static_cast<uint64_t>(i + (part[0] == 'v' ? 1000 : 0));
        const Image picture = draw_shape(height, width, label, seed);
        const std::string path = folder + std::to_string(i);
        if (i % 2 == 0) {
          write_jpeg(path + ".jpg", picture);
        } else {
          write_png(path + ".png", picture);
        }
      }
    }
  }
}

}  // namespace cohort::test
