// SPDX-License-Identifier: Apache-2.0
#include "cohort/train/chart.h"

#include <cmath>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

namespace cohort::train {
namespace chart_test {

size_t count(const std::string& text, const std::string& part) {
  size_t found = 0;
  for (size_t at = 0; (at = text.find(part, at)) != std::string::npos; at += part.size()) ++found;
  return found;
}

TEST(ChartTest, NumbersAreReadable) {
  EXPECT_EQ(readable(0), "0");
  EXPECT_EQ(readable(12345.6), "12,346");
  EXPECT_EQ(readable(-1000), "-1,000");
  EXPECT_EQ(readable(26.5049), "26.5");
  EXPECT_EQ(readable(2.14159), "2.142");
  EXPECT_EQ(readable(0.05), "0.05");
  EXPECT_EQ(readable(0.0002), "2e-4");
  EXPECT_EQ(readable(std::nan("")), "\xE2\x80\x93");
}

TEST(ChartTest, TicksAreRoundAndEncloseTheValues) {
  EXPECT_EQ(round_ticks(0, 100, 5), (std::vector<double>{0, 20, 40, 60, 80, 100}));
  EXPECT_EQ(round_ticks(1.9, 9.5, 5), (std::vector<double>{0, 2, 4, 6, 8, 10}));
  const auto one_value = round_ticks(3, 3, 5);
  EXPECT_LT(one_value.front(), 3);
  EXPECT_GT(one_value.back(), 3);
  for (double power = -8; power < 9; ++power) {
    const double high = std::pow(10, power) * 1.7;
    const auto ticks = round_ticks(0, high, 5);
    EXPECT_GE(ticks.back(), high * (1 - 1e-9));
    EXPECT_LE(ticks.size(), 7) << high;
    EXPECT_GE(ticks.size(), 4) << high;
  }
}

TEST(ChartTest, TicksOfValuesThatAreAlmostEqualAreFew) {
  for (const double low : {0.0, 1.0, -1.0, 3.7, 1e6, 1e15, -1e15, 1e299, 1e-299, 5e-324}) {
    for (const double high : {low, std::nextafter(low, INFINITY), low * (1 + 1e-15),
                              low * (1 + 1e-10), low * (1 + 1e-8)}) {
      const auto ticks = round_ticks(std::min(low, high), std::max(low, high), 5);
      ASSERT_GE(ticks.size(), 2) << low << " to " << high;
      ASSERT_LE(ticks.size(), 12) << low << " to " << high;
      for (size_t i = 1; i < ticks.size(); ++i) ASSERT_LT(ticks[i - 1], ticks[i]);
      const double rounding = 1e-12 * std::fabs(low);
      EXPECT_LE(ticks.front(), std::min(low, high) + rounding);
      EXPECT_GE(ticks.back(), std::max(low, high) - rounding);
    }
  }
}

TEST(ChartTest, PointsWithoutAPlaceAreLeftOut) {
  const Points good = {{1, 2}, {2, 3}};
  Points all = {{NAN, 1}, {1, 2}, {INFINITY, 1}, {-INFINITY, 1}, {1.5, INFINITY}, {2, 3}};
  const std::string html = chart_html({.title = "t", .series = {{.name = "a", .points = good}}});
  EXPECT_EQ(chart_html({.title = "t", .series = {{.name = "a", .points = all}}}), html);
  EXPECT_EQ(chart_html({.title = "t", .series = {{.name = "a", .points = {{NAN, 1}, {NAN, 2}}}}}),
            "");
  const double next = std::nextafter(1e9, INFINITY);
  for (const Points& points : {Points{{1e9, 1}, {next, 1}},
                               {{1, 1e9}, {2, next}},
                               {{5e-324, 1}, {1e-323, 2}},
                               {{-9e299, -9e299}, {9e299, 9e299}},
                               {{3, 1}, {1, 2}}}) {
    const std::string drawn =
        chart_html({.title = "t", .series = {{.name = "a", .points = points}}});
    EXPECT_EQ(count(drawn, "<path class=\"line "), 1);
    EXPECT_EQ(count(drawn, "nan"), 0) << drawn;
    EXPECT_EQ(count(drawn, "inf"), 0) << drawn;
  }
}

TEST(ChartTest, LongCurvesAreThinnedToMeans) {
  Points points;
  for (int i = 0; i < 1000; ++i) points.emplace_back(i, 2 * i);
  const Points thin = thinned(points, 10);
  ASSERT_EQ(thin.size(), 10);
  EXPECT_DOUBLE_EQ(thin[0].first, 49.5);
  EXPECT_DOUBLE_EQ(thin[9].second, 1899);
  EXPECT_EQ(thinned(points, 1000), points);
}

TEST(ChartTest, AChartHasAPathForEachCurveAndItsPointsAsJson) {
  const std::string html =
      chart_html({.title = "Loss <1>",
                  .unit = "nats",
                  .series = {{.name = "a", .points = {{0, 4.0}, {10, std::nan("")}, {20, 2.0}}},
                             {.name = "</script>", .points = {{20, 3.0}}, .dots = true},
                             {.name = "empty", .points = {}}},
                  .marks = {{10, "again"}, {15, "again"}}});
  EXPECT_EQ(count(html, "<path class=\"line "), 2);
  EXPECT_EQ(count(html, "<path class=\"dots "), 1);
  EXPECT_EQ(count(html, "<path class=\"mark\""), 2);
  EXPECT_EQ(count(html, "again"), 1) << "once in the legend";
  EXPECT_NE(html.find("d=\"M0.0 0.0L1000.0 1000.0\""), std::string::npos) << html;
  EXPECT_NE(html.find("Loss &lt;1&gt;"), std::string::npos);
  EXPECT_EQ(count(html, "</script>"), 1) << "a name does not end the script";
  const std::string begin = "<script type=\"application/json\">";
  const size_t at = html.find(begin) + begin.size();
  const auto data = nlohmann::json::parse(html.substr(at, html.find("</script>") - at));
  EXPECT_EQ(data["series"][0]["points"], nlohmann::json::parse("[[0,4],[20,2]]"));
  EXPECT_EQ(data["series"][1]["name"], "</script>");
  EXPECT_EQ(chart_html({.title = "none", .series = {{.name = "a", .points = {{1, NAN}}}}}), "");
}

TEST(ChartTest, ASparklineHasAtMostTheWidthAndNoUtf8WhereThatIsNotWanted) {
  EXPECT_EQ(sparkline({1, 2, 3, 4, 5, 6, 7, 8}, 8, true), "▁▂▃▄▅▆▇█");
  EXPECT_EQ(sparkline({8, NAN, 1}, 8, false), "#_");
  EXPECT_EQ(sparkline({5, 5}, 8, true), "▁▁");
  EXPECT_EQ(sparkline(std::vector<double>(1000, 1.0), 30, false).size(), 30);
  EXPECT_EQ(sparkline({}, 30, true), "");
}

}  // namespace chart_test
}  // namespace cohort::train
