// SPDX-License-Identifier: Apache-2.0
#include "cohort/image/transforms.h"

#include <algorithm>
#include <cmath>

namespace cohort::image {
namespace {

constexpr int kTries = 10;

// The largest reduction that leaves `least` pixels of `available`.
int shrink_for(int64_t available, int64_t least) {
  int shrink = 8;
  while (shrink > 1 && available < shrink * least) shrink /= 2;
  return shrink;
}

double between(double low, double high, data::SplitMix64& random) {
  return low + (high - low) * random.uniform();
}

Box as_box(const Rect& rect) {
  return {.top = static_cast<double>(rect.top),
          .left = static_cast<double>(rect.left),
          .height = static_cast<double>(rect.height),
          .width = static_cast<double>(rect.width)};
}

Rect centre(int64_t height, int64_t width, int64_t crop_height, int64_t crop_width) {
  return {.top = (height - crop_height) / 2,
          .left = (width - crop_width) / 2,
          .height = crop_height,
          .width = crop_width};
}

}  // namespace

Rect random_resized_crop(int64_t height, int64_t width, const TransformOptions& options,
                         data::SplitMix64& random) {
  const auto h = static_cast<double>(height);
  const auto w = static_cast<double>(width);
  for (int i = 0; i < kTries; ++i) {
    const double area = h * w * between(options.min_area, options.max_area, random);
    const double aspect =
        std::exp(between(std::log(options.min_aspect), std::log(options.max_aspect), random));
    const int64_t crop_width = std::llround(std::sqrt(area * aspect));
    const int64_t crop_height = std::llround(std::sqrt(area / aspect));
    if (crop_width < 1 || crop_width > width || crop_height < 1 || crop_height > height) continue;
    Rect crop{.height = crop_height, .width = crop_width};
    crop.top = static_cast<int64_t>(random.below(static_cast<uint64_t>(height - crop_height + 1)));
    crop.left = static_cast<int64_t>(random.below(static_cast<uint64_t>(width - crop_width + 1)));
    return crop;
  }
  const auto at_least_one = [](double pixels) {
    return std::max<int64_t>(std::llround(pixels), 1);
  };
  if (w / h < options.min_aspect) {
    return centre(height, width, at_least_one(w / options.min_aspect), width);
  }
  if (w / h > options.max_aspect) {
    return centre(height, width, height, at_least_one(h * options.max_aspect));
  }
  return centre(height, width, height, width);
}

void transform_for_training(const EncodedImage& picture, const TransformOptions& options,
                            data::SplitMix64& random, std::span<float> out_CHW) {
  const Rect crop = random_resized_crop(picture.height(), picture.width(), options, random);
  const Flip flip = random.uniform() < options.flip ? Flip::kHorizontal : Flip::kNo;
  const int shrink = shrink_for(std::min(crop.height, crop.width), options.size);
  resize(picture.decode(crop, shrink), as_box(crop), options.size, options.size, flip,
         options.normalisation, out_CHW);
}

void transform_for_evaluation(const EncodedImage& picture, const TransformOptions& options,
                              std::span<float> out_CHW) {
  const int64_t height = picture.height();
  const int64_t width = picture.width();
  const int64_t shorter = std::min(height, width);
  // The longer side is cut to whole pixels, as torchvision does.
  const Rect resized{.height = options.resize * height / shorter,
                     .width = options.resize * width / shorter};
  const double scale_y = static_cast<double>(height) / static_cast<double>(resized.height);
  const double scale_x = static_cast<double>(width) / static_cast<double>(resized.width);
  // An odd pixel too many is cut off where round() to even says, as in torchvision.
  const auto offset = [&](int64_t all) {
    return std::nearbyint(static_cast<double>(all - options.size) / 2);
  };
  const auto size = static_cast<double>(options.size);
  const Box source{.top = offset(resized.height) * scale_y,
                   .left = offset(resized.width) * scale_x,
                   .height = size * scale_y,
                   .width = size * scale_x};
  // What the filter reaches, clipped to the image.
  const auto reach = [](double begin, double extent, double scale, int64_t all) {
    const double margin = std::max(scale, 1.0) + 1;
    const auto first = std::max<int64_t>(static_cast<int64_t>(std::floor(begin - margin)), 0);
    const auto end = std::min(static_cast<int64_t>(std::ceil(begin + extent + margin)), all);
    return std::pair(first, end - first);
  };
  const auto [top, rows] = reach(source.top, source.height, scale_y, height);
  const auto [left, columns] = reach(source.left, source.width, scale_x, width);
  const Rect part{.top = top, .left = left, .height = rows, .width = columns};
  resize(picture.decode(part, shrink_for(shorter, options.resize)), source, options.size,
         options.size, Flip::kNo, options.normalisation, out_CHW);
}

}  // namespace cohort::image
