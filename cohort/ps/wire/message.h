// SPDX-License-Identifier: Apache-2.0
// The bytes of the hot calls: pushes, pulls and their replies, little-endian, as they also lie in
// the update log. Knows nothing of sockets.
//
//   header            72 bytes (Header, in the order of its fields)
//   section, any      table u32, kind u32, count u64, width u32, flags u32
//     kRows             ids u64 [count], values f32 [count x width], padded to 8 bytes
//     kBlock            values f32 [count x width] (width 1), padded likewise
//   and so on
// A pull's sections have no values (flag kNoValues), a pull's reply no ids (flag kNoIds). With flag
// kBfloat16 values are u16, the bits of bfloat16.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "cohort/ps/wire_dtype.h"

namespace cohort::ps {

/// Takes a Buffer's own memory back.
struct BufferDeleter {
  size_t capacity = 0;  ///< Of memory that is kept; 0: it is not.
  void operator()(std::byte* bytes) const;
};

/// Bytes of a message, aligned to 8: its own, or of memory that has another owner. Moved, never
/// copied.
///
/// A large one's memory (128 KiB or more) is kept for later ones, up to 64 MiB in a process: memory
/// that is fresh from the system costs a page fault every 4 KiB. Not under the address sanitizer,
/// which would not see who uses it too late.
class Buffer {
 public:
  Buffer() = default;
  /// Memory for `size` bytes, not set.
  explicit Buffer(size_t size);
  /// `bytes`, which `owner` keeps.
  Buffer(std::span<std::byte> bytes, std::shared_ptr<const void> owner);

  std::byte* data() { return begin_ + offset_; }
  std::span<std::byte> span() { return {data(), size_}; }
  std::span<const std::byte> span() const { return {begin_ + offset_, size_}; }
  /// Forgets the first `bytes`, a multiple of 8, without moving the others.
  void remove_prefix(size_t bytes) {
    offset_ += bytes;
    size_ -= bytes;
  }
  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  bool is_owner() const { return bytes_ != nullptr; }

 private:
  std::unique_ptr<std::byte[], BufferDeleter> bytes_;
  std::shared_ptr<const void> owner_;
  std::byte* begin_ = nullptr;
  size_t offset_ = 0;
  size_t size_ = 0;
};

enum class MessageKind : uint32_t { kPush = 1, kPull = 2, kReply = 3 };

/// Flags of a message.
inline constexpr uint32_t kInitialValues = 1;  ///< Push: sets blocks instead of updating them.
inline constexpr uint32_t kPrediction = 2;     ///< Pull: rows that are not there are zeros.

/// What identifies a message (reference of the names: docs/ps.md, "The contract").
struct Header {
  static constexpr uint32_t kMagic = 0x31535043;  // "CPS1"

  uint32_t magic = kMagic;
  /// CRC-32C of all that follows this field. 0 in a reply in shared memory, which is not checked:
  /// its bytes are not sent.
  uint32_t checksum = 0;
  MessageKind kind = MessageKind::kPush;
  uint32_t flags = 0;
  uint64_t job = 0;  ///< JobOptions::fingerprint.
  uint32_t trainer = 0;
  uint32_t num_sections = 0;
  uint64_t trainer_incarnation = 0;  ///< As Join granted it.
  uint64_t server_incarnation = 0;   ///< As Join told it.
  uint64_t sequence = 0;             ///< Push: counts this trainer's on this server, from 1.
  uint64_t step = 0;                 ///< Pull: see Server. Reply: the state's number of steps.
  uint64_t reserved = 0;
};
static_assert(sizeof(Header) == 72);

enum class SectionKind : uint32_t { kRows = 0, kBlock = 1 };

/// Rows of a table, or one block of a dense parameter; spans point into the message.
struct Section {
  SectionKind kind = SectionKind::kRows;
  uint32_t table = 0;  ///< Number of the table, or of the block, in the job.
  uint32_t width = 1;  ///< Values of a row.
  WireDtype dtype = WireDtype::kFloat32;
  std::span<const uint64_t> ids{};  ///< Empty for blocks and replies.
  // One of both, by `dtype`; neither in pulls.
  std::span<const float> values{};
  std::span<const uint16_t> bfloat16s{};  ///< Their bits (bfloat16.h).

  size_t num_values() const { return values.size() + bfloat16s.size(); }
};
/// Value `i` of `section`.
float value_of(const Section& section, size_t i);
/// The values of `section`; those that travel in another type in `scratch`.
std::span<const float> floats_of(const Section& section, std::vector<float>& scratch);

/// A section to be written: as many rows, of which the writer gives the places.
struct SectionShape {
  SectionKind kind = SectionKind::kRows;
  uint32_t table = 0;
  uint32_t width = 1;
  uint64_t count = 0;  ///< Rows, or a block's elements.
  bool has_ids = true;
  bool has_values = true;
  WireDtype dtype = WireDtype::kFloat32;  ///< Of the values, or of those of a pull's answer.
};

/// Of a message with these sections.
size_t message_bytes(std::span<const SectionShape> shapes);

/// Returns memory for a message of the given number of bytes.
using BufferMaker = std::function<Buffer(size_t)>;

/// A message being written: sections of known shapes, filled in place, so that nothing is copied.
class MessageWriter {
 public:
  /// `make`: where it is written; empty: to memory of its own.
  explicit MessageWriter(std::span<const SectionShape> shapes, const BufferMaker& make = nullptr);

  std::span<uint64_t> ids(size_t section);
  /// The place of its values; empty where they are of the other type.
  std::span<float> values(size_t section);
  std::span<uint16_t> bfloat16s(size_t section);

  /// Writes the header (its number of sections is known here) and the checksum. The last call.
  Buffer finish(Header header);
  /// Likewise, of a reply: without a checksum if its memory has another owner.
  Buffer finish_reply(Header header);

 private:
  enum class Seal { kChecksum, kNone };
  Buffer finish(Header header, Seal seal);

  struct Offsets {
    size_t ids, values;
    size_t num_ids, num_values;
    WireDtype dtype;
  };
  Buffer buffer_;
  std::vector<Offsets> offsets_;
};

/// A message that was read; views into `bytes`, which must outlive it and be aligned to 8.
struct Message {
  Header header;
  std::vector<Section> sections;
};

enum class Checksums { kChecked, kIgnored };

/// Reads a message of anyone's making: every length is held against the bytes that are there.
/// Errors: c10::ValueError that says what is wrong with it.
Message parse_message(std::span<const std::byte> bytes, Checksums checksums = Checksums::kChecked);

/// CRC-32C of all of `message`, whose own checksum is right: read from that, not from its bytes.
uint32_t crc32c_of_checked(std::span<const std::byte> message);

/// A value of a message.
struct ValuePosition {
  size_t section = 0;
  size_t value = 0;  ///< In the section's values.
};
/// The first value that is a NaN or an infinity.
/// Cost: one pass over all values.
std::optional<ValuePosition> find_nonfinite(const Message& message);

/// Gives `message` another header (retries after a server's restart) and seals it again.
void reseal(std::span<std::byte> message, const Header& header);

}  // namespace cohort::ps
