// SPDX-License-Identifier: Apache-2.0
// One server's tables and blocks. Without a server.
#include "cohort/ps/server/shard.h"

#include <algorithm>
#include <array>
#include <gtest/gtest.h>
#include <utility>
#include <vector>

#include "cohort/ps/id_hash.h"

namespace cohort::ps {
namespace shard_test {

constexpr float kInitial = 10;

// Server 0 of 2: a table of width 2 and the first half of a parameter of 6 elements.
JobOptions job_of(Reduce reduce = Reduce::kSum) {
  const RuleOptions rule{.rule = Rule::kSgd, .learning_rate = 1};
  return {.reduce = reduce,
          .servers = 2,
          .dense_rule = rule,
          .blocks = {{"p", 0, 3, 0}, {"p", 3, 6, 1}},
          .tables = {{.name = "rows",
                      .width = 2,
                      .rule = rule,
                      .initializer = {.kind = Initializer::Kind::kZeros}}}};
}

Shard shard_of(const JobOptions& job) {
  Shard shard(0, "", make_host_block);
  shard.set_job(job);
  return shard;
}

uint64_t id_of_server(uint32_t server) {
  uint64_t id = 0;
  while (server_of(id, 2) != server) ++id;
  return id;
}

// Sections without values of a pull; else of a push whose values are all `value`.
class Built {
 public:
  Built(MessageKind kind, const std::vector<SectionShape>& shapes, uint64_t id = id_of_server(0),
        float value = 0, uint32_t flags = 0) {
    MessageWriter writer(shapes);
    for (size_t i = 0; i < shapes.size(); ++i) {
      std::ranges::fill(writer.ids(i), id);
      std::ranges::fill(writer.values(i), value);
    }
    bytes_ = writer.finish({.kind = kind, .flags = flags});
    message = parse_message(bytes_.span());
  }

  Message message;

 private:
  Buffer bytes_;
};

const SectionShape kRow{.table = 0, .width = 2, .count = 1};
const SectionShape kFirstBlock{.kind = SectionKind::kBlock, .table = 0, .count = 3};

Built push_of(float value) {
  return {MessageKind::kPush, {kRow, kFirstBlock}, id_of_server(0), value};
}

// The values of the row and of the block, which have one value each.
std::pair<float, float> pulled(const Shard& shard) {
  SectionShape row = kRow, block = kFirstBlock;
  row.has_values = block.has_values = false;
  const Built request(MessageKind::kPull, {row, block});
  EXPECT_EQ(shard.declared_job()->answer_bytes(request.message), 5 * 4);
  const Buffer reply = shard.pull(request.message, {.kind = MessageKind::kReply});
  const Message message = parse_message(reply.span());
  EXPECT_EQ(message.sections[1].values.size(), 3U);
  return {message.sections[0].values[1], message.sections[1].values[2]};
}

TEST(ShardTest, APushIsAppliedToRowsAndBlocks) {
  Shard shard = shard_of(job_of());
  EXPECT_TRUE(shard.has_blocks());
  const Built initial(MessageKind::kPush, {kFirstBlock}, 0, kInitial, kInitialValues);
  shard.set_initial(initial.message);
  EXPECT_EQ(pulled(shard), std::pair(0.0f, kInitial));
  shard.push(push_of(1).message, 1, 1);
  EXPECT_EQ(pulled(shard), std::pair(-1.0f, kInitial - 1));
  ASSERT_EQ(shard.table_statistics().size(), 1U);
  EXPECT_EQ(shard.table_statistics()[0].rows, 1);
}

TEST(ShardTest, PushesOfAStepAreOneUpdateAndAbstentionsDoNotCount) {
  for (const auto& [reduce, update] :
       {std::pair(Reduce::kSum, 6.0f), std::pair(Reduce::kMean, 3.0f)}) {
    Shard shard = shard_of(job_of(reduce));
    const Built two = push_of(2), four = push_of(4), none(MessageKind::kPush, {});
    const std::array pushes{two.message, none.message, four.message};
    shard.push_sum(pushes, 1, 1);
    EXPECT_EQ(pulled(shard), std::pair(-update, -update));
  }
}

}  // namespace shard_test
}  // namespace cohort::ps
