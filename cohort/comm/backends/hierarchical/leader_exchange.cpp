// SPDX-License-Identifier: Apache-2.0
#include "cohort/comm/backends/hierarchical/leader_exchange.h"

#include <ATen/ops/from_blob.h>
#include <algorithm>

#include "cohort/comm/time_left.h"

namespace cohort::comm {
namespace {

// What every leader reduces whole: one message there costs less than two.
constexpr size_t kSmallBytes = size_t{16} << 10U;
constexpr size_t kAlignedBytes = 64;  // the alignment of what is reduced

std::vector<at::Tensor> as_message(const std::byte* data, size_t size) {
  // Gloo does not write to what it sends.
  return {at::from_blob(const_cast<std::byte*>(data), {static_cast<int64_t>(size)},
                        at::kByte)};  // NOLINT
}

}  // namespace

void LeaderExchange::send(Batch& batch, std::span<const std::byte> bytes, int to) {
  if (bytes.empty()) return;
  auto message = as_message(bytes.data(), bytes.size());
  batch.push_back(gloo_->send(message, to, tag_));
}

void LeaderExchange::receive(Batch& batch, std::span<std::byte> bytes, int from) {
  if (bytes.empty()) return;
  auto message = as_message(bytes.data(), bytes.size());
  batch.push_back(gloo_->recv(message, from, tag_));
}

void LeaderExchange::wait(Batch& batch) {
  for (const auto& work : batch) {
    work->wait(time_left(deadline_));
  }
  batch.clear();
}

bool LeaderReduction::is_small(Bytes piece) const {
  return piece.size() <= kSmallBytes;
}

LeaderReduction::Bytes LeaderReduction::part_of(Bytes piece, int leader) const {
  if (is_small(piece)) return piece;
  const auto leaders = static_cast<size_t>(leaders_.size());
  const size_t part = (piece.size() / bytes_each_ + leaders - 1) / leaders * bytes_each_;
  const size_t begin = std::min(part * static_cast<size_t>(leader), piece.size());
  return piece.subspan(begin, std::min(part, piece.size() - begin));
}

LeaderReduction::Bytes LeaderReduction::scratch_for(size_t n, int leader, size_t bytes) const {
  const size_t each =
      scratch_.size() / 2 / static_cast<size_t>(leaders_.size()) / kAlignedBytes * kAlignedBytes;
  return Bytes(scratch_).subspan(
      (n % 2 * static_cast<size_t>(leaders_.size()) + static_cast<size_t>(leader)) * each, bytes);
}

void LeaderReduction::reserve(size_t most) {
  const auto leaders = static_cast<size_t>(leaders_.size());
  const size_t part = most / leaders + bytes_each_;
  const size_t each =
      std::max(part, std::min(most, kSmallBytes)) / kAlignedBytes * kAlignedBytes + kAlignedBytes;
  scratch_.resize(std::max(scratch_.size(), 2 * leaders * each));
}

void LeaderReduction::send_terms(size_t n, Bytes bytes) {
  Piece& piece = pieces_[n % pieces_.size()];
  piece.bytes = bytes;
  const size_t own = part_of(bytes, leaders_.rank()).size();
  for (int peer = 0; peer < leaders_.size(); ++peer) {
    if (peer == leaders_.rank()) continue;
    leaders_.receive(piece.terms, scratch_for(n, peer, own), peer);
    leaders_.send(piece.terms, part_of(bytes, peer), peer);
  }
}

void LeaderReduction::reduce(size_t n) {
  Piece& piece = pieces_[n % pieces_.size()];
  leaders_.wait(piece.terms);
  const Bytes own = part_of(piece.bytes, leaders_.rank());
  std::vector<const std::byte*> terms;
  for (int peer = 0; peer < leaders_.size(); ++peer)
    terms.push_back(peer == leaders_.rank() ? own.data() : scratch_for(n, peer, own.size()).data());
  comm::reduce(reduction_, own.data(), terms, static_cast<int64_t>(own.size() / bytes_each_));
  if (is_small(piece.bytes)) return;
  for (int peer = 0; peer < leaders_.size(); ++peer) {
    if (peer == leaders_.rank()) continue;
    if (to_ < 0 || to_ == leaders_.rank())
      leaders_.receive(piece.results, part_of(piece.bytes, peer), peer);
    if (to_ < 0 || to_ == peer) leaders_.send(piece.results, own, peer);
  }
}

void LeaderReduction::finish(size_t n) {
  leaders_.wait(pieces_[n % pieces_.size()].results);
}

}  // namespace cohort::comm
