// SPDX-License-Identifier: Apache-2.0
// What a rank sends in each collective, to the byte: what docs/collectives.md says of them.
#include <ATen/ATen.h>
#include <functional>
#include <gtest/gtest.h>
#include <string>
#include <vector>

#include "cohort/comm/process_group.h"

#include "bench/collective_traffic.h"
#include "bench/sent_bytes.h"
#include "tests/support/ranks.h"

namespace cohort::comm {
namespace traffic_test {

using namespace bench;

// `traffic`: of this rank, for a call whose kind is known. The first one is compared, too.
void expect_sent(const ProcessGroup& group, const std::string& what, const Traffic& traffic,
                 const std::function<void()>& call) {
  call();
  const int64_t before = tcp_bytes_sent(group.rank_info().master_port);
  call();
  EXPECT_EQ(tcp_bytes_sent(group.rank_info().master_port) - before, traffic.wire_bytes())
      << what << " on rank " << group.rank() << " of " << group.size();
  group.barrier("counted");  // A rank that has ended closes its connections.
}

// The least, a number that no number of ranks divides, and more than one of Gloo's segments.
void expect_traffic(const ProcessGroup& group, int64_t numel) {
  const int rank = group.rank(), size = group.size(), last = size - 1;
  const int64_t bytes = 4 * numel;
  const at::Tensor one = at::ones({numel}), all = at::ones({size, numel}), out = at::ones_like(all);
  const auto of_root = [&](int root) {
    return rank == root ? out.unbind(0) : std::vector<at::Tensor>();
  };
  expect_sent(group, "all_reduce", all_reduce_traffic(bytes, rank, size),
              [&] { group.all_reduce(one, ReduceOp::kMax); });
  expect_sent(group, "all_gather_into", exchange_traffic(bytes, size),
              [&] { group.all_gather_into(all, one); });
  expect_sent(group, "reduce_scatter", exchange_traffic(bytes, size),
              [&] { group.reduce_scatter(one, all); });
  expect_sent(group, "all_to_all", exchange_traffic(bytes, size),
              [&] { group.all_to_all(out, all); });
  for (const int root : {0, last}) {
    expect_sent(group, "reduce", reduce_traffic(bytes, root, rank, size),
                [&] { group.reduce(one, root, ReduceOp::kMax); });
    expect_sent(group, "broadcast", broadcast_traffic(bytes, root, rank, size),
                [&] { group.broadcast(one, root); });
    expect_sent(group, "gather", gather_traffic(bytes, root, rank, size),
                [&] { group.gather(one, root); });
    expect_sent(group, "scatter", scatter_traffic(bytes, root, rank, size),
                [&] { group.scatter(one, of_root(root), root); });
  }
  // Dtype, number of elements and number of the message, 24 bytes, go ahead.
  const Traffic message = rank == 0      ? Traffic{.bytes = bytes + 24, .sent = 2}
                          : rank == last ? Traffic{.received = 2}
                                         : Traffic{};
  expect_sent(group, "send", message, [&] {
    if (rank == 0) group.send(one, last);
    if (rank == last) group.recv(one, 0);
  });
}

void expect_traffic_of_all_sizes(const ProcessGroup& group) {
  for (const int64_t numel : {1, 1001, (5 << 18) + 7}) {
    SCOPED_TRACE(std::to_string(numel) + " elements");
    expect_traffic(group, numel);
  }
  expect_sent(group, "barrier", comparison_traffic(group.rank(), group.size()),
              [&] { group.barrier("of all"); });
}

TEST(TrafficTest, TwoRanksSendWhatIsPredicted) {
  test::ranks(2, expect_traffic_of_all_sizes, {.backend = "gloo"});
}

TEST(TrafficTest, ThreeRanksSendWhatIsPredicted) {
  test::ranks(3, expect_traffic_of_all_sizes, {.backend = "gloo"});
}

TEST(TrafficTest, FourRanksSendWhatIsPredicted) {
  test::ranks(4, expect_traffic_of_all_sizes, {.backend = "gloo"});
}

// The formulas of the document, on ranks of which the number divides the elements.
TEST(TrafficTest, MessagesAddUpToTheFormulas) {
  constexpr int64_t kBytes = 4 * 840;
  for (const int size : {2, 3, 4, 5, 7}) {
    Traffic reduced, broadcast;
    for (int rank = 0; rank < size; ++rank) {
      const Traffic all_reduced = all_reduce_traffic(kBytes, rank, size);
      EXPECT_EQ(all_reduced.bytes, 2 * (size - 1) * kBytes / size);
      EXPECT_EQ(all_reduced.sent, 4 * (size - 1));
      EXPECT_EQ(all_reduced.received, all_reduced.sent);
      reduced = reduced + reduce_traffic(kBytes, 1, rank, size);
      broadcast = broadcast + broadcast_traffic(kBytes, 1, rank, size);
    }
    EXPECT_EQ(reduced.bytes, (size - 1) * kBytes + (size - 1) * kBytes / size);
    EXPECT_EQ(reduced.sent, reduced.received);
    EXPECT_EQ(broadcast.bytes, (size - 1) * kBytes);
    EXPECT_EQ(broadcast.received, size - 1);
  }
}

}  // namespace traffic_test
}  // namespace cohort::comm
