// SPDX-License-Identifier: Apache-2.0
// Curves as HTML with inline SVG: a piece of a page that needs no script and no other file.
#pragma once
#include <string>
#include <utility>
#include <vector>

namespace cohort::train {

using Points = std::vector<std::pair<double, double>>;

/// One curve.
struct Series {
  std::string name;  ///< May be "" if it is the chart's only one: the title says what it is.
  /// x ascending. Left out are those of which x or y is no finite number below 1e300.
  Points points;
  bool dots = false;  ///< Each point has a dot, for curves with few.
};

/// A vertical line across a chart.
struct ChartMark {
  double x = 0;
  std::string name;
};

struct Chart {
  std::string title;
  std::string unit;  ///< Of y, in words; may be "".
  std::string x_name = "update";
  bool from_zero = false;  ///< The y axis begins at 0.
  std::vector<Series> series;
  std::vector<ChartMark> marks;
};

/// Returns `text` with the characters that mean something in HTML written as entities.
std::string escape_html(const std::string& text);

/// Returns the number for the eye: rounded to four digits, as 1.234e9 from 1e9 up and below 1e-3;
/// from 1,000 to 1e9 to a whole number with all its digits, grouped. Not finite: a dash.
std::string readable(double number);

/// Returns round numbers, ascending, about `count` of them, of which the first is at or below `low`
/// and the last at or above `high`. A range narrower than a billionth of its ends is widened first.
/// Precondition: both are below 1e300 in size.
std::vector<double> round_ticks(double low, double high, int count);

/// Returns at most `count` points: the mean of x and of y over neighbours.
Points thinned(const Points& points, size_t count);

/// Returns a <figure class="chart">: title, legend, axes, one <path class="line"> a curve, and the
/// points once more as JSON for a script that shows the values under the pointer. Curves longer
/// than 600 points are thinned. A chart without a point is the empty text.
/// Lines are drawn in an SVG that stretches with the page while texts keep their size, so that a
/// chart can be read at any width. Colours and sizes are the page's: classes s0, s1, ... by curve.
std::string chart_html(const Chart& chart);

/// Returns one character a value from U+2581 to U+2588 (or, if not `utf8`, from _ to #), of at most
/// `width` values: neighbours are averaged. Values that are not finite are left out.
std::string sparkline(std::vector<double> values, size_t width, bool utf8);

}  // namespace cohort::train
