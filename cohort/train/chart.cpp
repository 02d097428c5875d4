// SPDX-License-Identifier: Apache-2.0
#include "cohort/train/chart.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>

namespace cohort::train {
namespace {

constexpr size_t kMaxPoints = 600;
constexpr double kSide = 1000;  // Of the SVG's square, which the page stretches.

template <class... Values>
std::string print(const char* format, Values... values) {
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), format, values...);
  return text.data();
}

// "0.0500" -> "0.05"
std::string without_zeros(std::string text) {
  if (text.find('.') == std::string::npos) return text;
  text.erase(text.find_last_not_of('0') + 1);
  if (text.back() == '.') text.pop_back();
  return text;
}

std::string percent(double share) {
  return print("%.2f%%", 100 * share);
}

// What an axis can hold: sums and differences of such numbers are finite.
bool is_drawable(double number) {
  return std::fabs(number) < 1e300;  // Not a number is neither below nor above.
}

// Whether round numbers tell the ends of a range apart.
bool is_range(double low, double high) {
  return high - low >= std::max(1e-9 * std::max(std::fabs(low), std::fabs(high)), 1e-300);
}

struct Axis {
  std::vector<double> ticks;
  double low = 0;
  double high = 1;

  double place(double value) const { return (value - low) / (high - low); }
};

Axis x_axis(const std::vector<Series>& series) {
  Axis axis{.ticks = {}, .low = HUGE_VAL, .high = -HUGE_VAL};
  for (const Series& one : series) {
    for (const auto& [x, y] : one.points) {
      axis.low = std::min(axis.low, x);
      axis.high = std::max(axis.high, x);
    }
  }
  // Runs begin at 0; one that is shown from far on may begin there.
  if (axis.low < 0.5 * axis.high) axis.low = std::min(axis.low, 0.0);
  if (!is_range(axis.low, axis.high)) axis.high = axis.low + std::max(1.0, std::fabs(axis.low) / 2);
  for (const double tick : round_ticks(axis.low, axis.high, 6))
    if (tick >= axis.low && tick <= axis.high) axis.ticks.push_back(tick);
  return axis;
}

Axis y_axis(const std::vector<Series>& series, bool from_zero) {
  double low = HUGE_VAL, high = -HUGE_VAL;
  for (const Series& one : series) {
    for (const auto& [x, y] : one.points) {
      low = std::min(low, y);
      high = std::max(high, y);
    }
  }
  if (from_zero) low = std::min(low, 0.0);
  Axis axis{.ticks = round_ticks(low, high, 5)};
  axis.low = axis.ticks.front();
  axis.high = axis.ticks.back();
  return axis;
}

std::string path(const Points& points, const Axis& x, const Axis& y) {
  std::string d;
  for (const auto& [px, py] : points) {
    d +=
        print("%s%.1f %.1f", d.empty() ? "M" : "L", kSide * x.place(px), kSide * (1 - y.place(py)));
  }
  return d;
}

// Lines of no length with round ends: they stay round however the SVG is stretched.
std::string dots(const Points& points, const Axis& x, const Axis& y) {
  std::string d;
  for (const auto& [px, py] : points)
    d += print("M%.1f %.1fh0", kSide * x.place(px), kSide * (1 - y.place(py)));
  return d;
}

std::string svg(const Chart& chart, const Axis& x, const Axis& y) {
  std::string grid;
  for (const double tick : y.ticks) grid += print("M0 %.1fH1000", kSide * (1 - y.place(tick)));
  std::string lines;
  for (size_t i = 0; i < chart.series.size(); ++i) {
    const Series& one = chart.series[i];
    const std::string color = "s" + std::to_string(i);
    lines += "<path class=\"line " + color + "\" d=\"" + path(one.points, x, y) + "\"/>";
    if (one.dots || one.points.size() == 1)
      lines += "<path class=\"dots " + color + "\" d=\"" + dots(one.points, x, y) + "\"/>";
  }
  std::string marks;
  for (const ChartMark& mark : chart.marks) {
    if (mark.x >= x.low && mark.x <= x.high)
      marks +=
          "<path class=\"mark\" d=\"" + print("M%.1f 0V1000", kSide * x.place(mark.x)) + "\"/>";
  }
  return "<svg viewBox=\"0 0 1000 1000\" preserveAspectRatio=\"none\" role=\"img\" aria-label=\"" +
         escape_html(chart.title) + " by " + escape_html(chart.x_name) +
         "\"><path class=\"grid\" d=\"" + grid + "\"/>" + marks + lines + "</svg>";
}

std::string legend(const Chart& chart) {
  std::string html = "<div class=\"legend\">";
  const bool one_says_nothing = chart.series.size() == 1 && chart.series[0].name.empty();
  for (size_t i = 0; i < chart.series.size() && !one_says_nothing; ++i) {
    html += "<span><i class=\"s" + std::to_string(i) + "\"></i>" +
            escape_html(chart.series[i].name) + "</span>";
  }
  std::string last;
  for (const ChartMark& mark : chart.marks) {
    if (mark.name != last)
      html += "<span><i class=\"mark\"></i>" + escape_html(mark.name) + "</span>";
    last = mark.name;
  }
  return html + "</div>";
}

// Four digits tell neighbours apart; more would only make the page larger.
nlohmann::ordered_json rounded(double number) {
  return std::strtod(print("%.5g", number).c_str(), nullptr);
}

std::string data(const Chart& chart, const Axis& x, const Axis& y) {
  nlohmann::ordered_json json = {
      {"x", {x.low, x.high}}, {"y", {y.low, y.high}}, {"name", chart.x_name}};
  json["series"] = nlohmann::ordered_json::array();
  for (const Series& one : chart.series) {
    nlohmann::ordered_json points = nlohmann::ordered_json::array();
    for (const auto& [px, py] : one.points) points.push_back({std::round(px), rounded(py)});
    json["series"].push_back({{"name", one.name}, {"points", std::move(points)}});
  }
  std::string text = json.dump(-1, ' ', true, nlohmann::ordered_json::error_handler_t::replace);
  // "</script>" in a name would end the element.
  for (size_t at = 0; (at = text.find('<', at)) != std::string::npos;)
    text.replace(at, 1, "\\u003c");
  return "<script type=\"application/json\">" + text + "</script>";
}

}  // namespace

std::string escape_html(const std::string& text) {
  std::string escaped;
  for (const char c : text) {
    switch (c) {
      case '&':
        escaped += "&amp;";
        break;
      case '<':
        escaped += "&lt;";
        break;
      case '>':
        escaped += "&gt;";
        break;
      case '"':
        escaped += "&quot;";
        break;
      default:
        escaped += c;
    }
  }
  return escaped;
}

std::string readable(double number) {
  if (!std::isfinite(number)) return "\xE2\x80\x93";  // A dash, U+2013.
  const double size = std::fabs(number);
  if (size == 0) return "0";
  if (size >= 1e9 || size < 1e-3) {
    const std::string text = print("%.3e", number);
    const size_t e = text.find('e');
    return without_zeros(text.substr(0, e)) + "e" + std::to_string(std::stoi(text.substr(e + 1)));
  }
  if (size >= 1000) {
    std::string digits = print("%.0f", size);
    for (auto place = static_cast<ptrdiff_t>(digits.size()) - 3; place > 0; place -= 3)
      digits.insert(static_cast<size_t>(place), ",");
    return (number < 0 ? "-" : "") + digits;
  }
  const int decimals = size >= 100 ? 1 : size >= 10 ? 2 : size >= 1 ? 3 : 4;
  return without_zeros(print("%.*f", decimals, number));
}

std::vector<double> round_ticks(double low, double high, int count) {
  if (!is_range(low, high)) {  // As good as one value: a range around it.
    const double room = std::fabs(low) < 1e-290 ? 1 : std::fabs(low) * 0.1;
    low -= room;
    high += room;
  }
  const double raw = (high - low) / count;
  const double power = std::pow(10, std::floor(std::log10(raw)));
  double step = 10 * power;
  for (const double factor : {1.0, 2.0, 2.5, 5.0}) {
    if (factor * power >= raw * 0.999) {
      step = factor * power;
      break;
    }
  }
  std::vector<double> ticks;
  const double last = std::ceil(high / step - 1e-9);
  for (double i = std::floor(low / step + 1e-9); i <= last; ++i) ticks.push_back(i * step);
  return ticks;
}

Points thinned(const Points& points, size_t count) {
  if (points.size() <= count) return points;
  Points result;
  for (size_t i = 0; i < count; ++i) {
    const size_t begin = i * points.size() / count, end = (i + 1) * points.size() / count;
    double x = 0, y = 0;
    for (size_t k = begin; k < end; ++k) {
      x += points[k].first;
      y += points[k].second;
    }
    const auto number = static_cast<double>(end - begin);
    result.emplace_back(x / number, y / number);
  }
  return result;
}

std::string chart_html(const Chart& chart) {
  Chart drawn = chart;
  for (Series& one : drawn.series) {
    std::erase_if(one.points, [](const auto& point) {
      return !is_drawable(point.first) || !is_drawable(point.second);
    });
    one.points = thinned(one.points, kMaxPoints);
  }
  std::erase_if(drawn.series, [](const Series& one) { return one.points.empty(); });
  if (drawn.series.empty()) return "";
  const Axis x = x_axis(drawn.series);
  const Axis y = y_axis(drawn.series, chart.from_zero);
  std::string y_labels, x_labels;
  for (const double tick : y.ticks)
    y_labels +=
        "<span style=\"bottom:" + percent(y.place(tick)) + "\">" + readable(tick) + "</span>";
  for (const double tick : x.ticks)
    x_labels += "<span style=\"left:" + percent(x.place(tick)) + "\">" + readable(tick) + "</span>";
  const std::string unit =
      chart.unit.empty() ? "" : " <small>" + escape_html(chart.unit) + "</small>";
  return "<figure class=\"chart\"><figcaption>" + escape_html(chart.title) + unit +
         "</figcaption>" + legend(drawn) + "<div class=\"plot\"><div class=\"y\">" + y_labels +
         "</div><div class=\"area\">" + svg(drawn, x, y) + "</div><div class=\"x\">" + x_labels +
         "<em>" + escape_html(chart.x_name) + "</em></div></div>" + data(drawn, x, y) +
         "</figure>\n";
}

std::string sparkline(std::vector<double> values, size_t width, bool utf8) {
  std::erase_if(values, [](double value) { return !std::isfinite(value); });
  if (values.empty() || width == 0) return "";
  Points points;
  for (const double value : values) points.emplace_back(0, value);
  points = thinned(points, width);
  double low = points[0].second, high = low;
  for (const auto& [x, y] : points) {
    low = std::min(low, y);
    high = std::max(high, y);
  }
  constexpr std::array kAscii = {"_", ".", "-", "~", "=", "+", "*", "#"};
  std::string line;
  for (const auto& [x, y] : points) {
    const double share = high > low ? (y - low) / (high - low) : 0;
    const auto level = static_cast<size_t>(std::min(7.0, std::floor(share * 8)));
    line += utf8 ? "\xE2\x96" + std::string(1, static_cast<char>(0x81 + level)) : kAscii[level];
  }
  return line;
}

}  // namespace cohort::train
