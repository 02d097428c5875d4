// SPDX-License-Identifier: Apache-2.0
// What a rank sends in each collective of ProcessGroup over Gloo on one host, message by message.
// docs/collectives.md has the formulas.
//
// Sources: gloo/allreduce.cc, reduce.cc, broadcast.cc, gather.cc, scatter.cc and alltoall.cc as in
// libtorch 2.11; cohort/comm/backends/gloo/direct_exchange.cpp for all_gather and reduce_scatter.
#pragma once
#include <algorithm>
#include <cstdint>

namespace cohort::bench {

/// One rank's share of an operation.
struct Traffic {
  int64_t bytes = 0;               ///< Of tensors, sent.
  int64_t sent = 0, received = 0;  ///< Messages.

  /// Gloo announces each message at both ends, and its data has a header: 48 bytes each (Op::preamble
  /// of gloo/transport/tcp/pair.h).
  int64_t wire_bytes() const { return bytes + 48 * (2 * sent + received); }
  Traffic operator+(const Traffic& other) const {
    return {bytes + other.bytes, sent + other.sent, received + other.received};
  }
};

/// A tensor cut into one chunk a rank, each of equal segments, that travel around the ring.
class RingTraffic {
 public:
  RingTraffic(int64_t bytes, int64_t segment_bytes, int64_t segments_per_rank, int size)
      : bytes_(bytes), segment_bytes_(segment_bytes), segments_(segments_per_rank * size) {}
  /// Sends and receives `count` segments from those numbers on; what lies behind the end is not sent.
  void pass(int64_t first_sent, int64_t first_received, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      if (const int64_t length = length_of(first_sent + i)) {
        traffic_.bytes += length;
        ++traffic_.sent;
      }
      if (length_of(first_received + i) > 0) ++traffic_.received;
    }
  }
  const Traffic& traffic() const { return traffic_; }

 private:
  int64_t length_of(int64_t segment) const {
    return std::clamp<int64_t>(bytes_ - segment % segments_ * segment_bytes_, 0, segment_bytes_);
  }
  int64_t bytes_, segment_bytes_, segments_;
  Traffic traffic_;
};

inline constexpr int64_t kMaxSegmentBytes = 1 << 20;  // of Gloo

inline int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

/// `bytes`: of the tensor. Reduce-scatter around the ring, then all-gather.
inline Traffic all_reduce_traffic(int64_t bytes, int rank, int size, int64_t element_bytes = 4) {
  const int64_t per_rank =
      ceil_div(std::max<int64_t>(ceil_div(bytes, kMaxSegmentBytes), 2 * size), size);
  const int64_t segment = ceil_div(ceil_div(bytes, per_rank * size), element_bytes) * element_bytes;
  RingTraffic ring(bytes, segment, per_rank, size);
  ring.pass((rank + 1) * per_rank, (rank + 2) * per_rank, (size - 1) * per_rank);
  ring.pass(rank * per_rank, (rank + 1) * per_rank, (size - 1) * per_rank);
  return ring.traffic();
}

/// `bytes`: of the tensor. Reduce-scatter around the ring, which passes all segments but two, then
/// each rank's chunk straight to the root.
inline Traffic reduce_traffic(int64_t bytes, int root, int rank, int size) {
  constexpr int64_t kElement = 4;
  const int64_t segment =
      ceil_div(std::min(ceil_div(bytes, 2 * size), kMaxSegmentBytes), kElement) * kElement;
  const int64_t per_rank = ceil_div(std::max<int64_t>(ceil_div(bytes, segment), 2 * size), size);
  RingTraffic ring(bytes, segment, per_rank, size);
  ring.pass((rank + 1) * per_rank, (rank + 2) * per_rank, size * per_rank - 2);
  const auto chunk = [&](int64_t of) {
    return std::clamp<int64_t>(bytes - of * per_rank * segment, 0, per_rank * segment);
  };
  Traffic gather;
  for (int from = 0; from < size; ++from) {
    if (from == root || chunk(from) == 0) continue;
    if (rank == root) ++gather.received;
    if (rank == from) gather = {.bytes = chunk(from), .sent = 1};
  }
  return ring.traffic() + gather;
}

/// `bytes`: of the tensor. A binomial tree from the root.
inline Traffic broadcast_traffic(int64_t bytes, int root, int rank, int size) {
  const int place = (rank + size - root) % size;
  Traffic traffic;
  for (int stride = 1; stride < size; stride *= 2) {  // those below it have the tensor
    if (place < stride && place + stride < size) ++traffic.sent;
    if (place >= stride && place < 2 * stride) ++traffic.received;
  }
  traffic.bytes = traffic.sent * bytes;
  return traffic;
}

/// all_gather (`part_bytes` of the input), reduce_scatter (of the output), all_to_all (of a part):
/// every rank sends one message to every other.
inline Traffic exchange_traffic(int64_t part_bytes, int size) {
  return {.bytes = (size - 1) * part_bytes, .sent = size - 1, .received = size - 1};
}

/// `bytes`: of a rank's tensor.
inline Traffic gather_traffic(int64_t bytes, int root, int rank, int size) {
  return rank == root ? Traffic{.received = size - 1} : Traffic{.bytes = bytes, .sent = 1};
}
inline Traffic scatter_traffic(int64_t bytes, int root, int rank, int size) {
  if (rank != root) return {.received = 1};
  return {.bytes = (size - 1) * bytes, .sent = size - 1};
}

/// The comparison of calls (docs/comm.md), which is also the barrier: two numbers of 64 bits.
inline Traffic comparison_traffic(int rank, int size) {
  return all_reduce_traffic(16, rank, size, 8);
}

}  // namespace cohort::bench
