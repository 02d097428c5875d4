// SPDX-License-Identifier: Apache-2.0
// JPEG through libjpeg-turbo: the part of decode.h that is private to this layer.
#pragma once
#include <cstdint>
#include <span>
#include <string>

#include "cohort/image/decode.h"

namespace cohort::image {

struct Size {
  int64_t height = 0;
  int64_t width = 0;
};

/// Both throw as EncodedImage does; `name` is what errors call the file.
Size jpeg_size(const std::string& name, std::span<const uint8_t> bytes);
Region decode_jpeg(const std::string& name, std::span<const uint8_t> bytes, const Rect& part,
                   int shrink);

}  // namespace cohort::image
