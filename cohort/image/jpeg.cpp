// SPDX-License-Identifier: Apache-2.0
#include "cohort/image/jpeg.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <csetjmp>
#include <cstdio>
#include <cstring>
// After cstdio, which it needs and does not include.
#include <jpeglib.h>
// After jpeglib.h, by which it has the codes of arithmetic coding.
#include <jerror.h>

#include "cohort/base/error.h"

namespace cohort::image {
namespace {

// Chroma is interpolated between neighbours: so many more columns on each side make the wanted ones
// equal to those of the whole image.
constexpr int64_t kMargin = 4;

struct Errors {
  jpeg_error_mgr manager{};  // First: libjpeg hands back a pointer to it.
  std::jmp_buf jump{};
  std::array<char, JMSG_LENGTH_MAX> message{};
};

[[noreturn]] void leave(j_common_ptr info) {
  auto* errors = reinterpret_cast<Errors*>(info->err);
  errors->manager.format_message(info, errors->message.data());
  std::longjmp(errors->jump, 1);
}

// libjpeg only warns of missing and corrupt data, and paints it gray.
void on_message(j_common_ptr info, int level) {
  if (level >= 0) return;
  switch (info->err->msg_code) {
    case JWRN_HIT_MARKER:
    case JWRN_HUFF_BAD_CODE:
    case JWRN_ARITH_BAD_CODE:
    case JWRN_JPEG_EOF:
    case JWRN_MUST_RESYNC:
      leave(info);
    default:
      break;
  }
}

// One image being read. libjpeg reports errors by longjmp: code under guarded() must not own
// anything.
class Reader {
 public:
  Reader(const std::string& name, std::span<const uint8_t> bytes) : name_(name) {
    info_.err = jpeg_std_error(&errors_.manager);
    errors_.manager.error_exit = leave;
    errors_.manager.emit_message = on_message;
    guarded([&] {
      jpeg_create_decompress(&info_);
      jpeg_mem_src(&info_, bytes.data(), bytes.size());
      jpeg_read_header(&info_, TRUE);
    });
  }
  ~Reader() { jpeg_destroy_decompress(&info_); }
  Reader(const Reader&) = delete;
  Reader& operator=(const Reader&) = delete;

  Size size() const { return {.height = info_.image_height, .width = info_.image_width}; }
  Region read(const Rect& part, int shrink);

 private:
  template <class Steps>
  void guarded(const Steps& steps) {
    if (setjmp(errors_.jump) != 0) {
      const std::string message = name_ + ": no readable JPEG: " + errors_.message.data();
      jpeg_destroy_decompress(&info_);
      throw ConfigError(message);
    }
    steps();
  }
  void read_rows(const Rect& wanted, int64_t first_column, std::vector<uint8_t>& row, Image& image);

  const std::string& name_;
  Errors errors_;
  jpeg_decompress_struct info_{};
};

// Adobe's programs write CMYK inverted, and say so by their marker.
void cmyk_to_rgb(const uint8_t* cmyk, int64_t count, bool inverted, uint8_t* rgb) {
  for (int64_t i = 0; i < count; ++i, cmyk += 4, rgb += 3) {
    for (int c = 0; c < 3; ++c) {
      const int light = inverted ? cmyk[c] : 255 - cmyk[c];
      const int white = inverted ? cmyk[3] : 255 - cmyk[3];
      rgb[c] = static_cast<uint8_t>((light * white + 127) / 255);
    }
  }
}

// Rows info_.output_scanline to the end of `wanted`; `row` holds one line that starts at
// `first_column`.
void Reader::read_rows(const Rect& wanted, int64_t first_column, std::vector<uint8_t>& row,
                       Image& image) {
  const bool cmyk = info_.out_color_space == JCS_CMYK;
  const int64_t skipped = (wanted.left - first_column) * info_.output_components;
  guarded([&] {
    for (int64_t y = 0; y < wanted.height; ++y) {
      uint8_t* line = row.data();
      jpeg_read_scanlines(&info_, &line, 1);
      uint8_t* out = image.pixels.data() + y * wanted.width * 3;
      if (cmyk) {
        cmyk_to_rgb(line + skipped, wanted.width, info_.saw_Adobe_marker != 0, out);
      } else {
        std::memcpy(out, line + skipped, static_cast<size_t>(wanted.width * 3));
      }
    }
  });
}

Region Reader::read(const Rect& part, int shrink) {
  info_.scale_num = 1;
  info_.scale_denom = static_cast<unsigned>(shrink);
  const bool cmyk = info_.jpeg_color_space == JCS_CMYK || info_.jpeg_color_space == JCS_YCCK;
  info_.out_color_space = cmyk ? JCS_CMYK : JCS_RGB;
  guarded([&] { jpeg_start_decompress(&info_); });

  const double ratio_y = static_cast<double>(info_.output_height) / info_.image_height;
  const double ratio_x = static_cast<double>(info_.output_width) / info_.image_width;
  const auto first = [](int64_t place, double ratio) {
    return static_cast<int64_t>(std::floor(static_cast<double>(place) * ratio));
  };
  const auto end = [](int64_t place, double ratio, JDIMENSION limit) {
    const double exact = std::ceil(static_cast<double>(place) * ratio);
    return std::min<int64_t>(static_cast<int64_t>(exact), limit);
  };
  Rect wanted{.top = first(part.top, ratio_y), .left = first(part.left, ratio_x)};
  wanted.height = end(part.top + part.height, ratio_y, info_.output_height) - wanted.top;
  wanted.width = end(part.left + part.width, ratio_x, info_.output_width) - wanted.left;

  const int64_t from = std::max<int64_t>(wanted.left - kMargin, 0);
  const int64_t to = std::min<int64_t>(wanted.left + wanted.width + kMargin, info_.output_width);
  auto column = static_cast<JDIMENSION>(from);
  auto columns = static_cast<JDIMENSION>(to - from);
  guarded([&] {
    jpeg_crop_scanline(&info_, &column, &columns);
    if (wanted.top > 0) jpeg_skip_scanlines(&info_, static_cast<JDIMENSION>(wanted.top));
  });
  Region region{.image = {.height = wanted.height, .width = wanted.width},
                .covers = {.top = static_cast<double>(wanted.top) / ratio_y,
                           .left = static_cast<double>(wanted.left) / ratio_x,
                           .height = static_cast<double>(wanted.height) / ratio_y,
                           .width = static_cast<double>(wanted.width) / ratio_x}};
  region.image.pixels.resize(static_cast<size_t>(wanted.height * wanted.width * 3));
  std::vector<uint8_t> row(size_t{columns} * static_cast<size_t>(info_.output_components));
  read_rows(wanted, column, row, region.image);
  return region;
}

}  // namespace

Size jpeg_size(const std::string& name, std::span<const uint8_t> bytes) {
  return Reader(name, bytes).size();
}

Region decode_jpeg(const std::string& name, std::span<const uint8_t> bytes, const Rect& part,
                   int shrink) {
  return Reader(name, bytes).read(part, shrink);
}

}  // namespace cohort::image
