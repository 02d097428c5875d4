// SPDX-License-Identifier: Apache-2.0
#include "examples/ctr/example_line.h"

#include <charconv>
#include <cmath>
#include <system_error>

namespace ctr {
namespace {

constexpr uint8_t kNoDigit = 0xff;

constexpr std::array<uint8_t, 256> make_hex_digits() {
  std::array<uint8_t, 256> digits{};
  for (auto& digit : digits) digit = kNoDigit;
  for (int i = 0; i < 10; ++i) digits[static_cast<size_t>('0' + i)] = static_cast<uint8_t>(i);
  for (int i = 0; i < 6; ++i) {
    digits[static_cast<size_t>('a' + i)] = static_cast<uint8_t>(10 + i);
    digits[static_cast<size_t>('A' + i)] = static_cast<uint8_t>(10 + i);
  }
  return digits;
}

constexpr std::array<uint8_t, 256> kHexDigits = make_hex_digits();

uint32_t hex_digit(char c) {
  return kHexDigits[static_cast<unsigned char>(c)];
}

// Most numbers are small, and std::log takes as long as the rest of its field.
float log_of(int64_t number) {
  static const auto kTable = [] {
    std::array<float, 4096> table{};
    for (size_t i = 0; i < table.size(); ++i) {
      table[i] = static_cast<float>(std::log1p(static_cast<double>(i)));
    }
    return table;
  }();
  if (number <= 0) return 0;
  if (number < static_cast<int64_t>(kTable.size())) return kTable[static_cast<size_t>(number)];
  return static_cast<float>(std::log1p(static_cast<double>(number)));
}

// A cursor over one line; every reader of a field leaves it on the field's end.
class Cursor {
 public:
  Cursor(const char* begin, const char* end) : at_(begin), end_(end) {}

  bool at_field_end() const { return at_ == end_ || *at_ == '\t'; }
  bool at_line_end() const { return at_ == end_; }
  /// Passes the tab; false if the line ends here.
  bool next_field() {
    if (at_ == end_) return false;
    ++at_;
    return true;
  }

  bool read_label(float& label) {
    if (at_ == end_ || (*at_ != '0' && *at_ != '1')) return false;
    label = *at_++ == '1' ? 1.0f : 0.0f;
    return at_field_end();
  }

  bool read_number(float& number) {
    if (at_field_end()) {
      number = 0;
      return true;
    }
    const char* first = at_;
    const bool negative = *at_ == '-';
    if (negative) ++at_;
    uint64_t value = 0;  // Of more than 18 digits it is not used.
    const char* digits = at_;
    for (; at_ != end_ && *at_ >= '0' && *at_ <= '9'; ++at_)
      value = value * 10 + static_cast<uint64_t>(*at_ - '0');
    if (at_field_end() && at_ != digits && at_ - digits <= 18) {
      number = negative ? 0 : log_of(static_cast<int64_t>(value));
      return true;
    }
    return read_decimal(first, number);
  }

  bool read_category(std::optional<uint32_t>& category) {
    if (at_field_end()) {
      category.reset();
      return true;
    }
    if (end_ - at_ >= 8) {
      const uint32_t d0 = hex_digit(at_[0]), d1 = hex_digit(at_[1]), d2 = hex_digit(at_[2]),
                     d3 = hex_digit(at_[3]), d4 = hex_digit(at_[4]), d5 = hex_digit(at_[5]),
                     d6 = hex_digit(at_[6]), d7 = hex_digit(at_[7]);
      if ((d0 | d1 | d2 | d3 | d4 | d5 | d6 | d7) < 16) {
        category = d0 << 28 | d1 << 24 | d2 << 20 | d3 << 16 | d4 << 12 | d5 << 8 | d6 << 4 | d7;
        at_ += 8;
        return at_field_end();
      }
    }
    uint32_t value = 0;
    int count = 0;
    for (; !at_field_end() && count < 8; ++at_, ++count) {
      const uint32_t digit = hex_digit(*at_);
      if (digit == kNoDigit) return false;
      value = value << 4 | digit;
    }
    category = value;
    return at_field_end();
  }

 private:
  // Whole numbers that are long, or have a fraction or an exponent.
  bool read_decimal(const char* first, float& number) {
    double value = 0;
    const auto [stop, error] = std::from_chars(first, end_, value);
    at_ = stop;
    if (error != std::errc() || !at_field_end() || !std::isfinite(value)) return false;
    number = value > 0 ? static_cast<float>(std::log1p(value)) : 0;
    return true;
  }

  const char* at_;
  const char* end_;
};

}  // namespace

std::optional<LineFault> parse_line(const char* begin, const char* end, Labels labels,
                                    Example& example) {
  Cursor cursor(begin, end);
  int field = 1;
  example.label = 0;
  if (labels == Labels::kGiven) {
    if (!cursor.read_label(example.label)) return LineFault{field, "a label, 0 or 1"};
    ++field;
    if (!cursor.next_field()) return LineFault{field, "a number, or nothing, after a tab"};
  }
  for (size_t i = 0; i < kNumbers; ++i, ++field) {
    if (!cursor.read_number(example.numbers[i])) return LineFault{field, "a number, or nothing"};
    if (!cursor.next_field()) return LineFault{field + 1, "a field after a tab: the line ends"};
  }
  for (int slot = 0; slot < kCategories; ++slot, ++field) {
    std::optional<uint32_t> category;
    if (!cursor.read_category(category)) {
      return LineFault{field, "up to 8 hexadecimal digits, or nothing"};
    }
    example.ids[static_cast<size_t>(slot)] = category_id(slot, category);
    if (slot + 1 < kCategories && !cursor.next_field()) {
      return LineFault{field + 1, "a field after a tab: the line ends"};
    }
  }
  if (!cursor.at_line_end()) return LineFault{field, "the line's end"};
  return std::nullopt;
}

}  // namespace ctr
