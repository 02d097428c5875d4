// SPDX-License-Identifier: Apache-2.0
// Pushes that hold a value which is no finite number.
#include <array>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <gtest/gtest.h>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cohort/ps/rpc/rpc_channel.h"
#include "cohort/ps/rpc/rpc_server.h"

#include "tests/ps/cluster.h"
#include "tests/support/message_of.h"

namespace cohort::ps {
namespace nonfinite_test {

using cohort::test::message_of;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int64_t kElements = 40;

// Rows of two and, as its second piece, elements 40 to 80 of a dense parameter.
JobOptions job_of(Mode mode = Mode::kAsync) {
  JobOptions job = ledger_job(1, 1, mode);
  job.blocks = {{.parameter = "net.bias", .begin = 0, .end = kElements, .server = 0},
                {.parameter = "net.bias", .begin = kElements, .end = 2 * kElements, .server = 0}};
  return job;
}

class NonfiniteTest : public testing::Test {
 protected:
  // Gradients of -1, which add 1: of rows 7 and 9, and of both blocks; with `value` at `element` of
  // section `section`.
  Request push(const RawTrainer& trainer, uint64_t sequence, size_t section = 0, size_t element = 0,
               float value = -1) const {
    const std::array<SectionShape, 3> shapes{
        SectionShape{.table = 0, .width = 2, .count = 2},
        SectionShape{.kind = SectionKind::kBlock, .table = 0, .count = kElements},
        SectionShape{.kind = SectionKind::kBlock, .table = 1, .count = kElements}};
    return sealed(trainer, shapes, sequence, 0, section, element, value);
  }

  Request initial(const RawTrainer& trainer, size_t section, size_t element, float value) const {
    const std::array<SectionShape, 2> shapes{
        SectionShape{.kind = SectionKind::kBlock, .table = 0, .count = kElements},
        SectionShape{.kind = SectionKind::kBlock, .table = 1, .count = kElements}};
    return sealed(trainer, shapes, 0, kInitialValues, section, element, value);
  }

  // The first weight of row 7, and of the second block the last.
  std::array<float, 2> weights(const RawTrainer& trainer) {
    const std::array<SectionShape, 2> shapes{
        SectionShape{.table = 0, .width = 2, .count = 1, .has_values = false},
        SectionShape{
            .kind = SectionKind::kBlock, .table = 1, .count = kElements, .has_values = false}};
    MessageWriter writer(shapes);
    writer.ids(0)[0] = 7;
    Header header = trainer.header;
    header.kind = MessageKind::kPull;
    const Reply reply = cluster_.ask(
        0, {.call = Call::kPull, .message = std::make_shared<const Buffer>(writer.finish(header))});
    EXPECT_EQ(reply.code, Code::kOk) << reply.text;
    if (reply.code != Code::kOk) return {-99, -99};
    const Message message = parse_message(reply.message.span());
    return {message.sections[0].values[0], message.sections[1].values[kElements - 1]};
  }

  uintmax_t log_bytes() const {
    uintmax_t bytes = 0;
    for (const auto& entry : std::filesystem::directory_iterator(cluster_.folder(0) + "/log"))
      bytes += entry.file_size();
    return bytes;
  }

  Cluster cluster_{1};

 private:
  static Request sealed(const RawTrainer& trainer, std::span<const SectionShape> shapes,
                        uint64_t sequence, uint32_t flags, size_t section, size_t element,
                        float value) {
    MessageWriter writer(shapes);
    for (size_t i = 0; i < shapes.size(); ++i) {
      std::fill(writer.values(i).begin(), writer.values(i).end(), -1.0f);
      if (shapes[i].kind != SectionKind::kRows) continue;
      writer.ids(i)[0] = 7;
      writer.ids(i)[1] = 9;
    }
    writer.values(section)[element] = value;
    Header header = trainer.header;
    header.kind = MessageKind::kPush;
    header.sequence = sequence;
    header.flags = flags;
    return {.call = Call::kPush,
            .trainer = header.trainer,
            .message = std::make_shared<const Buffer>(writer.finish(header))};
  }
};

TEST_F(NonfiniteTest, IsRefusedByNameAndNothingOfItIsLogged) {
  const RawTrainer trainer(cluster_, job_of(), 0);
  ASSERT_EQ(cluster_.ask(0, initial(trainer, 0, 0, -1)).code, Code::kOk);
  ASSERT_EQ(cluster_.ask(0, push(trainer, 1)).code, Code::kOk);
  const std::array<float, 2> before = weights(trainer);
  EXPECT_EQ(before, (std::array<float, 2>{1, 0}));
  const uintmax_t logged = log_bytes();
  const std::string advice =
      ": expected finite values: lower the learning rate, clip the gradients, or set "
      "error_if_nonfinite to false";
  const auto refused = [&](size_t section, size_t element, float value, const std::string& text) {
    const Reply reply = cluster_.ask(0, push(trainer, 2, section, element, value));
    EXPECT_EQ(reply.code, Code::kInvalid) << text;
    EXPECT_EQ(reply.text, "push 2 of trainer 0: " + text + advice);
  };
  refused(0, 0, kNan, "the gradient of row 7 of table 'rows' is nan at element 0");
  refused(0, 3, kInfinity, "the gradient of row 9 of table 'rows' is inf at element 1");
  refused(0, 2, -kInfinity, "the gradient of row 9 of table 'rows' is -inf at element 0");
  refused(1, 0, -kNan, "the gradient of parameter 'net.bias' is nan at element 0");
  refused(2, 39, kInfinity, "the gradient of parameter 'net.bias' is inf at element 79");
  // All places, those that no block of 16 has among them.
  for (size_t element = 0; element < kElements; ++element)
    EXPECT_EQ(cluster_.ask(0, push(trainer, 2, 2, element, kNan)).code, Code::kInvalid) << element;
  EXPECT_EQ(weights(trainer), before);
  EXPECT_EQ(log_bytes(), logged);
  EXPECT_EQ(nlohmann::json::parse(cluster_.ask(0, {.call = Call::kStatus}).text)["refused"], 45);
  // Numbers that are merely strange, and the next push under the number of the refused one.
  uint64_t next = 2;
  for (const float fine : {std::numeric_limits<float>::max(), std::numeric_limits<float>::lowest(),
                           std::numeric_limits<float>::denorm_min(), -0.0f}) {
    EXPECT_EQ(cluster_.ask(0, push(trainer, next++, 0, 3, fine)).code, Code::kOk) << fine;
  }
}

TEST_F(NonfiniteTest, InitialValuesAreHeldToIt) {
  const RawTrainer trainer(cluster_, job_of(), 0);
  const Reply reply = cluster_.ask(0, initial(trainer, 1, 3, kNan));
  EXPECT_EQ(reply.code, Code::kInvalid);
  EXPECT_EQ(reply.text,
            "initial values of trainer 0: the value of parameter 'net.bias' is nan at element 43: "
            "expected finite values");
  ASSERT_EQ(cluster_.ask(0, initial(trainer, 0, 0, 5)).code, Code::kOk) << "it may try again";
  EXPECT_EQ(weights(trainer)[1], -1);
}

// One that overtook another is looked at when it comes, not when its turn does.
TEST_F(NonfiniteTest, AStepOfASyncJobCanBePushedAgain) {
  const RawTrainer trainer(cluster_, job_of(Mode::kSync), 0);
  ASSERT_EQ(cluster_.ask(0, initial(trainer, 0, 0, -1)).code, Code::kOk);
  EXPECT_EQ(cluster_.ask(0, push(trainer, 2, 0, 0, kNan)).code, Code::kInvalid);
  EXPECT_EQ(cluster_.ask(0, push(trainer, 1, 0, 0, kNan)).code, Code::kInvalid);
  ASSERT_EQ(cluster_.ask(0, push(trainer, 1)).code, Code::kOk);
  EXPECT_EQ(weights(trainer), (std::array<float, 2>{1, 0}));
}

TEST_F(NonfiniteTest, PassesWhereTheJobSaysSo) {
  JobOptions job = job_of();
  job.error_if_nonfinite = false;
  EXPECT_FALSE(JobOptions::parse(job.to_json()).error_if_nonfinite);
  EXPECT_NE(job.fingerprint(), job_of().fingerprint());
  const RawTrainer trainer(cluster_, job, 0);
  ASSERT_EQ(cluster_.ask(0, initial(trainer, 0, 0, -1)).code, Code::kOk);
  ASSERT_EQ(cluster_.ask(0, push(trainer, 1, 0, 0, kNan)).code, Code::kOk);
  EXPECT_TRUE(std::isnan(weights(trainer)[0]));
}

// A job of a log or checkpoint that was written before there was the option.
TEST_F(NonfiniteTest, AJobWithoutTheOptionIsRead) {
  auto json = nlohmann::json::parse(job_of().to_json());
  EXPECT_EQ(json.erase("error_if_nonfinite"), 1U);
  EXPECT_TRUE(JobOptions::parse(json.dump()).error_if_nonfinite);
}

TEST_F(NonfiniteTest, ATrainerIsToldSoThroughTheNetwork) {
  const auto server = cluster_.slot(0).get();
  const RpcServer rpc(*server, {});
  const std::string endpoint = "127.0.0.1:" + std::to_string(rpc.port());
  Client client({.servers = {endpoint}, .trainer = 0}, ledger_job(1, 1, Mode::kAsync));
  const std::vector<uint64_t> ids{7, 9};
  const std::vector<float> gradients{1, 2, 3, kNan};
  const PushRows pushed{0, ids, gradients};
  const std::string text = message_of<c10::ValueError>([&] {
    client.push(std::span(&pushed, 1), {});
    client.flush();
  });
  EXPECT_EQ(text.find("server 0 (" + endpoint +
                      "): push 1 of trainer 0: the gradient of row 9 of table 'rows' is nan at "
                      "element 1: expected finite values"),
            0U)
      << text;
  std::vector<float> rows(4, 5);
  const PullRows asked{0, ids, rows};
  client.pull(std::span(&asked, 1), {}, /*is_prediction=*/true).wait();
  EXPECT_EQ(rows, std::vector<float>(4));
  // Also where it pulls before it looks after its pushes: a pull waits for those before it.
  EXPECT_EQ(message_of<c10::ValueError>([&] { client.pull(std::span(&asked, 1), {}).wait(); }),
            text);
}

}  // namespace nonfinite_test
}  // namespace cohort::ps
