// SPDX-License-Identifier: Apache-2.0
// Traces of training steps, as a viewer reads them.
#include "cohort/comm/profiler.h"

#include <ATen/ATen.h>
#include <fstream>
#include <gtest/gtest.h>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "cohort/base/error.h"
#include "cohort/comm/process_group.h"

#include "tests/base/temporary_folder.h"
#include "tests/support/message_of.h"
#include "tests/support/ranks.h"

namespace cohort::comm {
namespace profiler_test {

using Json = nlohmann::json;

Json read_trace(const std::string& path) {
  std::ifstream stream(path);
  EXPECT_TRUE(stream) << path;
  return Json::parse(stream);
}

// Ranges by their name.
std::multimap<std::string, Json> ranges_of(const Json& trace) {
  std::multimap<std::string, Json> ranges;
  for (const Json& event : trace.at("traceEvents"))
    if (event.value("ph", "") == "X") ranges.emplace(event.at("name"), event);
  return ranges;
}

// Names of tracks by their number.
std::map<int64_t, std::string> tracks_of(const Json& trace) {
  std::map<int64_t, std::string> tracks;
  for (const Json& event : trace.at("traceEvents"))
    if (event.value("name", "") == "thread_name")
      tracks[event.at("tid")] = event.at("args").at("name");
  return tracks;
}

// Steps with two all-reduces under way at once.
void train(Profiler& profiler, const ProcessGroup& group, int num_steps) {
  for (int step = 0; step < num_steps; ++step) {
    profiler.step();
    const ProfileScope scope("forward");
    const at::Tensor large = at::ones({1'000'000}), small = at::ones({10}, at::kBFloat16);
    Work first = group.all_reduce_async(large);
    Work second = group.all_reduce_async(small);
    first.wait();
    second.wait();
  }
}

TEST(ProfilerTest, ATraceHasTheStepsAskedForAndCommunicationOnTracksOfItsOwn) {
  test::ranks(2, [](const ProcessGroup& group) {
    const TemporaryFolder folder;
    Profiler profiler({.file = folder / "trace.json", .skip_steps = 2, .num_steps = 3},
                      group.rank(), group.size());
    train(profiler, group, 7);
    profiler.finish();
    const Json trace =
        read_trace(folder / (group.rank() == 0 ? "trace.json" : "trace.rank-1.json"));
    EXPECT_EQ(trace.at("distributedInfo").at("rank"), group.rank());
    EXPECT_EQ(trace.at("distributedInfo").at("world_size"), 2);
    const auto ranges = ranges_of(trace);
    for (int step = 0; step < 7; ++step) {
      EXPECT_EQ(ranges.count("ProfilerStep#" + std::to_string(step)), step >= 2 && step < 5 ? 1 : 0)
          << step;
    }
    EXPECT_EQ(ranges.count("forward"), 3);
    const auto tracks = tracks_of(trace);
    std::map<int64_t, int> bytes;
    std::multimap<int64_t, std::pair<double, double>> times;
    const auto [begin, end] = ranges.equal_range("shm:all_reduce");
    for (auto it = begin; it != end; ++it) {
      const Json& event = it->second;
      ++bytes[event.at("args").at("bytes").get<int64_t>()];
      const int64_t track = event.at("tid");
      ASSERT_TRUE(tracks.contains(track));
      EXPECT_LT(track, int64_t{1} << 31) << "Perfetto leaves out what does not fit into 32 bits";
      EXPECT_EQ(tracks.at(track).rfind("communication", 0), 0) << tracks.at(track);
      const double from = event.at("ts"), until = from + event.at("dur").get<double>();
      const auto [first, last] = times.equal_range(track);
      for (auto other = first; other != last; ++other)
        EXPECT_TRUE(until <= other->second.first || other->second.second <= from) << event;
      times.emplace(track, std::pair(from, until));
    }
    EXPECT_EQ(bytes[4'000'000], 3);
    EXPECT_EQ(bytes[20], 3);
  });
}

TEST(ProfilerTest, ALoopThatEndsEarlyWritesWhatItHas) {
  const TemporaryFolder folder;
  Profiler profiler({.file = folder / "t.json", .skip_steps = 1, .num_steps = 9}, 0, 1);
  for (int step = 0; step < 3; ++step) profiler.step();
  profiler.finish();
  profiler.finish();
  const auto ranges = ranges_of(read_trace(folder / "t.json"));
  EXPECT_EQ(ranges.count("ProfilerStep#0"), 0);
  EXPECT_EQ(ranges.count("ProfilerStep#1"), 1);
  EXPECT_EQ(ranges.count("ProfilerStep#2"), 1);
}

TEST(ProfilerTest, WhatCannotBeRecordedIsAnErrorThatNamesTheFile) {
  const TemporaryFolder folder;
  Profiler late({.file = folder / "t.json"}, 0, 1);
  late.step();
  const std::string message = test::message_of<ConfigError>([&] { late.finish(); });
  EXPECT_NE(message.find("t.json"), std::string::npos) << message;
  EXPECT_NE(message.find("after 1 steps"), std::string::npos) << message;
  const std::string nowhere = folder / "none/t.json";
  EXPECT_NE(
      test::message_of<ConfigError>([&] { Profiler({.file = nowhere}, 0, 1); }).find("none: "),
      std::string::npos);
  Profiler first({.file = folder / "a.json", .skip_steps = 0}, 0, 1);
  first.step();
  Profiler second({.file = folder / "b.json", .skip_steps = 0}, 0, 1);
  EXPECT_THROW(second.step(), c10::ValueError);
  first.step();  // The first one records on.
  first.finish();
  EXPECT_EQ(ranges_of(read_trace(folder / "a.json")).count("ProfilerStep#1"), 1);
}

TEST(ProfilerTest, WithoutAFileNothingIsRecorded) {
  Profiler profiler({}, 0, 1);
  for (int step = 0; step < 20; ++step) profiler.step();
  profiler.finish();
  const ProfilerOptions no_steps{.file = "t.json", .num_steps = 0};
  EXPECT_THROW(Profiler(no_steps, 0, 1), c10::ValueError);
}

}  // namespace profiler_test
}  // namespace cohort::comm
