// SPDX-License-Identifier: Apache-2.0
#include "cohort/comm/backends/shm/mailbox.h"

#include <algorithm>
#include <bit>
#include <c10/util/Exception.h>
#include <cstring>
#include <pthread.h>
#include <string>

#include "cohort/comm/backends/shm/futex.h"

namespace cohort::comm {
namespace {

// Of all rings of a group together, and of one.
constexpr size_t kAllRings = size_t{8} << 20U;
constexpr size_t kMostBytes = size_t{64} << 10U;
constexpr size_t kLeastBytes = size_t{1} << 10U;

struct Header {
  uint64_t bytes;
  int64_t tag;
};

// A power of two.
size_t ring_bytes_of(int world_size) {
  const auto ranks = static_cast<size_t>(world_size);
  return std::bit_floor(std::clamp(kAllRings / (ranks * ranks), kLeastBytes, kMostBytes));
}

std::exception_ptr error_of(const std::string& text) {
  return std::make_exception_ptr(
      c10::DistBackendError({__func__, __FILE__, __LINE__}, "shm: " + text));
}

}  // namespace

// A rank's: a peer that has put something in a ring of it, or taken something out, rings it.
struct alignas(128) Mailbox::Bell {
  std::atomic<uint32_t> rung;
  std::atomic<uint32_t> sleepers;
  std::atomic<uint32_t> closed;

  void ring() {
    rung.fetch_add(1);
    wake_sleepers(rung, sleepers);
  }
};

// Bytes from one rank to another: one writes, one reads.
struct alignas(128) Mailbox::Ring {
  std::atomic<uint64_t> written;
  alignas(64) std::atomic<uint64_t> read;
  alignas(64) std::byte data[1];  // NOLINT(modernize-avoid-c-arrays): the first of ring_bytes_

  size_t num_readable() const { return written.load() - read.load(); }

  // Writes as much of `from` as there is room for.
  size_t write(std::span<const std::byte> from, size_t capacity) {
    const uint64_t at = written.load();
    const size_t count = std::min(from.size(), capacity - (at - read.load()));
    const size_t begin = at % capacity;
    const size_t first = std::min(count, capacity - begin);
    std::memcpy(data + begin, from.data(), first);
    if (first < count) std::memcpy(data, from.data() + first, count - first);
    written.store(at + count);
    return count;
  }

  size_t take(std::span<std::byte> to, size_t capacity) {
    const uint64_t at = read.load();
    const size_t count = std::min<size_t>(to.size(), written.load() - at);
    const size_t begin = at % capacity;
    const size_t first = std::min(count, capacity - begin);
    std::memcpy(to.data(), data + begin, first);
    if (first < count) std::memcpy(to.data() + first, data, count - first);
    read.store(at + count);
    return count;
  }

  // The same, to nowhere.
  size_t drop(size_t most) {
    const uint64_t at = read.load();
    const size_t count = std::min<size_t>(most, written.load() - at);
    read.store(at + count);
    return count;
  }
};

namespace {

constexpr size_t kLineBytes = 128;

size_t stride_of(size_t ring_bytes) {
  return ring_bytes + 2 * kLineBytes;
}

}  // namespace

size_t Mailbox::bytes_for(int world_size) {
  const auto ranks = static_cast<size_t>(world_size);
  return ranks * sizeof(Bell) + ranks * ranks * stride_of(ring_bytes_of(world_size));
}

Mailbox::Mailbox(std::byte* memory, int rank, const std::vector<PeerProcess>& peers,
                 std::function<void()> on_failure)
    : memory_(memory),
      rank_(rank),
      peers_(peers),
      ring_bytes_(ring_bytes_of(static_cast<int>(peers.size()))),
      on_failure_(std::move(on_failure)),
      outgoing_(peers.size()),
      incoming_(peers.size()) {}

Mailbox::~Mailbox() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  bell(rank_).closed.store(1);
  for (int peer = 0; peer < std::ssize(peers_); ++peer) bell(peer).ring();
  if (thread_.joinable()) thread_.join();
}

Mailbox::Bell& Mailbox::bell(int rank) const {
  return reinterpret_cast<Bell*>(memory_)[rank];
}

Mailbox::Ring& Mailbox::ring(int from, int to) const {
  const size_t index = static_cast<size_t>(from) * peers_.size() + static_cast<size_t>(to);
  return *reinterpret_cast<Ring*>(memory_ + peers_.size() * sizeof(Bell) +
                                  index * stride_of(ring_bytes_));
}

void Mailbox::send(std::span<const std::byte> data, int to, int tag, Done done) {
  post([&] {
    outgoing_[static_cast<size_t>(to)].push_back(
        {.data = data, .tag = tag, .done = std::move(done)});
  });
}

void Mailbox::receive(std::span<std::byte> data, int from, int tag, std::function<bool()> is_wanted,
                      Done done) {
  post([&] {
    wanted_.push_back({.data = data,
                       .from = from,
                       .tag = tag,
                       .is_wanted = std::move(is_wanted),
                       .done = std::move(done)});
  });
}

void Mailbox::post(const std::function<void()>& add) {
  {
    const std::lock_guard lock(mutex_);
    add();
    if (!thread_.joinable()) {
      thread_ = std::thread([this] { run(); });
      pthread_setname_np(thread_.native_handle(), "cohort-mail");
    }
  }
  bell(rank_).ring();
}

void Mailbox::fail(const std::string& why) {
  {
    const std::lock_guard lock(mutex_);
    if (failure_.empty()) failure_ = why;
  }
  bell(rank_).ring();
}

// After a failure nothing is read or written any more: messages that were cut off would be taken
// for what follows them.
void Mailbox::run() {
  Bell& own = bell(rank_);
  bool has_failed = false;
  while (true) {
    const uint32_t seen = own.rung.load();
    std::vector<Ended> ended;
    bool moved = false, ends = false, idle = false;
    {
      const std::lock_guard lock(mutex_);
      try {
        moved = failure_.empty() && !ending_ && move(ended);
        if (!moved && failure_.empty()) failure_ = lost_peer(ended);
      } catch (const std::exception& error) {
        failure_ = error.what();
      }
      if (ending_ && failure_.empty()) failure_ = "the group has ended";
      if (!failure_.empty()) end_all(ended);
      ends = ending_;
      idle = is_idle();
    }
    for (const Ended& message : ended) message.done(message.sender, message.error);
    if (ends) return;
    if (!has_failed && has_failure()) {
      has_failed = true;
      on_failure_();
    }
    if (!moved) sleep_until_changed(own.rung, own.sleepers, seen, /*looks=*/!idle);
  }
}

bool Mailbox::has_failure() {
  const std::lock_guard lock(mutex_);
  return !failure_.empty();
}

bool Mailbox::is_idle() const {
  return wanted_.empty() && std::ranges::all_of(outgoing_, &std::deque<Outgoing>::empty) &&
         std::ranges::all_of(incoming_, [](const auto& messages) {
           return messages.empty() || messages.back().is_whole();
         });
}

bool Mailbox::move(std::vector<Ended>& ended) {
  bool moved = false;
  std::erase_if(wanted_, [](const Wanted& wanted) { return !wanted.is_wanted(); });
  for (int peer = 0; peer < std::ssize(peers_); ++peer) {
    const bool moves_out = move_out(peer, ended);
    const bool moves_in = move_in(peer, ended);
    if (moves_out || moves_in) bell(peer).ring();
    moved = moved || moves_out || moves_in;
  }
  return moved;
}

bool Mailbox::move_out(int peer, std::vector<Ended>& ended) {
  auto& queue = outgoing_[static_cast<size_t>(peer)];
  Ring& to = ring(rank_, peer);
  bool moved = false;
  while (!queue.empty()) {
    Outgoing& message = queue.front();
    if (!message.has_header) {
      if (ring_bytes_ - to.num_readable() < sizeof(Header)) break;
      const Header header{.bytes = message.data.size(), .tag = message.tag};
      to.write(std::as_bytes(std::span(&header, 1)), ring_bytes_);
      message.has_header = moved = true;
    }
    const size_t written = to.write(message.data, ring_bytes_);
    message.data = message.data.subspan(written);
    moved = moved || written > 0;
    if (!message.data.empty()) break;
    ended.push_back({std::move(message.done), rank_, nullptr});
    queue.pop_front();
  }
  return moved;
}

// Does a message that has not arrived have a receiver that waits for it?
bool Mailbox::wants(int peer) const {
  return std::ranges::any_of(wanted_,
                             [&](const Wanted& w) { return w.from == peer || w.from == kAnyRank; });
}

std::optional<Mailbox::Wanted> Mailbox::take_wanted(int peer, int tag) {
  const auto found = std::ranges::find_if(wanted_, [&](const Wanted& w) {
    return w.tag == tag && (w.from == peer || w.from == kAnyRank);
  });
  if (found == wanted_.end()) return std::nullopt;
  Wanted wanted = std::move(*found);
  wanted_.erase(found);
  return wanted;
}

bool Mailbox::read_header(int peer) {
  Ring& from = ring(peer, rank_);
  if (from.num_readable() < sizeof(Header)) return false;
  Header header{};
  from.take(std::as_writable_bytes(std::span(&header, 1)), ring_bytes_);
  Incoming message{.tag = static_cast<int>(header.tag), .bytes = header.bytes};
  message.wanted = take_wanted(peer, message.tag);
  if (!message.wanted) message.kept.resize(message.bytes);
  incoming_[static_cast<size_t>(peer)].push_back(std::move(message));
  return true;
}

bool Mailbox::move_in(int peer, std::vector<Ended>& ended) {
  auto& messages = incoming_[static_cast<size_t>(peer)];
  bool moved = false;
  // A kept message goes to the receive that wants it now, in the order in which it came.
  for (Incoming& message : messages) {
    if (message.wanted) continue;
    message.wanted = take_wanted(peer, message.tag);
    if (message.wanted && message.is_whole()) finish(peer, message, ended);
  }
  std::erase_if(messages, [](const Incoming& m) { return m.wanted && m.is_whole(); });
  Ring& from = ring(peer, rank_);
  while (true) {
    const bool arrives = !messages.empty() && !messages.back().is_whole();
    if (!arrives) {
      if (!wants(peer) || !read_header(peer)) return moved;
      moved = true;
    }
    Incoming& message = messages.back();
    const size_t received = receive_some(from, message);
    moved = moved || received > 0;
    if (!message.is_whole()) {
      if (received == 0) return moved;
    } else if (message.wanted) {
      finish(peer, message, ended);
      messages.pop_back();
    }
  }
}

size_t Mailbox::receive_some(Ring& from, Incoming& message) const {
  const size_t left = message.bytes - message.received;
  const bool kept = !message.kept.empty();
  const bool fits = message.wanted && message.wanted->data.size() == message.bytes;
  const auto whole = kept   ? std::span(message.kept)
                     : fits ? message.wanted->data
                            : std::span<std::byte>();
  const size_t received =
      kept || fits ? from.take(whole.subspan(message.received), ring_bytes_) : from.drop(left);
  message.received += received;
  return received;
}

void Mailbox::finish(int peer, Incoming& message, std::vector<Ended>& ended) {
  Wanted& wanted = *message.wanted;
  if (wanted.data.size() != message.bytes) {
    ended.push_back(
        {std::move(wanted.done), peer,
         error_of("expected a message of " + std::to_string(wanted.data.size()) + " bytes, rank " +
                  std::to_string(peer) + " sends " + std::to_string(message.bytes))});
    return;
  }
  if (!message.kept.empty()) std::memcpy(wanted.data.data(), message.kept.data(), message.bytes);
  ended.push_back({std::move(wanted.done), peer, nullptr});
}

bool Mailbox::is_gone(int peer) const {
  return peers_[static_cast<size_t>(peer)].has_ended() || bell(peer).closed.load() != 0;
}

// The peer without which a message cannot end: empty if there is none. What a peer had written
// before it ended is moved first.
std::string Mailbox::lost_peer(std::vector<Ended>& ended) {
  int num_gone = 0;
  for (int peer = 0; peer < std::ssize(peers_); ++peer) {
    if (peer == rank_ || !is_gone(peer)) continue;
    ++num_gone;
    const auto index = static_cast<size_t>(peer);
    while (move_in(peer, ended)) continue;
    const bool is_receiver = !outgoing_[index].empty();
    const bool is_sender =
        std::ranges::any_of(wanted_, [&](const Wanted& w) { return w.from == peer; }) ||
        (!incoming_[index].empty() && !incoming_[index].back().is_whole());
    if (is_receiver || is_sender)
      return "rank " + std::to_string(peer) + " has ended or left the group";
  }
  const bool all_gone = num_gone + 1 == static_cast<int>(peers_.size());
  if (!wanted_.empty() && all_gone) return "all other ranks have ended or left the group";
  return {};
}

void Mailbox::end_all(std::vector<Ended>& ended) {
  const auto end = [&](Done& done) {
    ended.push_back({std::move(done), rank_, error_of(failure_)});
  };
  for (auto& queue : outgoing_) {
    for (Outgoing& message : queue) end(message.done);
    queue.clear();
  }
  for (auto& messages : incoming_) {
    for (Incoming& message : messages) {
      if (message.wanted) end(message.wanted->done);
    }
    messages.clear();
  }
  for (Wanted& wanted : wanted_) end(wanted.done);
  wanted_.clear();
}

}  // namespace cohort::comm
