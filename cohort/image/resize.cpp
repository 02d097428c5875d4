// SPDX-License-Identifier: Apache-2.0
#include "cohort/image/resize.h"

#include <algorithm>
#include <cmath>

namespace cohort::image {
namespace {

// For each number of the result, the neighbours that make it up and their weights.
struct Taps {
  int64_t most = 0;            // Weights kept for each number; those not needed are 0.
  std::vector<int64_t> first;  // The first neighbour ...
  std::vector<int64_t> count;  // ... and how many.
  std::vector<float> weights;  // [numbers x most]
};

// `count` numbers spread evenly over [origin, origin + extent) of `size` neighbours.
Taps make_taps(double origin, double extent, int64_t count, int64_t size) {
  const double step = extent / static_cast<double>(count);
  const double support = std::max(step, 1.0);
  Taps taps;
  taps.most = static_cast<int64_t>(std::ceil(support)) * 2 + 1;
  taps.weights.resize(static_cast<size_t>(count * taps.most));
  for (int64_t i = 0; i < count; ++i) {
    const double centre = origin + (static_cast<double>(i) + 0.5) * step;
    const auto nearest = [&](double place) {
      return std::clamp<int64_t>(static_cast<int64_t>(std::floor(place + 0.5)), 0, size);
    };
    const int64_t first = std::min(nearest(centre - support), size - 1);
    const int64_t end = std::max(nearest(centre + support), first + 1);
    float* weights = taps.weights.data() + i * taps.most;
    double sum = 0;
    for (int64_t k = 0; k < end - first; ++k) {
      const double distance = std::abs(static_cast<double>(first + k) + 0.5 - centre) / support;
      weights[k] = static_cast<float>(std::max(1 - distance, 0.0));
      sum += weights[k];
    }
    if (sum == 0) weights[0] = 1;  // A box that ends a rounding error outside.
    for (int64_t k = 0; k < end - first && sum > 0; ++k)
      weights[k] = static_cast<float>(weights[k] / sum);
    taps.first.push_back(first);
    taps.count.push_back(end - first);
  }
  return taps;
}

// One row of pixels to 3 planes of `width` numbers.
void shrink_row(const uint8_t* pixels, const Taps& taps, int64_t width, Flip flip, float* planes) {
  for (int64_t x = 0; x < width; ++x) {
    const auto i = static_cast<size_t>(x);
    const float* weights = taps.weights.data() + x * taps.most;
    const uint8_t* pixel = pixels + taps.first[i] * 3;
    float red = 0;
    float green = 0;
    float blue = 0;
    for (int64_t k = 0; k < taps.count[i]; ++k, pixel += 3) {
      red += weights[k] * static_cast<float>(pixel[0]);
      green += weights[k] * static_cast<float>(pixel[1]);
      blue += weights[k] * static_cast<float>(pixel[2]);
    }
    const int64_t place = flip == Flip::kNo ? x : width - 1 - x;
    planes[place] = red;
    planes[width + place] = green;
    planes[2 * width + place] = blue;
  }
}

void add_weighted(const float* __restrict row, float weight, int64_t width, float* __restrict sum) {
  for (int64_t x = 0; x < width; ++x) sum[x] += weight * row[x];
}

}  // namespace

void resize(const Region& region, const Box& source, int64_t height, int64_t width, Flip flip,
            const Normalisation& normalisation, std::span<float> out_CHW) {
  const Image& image = region.image;
  const double pixels_y = static_cast<double>(image.height) / region.covers.height;
  const double pixels_x = static_cast<double>(image.width) / region.covers.width;
  const Taps rows = make_taps((source.top - region.covers.top) * pixels_y, source.height * pixels_y,
                              height, image.height);
  const Taps columns = make_taps((source.left - region.covers.left) * pixels_x,
                                 source.width * pixels_x, width, image.width);
  const int64_t first_row = rows.first.front();
  const int64_t end_row = rows.first.back() + rows.count.back();
  std::vector<float> narrow(static_cast<size_t>((end_row - first_row) * 3 * width));
  for (int64_t y = first_row; y < end_row; ++y) {
    shrink_row(image.pixels.data() + y * image.width * 3, columns, width, flip,
               narrow.data() + (y - first_row) * 3 * width);
  }
  for (size_t c = 0; c < 3; ++c) {
    const auto channel = static_cast<int64_t>(c);
    const float factor = 1 / (255 * normalisation.deviation[c]);
    const float shift = -normalisation.mean[c] / normalisation.deviation[c];
    for (int64_t y = 0; y < height; ++y) {
      float* out = out_CHW.data() + (channel * height + y) * width;
      std::fill_n(out, width, shift);
      for (int64_t k = 0; k < rows.count[static_cast<size_t>(y)]; ++k) {
        const int64_t row = rows.first[static_cast<size_t>(y)] + k - first_row;
        add_weighted(narrow.data() + (row * 3 + channel) * width,
                     rows.weights[static_cast<size_t>(y * rows.most + k)] * factor, width, out);
      }
    }
  }
}

}  // namespace cohort::image
