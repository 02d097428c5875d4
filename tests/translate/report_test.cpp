// SPDX-License-Identifier: Apache-2.0
// The page about a run, as a browser (Debian's chromium, which scripts/setup installs) reads it.
#include "cohort/translate/report.h"

#include <cstdlib>
#include <filesystem>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <string>

#include "cohort/base/error.h"
#include "cohort/train/history.h"

#include "tests/base/temporary_folder.h"
#include "tests/support/shell.h"

namespace cohort::translate {
namespace report_test {

using Texts = std::vector<std::string>;

size_t count(const std::string& text, const std::string& part) {
  size_t found = 0;
  for (size_t at = 0; (at = text.find(part, at)) != std::string::npos; at += part.size()) ++found;
  return found;
}

void write_start(train::History& history, int64_t update, int ranks) {
  const auto all = static_cast<size_t>(ranks);
  history.append({{"type", "start"},
                  {"update", update},
                  {"time", "2025-01-31T12:00:05Z"},
                  {"ranks", ranks},
                  {"precision", "float32"},
                  {"parameters", 93'255'680},
                  {"libtorch", "2.11.0"},
                  {"hosts", Texts(all, "node-a")},
                  {"cpus", Texts(all, "Some CPU @ 3 GHz")},
                  {"cores", std::vector<double>(all, 8)},
                  {"threads", std::vector<double>(all, 4)},
                  {"memory_gib", std::vector<double>(all, 31.25)},
                  {"instructions", Texts(all, "avx2 fma")},
                  {"gpus", Texts{"NVIDIA Fake 80GB", "NVIDIA Far"}},
                  {"gpu_hosts", Texts{"node-a", "node-b"}},
                  {"gpu_total_gib", std::vector<double>{80, NAN}},
                  {"sample_sources", Texts{"a red <cat>", "two dogs"}},
                  {"sample_references", Texts{"eine rote Katze", "zwei Hunde"}}});
}

// Two starts of three epochs, on two ranks, with one GPU.
void write_run(const std::string& folder) {
  std::filesystem::create_directories(folder);
  train::History history(folder + "/history.jsonl");
  write_start(history, 0, 2);
  for (int64_t update = 10; update <= 300; update += 10) {
    const auto at = static_cast<double>(update);
    if (update == 110) write_start(history, 100, 2);
    history.append({{"type", "train"},
                    {"epoch", 1 + (update - 1) / 100},
                    {"update", update},
                    {"wall_s", at},
                    {"loss", 9 - at / 50},
                    {"gradient_norm", 1.5},
                    {"learning_rate", at * 1e-5},
                    {"tgt_tokens_per_s", 8000},
                    {"rank_tokens_per_s", std::vector<double>{4060, 4055}},
                    {"gpu_percent", std::vector<double>{update == 50 ? 99.0 : 87.0}},
                    {"gpu_memory_gib", std::vector<double>{12}}});
    if (update % 100 != 0) continue;
    history.append({{"type", "valid"},
                    {"epoch", update / 100},
                    {"update", update},
                    {"wall_s", at},
                    {"train_loss", 9 - at / 50},
                    {"valid_loss", 9.5 - at / 50},
                    {"valid_bleu", at / 20},
                    {"valid_chrf", at / 10},
                    {"best", true},
                    {"tgt_tokens_per_s", 8000},
                    {"gpu_percent", std::vector<double>{update == 100 ? 90.0 : 87.0, 50}},
                    {"gpu_percent_peak", std::vector<double>{update == 100 ? 99.0 : 87.0, 70}},
                    {"gpu_memory_gib", std::vector<double>{12, NAN}},
                    {"gpu_memory_gib_peak", std::vector<double>{12, NAN}},
                    {"samples", Texts{update < 300 ? "eine eine" : "eine rote Katze", "zwei"}}});
  }
  write_file(folder + "/config.json",
             R"({"mini_batch_words": 4096, "train_sets": ["a.en", "a.de"]})");
}

struct Page {
  std::string dom;      // After scripts ran.
  std::string console;  // What the page complained of.
};

Page open_page(const std::string& html_file, const std::string& folder) {
  const test::Ended ended = test::shell(
      "chromium --headless --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run "
      "--window-size=1280,900 --hide-scrollbars "  // Bars come when the browser finds the time.
      "--enable-logging=stderr --user-data-dir=" +
      folder + "/profile --dump-dom file://" + html_file + " 2> " + folder + "/stderr");
  EXPECT_EQ(ended.code, 0) << ended.output << read_file(folder + "/stderr");
  Page page{.dom = ended.output, .console = ""};
  std::istringstream lines(read_file(folder + "/stderr"));
  for (std::string line; std::getline(lines, line);)
    if (line.find("CONSOLE") != std::string::npos) page.console += line + "\n";
  return page;
}

TEST(ReportTest, ABrowserShowsCurvesTranslationsAndMachines) {
  const TemporaryFolder folder;
  write_run(folder / "run");
  write_report(folder / "run");
  const Page page = open_page(folder / "run/report.html", folder.path());
  EXPECT_EQ(page.console, "");
  // Loss and scores two each, rate, norm, speed, ranks two, GPU two; one mark in each of 8 charts.
  EXPECT_EQ(count(page.dom, "<path class=\"line "), 11);
  EXPECT_EQ(count(page.dom, "<path class=\"dots "), 3) << "loss, BLEU, chrF of validations";
  EXPECT_EQ(count(page.dom, "<figure"), 8);
  EXPECT_EQ(count(page.dom, "<path class=\"mark\""), 8);
  EXPECT_EQ(count(page.dom, "class=\"tip\""), 8) << "the script has run";
  for (const char* shown :
       {"<title>run \xC2\xB7 Cohort</title>", "<b>15.00</b>", "<b>30.00</b>", "<b>3.500</b>",
        "<b>8,000</b>", "a red &lt;cat&gt;", "<span class=\"same\">eine rote Katze</span>",
        "0\xE2\x80\x93"
        "1",
        "Some CPU @ 3 GHz", "31.2 GiB", "avx2 fma", "93,255,680 parameters",
        "<td>node-a</td><td>0</td><td>NVIDIA Fake 80GB</td><td>80</td><td>12 / 12</td>"
        "<td>88 / 99</td>",
        "<td>node-b</td><td>1</td><td>NVIDIA Far</td><td>\xE2\x80\x93</td><td>\xE2\x80\x93</td>"
        "<td>50 / 70</td>",
        "mini_batch_words", "a.en, a.de", "2025-01-31 12:00 UTC", "no end recorded yet"}) {
    EXPECT_NE(page.dom.find(shown), std::string::npos) << shown;
  }
  // One word of two is the reference's, and it is there once.
  EXPECT_NE(page.dom.find("<span class=\"same\">eine</span> eine"), std::string::npos);
  EXPECT_EQ(count(page.dom, "http://") + count(page.dom, "https://"), 0) << "nothing from outside";

  // Place, size, colours and text of all that can be seen. (Two pictures of one page may differ in
  // some pixels on a busy machine.)
  const auto seen = [&](std::string html) {
    html.insert(html.rfind("</body>"), R"js(<script>
      const seen = [];
      for (const e of document.body.querySelectorAll("*:not(script)")) {
        if (!e.checkVisibility({opacityProperty: true, visibilityProperty: true})) continue;
        const b = e.getBoundingClientRect(), s = getComputedStyle(e);
        seen.push([e.tagName, b.x, b.y, b.width, b.height, s.color, s.fill, s.stroke,
                   s.backgroundColor, s.fontSize, e.children.length ? "" : e.textContent].join(" "));
      }
      document.body.replaceChildren(seen.join("\n"));
      </script>)js");
    write_file(folder / "run/probe.html", html);
    return open_page(folder / "run/probe.html", folder.path()).dom;
  };
  const auto body = [](const std::string& dom) { return dom.substr(dom.find("<body")); };
  std::string html = read_file(folder / "run/report.html");
  const std::string whole = body(seen(html));
  const size_t script = html.rfind("<script>"), end = html.rfind("</script>");
  EXPECT_GT(count(whole, "\n"), 200) << whole;
  EXPECT_EQ(whole, body(seen(html.erase(script, end + 9 - script))))
      << "the page is the same without its script";
}

TEST(ReportTest, OfManyRanksTheHighestTheMedianAndTheLowestAreShown) {
  const TemporaryFolder folder;
  {
    train::History history(folder / "history.jsonl");
    for (const double update : {10, 20}) {
      std::vector<double> speeds;
      for (int rank = 0; rank < 33; ++rank) speeds.push_back(1000 + (rank * 7) % 33);
      history.append({{"type", "train"}, {"update", update}, {"rank_tokens_per_s", speeds}});
    }
  }
  const std::string html = report_html(folder.path());
  EXPECT_EQ(count(html, "<path class=\"line "), 3);
  for (const char* point : {"[10.0,1032.0]", "[10.0,1016.0]", "[10.0,1000.0]"})
    EXPECT_NE(html.find(point), std::string::npos) << point << "\n" << html;
}

TEST(ReportTest, ThePointerIsShownTheValuesBelowIt) {
  const TemporaryFolder folder;
  write_run(folder / "run");
  std::string html = report_html(folder / "run");
  html.replace(html.find("</body>"), 7, R"(<script>
    const area = document.querySelector(".area"), box = area.getBoundingClientRect();
    area.dispatchEvent(new PointerEvent("pointermove", {clientX: box.left + box.width * 0.67}));
    </script></body>)");
  write_file(folder / "probe.html", html);
  const Page page = open_page(folder / "probe.html", folder.path());
  EXPECT_EQ(page.console, "");
  const size_t tip = page.dom.find("class=\"tip\"");
  const std::string shown = page.dom.substr(tip, page.dom.find("<div class=\"x\"", tip) - tip);
  EXPECT_NE(shown.find("update</span><b>200</b>"), std::string::npos) << shown;
  EXPECT_NE(shown.find("training</span><b>5</b>"), std::string::npos) << shown;
  EXPECT_NE(shown.find("validation</span><b>5.5</b>"), std::string::npos) << shown;
}

TEST(ReportTest, AHistoryOfAnEarlierVersionHasItsCurves) {
  const TemporaryFolder folder;
  write_file(folder / "history.jsonl",
             "{\"epoch\":1,\"update\":5,\"train_loss\":4.0,\"valid_loss\":3.5,\"valid_bleu\":1.5,"
             "\"best\":true}\n{\"epoch\":2,\"update\":10,\"train_loss\":3.0,\"valid_loss\":2.5,"
             "\"valid_bleu\":2.5,\"best\":true}\n{\"epoch\":3,\"upd");
  const std::string html = report_html(folder.path());
  EXPECT_EQ(count(html, "<path class=\"line "), 3);
  EXPECT_EQ(run_summary(folder.path(), {.sparklines = false}),
            "loss, training    4.000 -> 3.000\nloss, validation  3.500 -> 2.500\n"
            "BLEU              1.50 -> 2.50\n");
}

// Another program's lines, or a disk's fault: what can be shown is.
TEST(ReportTest, AFieldOfAnotherKindIsAsGoodAsMissing) {
  const TemporaryFolder folder;
  const std::string good =
      "{\"type\":\"valid\",\"epoch\":1,\"update\":5,\"valid_loss\":3.5,\"best\":true}\n";
  write_file(folder / "history.jsonl", good);
  const std::string summary = run_summary(folder.path(), {.sparklines = false});
  const char* kinds[] = {"null", "[]", "{}", "\"x\"", "7", "true", "[null,\"x\",{}]", "1e308"};
  for (const char* type : {"\"start\"", "\"train\"", "\"valid\"", "\"end\"", "null", "3", "[1]"}) {
    for (const char* field : {"type", "epoch", "update", "best", "samples", "wall_s", "loss",
                              "time", "valid_loss", "rank_tokens_per_s", "hosts", "gpus", "ranks",
                              "reason", "sample_sources", "sample_references", "gpu_percent"}) {
      for (const char* kind : kinds) {
        const std::string bad =
            std::string("{\"type\":") + type + ",\"" + field + "\":" + kind + "}\n";
        write_file(folder / "history.jsonl", bad + good + bad);
        write_file(folder / "config.json", bad);
        EXPECT_NE(report_html(folder.path()).find("</html>"), std::string::npos) << bad;
        EXPECT_NO_THROW(run_summary(folder.path(), {})) << bad;
      }
    }
  }
  write_file(folder / "history.jsonl",
             "{\"type\":7}\n{\"type\":null,\"valid_loss\":1}\n[]\n\n\xFF\n" + good);
  EXPECT_EQ(run_summary(folder.path(), {.sparklines = false}), summary);
}

TEST(ReportTest, TextsAreEscapedOnce) {
  const TemporaryFolder folder;
  write_file(
      folder / "history.jsonl",
      "{\"type\":\"start\",\"time\":\"<noon>\"}\n{\"type\":\"start\",\"time\":\"<noon>\"}\n");
  const std::string html = report_html(folder.path());
  EXPECT_EQ(count(html, "&lt;noon&gt;"), 3) << "header and two rows";
  EXPECT_EQ(count(html, "&amp;"), 0);
}

TEST(ReportTest, APlaceholderInATextIsText) {
  const TemporaryFolder folder;
  write_file(folder / "history.jsonl", "{\"type\":\"start\",\"time\":\"{{script}}\"}\n");
  write_file(folder / "config.json", R"({"note": "{{unknown}}"})");
  const std::string html = report_html(folder.path());
  EXPECT_EQ(count(html, "{{"), 2) << "the two texts, and no placeholder of the page";
  EXPECT_EQ(count(html, "{{script}}"), 1);
  EXPECT_EQ(count(html, "{{unknown}}"), 1);
}

TEST(ReportTest, TheSummaryFitsTheWidth) {
  const TemporaryFolder folder;
  write_run(folder / "run");
  EXPECT_EQ(run_summary(folder / "run", {.width = 32, .sparklines = false}),
            "loss, training    8.800 -> 3.000\nloss, validation  7.500 -> 3.500\n"
            "BLEU              5.00 -> 15.00\nchrF              10.00 -> 30.00\n"
            "tokens/s          8000 -> 8000\n");
  EXPECT_EQ(run_summary(folder / "run", {.width = 10, .sparklines = false}),
            "loss,3.000\nloss,3.500\nBLEU 15.00\nchrF 30.00\ntokens8000\n");
  for (const size_t width : {1U, 5U, 10U, 20U, 30U, 40U, 60U, 80U}) {
    std::istringstream lines(run_summary(folder / "run", {.width = width, .utf8 = false}));
    for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), width) << line;
  }
  const std::string summary = run_summary(folder / "run", {});
  EXPECT_NE(summary.find("█"), std::string::npos) << summary;
  EXPECT_NE(summary.find("BLEU              ▁▅█"), std::string::npos) << summary;
}

TEST(ReportTest, AFolderWithoutARunIsNamed) {
  const TemporaryFolder folder;
  try {
    write_report(folder.path());
    FAIL() << "no exception";
  } catch (const ConfigError& error) {
    EXPECT_EQ(one_line(error),
              folder / "history.jsonl" + ": cannot be read: expected the history of a run");
  }
}

}  // namespace report_test
}  // namespace cohort::translate
