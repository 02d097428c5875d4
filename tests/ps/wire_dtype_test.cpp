// SPDX-License-Identifier: Apache-2.0
// Values that travel as bfloat16: how they are rounded, what arrives, how many bytes it takes, and
// what does not fit a job.
#include "cohort/ps/wire_dtype.h"

#include <algorithm>
#include <array>
#include <bit>
#include <c10/util/BFloat16.h>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <functional>
#include <gtest/gtest.h>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/ps/client/communicator.h"
#include "cohort/ps/rpc/rpc_server.h"
#include "cohort/ps/server/declared_job.h"
#include "cohort/ps/wire/bfloat16.h"

#include "tests/ps/cluster.h"
#include "tests/support/message_of.h"

namespace cohort::ps {
namespace wire_dtype_test {

using cohort::test::message_of;
using nlohmann::json;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

float widened(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

std::vector<float> nearest_of(std::span<const float> values) {
  std::vector<uint16_t> rounded(values.size());
  round_to_bfloat16(values, rounded);
  std::vector<float> result(values.size());
  widen_bfloat16(rounded, result);
  return result;
}

// What a push of trainer `trainer` with this number brings of a row's gradient, by the header's
// words: a function of (seed, table, trainer, number, id, element).
std::vector<float> pushed_row(std::span<const float> gradient, uint64_t id, uint32_t trainer,
                              uint64_t number, uint64_t seed = 1) {
  std::vector<uint16_t> rounded(gradient.size());
  round_stochastically(rounding_key_of_row(rounding_key(seed, 0, trainer, number), id), 0, gradient,
                       rounded);
  std::vector<float> result(gradient.size());
  widen_bfloat16(rounded, result);
  return result;
}

// Every upper half with lower halves around the tie.
TEST(Bfloat16Test, RoundingToNearestAndWideningAreThoseOfLibtorch) {
  std::vector<float> values;
  for (uint32_t upper = 0; upper < 1 << 16; ++upper) {
    for (const uint32_t lower : {0x0000U, 0x0001U, 0x7fffU, 0x8000U, 0x8001U, 0xffffU})
      values.push_back(std::bit_cast<float>(upper << 16 | lower));
  }
  values.pop_back();  // No multiple of a vector.
  std::vector<uint16_t> rounded(values.size());
  round_to_bfloat16(values, rounded);
  std::vector<float> back(values.size());
  widen_bfloat16(rounded, back);
  for (size_t i = 0; i < values.size(); ++i) {
    const c10::BFloat16 expected(values[i]);
    ASSERT_EQ(rounded[i], expected.x) << std::bit_cast<uint32_t>(values[i]);
    ASSERT_EQ(std::bit_cast<uint32_t>(back[i]),
              std::bit_cast<uint32_t>(static_cast<float>(expected)));
  }
}

TEST(Bfloat16Test, AValueIsRoundedTheSameWayWhereverItStands) {
  std::vector<float> values;
  for (int i = 0; i < 77; ++i) values.push_back(std::sin(static_cast<float>(i)) * 1e-3f);
  std::vector<uint16_t> together(values.size());
  round_stochastically(5, 1000, values, together);
  for (size_t i = 0; i < values.size(); ++i) {
    uint16_t alone = 0;
    round_stochastically(5, 1000 + i, {&values[i], 1}, {&alone, 1});
    EXPECT_EQ(alone, together[i]) << i;
  }
  std::vector<uint16_t> nothing;
  round_stochastically(5, 0, {}, nothing);
  round_to_bfloat16({}, nothing);
  widen_bfloat16({}, {});
}

TEST(Bfloat16Test, StochasticRoundingKeepsWhatBfloat16Has) {
  std::vector<float> values;
  for (uint32_t upper = 0; upper < 1 << 16; ++upper) values.push_back(widened(uint16_t(upper)));
  std::vector<uint16_t> rounded(values.size());
  round_stochastically(3, 0, values, rounded);
  for (uint32_t upper = 0; upper < 1 << 16; ++upper) {
    if (std::isnan(values[upper])) {
      ASSERT_TRUE(std::isnan(widened(rounded[upper]))) << upper;
    } else {
      ASSERT_EQ(rounded[upper], upper);
    }
  }
  // A NaN whose bits are all in the lower half, and what is beyond the largest bfloat16.
  const std::array<float, 4> strange{
      std::bit_cast<float>(0x7f800001U), std::bit_cast<float>(0xffffffffU),
      std::numeric_limits<float>::max(), std::numeric_limits<float>::lowest()};
  for (uint64_t key = 0; key < 1000; ++key) {
    std::array<uint16_t, 4> bits{};
    round_stochastically(key, 0, strange, bits);
    EXPECT_TRUE(std::isnan(widened(bits[0])) && std::isnan(widened(bits[1])));
    EXPECT_EQ(bits[2], 0x7f7f);
    EXPECT_EQ(bits[3], 0xff7f);
  }
}

// Of n roundings a share p goes up, give or take 5 standard deviations: sqrt(p (1 - p) / n). Over
// the elements of one push, and over pushes of one element.
TEST(Bfloat16Test, TheMeanOfManyStochasticRoundingsIsTheValue) {
  constexpr size_t kRoundings = 200'000;
  for (const float value : {0.1f, -1.003f, 3.7e5f, 1e-30f, 1.3e-40f, -3.3333e38f, 1.00001f}) {
    const auto bits = std::bit_cast<uint32_t>(value);
    const double below = widened(uint16_t(bits >> 16)), above = widened(uint16_t((bits >> 16) + 1));
    const double p = (bits & 0xffff) / 65536.0;
    const double bound = 5 * std::sqrt(p * (1 - p) / kRoundings);
    EXPECT_NEAR((value - below) / (above - below), p, 1e-6);
    const std::vector<float> values(kRoundings, value);
    std::vector<uint16_t> across(kRoundings), over(kRoundings);
    round_stochastically(17, 0, values, across);
    for (size_t push = 0; push < kRoundings; ++push) {
      const uint64_t key = rounding_key_of_row(rounding_key(1, 0, 0, push), 42);
      round_stochastically(key, 3, {&value, 1}, {&over[push], 1});
    }
    for (const auto& rounded : {across, over}) {
      size_t ups = 0;
      for (const uint16_t one : rounded) {
        ASSERT_TRUE(one == bits >> 16 || one == (bits >> 16) + 1) << value;
        ups += one != bits >> 16;
      }
      EXPECT_NEAR(static_cast<double>(ups) / kRoundings, p, bound) << value;
    }
  }
}

// Half of all roundings of a tie differ between two streams that have nothing to do with each
// other.
TEST(Bfloat16Test, EachPushTrainerRowTableAndSeedHasRandomNumbersOfItsOwn) {
  constexpr size_t kValues = 10'000;
  const std::vector<float> ties(kValues, 1 + 0x1p-8f);
  const auto stream = [&](uint64_t key) {
    std::vector<uint16_t> rounded(kValues);
    round_stochastically(key, 0, ties, rounded);
    return rounded;
  };
  const auto row = [](uint64_t seed, uint64_t part, uint32_t trainer, uint64_t push, uint64_t id) {
    return rounding_key_of_row(rounding_key(seed, part, trainer, push), id);
  };
  const auto first = stream(row(1, 0, 0, 1, 7));
  EXPECT_EQ(stream(row(1, 0, 0, 1, 7)), first);
  for (const uint64_t key : {row(2, 0, 0, 1, 7), row(1, 1, 0, 1, 7), row(1, 0, 1, 1, 7),
                             row(1, 0, 0, 2, 7), row(1, 0, 0, 1, 8), row(1, 0, 1, 0, 7)}) {
    const auto other = stream(key);
    size_t equal = 0;
    for (size_t i = 0; i < kValues; ++i) equal += first[i] == other[i];
    EXPECT_NEAR(static_cast<double>(equal), kValues / 2.0, 5 * std::sqrt(kValues / 4.0));
  }
}

// A job that another build resumes is rounded as before.
TEST(Bfloat16Test, TheRandomNumbersAreTheseEverywhere) {
  const std::vector<float> ties(20, 1 + 0x1p-8f);
  std::vector<uint16_t> rounded(ties.size());
  round_stochastically(rounding_key_of_row(rounding_key(1, 2, 3, 4), 5), 9, ties, rounded);
  std::string ups;
  for (const uint16_t bits : rounded) ups += bits == 0x3f80 ? '0' : '1';
  EXPECT_EQ(ups, "00010111011110000001");
}

TEST(WireDtypeTest, NamesAreRead) {
  for (const WireDtype dtype : {WireDtype::kFloat32, WireDtype::kBfloat16})
    EXPECT_EQ(wire_dtype_named(to_string(dtype)), dtype);
  EXPECT_EQ(message_of<ConfigError>([] { wire_dtype_named("half"); }),
            "expected one of float32, bfloat16, got \"half\"");
  JobOptions job = ledger_job(1, 1, Mode::kSync);
  job.tables[0].wire_dtype = job.dense_wire_dtype = WireDtype::kBfloat16;
  const JobOptions read = JobOptions::parse(job.to_json());
  EXPECT_EQ(read.tables[0].wire_dtype, WireDtype::kBfloat16);
  EXPECT_EQ(read.dense_wire_dtype, WireDtype::kBfloat16);
  json of_0_3 = json::parse(job.to_json());
  of_0_3.erase("dense_wire_dtype");
  of_0_3["tables"][0].erase("wire_dtype");
  const JobOptions old = JobOptions::parse(of_0_3.dump());
  EXPECT_EQ(old.tables[0].wire_dtype, WireDtype::kFloat32);
  EXPECT_EQ(old.dense_wire_dtype, WireDtype::kFloat32);
  of_0_3["dense_wire_dtype"] = "float16";
  EXPECT_NE(message_of<ConfigError>([&] {
              JobOptions::parse(of_0_3.dump());
            }).find("expected one of float32, bfloat16, got \"float16\""),
            std::string::npos);
  // Rows do not depend on it.
  EXPECT_NO_THROW(check_same_rows(old.tables[0], job.tables[0]));
}

// Rows of 16 and a parameter in two blocks; w -= g from zeros, and from initial values.
constexpr size_t kWidth = 16;
constexpr size_t kElements = 37;
JobOptions job_of(int trainers, Mode mode = Mode::kSync, WireDtype dtype = WireDtype::kBfloat16) {
  JobOptions job = ledger_job(trainers, 1, mode, kWidth);
  job.blocks = {{"p", 0, 20, 0}, {"p", 20, kElements, 0}};
  job.tables[0].wire_dtype = job.dense_wire_dtype = dtype;
  return job;
}

float gradient_of(uint64_t step, uint32_t trainer, uint64_t id, size_t element) {
  return std::sin(static_cast<float>(100 * step + 10 * trainer + id) +
                  0.37f * static_cast<float>(element));
}

struct Model {
  std::vector<uint64_t> ids{3, 1, 40, 7, 9};
  std::vector<float> rows = std::vector<float>(5 * kWidth);
  std::vector<float> parameter = std::vector<float>(kElements);
};

void initialise(Client& client) {
  std::vector<float> values(kElements);
  for (size_t i = 0; i < kElements; ++i) values[i] = 0.1f * static_cast<float>(i);
  const std::array<std::span<const float>, 1> all{values};
  if (client.needs_initial_values()) client.initialise(all);
}

void pull(Client& client, Model& model) {
  const PullRows asked{0, model.ids, model.rows};
  client.pull(std::span(&asked, 1), {model.parameter}).wait();
}

Model gradients_of(uint64_t step, uint32_t trainer) {
  Model gradients;
  for (size_t row = 0; row < gradients.ids.size(); ++row) {
    for (size_t i = 0; i < kWidth; ++i)
      gradients.rows[row * kWidth + i] = gradient_of(step, trainer, gradients.ids[row], i);
  }
  for (size_t i = 0; i < kElements; ++i) gradients.parameter[i] = gradient_of(step, trainer, 77, i);
  return gradients;
}

void push(Client& client, uint64_t step, uint32_t trainer) {
  const Model gradients = gradients_of(step, trainer);
  const PushRows pushed{0, gradients.ids, gradients.rows};
  client.push(std::span(&pushed, 1), {gradients.parameter});
}

// The same by this test's arithmetic: what servers hold in float32, rounded as it is pulled.
Model expected_after(uint64_t steps, uint32_t trainers) {
  Model model;
  for (size_t i = 0; i < kElements; ++i) model.parameter[i] = 0.1f * static_cast<float>(i);
  for (uint64_t step = 1; step <= steps; ++step) {
    Model sum;
    for (uint32_t trainer = 0; trainer < trainers; ++trainer) {
      const Model gradients = gradients_of(step, trainer);
      for (size_t row = 0; row < model.ids.size(); ++row) {
        const auto arrived = pushed_row(std::span(gradients.rows).subspan(row * kWidth, kWidth),
                                        model.ids[row], trainer, step);
        for (size_t i = 0; i < kWidth; ++i) sum.rows[row * kWidth + i] += arrived[i];
      }
      std::vector<uint16_t> rounded(kElements);
      round_stochastically(rounding_key(0, uint64_t{1} << 32, trainer, step), 0,
                           gradients.parameter, rounded);
      for (size_t i = 0; i < kElements; ++i) sum.parameter[i] += widened(rounded[i]);
    }
    for (size_t i = 0; i < sum.rows.size(); ++i) model.rows[i] -= sum.rows[i];
    for (size_t i = 0; i < kElements; ++i) model.parameter[i] -= sum.parameter[i];
  }
  model.rows = nearest_of(model.rows);
  model.parameter = nearest_of(model.parameter);
  return model;
}

// A server behind gRPC: over TCP, or over a Unix socket, where messages lie in shared memory.
class Served {
 public:
  explicit Served(bool is_unix) {
    const std::string socket = "unix:" + cluster_.path("socket");
    rpc_ = std::make_unique<RpcServer>(
        *cluster_.slot(0).get(),
        RpcServerOptions{.endpoint = is_unix ? socket : std::string("127.0.0.1:0")});
    endpoint_ = is_unix ? socket : "127.0.0.1:" + std::to_string(rpc_->port());
  }
  std::unique_ptr<Client> join(uint32_t trainer, const JobOptions& job) const {
    return std::make_unique<Client>(ClientOptions{.servers = {endpoint_}, .trainer = trainer}, job);
  }
  uintmax_t log_bytes() const {
    uintmax_t bytes = 0;
    for (const auto& entry : std::filesystem::directory_iterator(cluster_.folder(0) + "/log"))
      bytes += entry.file_size();
    return bytes;
  }

 private:
  Cluster cluster_{1};
  std::unique_ptr<RpcServer> rpc_;
  std::string endpoint_;
};

class WireTest : public testing::TestWithParam<bool> {};

TEST_P(WireTest, WhatArrivesIsTheReferencesRounding) {
  constexpr uint64_t kSteps = 6;
  const JobOptions job = job_of(2);
  const Served served(GetParam());
  const auto first = served.join(0, job);
  initialise(*first);
  const auto second = served.join(1, job);
  std::array<Model, 2> pulled;
  pull(*first, pulled[0]);
  EXPECT_EQ(pulled[0].parameter, expected_after(0, 2).parameter) << "initial values";
  EXPECT_EQ(pulled[0].rows, std::vector<float>(5 * kWidth));
  for (uint64_t step = 1; step <= kSteps; ++step) {
    push(*first, step, 0);
    push(*second, step, 1);
    pull(*first, pulled[0]);
    pull(*second, pulled[1]);
    const Model expected = expected_after(step, 2);
    for (const Model& model : pulled) {
      EXPECT_EQ(model.rows, expected.rows) << step;
      EXPECT_EQ(model.parameter, expected.parameter) << step;
    }
  }
}

// To the byte, in pushes, answers to pulls and the log.
TEST_P(WireTest, ValuesTakeHalfOfTheBytes) {
  constexpr int64_t kRows = 1000, kSteps = 3;
  std::vector<uint64_t> ids;
  for (uint64_t id = 0; id < kRows; ++id) ids.push_back(id);
  std::vector<float> values(kRows * kWidth, 0.1f);
  struct Bytes {
    int64_t in = 0, out = 0, logged = 0;
  };
  const auto bytes_of_job = [&](WireDtype dtype) {
    JobOptions job = job_of(1, Mode::kSync, dtype);
    job.blocks.clear();
    const Served served(GetParam());
    const auto client = served.join(0, job);
    const auto before = static_cast<int64_t>(served.log_bytes());
    for (int64_t step = 0; step < kSteps; ++step) {
      const PushRows pushed{0, ids, values};
      client->push(std::span(&pushed, 1), {});
      const PullRows asked{0, ids, values};
      client->pull(std::span(&asked, 1), {}).wait();
    }
    const json status = json::parse(client->status().front());
    return Bytes{status.at("bytes_in"), status.at("bytes_out"),
                 static_cast<int64_t>(served.log_bytes()) - before};
  };
  const Bytes wide = bytes_of_job(WireDtype::kFloat32), half = bytes_of_job(WireDtype::kBfloat16);
  constexpr int64_t kSaved = kSteps * kRows * int64_t{kWidth} * 2;
  EXPECT_EQ(wide.in - half.in, kSaved);
  EXPECT_EQ(wide.out - half.out, kSaved);
  EXPECT_EQ(wide.logged - half.logged, kSaved);
  EXPECT_LT(half.out, 0.51 * static_cast<double>(wide.out)) << "answers have no ids";
}

TEST_P(WireTest, NoIdsAtAllAreFine) {
  const JobOptions job = job_of(1);
  const Served served(GetParam());
  const auto client = served.join(0, job);
  initialise(*client);
  const PushRows nothing_pushed{0, {}, {}};
  client->push(std::span(&nothing_pushed, 1), {});
  const PullRows nothing_asked{0, {}, {}};
  EXPECT_EQ(client->pull(std::span(&nothing_asked, 1), {}).wait(), 1U);
}

INSTANTIATE_TEST_SUITE_P(Networks, WireTest, testing::Bool(), [](const auto& parameter) {
  return parameter.param ? "SharedMemory" : "Tcp";
});

TEST(WireDtypeTest, ATrainerWithAnotherTypeIsRefusedByTheFieldsName) {
  Cluster cluster(1);
  const auto first = cluster.client(0, job_of(2));
  JobOptions other = job_of(2);
  other.tables[0].wire_dtype = WireDtype::kFloat32;
  EXPECT_NE(message_of<ConfigError>([&] {
              cluster.client(1, other);
            }).find("/tables/0/wire_dtype is \"bfloat16\", this trainer's \"float32\""),
            std::string::npos);
  other = job_of(2);
  other.dense_wire_dtype = WireDtype::kFloat32;
  EXPECT_NE(message_of<ConfigError>([&] {
              cluster.client(1, other);
            }).find("/dense_wire_dtype is \"bfloat16\", this trainer's \"float32\""),
            std::string::npos);
}

// As it is with float32.
TEST(WireDtypeTest, AGradientThatIsNoNumberIsRefusedByNameOrArrives) {
  const std::vector<uint64_t> ids{8, 7};
  for (const float bad : {kNan, kInfinity, -kInfinity}) {
    for (const bool is_error : {true, false}) {
      Cluster cluster(1);
      JobOptions job = job_of(1);
      job.blocks.clear();
      job.error_if_nonfinite = is_error;
      const auto client = cluster.client(0, job);
      std::vector<float> values(2 * kWidth, 0.5f);
      values[kWidth + 5] = bad;
      const PushRows pushed{0, ids, values};
      const auto push_it = [&] {
        client->push(std::span(&pushed, 1), {});
        client->flush();
      };
      if (is_error) {
        const std::string name = std::isnan(bad) ? "nan" : bad > 0 ? "inf" : "-inf";
        EXPECT_NE(message_of<c10::ValueError>(push_it).find(
                      "the gradient of row 7 of table 'rows' is " + name + " at element 5"),
                  std::string::npos);
        continue;
      }
      push_it();
      const PullRows asked{0, ids, values};
      client->pull(std::span(&asked, 1), {}).wait();
      const float got = values[kWidth + 5];
      EXPECT_TRUE(std::isnan(bad) ? std::isnan(got) : got == -bad) << got;
      EXPECT_EQ(values[kWidth + 4], -0.5f);
    }
  }
}

// What is beyond the largest bfloat16 is a finite gradient.
TEST(WireDtypeTest, AFiniteGradientStaysFinite) {
  Cluster cluster(1);
  JobOptions job = job_of(1);
  job.blocks.clear();
  const auto client = cluster.client(0, job);
  const std::vector<uint64_t> ids{8};
  const std::vector<float> values(kWidth, std::numeric_limits<float>::max());
  const PushRows pushed{0, ids, values};
  client->push(std::span(&pushed, 1), {});
  client->flush();
}

// Sent by hand: no message of another type than the job's changes anything, or ends the server.
TEST(WireDtypeTest, AMessageOfAnotherTypeOrLengthIsRefusedByName) {
  Cluster cluster(1);
  const JobOptions job = job_of(1, Mode::kAsync);
  const RawTrainer trainer(cluster, job, 0);
  const auto ask = [&](const SectionShape& shape, MessageKind kind, uint32_t flags = 0) {
    MessageWriter writer(std::span(&shape, 1));
    std::ranges::fill(writer.ids(0), 5);
    std::ranges::fill(writer.values(0), 1.0f);
    std::ranges::fill(writer.bfloat16s(0), uint16_t{0x3f80});
    Header header = trainer.header;
    header.kind = kind;
    header.flags = flags;
    header.sequence = kind == MessageKind::kPush ? 1 : 0;
    const Reply reply =
        cluster.ask(0, {.call = kind == MessageKind::kPush ? Call::kPush : Call::kPull,
                        .trainer = 0,
                        .message = std::make_shared<const Buffer>(writer.finish(header))});
    return reply.code == Code::kInvalid ? reply.text : std::string(to_string(reply.code));
  };
  const SectionShape rows{.table = 0, .width = kWidth, .count = 1};
  const SectionShape block{.kind = SectionKind::kBlock, .table = 0, .count = 20};
  const std::string text = " travel as bfloat16, got float32";
  EXPECT_EQ(ask(rows, MessageKind::kPush), "message: the values of table 'rows'" + text);
  EXPECT_EQ(ask(block, MessageKind::kPush), "message: the values of block 0" + text);
  SectionShape asked = rows;
  asked.has_values = false;
  EXPECT_EQ(ask(asked, MessageKind::kPull), "message: the values of table 'rows'" + text);
  SectionShape half = block;
  half.dtype = WireDtype::kBfloat16;
  half.count = 19;
  EXPECT_EQ(ask(half, MessageKind::kPush), "message: block 0 has 20 elements, got 19");
  half = rows;
  half.dtype = WireDtype::kBfloat16;
  half.has_values = false;
  EXPECT_EQ(ask(half, MessageKind::kPush), "message: table 'rows': 1 ids with 0 values");
  half.has_values = true;
  EXPECT_EQ(ask(half, MessageKind::kPush), "push: the blocks have no values yet") << "it fits";
  JobOptions of_floats = job_of(1, Mode::kAsync, WireDtype::kFloat32);
  of_floats.blocks.clear();
  Cluster other(1);
  const RawTrainer its(other, of_floats, 0);
  EXPECT_EQ(other.ask(0, its.push(1)).code, Code::kOk);
  MessageWriter writer(std::span(&half, 1));
  writer.ids(0)[0] = 5;
  std::ranges::fill(writer.bfloat16s(0), uint16_t{0x3f80});
  Header header = its.header;
  header.sequence = 2;
  EXPECT_EQ(other
                .ask(0, {.call = Call::kPush,
                         .message = std::make_shared<const Buffer>(writer.finish(header))})
                .text,
            "message: the values of table 'rows' travel as float32, got bfloat16");
}

TEST(WireDtypeTest, InitialValuesTravelAsFloat32) {
  JobOptions job = job_of(1);
  const DeclaredJob declared(job, 0);
  for (const WireDtype dtype : {WireDtype::kFloat32, WireDtype::kBfloat16}) {
    const std::array<SectionShape, 2> shapes{
        SectionShape{.kind = SectionKind::kBlock, .table = 0, .count = 20, .dtype = dtype},
        SectionShape{.kind = SectionKind::kBlock, .table = 1, .count = 17, .dtype = dtype}};
    MessageWriter writer(shapes);
    for (size_t i = 0; i < 2; ++i) {
      std::ranges::fill(writer.values(i), 1.0f);
      std::ranges::fill(writer.bfloat16s(i), uint16_t{0x3f80});
    }
    const Buffer bytes = writer.finish({.flags = kInitialValues, .job = declared.fingerprint()});
    EXPECT_EQ(message_of<c10::ValueError>([&] { declared.check(parse_message(bytes.span())); }),
              dtype == WireDtype::kFloat32
                  ? "nothing was thrown"
                  : "message: the initial values of block 0 travel as float32, got bfloat16");
  }
}

// Every length of a message with an odd number of bfloat16 values, cut off anywhere, with any count.
TEST(WireDtypeTest, NoLengthOfAMessageIsTrusted) {
  const std::array<SectionShape, 2> shapes{
      SectionShape{.table = 0, .width = 3, .count = 3, .dtype = WireDtype::kBfloat16},
      SectionShape{
          .kind = SectionKind::kBlock, .table = 0, .count = 5, .dtype = WireDtype::kBfloat16}};
  MessageWriter writer(shapes);
  for (size_t i = 0; i < 2; ++i) {
    std::ranges::fill(writer.ids(i), 1);
    std::iota(writer.bfloat16s(i).begin(), writer.bfloat16s(i).end(), uint16_t{1});
    EXPECT_TRUE(writer.values(i).empty());
  }
  const Buffer whole = writer.finish({});
  EXPECT_EQ(whole.size(), message_bytes(shapes));
  EXPECT_EQ(whole.size(), 72U + 24 + 24 + 24 + 24 + 16) << "18 bytes are padded to 24, 10 to 16";
  const Message message = parse_message(whole.span());
  EXPECT_EQ(message.sections[0].bfloat16s.size(), 9U);
  EXPECT_TRUE(message.sections[0].values.empty());
  EXPECT_EQ(message.sections[1].bfloat16s[4], 5);
  EXPECT_EQ(value_of(message.sections[1], 4), widened(5));
  for (size_t size = 0; size < whole.size(); ++size) {
    Buffer copy(size);
    if (size > 0) std::memcpy(copy.data(), whole.span().data(), size);
    EXPECT_THROW(parse_message(copy.span(), Checksums::kIgnored), c10::ValueError) << size;
  }
  for (const uint64_t count : {uint64_t{4}, uint64_t{1} << 33, UINT64_MAX / 6, UINT64_MAX}) {
    Buffer copy(whole.size());
    std::memcpy(copy.data(), whole.span().data(), whole.size());
    std::memcpy(copy.data() + 72 + 8, &count, sizeof(count));
    EXPECT_THROW(parse_message(copy.span(), Checksums::kIgnored), c10::ValueError) << count;
  }
  Buffer copy(whole.size());
  std::memcpy(copy.data(), whole.span().data(), whole.size());
  const uint32_t flags = 8;
  std::memcpy(copy.data() + 72 + 20, &flags, sizeof(flags));
  EXPECT_EQ(message_of<c10::ValueError>([&] { parse_message(copy.span(), Checksums::kIgnored); }),
            "message: section 0 has unknown flags");
}

// The communicators round once, where the message is written: geo its change, half-async and a
// host's ranks their sum.
TEST(WireDtypeTest, EveryCommunicatorRoundsWhatItSends) {
  const std::vector<uint64_t> ids{5};
  std::vector<float> gradient(kWidth);
  for (size_t i = 0; i < kWidth; ++i) gradient[i] = gradient_of(1, 0, 5, i);
  const std::vector<float> sent = pushed_row(gradient, 5, 0, 1);
  ASSERT_NE(sent, gradient);
  std::vector<float> negative(kWidth);
  std::ranges::transform(gradient, negative.begin(), std::negate());
  for (const std::string kind : {"direct", "half-async", "geo", "host"}) {
    Cluster cluster(1);
    JobOptions job = job_of(1, Mode::kAsync);
    job.blocks.clear();
    const bool is_geo = kind == "geo";
    if (is_geo) job.tables[0].rule = {.rule = Rule::kAdd};
    const auto client = cluster.client(0, job);
    std::unique_ptr<Communicator> communicator = make_direct_communicator(*client);
    if (kind == "half-async") communicator = make_half_async_communicator(*client, 4);
    if (is_geo)
      communicator = make_geo_communicator(
          *client, {.table_rules = {{.rule = Rule::kSgd, .learning_rate = 1}}, .steps = 1});
    if (kind == "host") {
      const HostRanks two_alike{.size = 2,
                                .gather =
                                    [](const std::vector<std::byte>& own) {
                                      return std::vector{own, own};
                                    },
                                .broadcast = [](std::vector<std::byte>&) {}};
      communicator = make_host_communicator(job, two_alike, std::move(communicator));
    }
    std::vector<float> weights(kWidth, 9);
    communicator->pull({{0, ids, weights}}, {})();
    EXPECT_EQ(weights, std::vector<float>(kWidth)) << kind;
    communicator->push({{0, ids, gradient}}, {});
    communicator->flush();
    communicator->pull({{0, ids, weights}}, {})();
    std::vector<float> expected(kWidth);
    // Of a push, -g; of a change, what -g was rounded to, by the same random numbers.
    const std::vector<float> change = pushed_row(negative, 5, 0, 1);
    for (size_t i = 0; i < kWidth; ++i) expected[i] = is_geo ? change[i] : -sent[i];
    EXPECT_EQ(weights, expected) << kind;
  }
}

}  // namespace wire_dtype_test
}  // namespace cohort::ps
