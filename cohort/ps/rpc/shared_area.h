// SPDX-License-Identifier: Apache-2.0
// Memory that a client shares with a server of the same host, beside their unix socket: bytes of
// pushes, pulls and their answers lie there, and calls carry where.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>

#include "cohort/base/fd.h"
#include "cohort/ps/wire/message.h"

namespace cohort::ps {

/// Where a server finds a client's area: file descriptor `file` of process `process`, which begins
/// with `number`.
struct SharedAreaName {
  int32_t process = 0;
  int32_t file = -1;
  uint64_t number = 0;  ///< Random, not 0: who knows it has the memory.
  uint64_t bytes = 0;
};

/// An area as both sides map it. It cannot be made smaller, and its client gives out parts that have
/// pages: an access does not fail.
/// Threads: any; what is in it is its users' matter.
class SharedArea {
 public:
  static constexpr uint64_t kMostBytes = uint64_t{64} << 20;  ///< What a channel offers.

  /// A client's.
  /// Errors: c10::Error with the system's reason.
  explicit SharedArea(uint64_t bytes);
  /// Maps a client's, at a server.
  /// Errors: c10::Error that says why: the process is out of sight or another user's, or the file
  ///         is no such area (nothing else is opened).
  explicit SharedArea(const SharedAreaName& name);
  ~SharedArea();
  SharedArea(const SharedArea&) = delete;
  SharedArea& operator=(const SharedArea&) = delete;

  const SharedAreaName& name() const { return name_; }
  /// Gives bytes [begin, end) pages, at a client: else the first access would, by a signal where
  /// there are none. Returns whether it could.
  bool allocate(uint64_t begin, uint64_t end) const;
  /// Whether the process that made it has ended.
  bool is_orphaned() const;
  /// Bytes [offset, offset + bytes), a multiple of 8 each; nothing if the area does not have them.
  std::optional<std::span<std::byte>> part(uint64_t offset, uint64_t bytes) const;
  /// Where in it `bytes` are; nothing if they are elsewhere.
  std::optional<uint64_t> offset_of(std::span<const std::byte> bytes) const;

 private:
  void map();

  SharedAreaName name_;
  Fd file_;     // A client's.
  Fd process_;  // Of the client, at a server.
  std::byte* data_ = nullptr;
};

/// Gives out parts of a client's area, the first that is free: memory that was used last is in the
/// CPU's caches.
/// Threads: any. Local.
class SharedParts : public std::enable_shared_from_this<SharedParts> {
 public:
  explicit SharedParts(uint64_t bytes);

  const SharedArea& area() const { return area_; }
  /// Of parts that were lost.
  uint64_t lost_bytes() const;

  /// A part that is given back by its destructor, unless it is lost.
  class Part {
   public:
    Part(std::shared_ptr<SharedParts> parts, uint64_t offset, std::span<std::byte> bytes)
        : parts_(std::move(parts)), offset_(offset), bytes_(bytes) {}
    ~Part();
    Part(const Part&) = delete;
    Part& operator=(const Part&) = delete;

    uint64_t offset() const { return offset_; }
    std::span<std::byte> bytes() const { return bytes_; }

   private:
    std::shared_ptr<SharedParts> parts_;
    uint64_t offset_;
    std::span<std::byte> bytes_;
  };
  /// nullptr if there is no room, or no memory for it. The part has `bytes` or a few more.
  std::shared_ptr<Part> take(uint64_t bytes);
  /// The other side may still read or write the part at `offset`: it is not given out again.
  void lose(uint64_t offset);

 private:
  void give_back(uint64_t offset);

  const SharedArea area_;
  mutable std::mutex mutex_;
  struct Taken {
    uint64_t end = 0;
    bool is_lost = false;
  };
  std::map<uint64_t, Taken> taken_;  // By its begin.
  uint64_t allocated_ = 0;           // Bytes from the area's begin that have pages.
  uint64_t lost_bytes_ = 0;
};

/// What a call carries instead of its message.
struct SharedMessage {
  static constexpr uint32_t kMagic = 0x53535043;  // "CPSS"

  uint32_t magic = kMagic;
  uint32_t reserved = 0;
  uint64_t area = 0;  ///< SharedAreaName::number.
  uint64_t offset = 0;
  uint64_t bytes = 0;
  uint64_t answer_offset = 0;  ///< Where the answer may be written, if it fits.
  uint64_t answer_bytes = 0;   ///< 0: nowhere.
};
static_assert(sizeof(SharedMessage) == 48);  // Less than a message has.

/// What stands for a message in the bytes of a call, of anyone's making; nothing: it is no such.
std::optional<SharedMessage> read_shared_message(std::span<const std::byte> bytes);

/// What a SharedMessage says, in the area that it names.
struct SharedPlaces {
  std::shared_ptr<const SharedArea> area;
  std::span<std::byte> message;
  std::optional<std::span<std::byte>> answer;  ///< Nothing: the answer goes through the socket.
};

/// A server's areas, by number.
/// Threads: any.
class SharedAreas {
 public:
  /// Adds one, in place of an older one of the same `channel`.
  /// Errors: as SharedArea; there are too many.
  void add(uint64_t channel, const SharedAreaName& name);
  /// Drops the channel's; answers that are written to it keep it until they are sent.
  void remove(uint64_t channel);
  /// Drops those whose processes have ended.
  void remove_orphans();
  /// nullptr: there is none.
  std::shared_ptr<const SharedArea> find(uint64_t number) const;
  /// Nothing: there is no such area, or the message is not in it.
  std::optional<SharedPlaces> find(const SharedMessage& message) const;

 private:
  mutable std::mutex mutex_;
  std::map<uint64_t, std::shared_ptr<const SharedArea>> areas_;  // By channel.
};

}  // namespace cohort::ps
