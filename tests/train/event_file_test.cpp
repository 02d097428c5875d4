// SPDX-License-Identifier: Apache-2.0
#include "cohort/train/event_file.h"

#include <cmath>
#include <filesystem>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <string>

#include "cohort/base/error.h"

#include "tests/base/temporary_folder.h"
#include "tests/support/environment.h"
#include "tests/support/message_of.h"
#include "tests/support/shell.h"

namespace cohort::train {
namespace event_file_test {

using nlohmann::json;

// What the real TensorBoard reads.
json read_events(const std::string& folder) {
  const test::Ended ended = test::shell("'" + test::environment("COHORT_TEST_PYTHON") + "' -B '" +
                                        test::environment("COHORT_SOURCE") +
                                        "/tests/train/read_events.py' '" + folder + "'");
  EXPECT_EQ(ended.code, 0) << ended.output;
  // TensorBoard warns on stderr that there is no TensorFlow.
  return json::parse(ended.output.substr(ended.output.find('{')));
}

TEST(EventFileTest, ChecksumIsCastagnolis) {
  EXPECT_EQ(crc32c("123456789"), 0xE3069283U);            // The catalogue's check value.
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8A9136AAU);  // RFC 3720, B.4.
}

TEST(EventFileTest, TensorBoardReadsCurvesAndTexts) {
  const TemporaryFolder folder;
  EventFile file(folder / "events", 0);
  for (int64_t step = 0; step <= 300; step += 100)
    file.add_scalars(step, {{"train/loss", 5.0 - 0.01 * static_cast<double>(step)},
                            {"train/learning_rate", 1e-4 * static_cast<double>(step)}});
  file.add_scalars(400, {{"train/loss", std::nan("")}, {"train/learning_rate", 0.5}});
  file.add_text(300, "samples/1", "| \xE4\xBD\xA0\xE5\xA5\xBD |");
  const json found = read_events(folder / "events");
  const json& loss = found["scalars"]["train/loss"];
  ASSERT_EQ(loss.size(), 4) << found;
  EXPECT_EQ(loss[3][0], 300);
  EXPECT_FLOAT_EQ(loss[3][1].get<float>(), 2.0F);
  EXPECT_EQ(found["scalars"]["train/learning_rate"].size(), 5);
  EXPECT_EQ(found["texts"]["samples/1"], json::parse(R"([[300, "| 你好 |"]])"));
}

TEST(EventFileTest, ALaterStartVoidsTheStepsThatItMakesAgain) {
  const TemporaryFolder folder;
  {
    EventFile killed(folder / "events", 1);
    for (int64_t step = 1; step <= 9; ++step) killed.add_scalars(step, {{"loss", 10.0}});
  }
  {  // The last checkpoint was at step 5. The two begin in the same second.
    EventFile resumed(folder / "events", 6);
    for (int64_t step = 6; step <= 7; ++step) resumed.add_scalars(step, {{"loss", 20.0}});
  }
  const json loss = read_events(folder / "events")["scalars"]["loss"];
  EXPECT_EQ(loss, json::parse("[[1,10.0],[2,10.0],[3,10.0],[4,10.0],[5,10.0],[6,20.0],[7,20.0]]"));
}

TEST(EventFileTest, NamesTheFolderThatCannotBeMade) {
  const TemporaryFolder folder;
  write_file(folder / "file", "x");
  const auto refusal = [](const std::string& path) {
    return test::message_of<ConfigError>([&] { EventFile(path, 1); });
  };
  EXPECT_EQ(refusal(folder / "file"), folder / "file" + " cannot be made: Not a directory");
  const std::string long_name = folder / std::string(300, 'x');
  EXPECT_EQ(refusal(long_name), long_name + " cannot be made: File name too long");
}

}  // namespace event_file_test
}  // namespace cohort::train
