// SPDX-License-Identifier: Apache-2.0
// What a message must look like to fit a job. Without a server.
#include "cohort/ps/server/declared_job.h"

#include <algorithm>
#include <gtest/gtest.h>
#include <limits>
#include <string>
#include <vector>

#include "cohort/ps/id_hash.h"
#include "cohort/ps/wire/request.h"

#include "tests/support/message_of.h"

namespace cohort::ps {
namespace declared_job_test {

using cohort::test::message_of;

// Server 0 of 2: a table of width 2 and the first half of a parameter of 6 elements.
DeclaredJob declared_job() {
  return {{.servers = 2,
           .blocks = {{"p", 0, 3, 0}, {"p", 3, 6, 1}},
           .tables = {{.name = "rows", .width = 2}}},
          0};
}

uint64_t id_of_server(uint32_t server) {
  uint64_t id = 0;
  while (server_of(id, 2) != server) ++id;
  return id;
}

const SectionShape kRow{.table = 0, .width = 2, .count = 1};
const SectionShape kFirstBlock{.kind = SectionKind::kBlock, .table = 0, .count = 3};

// Why a message with these sections is refused. All ids of rows are `id`, all values `value`.
struct Attempt {
  MessageKind kind = MessageKind::kPush;
  uint64_t id = id_of_server(0);
  uint32_t flags = 0;
  uint32_t trainer = 0;
  uint64_t job = declared_job().fingerprint();
  float value = 1;
};
std::string refusal(const std::vector<SectionShape>& shapes, const Attempt& attempt = {}) {
  MessageWriter writer(shapes);
  for (size_t i = 0; i < shapes.size(); ++i) {
    std::ranges::fill(writer.ids(i), attempt.id);
    std::ranges::fill(writer.values(i), attempt.value);
  }
  const Buffer bytes = writer.finish({.kind = attempt.kind,
                                      .flags = attempt.flags,
                                      .job = attempt.job,
                                      .trainer = attempt.trainer});
  return message_of<c10::ValueError>([&] { declared_job().check(parse_message(bytes.span())); });
}

TEST(DeclaredJobTest, AMessageThatDoesNotFitTheJobIsRefusedByName) {
  EXPECT_EQ(refusal({kRow, kFirstBlock}), "nothing was thrown");
  EXPECT_EQ(refusal({{.table = 1, .width = 2, .count = 1}}),
            "message: the job has 1 tables, got number 1");
  EXPECT_EQ(refusal({{.table = 0, .width = 3, .count = 1}}),
            "message: rows of table 'rows' have 2 values, got 3");
  EXPECT_EQ(refusal({{.table = 0, .width = 2, .count = 2, .has_values = false}}),
            "message: table 'rows': 2 ids with 0 values");
  const uint64_t other = id_of_server(1);
  EXPECT_EQ(refusal({kRow}, {.id = other}), "message: row " + std::to_string(other) +
                                                " of table 'rows' is server 1's, this is server 0");
  EXPECT_EQ(refusal({{.kind = SectionKind::kBlock, .table = 1, .count = 3}}),
            "message: server 0 has no block 1");
  EXPECT_EQ(refusal({{.kind = SectionKind::kBlock, .table = 0, .count = 2}}),
            "message: block 0 has 3 elements, got 2");
  EXPECT_EQ(refusal({kFirstBlock, kRow}),
            "message: expected its sections in the order of tables, each once");
  EXPECT_EQ(refusal({kRow, kRow}),
            "message: expected its sections in the order of tables, each once");
  EXPECT_EQ(refusal({kRow}, {.job = 1}), "the message is of another job");
  EXPECT_EQ(refusal({kRow}, {.trainer = kNoTrainer}), "push: it names no trainer");
  EXPECT_EQ(refusal({kFirstBlock}, {.flags = kInitialValues}), "nothing was thrown");
  EXPECT_EQ(refusal({}, {.flags = kInitialValues}),
            "message: initial values of 0 blocks, server 0 has 1");
  EXPECT_EQ(refusal({kRow}, {.flags = kInitialValues}),
            "message: initial values are of blocks, got those of rows");
}

TEST(DeclaredJobTest, APullHasNoValuesAndAnswersTheSizeOfItsBlocks) {
  SectionShape row = kRow, block = kFirstBlock;
  row.has_values = block.has_values = false;
  const Attempt pull{.kind = MessageKind::kPull, .trainer = kNoTrainer};
  EXPECT_EQ(refusal({row, block}, pull), "nothing was thrown");
  block.width = 2;
  EXPECT_EQ(refusal({row, block}, pull), "message: block 0 has width 1, got 2");
  const JobOptions wide{.blocks = {{"p", 0, int64_t{1} << 30, 0}}};
  const DeclaredJob job(wide, 0);
  block.width = 1;
  const Buffer bytes =
      MessageWriter({&block, 1}).finish({.kind = MessageKind::kPull, .job = job.fingerprint()});
  EXPECT_EQ(message_of<c10::ValueError>([&] { job.check(parse_message(bytes.span())); }),
            "pull: its answer would have 4294967296 bytes, a message has 2147483647 at most: ask "
            "for fewer rows at once");
}

TEST(DeclaredJobTest, AValueThatIsNoNumberIsRefusedUnlessTheJobTakesIt) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(refusal({kRow}, {.value = kNan}).substr(0, 10), "push 0 of ");
  JobOptions options = declared_job().options();
  options.error_if_nonfinite = false;
  const DeclaredJob careless(options, 0);
  MessageWriter writer({&kRow, 1});
  writer.ids(0)[0] = id_of_server(0);
  std::ranges::fill(writer.values(0), kNan);
  const Buffer bytes = writer.finish({.job = careless.fingerprint()});
  EXPECT_NO_THROW(careless.check(parse_message(bytes.span())));
}

}  // namespace declared_job_test
}  // namespace cohort::ps
