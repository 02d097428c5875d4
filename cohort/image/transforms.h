// SPDX-License-Identifier: Apache-2.0
// From an image file to a network's input: crop, resize, flip, normalise. torchvision's usual
// pair of transforms, with its names and numbers.
#pragma once
#include <span>

#include "cohort/data/random.h"
#include "cohort/image/decode.h"
#include "cohort/image/resize.h"

namespace cohort::image {

struct TransformOptions {
  int64_t size = 224;      ///< Height and width of the result.
  int64_t resize = 256;    ///< Evaluation: the shorter side before the centre is cut out; >= size.
  double min_area = 0.08;  ///< Training: share of the image that a crop covers ...
  double max_area = 1;     ///< ... at least and at most, in (0, 1].
  double min_aspect = 3.0 / 4;  ///< Width / height of a crop, at least ...
  double max_aspect = 4.0 / 3;  ///< ... and at most.
  double flip = 0.5;            ///< Training: probability of a horizontal flip.
  Normalisation normalisation{.mean = {0.485F, 0.456F, 0.406F},
                              .deviation = {0.229F, 0.224F, 0.225F}};  ///< ImageNet's.
};

/// Returns the crop that RandomResizedCrop cuts out of height x width pixels: area and aspect drawn
/// at random, ten tries, then the largest in the centre that keeps the aspect.
Rect random_resized_crop(int64_t height, int64_t width, const TransformOptions& options,
                         data::SplitMix64& random);

/// Training: RandomResizedCrop, random horizontal flip, normalisation.
///
/// A JPEG is decoded at the smallest of 1, 1/2, 1/4 and 1/8 of its size at which the crop has
/// options.size pixels on each side still; only the rows and columns of the crop are decoded.
/// Shapes: `out_CHW` 3 x size x size.
/// Errors: as EncodedImage.
void transform_for_training(const EncodedImage& picture, const TransformOptions& options,
                            data::SplitMix64& random, std::span<float> out_CHW);

/// Evaluation: the shorter side to options.resize, the centre of options.size cut out,
/// normalisation. Decodes at a smaller size as above, as far as it has options.resize pixels.
void transform_for_evaluation(const EncodedImage& picture, const TransformOptions& options,
                              std::span<float> out_CHW);

}  // namespace cohort::image
