// SPDX-License-Identifier: Apache-2.0
// Fuzzing of what reads JPEG and PNG files: their headers, and the decoding of small pictures.
#include "cohort/base/error.h"
#include "cohort/image/decode.h"

#include "tests/fuzz/input.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace cohort;
  constexpr int64_t kMostPixels = 1 << 14;  // More takes its time in libjpeg alone.
  try {
    const image::EncodedImage picture("picture", {data, data + size});
    const int64_t height = picture.height();
    const int64_t width = picture.width();
    TORCH_CHECK(height > 0 && width > 0, "a picture without pixels was taken");
    if (height * width > kMostPixels) return 0;
    const image::Image whole = picture.decode();
    TORCH_CHECK(static_cast<int64_t>(whole.pixels.size()) == height * width * 3,
                "pixels do not fit the size");
    fuzz::touch(std::as_bytes(std::span(whole.pixels)));
    const image::Rect part{
        .top = height / 3, .left = width / 3, .height = (height + 2) / 3, .width = (width + 2) / 3};
    for (const int shrink : {1, 2, 4, 8}) {
      const image::Region region = picture.decode(part, shrink);
      fuzz::touch(std::as_bytes(std::span(region.image.pixels)));
    }
  } catch (const ConfigError&) {
    // Refused, as it should be. Anything else that is thrown ends the program.
  }
  return 0;
}
