// SPDX-License-Identifier: Apache-2.0
#include "cohort/comm/backends/shm/shared_exchange.h"

#include <algorithm>
#include <cstring>

namespace cohort::comm {
namespace {

constexpr size_t kSlotBytes = size_t{64} << 10U;
// What each of more than two ranks reads whole: below, one step costs less than two.
constexpr size_t kWholeBytes = size_t{16} << 10U;
constexpr size_t kLine = 64;  // bytes of a cache line, and the alignment of every dtype
// Of each rank's tensor, which a sum in place reads and writes while it is in the first cache.
constexpr size_t kInPlaceBytes = size_t{8} << 10U;
// Beside offsets in a rank's room.
constexpr uint64_t kElsewhere = UINT64_MAX;
constexpr uint64_t kNothing = UINT64_MAX - 1;

size_t num_pieces(size_t bytes, size_t piece) {
  return std::max<size_t>((bytes + piece - 1) / piece, 1);
}

size_t lines_bytes(int world_size) {
  return static_cast<size_t>(world_size) * sizeof(RankLine);
}

constexpr std::byte kApart{};  // in no room

// Where the messages begin if they lie end to end, all of `each` bytes; elsewhere if not, and null
// if there are none.
const std::byte* first_of(const std::vector<SharedExchange::Message>& messages, size_t each) {
  for (size_t i = 0; i < messages.size(); ++i) {
    if (messages[i].size() != each || messages[i].data() != messages[0].data() + i * each)
      return &kApart;
  }
  return messages.empty() ? nullptr : messages[0].data();
}

}  // namespace

size_t SharedExchange::bytes_for(int world_size) {
  return lines_bytes(world_size) + static_cast<size_t>(world_size) * kSlots * kSlotBytes;
}

SharedExchange::SharedExchange(std::byte* memory, int rank, const std::vector<PeerProcess>& peers,
                               const std::vector<int>& names, Rooms rooms, bool spins)
    : rank_(rank),
      slot_bytes_(kSlotBytes),
      passed_bytes_(kSlotBytes / peers.size() / kLine * kLine),
      slots_(memory + lines_bytes(static_cast<int>(peers.size()))),
      signals_(reinterpret_cast<RankLine*>(memory), rank, peers, names, spins),
      rooms_(rooms),
      pieces_(signals_.size()),
      places_(signals_.size()) {}

std::byte* SharedExchange::slot(int rank, uint32_t step) const {
  return slots_ + (static_cast<size_t>(rank) * kSlots + step % kSlots) * slot_bytes_;
}

// A slot comes round after kSlots steps. By then this rank has waited for a step that its peers
// take after they have read that slot: step s - 2 or later before it puts down step s.
void SharedExchange::run_steps(size_t num_steps, const std::function<void(size_t, std::byte*)>& put,
                               const std::function<void(size_t, uint32_t)>& take) {
  uint32_t before = 0;
  for (size_t n = 0; n <= num_steps; ++n) {
    uint32_t step = 0;
    if (n < num_steps) {
      put(n, slot(rank_, signals_.next_step()));
      step = signals_.arrive();
    }
    if (n > 0) {
      signals_.wait(before);
      take(n - 1, before);
    }
    before = step;
  }
}

bool SharedExchange::find_places(const std::byte* data) {
  const auto room_of = [&](int rank) {
    return rooms_.first + static_cast<size_t>(rank) * rooms_.bytes_each;
  };
  const bool inside = data >= room_of(rank_) && data < room_of(rank_ + 1);
  signals_.set_place(data == nullptr ? kNothing
                     : inside        ? static_cast<uint64_t>(data - room_of(rank_))
                                     : kElsewhere);
  signals_.wait(signals_.arrive());
  bool all_seen = true;
  for (int peer = 0; peer < size(); ++peer) {
    const uint64_t place = signals_.place_of(peer);
    all_seen = all_seen && place != kElsewhere;
    places_[static_cast<size_t>(peer)] =
        place >= kNothing ? nullptr : room_of(peer) + static_cast<size_t>(place);
  }
  return all_seen;
}

void SharedExchange::show(Message own, size_t most, const Take& take) {
  if (most >= kLeastInPlace && rooms_.bytes_each > 0 && find_places(own.data())) {
    std::copy(places_.begin(), places_.end(), pieces_.begin());
    take(0, most, pieces_);
    return end_in_place();
  }
  show_in_slots(own, most, take);
}

void SharedExchange::show_in_slots(Message own, size_t most, const Take& take) {
  run_steps(
      num_pieces(most, slot_bytes_),
      [&](size_t n, std::byte* slot) {
        const size_t offset = n * slot_bytes_;
        if (offset < own.size())
          std::memcpy(slot, own.data() + offset, std::min(slot_bytes_, own.size() - offset));
      },
      [&](size_t n, uint32_t step) {
        const size_t offset = n * slot_bytes_;
        for (int peer = 0; peer < size(); ++peer)
          pieces_[static_cast<size_t>(peer)] = slot(peer, step);
        if (offset < own.size()) pieces_[static_cast<size_t>(rank_)] = own.data() + offset;
        take(offset, slot_bytes_, pieces_);
      });
}

void SharedExchange::pass(const std::vector<Message>& messages, size_t most, const Take& take,
                          bool in_place) {
  if (most * pieces_.size() >= kLeastInPlace && rooms_.bytes_each > 0 &&
      find_places(in_place ? first_of(messages, most) : &kApart)) {
    for (size_t peer = 0; peer < pieces_.size(); ++peer) {
      if (places_[peer] != nullptr)
        pieces_[peer] = places_[peer] + static_cast<size_t>(rank_) * most;
    }
    take(0, most, pieces_);
    return end_in_place();
  }
  run_steps(
      num_pieces(most, passed_bytes_),
      [&](size_t n, std::byte* slot) {
        const size_t offset = n * passed_bytes_;
        for (size_t peer = 0; peer < messages.size(); ++peer) {
          const Message& message = messages[peer];
          if (static_cast<int>(peer) == rank_ || offset >= message.size()) continue;
          std::memcpy(slot + peer * passed_bytes_, message.data() + offset,
                      std::min(passed_bytes_, message.size() - offset));
        }
      },
      [&](size_t n, uint32_t step) {
        const size_t offset = n * passed_bytes_;
        const auto own = static_cast<size_t>(rank_);
        for (int peer = 0; peer < size(); ++peer)
          pieces_[static_cast<size_t>(peer)] = slot(peer, step) + own * passed_bytes_;
        if (!messages.empty() && offset < messages[own].size())
          pieces_[own] = messages[own].data() + offset;
        take(offset, passed_bytes_, pieces_);
      });
}

void SharedExchange::barrier() {
  run_steps(
      1, [](size_t, std::byte*) {}, [](size_t, uint32_t) {});
}

void SharedExchange::end_in_place() {
  barrier();
  signals_.check_aborted();
}

void SharedExchange::all_reduce(const Reduction& reduction, std::byte* data, int64_t numel,
                                int64_t bytes_each) {
  const auto bytes = static_cast<size_t>(numel * bytes_each);
  if (bytes >= kLeastInPlace && rooms_.bytes_each > 0 && find_places(data))
    return all_reduce_in_place(reduction, numel, bytes_each);
  if (size() > 2 && bytes > kWholeBytes)
    return all_reduce_by_parts(reduction, data, numel, bytes_each);
  show_in_slots({data, bytes}, bytes, [&](size_t offset, size_t piece_bytes, const auto& pieces) {
    const size_t here = std::min(piece_bytes, bytes - offset);
    reduce(reduction, data + offset, pieces, static_cast<int64_t>(here) / bytes_each);
  });
}

// Every rank reduces a part, and writes it into all ranks' tensors while it is in the cache: memory
// is read and written once.
void SharedExchange::all_reduce_in_place(const Reduction& reduction, int64_t numel,
                                         int64_t bytes_each) {
  const auto bytes = static_cast<size_t>(numel * bytes_each);
  const auto ranks = static_cast<size_t>(size()), own = static_cast<size_t>(rank_);
  const size_t share = (bytes / ranks + kLine) / kLine * kLine;
  const size_t end = std::min((own + 1) * share, bytes);
  for (size_t offset = std::min(own * share, bytes); offset < end; offset += kInPlaceBytes) {
    const size_t here = std::min(kInPlaceBytes, end - offset);
    for (size_t peer = 0; peer < ranks; ++peer) pieces_[peer] = places_[peer] + offset;
    reduce(reduction, places_[own] + offset, pieces_, static_cast<int64_t>(here) / bytes_each);
    for (size_t peer = 0; peer < ranks; ++peer) {
      if (peer != own) std::memcpy(places_[peer] + offset, places_[own] + offset, here);
    }
  }
  end_in_place();
}

// Of each piece every rank reduces a part, and shows its sums. Two kinds of steps follow each
// other: terms 0, terms 1, sums 0, terms 2, sums 1, ... A rank reads terms n before it shows sums n,
// and sums n before it shows terms n + 3: no slot comes round before.
void SharedExchange::all_reduce_by_parts(const Reduction& reduction, std::byte* data, int64_t numel,
                                         int64_t bytes_each) {
  const auto part_bytes = passed_bytes_;
  const size_t piece_bytes = part_bytes * static_cast<size_t>(size());
  const auto bytes = static_cast<size_t>(numel * bytes_each);
  const size_t num = num_pieces(bytes, piece_bytes);
  const auto part_of = [&](size_t piece, int rank) {
    const size_t begin =
        std::min(piece * piece_bytes + static_cast<size_t>(rank) * part_bytes, bytes);
    return std::span(data + begin, std::min(part_bytes, bytes - begin));
  };
  std::vector<uint32_t> terms(num), sums(num);
  const auto show_terms = [&](size_t n) {
    std::byte* own_slot = slot(rank_, signals_.next_step());
    for (int rank = 0; rank < size(); ++rank) {
      const auto part = part_of(n, rank);
      if (rank != rank_ && !part.empty())
        std::memcpy(own_slot + static_cast<size_t>(rank) * part_bytes, part.data(), part.size());
    }
    terms[n] = signals_.arrive();
  };
  const auto show_sums = [&](size_t n) {
    signals_.wait(terms[n]);
    const auto part = part_of(n, rank_);
    for (int rank = 0; rank < size(); ++rank)
      pieces_[static_cast<size_t>(rank)] =
          slot(rank, terms[n]) + static_cast<size_t>(rank_) * part_bytes;
    pieces_[static_cast<size_t>(rank_)] = part.data();
    reduce(reduction, part.data(), pieces_, static_cast<int64_t>(part.size()) / bytes_each);
    if (!part.empty()) std::memcpy(slot(rank_, signals_.next_step()), part.data(), part.size());
    sums[n] = signals_.arrive();
  };
  const auto take_sums = [&](size_t n) {
    signals_.wait(sums[n]);
    for (int rank = 0; rank < size(); ++rank) {
      const auto part = part_of(n, rank);
      if (rank != rank_ && !part.empty())
        std::memcpy(part.data(), slot(rank, sums[n]), part.size());
    }
  };
  for (size_t n = 0; n < num + 2; ++n) {
    if (n < num) show_terms(n);
    if (n >= 1 && n - 1 < num) show_sums(n - 1);
    if (n >= 2) take_sums(n - 2);
  }
}

}  // namespace cohort::comm
