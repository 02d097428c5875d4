// SPDX-License-Identifier: Apache-2.0
#include "cohort/image/decode.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <png.h>

#include "cohort/base/error.h"
#include "cohort/image/jpeg.h"
#include "cohort/image/unreadable_file.h"

namespace cohort::image {
namespace {

constexpr std::array<uint8_t, 3> kJpegStart = {0xff, 0xd8, 0xff};
constexpr std::array<uint8_t, 8> kPngStart = {0x89, 'P', 'N', 'G', '\r', '\n', 0x1a, '\n'};
constexpr int64_t kMaxPixels = int64_t{1} << 28;  // More is a corrupt or hostile header.

bool starts_with(const std::vector<uint8_t>& bytes, std::span<const uint8_t> start) {
  return bytes.size() >= start.size() && std::equal(start.begin(), start.end(), bytes.begin());
}

// libpng's simple interface: it frees its state by itself when anything fails.
class PngReader {
 public:
  PngReader(const std::string& name, const std::vector<uint8_t>& bytes) : name_(name) {
    image_.version = PNG_IMAGE_VERSION;
    check(png_image_begin_read_from_memory(&image_, bytes.data(), bytes.size()));
  }
  ~PngReader() { png_image_free(&image_); }
  PngReader(const PngReader&) = delete;
  PngReader& operator=(const PngReader&) = delete;

  Size size() const { return {.height = image_.height, .width = image_.width}; }

  Image read() {
    // With alpha, or libpng would blend transparent pixels with a background. 16-bit files that do
    // not specify gamma are not linear.
    image_.format = PNG_FORMAT_RGBA;
    image_.flags |= PNG_IMAGE_FLAG_16BIT_sRGB;
    std::vector<uint8_t> rgba(PNG_IMAGE_SIZE(image_));
    check(png_image_finish_read(&image_, nullptr, rgba.data(), 0, nullptr));
    Image image{.height = image_.height, .width = image_.width};
    image.pixels.resize(rgba.size() / 4 * 3);
    for (size_t from = 0, to = 0; from < rgba.size(); from += 4, to += 3) {
      std::memcpy(&image.pixels[to], &rgba[from], 3);
    }
    return image;
  }

 private:
  void check(int succeeded) const {
    if (succeeded == 0) throw ConfigError(name_ + ": no readable PNG: " + image_.message);
  }

  const std::string& name_;
  png_image image_{};
};

Image cut_out(const Image& image, const Rect& part) {
  Image result{.height = part.height, .width = part.width};
  result.pixels.reserve(static_cast<size_t>(part.height * part.width * 3));
  for (int64_t y = part.top; y < part.top + part.height; ++y) {
    const auto row = image.pixels.begin() + (y * image.width + part.left) * 3;
    result.pixels.insert(result.pixels.end(), row, row + part.width * 3);
  }
  return result;
}

}  // namespace

EncodedImage::EncodedImage(std::string name, std::vector<uint8_t> bytes)
    : name_(std::move(name)), bytes_(std::move(bytes)) {
  Size size;
  if (starts_with(bytes_, kJpegStart)) {
    size = jpeg_size(name_, bytes_);
  } else if (starts_with(bytes_, kPngStart)) {
    format_ = Format::kPng;
    size = PngReader(name_, bytes_).size();
  } else {
    throw ConfigError(name_ + ": neither JPEG nor PNG (" + std::to_string(bytes_.size()) +
                      " bytes)");
  }
  height_ = size.height;
  width_ = size.width;
  if (height_ * width_ > kMaxPixels) {
    throw ConfigError(name_ + ": " + std::to_string(width_) + " x " + std::to_string(height_) +
                      " pixels, expected " + std::to_string(kMaxPixels) + " at most");
  }
}

EncodedImage EncodedImage::read(const std::string& path) {
  std::error_code error;
  const auto size = std::filesystem::file_size(path, error);
  if (error) throw UnreadableFile(path + ": " + error.message());
  std::vector<uint8_t> bytes(size);
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  if (!file.read(reinterpret_cast<char*>(bytes.data()),
                 static_cast<std::streamsize>(bytes.size()))) {
    throw UnreadableFile(
        path + ": " + (errno == 0 ? "it became shorter while it was read" : std::strerror(errno)));
  }
  return {path, std::move(bytes)};
}

Image EncodedImage::decode() const {
  return decode({.height = height_, .width = width_}, 1).image;
}

Region EncodedImage::decode(const Rect& part, int shrink) const {
  TORCH_CHECK_VALUE(part.top >= 0 && part.left >= 0 && part.height > 0 && part.width > 0 &&
                        part.top + part.height <= height_ && part.left + part.width <= width_,
                    name_, ": expected a part inside ", height_, " x ", width_, " pixels, got ",
                    part.height, " x ", part.width, " at ", part.top, ", ", part.left);
  TORCH_CHECK_VALUE(shrink == 1 || shrink == 2 || shrink == 4 || shrink == 8, name_,
                    ": expected shrink 1, 2, 4 or 8, got ", shrink);
  if (format_ == Format::kJpeg) return decode_jpeg(name_, bytes_, part, shrink);
  return {.image = cut_out(PngReader(name_, bytes_).read(), part),
          .covers = {.top = static_cast<double>(part.top),
                     .left = static_cast<double>(part.left),
                     .height = static_cast<double>(part.height),
                     .width = static_cast<double>(part.width)}};
}

}  // namespace cohort::image
