// SPDX-License-Identifier: Apache-2.0
// Resizes decoded pixels into planes of float32, antialiased. Knows nothing of tensors.
#pragma once
#include <array>
#include <cstdint>
#include <span>

#include "cohort/image/decode.h"

namespace cohort::image {

/// What happens to values in [0, 1]: (value - mean) / deviation, by channel red, green, blue.
struct Normalisation {
  std::array<float, 3> mean = {0, 0, 0};
  std::array<float, 3> deviation = {1, 1, 1};
};

enum class Flip { kNo, kHorizontal };

/// Writes `source`, a box of the image in full-size pixels, as 3 x height x width numbers.
///
/// Bilinear with antialiasing, separable, over the pixels that `region` has: torch's
/// upsample_bilinear2d with antialias and align_corners = false on those pixels, when `source` is
/// all that `region` covers.
/// Shapes:   `out_CHW` 3 * height * width numbers, height and width > 0.
/// Numerics: float32; horizontal sums first, then vertical.
void resize(const Region& region, const Box& source, int64_t height, int64_t width, Flip flip,
            const Normalisation& normalisation, std::span<float> out_CHW);

}  // namespace cohort::image
