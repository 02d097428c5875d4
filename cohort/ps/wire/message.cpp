// SPDX-License-Identifier: Apache-2.0
#include "cohort/ps/wire/message.h"

#include <algorithm>
#include <bit>
#include <c10/util/Exception.h>
#include <cmath>
#include <cstring>
#include <iterator>
#include <limits>
#include <mutex>
#include <utility>

#include "cohort/ps/crc32c.h"
#include "cohort/ps/wire/bfloat16.h"

namespace cohort::ps {

namespace {

constexpr uint32_t kNoIds = 1;
constexpr uint32_t kNoValues = 2;
constexpr uint32_t kBfloat16 = 4;
constexpr uint32_t kMaxWidth = 65536;
// Where the checksum's bytes begin: behind magic and checksum.
constexpr size_t kCheckedFrom = 2 * sizeof(uint32_t);
// The smallest buffer whose memory is kept, and the unit of such memory.
constexpr size_t kLeastKept = size_t{128} << 10;
#if defined(__SANITIZE_ADDRESS__)
constexpr bool kKeepsMemory = false;
#elif defined(__has_feature)
constexpr bool kKeepsMemory = !__has_feature(address_sanitizer);
#else
constexpr bool kKeepsMemory = true;
#endif

struct SectionHeader {
  uint32_t table = 0;
  SectionKind kind = SectionKind::kRows;
  uint64_t count = 0;
  uint32_t width = 1;
  uint32_t flags = 0;
};
static_assert(sizeof(SectionHeader) == 24);

constexpr size_t padded(size_t bytes) {
  return (bytes + 7) / 8 * 8;
}

bool has_ids(const SectionShape& shape) {
  return shape.kind == SectionKind::kRows && shape.has_ids;
}

size_t id_bytes(const SectionShape& shape) {
  return has_ids(shape) ? shape.count * sizeof(uint64_t) : 0;
}

size_t num_values(const SectionShape& shape) {
  return shape.has_values ? shape.count * shape.width : 0;
}

size_t value_bytes(const SectionShape& shape) {
  return num_values(shape) * bytes_of(shape.dtype);
}

uint32_t flags_of(const SectionShape& shape) {
  return (has_ids(shape) ? 0 : kNoIds) | (shape.has_values ? 0 : kNoValues) |
         (shape.dtype == WireDtype::kBfloat16 ? kBfloat16 : 0);
}

// Where all bits of an exponent are set, one more carries into the sign: three operations of whole
// numbers, of which a compiler makes vectors.
bool has_nonfinite(std::span<const float> values) {
  constexpr uint32_t kExponent = 0x7f800000, kOne = 0x00800000;
  uint32_t carried = 0;
  for (const float value : values) carried |= (std::bit_cast<uint32_t>(value) & kExponent) + kOne;
  return carried >> 31 != 0;
}

bool has_nonfinite(std::span<const uint16_t> bfloat16s) {
  uint32_t carried = 0;
  for (const uint32_t bits : bfloat16s) carried |= (bits & 0x7f80) + 0x80;
  return carried >> 15 != 0;
}

// Memory of large messages that are no more.
class KeptMemory {
 public:
  struct Piece {
    std::unique_ptr<std::byte[]> bytes;
    size_t capacity = 0;
  };

  KeptMemory() { pieces_.reserve(kMostBytes / kLeastKept + 1); }  // Giving does not throw.

  // The piece that was used last, which the CPU's caches have, of those that fit.
  Piece take(size_t size) {
    const size_t capacity = (size + kLeastKept - 1) / kLeastKept * kLeastKept;
    {
      const std::lock_guard lock(mutex_);
      const auto fits = [&](const Piece& piece) {
        return piece.capacity >= size && piece.capacity <= 2 * capacity;
      };
      if (const auto found = std::find_if(pieces_.rbegin(), pieces_.rend(), fits);
          found != pieces_.rend()) {
        Piece piece = std::move(*found);
        pieces_.erase(std::next(found).base());
        bytes_ -= piece.capacity;
        return piece;
      }
    }
    return {std::make_unique_for_overwrite<std::byte[]>(capacity), capacity};
  }

  void give(Piece piece) {
    if (piece.capacity > kMostBytes) return;
    const std::lock_guard lock(mutex_);
    bytes_ += piece.capacity;
    pieces_.push_back(std::move(piece));
    for (; bytes_ > kMostBytes; pieces_.erase(pieces_.begin())) bytes_ -= pieces_.front().capacity;
  }

 private:
  static constexpr size_t kMostBytes = size_t{64} << 20;

  std::mutex mutex_;
  std::vector<Piece> pieces_;  // In the order of their last use.
  size_t bytes_ = 0;
};

// Never destroyed: threads of gRPC may end a message after main() has returned.
KeptMemory& kept_memory() {
  static auto* const kMemory = new KeptMemory;
  return *kMemory;
}

// Reads section `i`, which begins at `position`, and moves that behind it.
Section parse_section(std::span<const std::byte> bytes, uint32_t i, size_t& position) {
  TORCH_CHECK_VALUE(bytes.size() - position >= sizeof(SectionHeader), "message: section ", i,
                    " is cut off");
  SectionHeader section;
  std::memcpy(&section, bytes.data() + position, sizeof(section));
  position += sizeof(section);
  const size_t left = bytes.size() - position;
  TORCH_CHECK_VALUE(section.kind == SectionKind::kRows || section.kind == SectionKind::kBlock,
                    "message: section ", i, " has the unknown kind ",
                    static_cast<uint32_t>(section.kind));
  TORCH_CHECK_VALUE(section.flags <= (kNoIds | kNoValues | kBfloat16), "message: section ", i,
                    " has unknown flags");
  TORCH_CHECK_VALUE(section.width >= 1 && section.width <= kMaxWidth, "message: section ", i,
                    " has width ", section.width);
  const bool with_ids = section.kind == SectionKind::kRows && !(section.flags & kNoIds);
  const bool with_values = !(section.flags & kNoValues);
  const auto dtype = section.flags & kBfloat16 ? WireDtype::kBfloat16 : WireDtype::kFloat32;
  // Without either the count is a number alone: nothing is taken for it here.
  const size_t row_bytes =
      (with_ids ? sizeof(uint64_t) : 0) + (with_values ? section.width * bytes_of(dtype) : 0);
  TORCH_CHECK_VALUE(row_bytes == 0 || section.count <= left / row_bytes, "message: section ", i,
                    ": ", section.count, " rows of ", section.width, " do not fit the bytes left, ",
                    left);
  Section view{
      .kind = section.kind, .table = section.table, .width = section.width, .dtype = dtype};
  if (with_ids) {
    view.ids = {reinterpret_cast<const uint64_t*>(bytes.data() + position), section.count};
    position += section.count * sizeof(uint64_t);
  }
  if (with_values) {
    const size_t num_values = section.count * section.width;
    const std::byte* const begin = bytes.data() + position;
    if (dtype == WireDtype::kBfloat16) {
      view.bfloat16s = {reinterpret_cast<const uint16_t*>(begin), num_values};
    } else {
      view.values = {reinterpret_cast<const float*>(begin), num_values};
    }
    const size_t padded_bytes = padded(num_values * bytes_of(dtype));
    TORCH_CHECK_VALUE(padded_bytes <= bytes.size() - position, "message: section ", i,
                      " is cut off");
    position += padded_bytes;
  }
  return view;
}

}  // namespace

Buffer::Buffer(size_t size) : size_(size) {
  if (size < kLeastKept || !kKeepsMemory) {
    bytes_.reset(std::make_unique_for_overwrite<std::byte[]>(size).release());
  } else {
    KeptMemory::Piece piece = kept_memory().take(size);
    bytes_ = {piece.bytes.release(), BufferDeleter{piece.capacity}};
  }
  begin_ = bytes_.get();
}

void BufferDeleter::operator()(std::byte* bytes) const {
  std::unique_ptr<std::byte[]> memory(bytes);
  if (capacity > 0) kept_memory().give({std::move(memory), capacity});
}

Buffer::Buffer(std::span<std::byte> bytes, std::shared_ptr<const void> owner)
    : owner_(std::move(owner)), begin_(bytes.data()), size_(bytes.size()) {}

size_t message_bytes(std::span<const SectionShape> shapes) {
  size_t bytes = sizeof(Header);
  for (const SectionShape& shape : shapes)
    bytes += sizeof(SectionHeader) + id_bytes(shape) + padded(value_bytes(shape));
  return bytes;
}

MessageWriter::MessageWriter(std::span<const SectionShape> shapes, const BufferMaker& make) {
  size_t end = sizeof(Header);
  for (const SectionShape& shape : shapes) {
    Offsets offsets{};
    offsets.ids = end + sizeof(SectionHeader);
    offsets.num_ids = id_bytes(shape) / sizeof(uint64_t);
    offsets.values = offsets.ids + id_bytes(shape);
    offsets.num_values = num_values(shape);
    offsets.dtype = shape.dtype;
    end = offsets.values + padded(value_bytes(shape));
    offsets_.push_back(offsets);
  }
  buffer_ = make ? make(end) : Buffer(end);
  for (size_t i = 0; i < shapes.size(); ++i) {
    const SectionHeader section{.table = shapes[i].table,
                                .kind = shapes[i].kind,
                                .count = shapes[i].count,
                                .width = shapes[i].width,
                                .flags = flags_of(shapes[i])};
    std::memcpy(buffer_.data() + offsets_[i].ids - sizeof(section), &section, sizeof(section));
    const size_t bytes = value_bytes(shapes[i]);
    std::memset(buffer_.data() + offsets_[i].values + bytes, 0, padded(bytes) - bytes);
  }
}

std::span<uint64_t> MessageWriter::ids(size_t section) {
  const Offsets& offsets = offsets_.at(section);
  return {reinterpret_cast<uint64_t*>(buffer_.data() + offsets.ids), offsets.num_ids};
}

std::span<float> MessageWriter::values(size_t section) {
  const Offsets& offsets = offsets_.at(section);
  if (offsets.dtype != WireDtype::kFloat32) return {};
  return {reinterpret_cast<float*>(buffer_.data() + offsets.values), offsets.num_values};
}

std::span<uint16_t> MessageWriter::bfloat16s(size_t section) {
  const Offsets& offsets = offsets_.at(section);
  if (offsets.dtype != WireDtype::kBfloat16) return {};
  return {reinterpret_cast<uint16_t*>(buffer_.data() + offsets.values), offsets.num_values};
}

Buffer MessageWriter::finish(Header header) {
  return finish(header, Seal::kChecksum);
}

Buffer MessageWriter::finish_reply(Header header) {
  return finish(header, buffer_.is_owner() ? Seal::kChecksum : Seal::kNone);
}

Buffer MessageWriter::finish(Header header, Seal seal) {
  header.num_sections = static_cast<uint32_t>(offsets_.size());
  if (seal == Seal::kChecksum) {
    reseal(buffer_.span(), header);
  } else {
    std::memcpy(buffer_.data(), &header, sizeof(header));
  }
  return std::move(buffer_);
}

void reseal(std::span<std::byte> message, const Header& header) {
  std::memcpy(message.data(), &header, sizeof(header));
  const uint32_t checksum = crc32c(message.subspan(kCheckedFrom));
  std::memcpy(message.data() + offsetof(Header, checksum), &checksum, sizeof(checksum));
}

uint32_t crc32c_of_checked(std::span<const std::byte> message) {
  Header header;
  std::memcpy(&header, message.data(), sizeof(header));
  return crc32c_joined(crc32c(message.first(kCheckedFrom)), header.checksum,
                       message.size() - kCheckedFrom);
}

Message parse_message(std::span<const std::byte> bytes, Checksums checksums) {
  TORCH_CHECK_VALUE(bytes.size() >= sizeof(Header), "message: expected at least ", sizeof(Header),
                    " bytes, got ", bytes.size());
  TORCH_CHECK_VALUE(reinterpret_cast<uintptr_t>(bytes.data()) % 8 == 0,
                    "message: its memory is not aligned to 8");
  Message message;
  Header& header = message.header;
  std::memcpy(&header, bytes.data(), sizeof(header));
  TORCH_CHECK_VALUE(header.magic == Header::kMagic, "message: it does not begin with CPS1");
  TORCH_CHECK_VALUE(
      checksums == Checksums::kIgnored || crc32c(bytes.subspan(kCheckedFrom)) == header.checksum,
      "message: its checksum does not fit its bytes");
  TORCH_CHECK_VALUE(header.kind >= MessageKind::kPush && header.kind <= MessageKind::kReply,
                    "message: unknown kind ", static_cast<uint32_t>(header.kind));
  size_t position = sizeof(Header);
  // Each section takes at least its header: a number beyond that is not worth memory.
  TORCH_CHECK_VALUE(header.num_sections <= (bytes.size() - position) / sizeof(SectionHeader),
                    "message: ", header.num_sections, " sections do not fit its ", bytes.size(),
                    " bytes");
  message.sections.reserve(header.num_sections);
  for (uint32_t i = 0; i < header.num_sections; ++i)
    message.sections.push_back(parse_section(bytes, i, position));
  TORCH_CHECK_VALUE(position == bytes.size(), "message: ", bytes.size() - position,
                    " bytes are left behind its sections");
  return message;
}

float value_of(const Section& section, size_t i) {
  if (section.dtype == WireDtype::kFloat32) return section.values[i];
  return std::bit_cast<float>(static_cast<uint32_t>(section.bfloat16s[i]) << 16);
}

std::span<const float> floats_of(const Section& section, std::vector<float>& scratch) {
  if (section.dtype == WireDtype::kFloat32) return section.values;
  const size_t count = section.bfloat16s.size();
  if (scratch.size() < count) scratch.resize(count);  // To shrink and grow again would clear it.
  widen_bfloat16(section.bfloat16s, {scratch.data(), count});
  return {scratch.data(), count};
}

std::optional<ValuePosition> find_nonfinite(const Message& message) {
  for (size_t number = 0; number < message.sections.size(); ++number) {
    const Section& section = message.sections[number];
    if (!has_nonfinite(section.values) && !has_nonfinite(section.bfloat16s)) continue;
    size_t value = 0;
    while (std::isfinite(value_of(section, value))) ++value;
    return ValuePosition{number, value};
  }
  return std::nullopt;
}

}  // namespace cohort::ps
