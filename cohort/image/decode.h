// SPDX-License-Identifier: Apache-2.0
// Reads JPEG and PNG files as RGB. Knows nothing of tensors.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace cohort::image {

/// Pixels as rows of red, green, blue: height x width x 3 bytes, without padding.
struct Image {
  int64_t height = 0;
  int64_t width = 0;
  std::vector<uint8_t> pixels{};
};

/// A rectangle of whole pixels.
struct Rect {
  int64_t top = 0;
  int64_t left = 0;
  int64_t height = 0;
  int64_t width = 0;
};

/// A rectangle whose edges may lie inside pixels; pixel i covers [i, i + 1).
struct Box {
  double top = 0;
  double left = 0;
  double height = 0;
  double width = 0;
};

/// Decoded pixels, and which part of the image they show.
struct Region {
  Image image{};
  Box covers{};  ///< In pixels of the full-size image.
};

/// An image file's content, with its header read.
///
/// The content decides what a file is, not its name. JPEG: gray, YCbCr, RGB, CMYK and YCCK,
/// baseline and progressive. PNG: every kind; 16 bits become 8, transparency is left out. EXIF
/// orientation is not applied, as in torchvision's ImageFolder.
/// Threads: immutable after construction.
/// Errors:  ConfigError with the file's name: empty, no JPEG or PNG, corrupt or cut short (if the
///          part that is read is affected). UnreadableFile (unreadable_file.h): the system did
///          not let it be read.
class EncodedImage {
 public:
  /// Takes a file's bytes; `name` is what errors call it.
  EncodedImage(std::string name, std::vector<uint8_t> bytes);
  /// Reads the file at `path`.
  static EncodedImage read(const std::string& path);

  const std::string& name() const { return name_; }
  int64_t height() const { return height_; }
  int64_t width() const { return width_; }

  /// Decodes the whole image.
  Image decode() const;

  /// Decodes `part`, which lies inside the image and is not empty.
  ///
  /// `shrink` is 1, 2, 4 or 8: a JPEG is decoded at 1/shrink of its size, which takes about
  /// 1/shrink of the time; the result then covers `part` and up to shrink - 1 pixels more on each
  /// side. A PNG ignores it. With shrink 1 the result is `part` exactly, equal to the same pixels
  /// of decode().
  Region decode(const Rect& part, int shrink) const;

 private:
  enum class Format { kJpeg, kPng };

  std::string name_;
  std::vector<uint8_t> bytes_;
  Format format_ = Format::kJpeg;
  int64_t height_ = 0;
  int64_t width_ = 0;
};

}  // namespace cohort::image
