// SPDX-License-Identifier: Apache-2.0
#include "cohort/translate/report.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <numeric>
#include <set>

#include "cohort/base/atomic_file.h"
#include "cohort/train/chart.h"
#include "cohort/translate/report_page.h"
#include "cohort/translate/run_history.h"

namespace cohort::translate {
namespace {

namespace fs = std::filesystem;
using train::escape_html;
using train::readable;

constexpr size_t kMaxRankCurves = 8;
constexpr size_t kMaxHypotheses = 10;

size_t widest(const std::vector<Json>& lines, const char* key) {
  size_t width = 0;
  for (const Json& line : lines) {
    if (const auto found = line.find(key); found != line.end())
      width = std::max(width, found->size());
  }
  return width;
}

std::string duration(double seconds) {
  if (!(std::fabs(seconds) < 1e12)) return readable(seconds);
  const auto whole = static_cast<int64_t>(std::llround(seconds));
  const auto two = [](int64_t a, const char* unit_a, int64_t b, const char* unit_b) {
    return std::to_string(a) + unit_a + (b > 0 ? " " + std::to_string(b) + unit_b : "");
  };
  if (whole >= 86400) return two(whole / 86400, "d", whole % 86400 / 3600, "h");
  if (whole >= 3600) return two(whole / 3600, "h", whole % 3600 / 60, "m");
  if (whole >= 60) return two(whole / 60, "m", whole % 60, "s");
  return fixed(seconds, seconds < 10 ? 1 : 0) + "s";
}

std::string counted(double count, const std::string& thing) {
  return readable(count) + " " + thing + (count == 1 ? "" : "s");
}

// "2025-01-31T12:00:05Z" -> "2025-01-31 12:00 UTC"
std::string shown_time(const Json& start) {
  std::string time = text_of(start, "time");
  if (time.size() != 20) return time;
  time[10] = ' ';
  return time.substr(0, 16) + " UTC";
}

// Not a number without values.
double mean_of(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.) / static_cast<double>(values.size());
}

double mean_speed(const RunHistory& history) {
  const auto all = values_of(points_of(history.validations, "tgt_tokens_per_s"));
  return mean_of(all.empty() ? values_of(points_of(history.trains, "tgt_tokens_per_s")) : all);
}

// Replaces each {{name}} of `page` by its value. What a value holds is not looked at again.
std::string fill_template(const std::string& page,
                          const std::map<std::string, std::string>& values) {
  std::string filled;
  size_t from = 0;
  for (size_t open = 0; (open = page.find("{{", from)) != std::string::npos;) {
    const size_t close = page.find("}}", open);
    filled += page.substr(from, open - from) + values.at(page.substr(open + 2, close - open - 2));
    from = close + 2;
  }
  return filled + page.substr(from);
}

// ---- the page's parts, from top to bottom

std::string state_badge(const RunHistory& history) {
  if (!history.end.is_object()) return "<span class=\"state\">no end recorded yet</span>";
  return "<span class=\"state ended\">" + escape_html(text_of(history.end, "reason")) + "</span>";
}

std::string summary_line(const RunHistory& history) {
  std::string line;
  const auto add = [&](const std::string& item) {
    line += (line.empty() ? "" : " \xC2\xB7 ") + item;
  };
  if (const Json* last = history.last()) add(counted(number_of(*last, "update"), "update"));
  if (!history.starts.empty()) {
    const Json& start = history.starts.back();
    add(counted(number_of(start, "ranks"), "rank"));
    add(readable(number_of(start, "parameters")) + " parameters");
    add(escape_html(text_of(start, "precision")));
    add("started " + escape_html(shown_time(start)));
  }
  return line;
}

std::string tile(const std::string& name, const std::string& value,
                 const std::string& remark = "") {
  return "<div class=\"tile\"><span>" + name + "</span><b>" + value + "</b>" +
         (remark.empty() ? "" : "<small>" + remark + "</small>") + "</div>";
}

std::string tiles(const RunHistory& history) {
  std::string html;
  if (const Json* best = history.best()) {
    const std::string when = "best model, epoch " + readable(number_of(*best, "epoch"));
    if (std::isfinite(number_of(*best, "valid_bleu")))
      html += tile("BLEU", fixed(number_of(*best, "valid_bleu"), 2), when);
    if (std::isfinite(number_of(*best, "valid_chrf")))
      html += tile("chrF", fixed(number_of(*best, "valid_chrf"), 2), when);
    html += tile("validation loss", fixed(number_of(*best, "valid_loss"), 3), when);
  }
  html += tile("tokens/s", readable(mean_speed(history)), "target text, all ranks");
  if (const Json* last = history.last()) {
    html += tile("epoch", readable(number_of(*last, "epoch")));
    html += tile("updates", readable(number_of(*last, "update")));
    html += tile("time", duration(number_of(*last, "wall_s")), "with validation");
  }
  return "<div class=\"tiles\">" + html + "</div>";
}

std::vector<train::ChartMark> marks(const RunHistory& history) {
  std::vector<train::ChartMark> found;
  for (size_t i = 1; i < history.starts.size(); ++i)
    found.push_back({number_of(history.starts[i], "update"), "started again"});
  return found;
}

// One curve an element of an array, or, if that is too many, the ends and the middle.
std::vector<train::Series> curves_of(const std::vector<Json>& lines, const char* key,
                                     const std::string& name) {
  const size_t width = widest(lines, key);
  std::vector<train::Series> curves;
  if (width <= kMaxRankCurves) {
    for (size_t i = 0; i < width; ++i)
      curves.push_back(
          {.name = name + " " + std::to_string(i), .points = points_of(lines, key, i)});
    return curves;
  }
  curves = {{.name = "highest"}, {.name = "median"}, {.name = "lowest"}};
  for (const Json& line : lines) {
    std::vector<double> all;
    for (size_t i = 0; i < width; ++i) {
      if (const double one = element_of(line, key, i); std::isfinite(one)) all.push_back(one);
    }
    if (all.empty()) continue;
    std::sort(all.begin(), all.end());
    const double update = number_of(line, "update");
    curves[0].points.emplace_back(update, all.back());
    curves[1].points.emplace_back(update, all[all.size() / 2]);
    curves[2].points.emplace_back(update, all.front());
  }
  return curves;
}

std::string charts(const RunHistory& history) {
  const auto& trains = history.trains;
  const auto& validations = history.validations;
  std::string html;
  const auto add = [&](train::Chart chart) {
    chart.marks = marks(history);
    html += train::chart_html(chart);
  };
  const bool lines = !trains.empty();
  add({.title = "Loss",
       .unit = "per target token, natural logarithm",
       .series = {
           {.name = "training",
            .points = lines ? points_of(trains, "loss") : points_of(validations, "train_loss")},
           {.name = "validation", .points = points_of(validations, "valid_loss"), .dots = true}}});
  add({.title = "Translation",
       .unit = "scores on the validation set, 0 to 100",
       .from_zero = true,
       .series = {{.name = "BLEU", .points = points_of(validations, "valid_bleu"), .dots = true},
                  {.name = "chrF", .points = points_of(validations, "valid_chrf"), .dots = true}}});
  add({.title = "Learning rate",
       .from_zero = true,
       .series = {
           {.name = "", .points = points_of(lines ? trains : validations, "learning_rate")}}});
  add({.title = "Gradient norm",
       .unit = "before clipping",
       .from_zero = true,
       .series = {{.name = "", .points = points_of(trains, "gradient_norm")}}});
  add({.title = "Speed",
       .unit = "target tokens per second, all ranks",
       .from_zero = true,
       .series = {
           {.name = "", .points = points_of(lines ? trains : validations, "tgt_tokens_per_s")}}});
  add({.title = "Speed by rank",
       .unit = "target tokens per second of a rank's own work",
       .from_zero = true,
       .series = curves_of(trains, "rank_tokens_per_s", "rank")});
  add({.title = "GPUs busy",
       .unit = "percent of the time",
       .from_zero = true,
       .series = curves_of(trains, "gpu_percent", "GPU")});
  add({.title = "GPU memory",
       .unit = "GiB used",
       .from_zero = true,
       .series = curves_of(trains, "gpu_memory_gib", "GPU")});
  return html.empty() ? "" : "<h2>Curves</h2><div class=\"charts\">" + html + "</div>";
}

// Words between spaces; of scripts without spaces (beyond U+2E80) single characters.
std::vector<std::string> words(const std::string& line) {
  std::vector<std::string> found(1);
  for (size_t i = 0; i < line.size();) {
    const auto lead = static_cast<unsigned char>(line[i]);
    const size_t length = lead < 0x80 ? 1 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
    const std::string character = line.substr(i, length);
    i += length;
    if (character == " " || character >= "\xE2\xBA\x80") {
      found.push_back(character);
      found.emplace_back();
    } else {
      found.back() += character;
    }
  }
  std::erase(found, "");
  return found;
}

// `hypothesis` with the words marked that are in `reference`.
std::string compared(const std::string& hypothesis, const std::string& reference) {
  const auto known = words(reference);
  std::multiset<std::string> left(known.begin(), known.end());
  std::string html, run, space;  // A space between two marked words is marked, too.
  const auto flush = [&] {
    if (!run.empty()) html += "<span class=\"same\">" + run + "</span>";
    html += space;
    run.clear();
    space.clear();
  };
  for (const std::string& word : words(hypothesis)) {
    const auto found = left.find(word);
    if (word == " ") {
      space += word;
    } else if (found != left.end()) {
      left.erase(found);
      if (run.empty()) flush();
      run += space + escape_html(word);
      space.clear();
    } else {
      flush();
      html += escape_html(word);
    }
  }
  flush();
  return html.empty() ? "<em>(nothing)</em>" : html;
}

// What the model said at which validation; where it said the same twice, the first time.
std::string hypotheses(const std::vector<const Json*>& validations, size_t sample,
                       const std::string& reference) {
  std::vector<const Json*> told;
  const auto said = [&](const Json& line) { return texts_of(line, "samples")[sample]; };
  for (const Json* line : validations)
    if (told.empty() || said(*told.back()) != said(*line)) told.push_back(line);
  // Evenly many of a long run, its first and its last among them.
  std::vector<const Json*> shown;
  const size_t count = std::min(told.size(), kMaxHypotheses);
  for (size_t i = 0; i < count; ++i)
    shown.push_back(told[count == 1 ? 0 : i * (told.size() - 1) / (count - 1)]);
  std::string html;
  for (const Json* line : shown) {
    html += "<dt>epoch " + readable(number_of(*line, "epoch")) + "</dt><dd>" +
            compared(said(*line), reference) + "</dd>";
  }
  return html;
}

std::string samples(const RunHistory& history) {
  if (history.starts.empty()) return "";
  const auto sources = texts_of(history.starts.back(), "sample_sources");
  const auto references = texts_of(history.starts.back(), "sample_references");
  std::vector<const Json*> validations;
  for (const Json& line : history.validations)
    if (texts_of(line, "samples").size() == sources.size()) validations.push_back(&line);
  if (sources.empty() || validations.empty() || references.size() != sources.size()) return "";
  std::string html;
  for (size_t i = 0; i < sources.size(); ++i) {
    html += "<article class=\"sample\"><dl><dt>source</dt><dd class=\"said\">" +
            escape_html(sources[i]) + "</dd><dt>reference</dt><dd class=\"said\">" +
            escape_html(references[i]) + "</dd></dl><dl class=\"later\">" +
            hypotheses(validations, i, references[i]) + "</dl></article>";
  }
  return "<h2>Translations over time</h2><p class=\"note\">A few sentences of the validation set. "
         "Words that the reference has as well are <span class=\"best-word\">marked</span>.</p>" +
         html;
}

std::string row(const char* cell, const std::vector<std::string>& cells) {
  std::string html = "<tr>";
  for (const std::string& one : cells)
    html += "<" + std::string(cell) + ">" + escape_html(one) + "</" + cell + ">";
  return html + "</tr>";
}

std::string table(const std::vector<std::string>& names, const std::string& rows) {
  return "<div class=\"table\"><table><thead>" + row("th", names) + "</thead><tbody>" + rows +
         "</tbody></table></div>";
}

// "40.5 / 71": mean of the curve of means, and the highest of the curve of peaks.
std::string mean_and_peak(const train::Points& means, const train::Points& peaks) {
  const auto all = values_of(means), highest = values_of(peaks);
  if (all.empty() || highest.empty()) return readable(std::nan(""));
  return readable(mean_of(all)) + " / " +
         readable(*std::max_element(highest.begin(), highest.end()));
}

// A GPU's use, by the lines about validation; before there is one, rank 0's host, whose GPUs come
// first, has it in the lines about training.
std::string gpu_use(const RunHistory& history, const std::string& key, size_t gpu) {
  const auto means = points_of(history.validations, key.c_str(), gpu);
  if (values_of(means).empty()) {
    const auto points = points_of(history.trains, key.c_str(), gpu);
    return mean_and_peak(points, points);
  }
  return mean_and_peak(means, points_of(history.validations, (key + "_peak").c_str(), gpu));
}

// All hosts' GPUs.
std::string gpus(const RunHistory& history) {
  const Json& start = history.starts.back();
  const auto names = texts_of(start, "gpus"), hosts = texts_of(start, "gpu_hosts");
  if (names.empty()) return "";
  std::string rows;
  for (size_t i = 0; i < names.size(); ++i) {
    rows += row("td", {i < hosts.size() ? hosts[i] : "", std::to_string(i), names[i],
                       readable(element_of(start, "gpu_total_gib", i)),
                       gpu_use(history, "gpu_memory_gib", i), gpu_use(history, "gpu_percent", i)});
  }
  return "<p class=\"note\">GPUs; what is used, and by whomever, as mean / peak.</p>" +
         table({"host", "GPU", "name", "memory, GiB", "GiB used", "percent of the time busy"},
               rows);
}

// Ranks on like machines share a row.
std::string machines(const RunHistory& history) {
  if (history.starts.empty()) return "";
  const Json& start = history.starts.back();
  const auto hosts = texts_of(start, "hosts"), cpus = texts_of(start, "cpus"),
             instructions = texts_of(start, "instructions");
  const auto cells_of = [&](size_t rank) {
    const auto text_at = [&](const std::vector<std::string>& all) {
      return rank < all.size() ? all[rank] : "";
    };
    return std::vector<std::string>{text_at(hosts),
                                    text_at(cpus),
                                    readable(element_of(start, "cores", rank)),
                                    readable(element_of(start, "threads", rank)),
                                    fixed(element_of(start, "memory_gib", rank), 1) + " GiB",
                                    text_at(instructions)};
  };
  std::string rows;
  for (size_t first = 0; first < hosts.size();) {
    size_t end = first + 1;
    while (end < hosts.size() && cells_of(end) == cells_of(first)) ++end;
    auto cells = cells_of(first);
    cells.insert(cells.begin(), end == first + 1 ? std::to_string(first)
                                                 : std::to_string(first) + "\xE2\x80\x93" +
                                                       std::to_string(end - 1));
    rows += row("td", cells);
    first = end;
  }
  const std::string gpu_table = gpus(history);
  return "<h2>Machines</h2><p class=\"note\">libtorch " + escape_html(text_of(start, "libtorch")) +
         (gpu_table.empty() ? ", no GPU" : "") + "</p>" +
         table({"rank", "host", "processor", "cores", "threads", "memory", "instructions"}, rows) +
         gpu_table;
}

std::string starts(const RunHistory& history) {
  if (history.starts.size() < 2) return "";
  std::string rows;
  for (const Json& start : history.starts) {
    rows += row("td", {shown_time(start), readable(number_of(start, "update")),
                       readable(number_of(start, "ranks")), text_of(start, "precision")});
  }
  return "<h2>Starts</h2>" + table({"time", "from update", "ranks", "precision"}, rows);
}

std::string shown(const Json& value) {
  if (value.is_string()) return value.get<std::string>();
  if (value.is_array()) {
    std::string all;
    for (const Json& one : value) all += (all.empty() ? "" : ", ") + shown(one);
    return all;
  }
  return value.dump(-1, ' ', false, Json::error_handler_t::replace);
}

std::string configuration(const RunHistory& history) {
  if (!history.config.is_object()) return "";
  std::string html;
  for (const auto& [name, value] : history.config.items()) {
    html +=
        "<div><span>" + escape_html(name) + "</span><b>" + escape_html(shown(value)) + "</b></div>";
  }
  return "<h2>Configuration</h2><div class=\"table config\">" + html + "</div>";
}

}  // namespace

std::string report_html(const std::string& model_dir) {
  const RunHistory history = read_history(model_dir);
  std::string name = fs::absolute(model_dir).lexically_normal().filename().string();
  if (name.empty()) name = fs::absolute(model_dir).lexically_normal().parent_path().filename();
  return fill_template(kReportPage,
                       {{"name", escape_html(name)},
                        {"state", state_badge(history)},
                        {"summary", summary_line(history)},
                        {"body", tiles(history) + charts(history) + samples(history) +
                                     machines(history) + starts(history) + configuration(history)},
                        {"style", kReportStyle},
                        {"script", kReportScript}});
}

void write_report(const std::string& model_dir) {
  write_atomically(model_dir + "/report.html", report_html(model_dir));
}

}  // namespace cohort::translate
