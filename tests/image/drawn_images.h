// SPDX-License-Identifier: Apache-2.0
// Pictures that a test draws by itself, and writes as JPEG or PNG.
#pragma once
#include <cstdint>
#include <string>

#include "cohort/image/decode.h"

namespace cohort::test {

/// Returns a coloured shape on a noisy gradient: a disc (label 0), a square (1) or stripes (2).
image::Image draw_shape(int64_t height, int64_t width, int64_t label, uint64_t seed);

enum class JpegColors { kYcc420, kYcc444, kGray, kCmyk };

struct JpegOptions {
  int quality = 95;
  JpegColors colors = JpegColors::kYcc420;
  bool progressive = false;
  bool arithmetic = false;  ///< Coding, in the place of Huffman's.
};

/// Writes `picture`; gray takes the green channel, CMYK stores the colours inverted, as Adobe does.
void write_jpeg(const std::string& path, const image::Image& picture,
                const JpegOptions& options = {});

enum class PngColors { kRgb, kRgba, kGray };

/// Writes `picture`; gray takes the green channel, alpha varies from pixel to pixel.
void write_png(const std::string& path, const image::Image& picture,
               PngColors colors = PngColors::kRgb);

/// Makes ROOT/{train,val}/{disc,square,stripes}/<n>.{jpg,png}, JPEG and PNG by turns.
void draw_image_folders(const std::string& root, int64_t train_per_class, int64_t val_per_class,
                        int64_t height, int64_t width);

}  // namespace cohort::test
