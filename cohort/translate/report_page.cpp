#include "cohort/translate/report_page.h"

namespace cohort::translate {

const char* const kReportStyle = R"css(
:root {
  color-scheme: light dark;
  --page: #f6f7f9; --card: #ffffff; --ink: #1a1f2b; --quiet: #5c6575; --line: #e3e6eb; --grid: #eceef2;
  --good: #14764f; --good-soft: #e2f4ea; --busy: #1d5fc4; --busy-soft: #e5eefb;
  --c0: #2563c9; --c1: #d9730d; --c2: #16855b; --c3: #8b3fc7; --c4: #c2334d; --c5: #0e8ba0;
  --c6: #8a6d14; --c7: #6b7280;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #12151b; --card: #1a1e26; --ink: #e6e9ef; --quiet: #9aa4b5; --line: #2b313c; --grid: #262b35;
    --good: #6fd3a4; --good-soft: #173327; --busy: #8ab6ff; --busy-soft: #1a2a44;
    --c0: #6ea4ff; --c1: #f2a35e; --c2: #55c795; --c3: #c08df0; --c4: #f2788e; --c5: #4ec3d6;
    --c6: #d6b656; --c7: #9aa4b5;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "Noto Sans CJK SC", "PingFang SC",
    "Microsoft YaHei", "DejaVu Sans", sans-serif;
  font-variant-numeric: tabular-nums;
}
main { max-width: 1240px; margin: 0 auto; padding: 28px 20px 40px; }
h1 { font-size: 24px; line-height: 1.25; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 36px 0 12px; }
header p { margin: 6px 0 0; color: var(--quiet); }
.state { display: inline-block; padding: 1px 10px; border-radius: 99px; font-size: 13px; font-weight: 600;
  background: var(--busy-soft); color: var(--busy); }
.state.ended { background: var(--good-soft); color: var(--good); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(142px, 1fr)); gap: 12px; margin-top: 20px; }
.tile, .chart, .sample, .table { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
.tile { padding: 12px 14px; }
.tile b { display: block; font-size: 24px; line-height: 1.35; font-weight: 650; white-space: nowrap; }
.tile span { color: var(--quiet); font-size: 13px; display: block; line-height: 1.3; }
.tile small { display: block; color: var(--quiet); font-size: 12px; line-height: 1.3; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)); gap: 16px; }
.chart { margin: 0; padding: 14px 16px 10px; position: relative; }
figcaption { font-weight: 600; }
figcaption small { color: var(--quiet); font-weight: 400; font-size: 13px; margin-left: 4px; }
.legend { min-height: 22px; font-size: 13px; color: var(--quiet); }
.legend span { margin-right: 14px; white-space: nowrap; }
.legend i { display: inline-block; width: 14px; height: 3px; border-radius: 2px; margin-right: 6px;
  vertical-align: middle; background: currentColor; }
.legend i.mark { height: 12px; width: 0; border-left: 1px dashed var(--quiet); border-radius: 0; background: none; }
.plot { display: grid; grid-template-columns: 48px minmax(0, 1fr); margin-top: 10px; padding-right: 18px;
  font-size: 12px;
  color: var(--quiet); }
.plot .y { position: relative; height: 210px; }
.plot .y span { position: absolute; right: 8px; transform: translateY(50%); white-space: nowrap; }
.area { position: relative; height: 210px; touch-action: pan-y; }
.area svg { display: block; width: 100%; height: 100%; overflow: visible; }
.plot .x { grid-column: 2; position: relative; height: 38px; }
.plot .x span { position: absolute; top: 5px; transform: translateX(-50%); white-space: nowrap; }
.plot .x em { position: absolute; right: 0; bottom: 0; font-style: normal; }
path { fill: none; vector-effect: non-scaling-stroke; }
.grid { stroke: var(--grid); stroke-width: 1; }
.line { stroke: currentColor; stroke-width: 1.75; stroke-linejoin: round; }
.dots { stroke: currentColor; stroke-width: 6; stroke-linecap: round; }
svg .mark { stroke: var(--quiet); stroke-width: 1; stroke-dasharray: 4 4; opacity: .7; }
.s0 { color: var(--c0); } .s1 { color: var(--c1); } .s2 { color: var(--c2); } .s3 { color: var(--c3); }
.s4 { color: var(--c4); } .s5 { color: var(--c5); } .s6 { color: var(--c6); } .s7 { color: var(--c7); }
.rule { position: absolute; top: 0; bottom: 0; width: 1px; background: var(--quiet); opacity: .6; pointer-events: none; }
.spot { position: absolute; width: 9px; height: 9px; margin: -4.5px; border-radius: 50%; background: currentColor;
  border: 2px solid var(--card); box-sizing: content-box; margin: -6.5px; pointer-events: none; }
.tip { position: absolute; z-index: 2; top: 0; padding: 7px 10px; border-radius: 8px; pointer-events: none;
  background: var(--card); color: var(--ink); border: 1px solid var(--line);
  box-shadow: 0 4px 16px rgb(0 0 0 / .16); white-space: nowrap; line-height: 1.45; }
.tip div { display: flex; justify-content: space-between; gap: 14px; }
.tip i { display: inline-block; width: 9px; height: 9px; border-radius: 50%; background: currentColor; margin-right: 6px; }
.sample { padding: 14px 16px; margin-bottom: 14px; }
.sample dl { display: grid; grid-template-columns: 104px minmax(0, 1fr); gap: 3px 14px; margin: 0; }
.sample dt { color: var(--quiet); font-size: 13px; line-height: 22px; }
.sample dd { margin: 0; overflow-wrap: anywhere; }
.sample .said { font-weight: 500; }
.sample .later { border-top: 1px solid var(--line); margin-top: 9px; padding-top: 9px; }
.sample .same { color: var(--good); background: var(--good-soft); border-radius: 3px; }
.best-word { color: var(--good); font-weight: 600; }
.note { color: var(--quiet); font-size: 13px; margin: -6px 0 12px; }
.table { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; vertical-align: top; padding: 7px 14px; border-top: 1px solid var(--line); }
thead th { border-top: 0; color: var(--quiet); font-weight: 500; font-size: 13px; white-space: nowrap; }
td { white-space: nowrap; }
td:last-child { white-space: normal; min-width: 200px; }
.config { columns: 3 280px; column-gap: 28px; padding: 10px 16px; font-size: 14px; }
.config div { display: flex; justify-content: space-between; gap: 14px; padding: 3px 0;
  border-bottom: 1px solid var(--grid); break-inside: avoid; }
.config span { color: var(--quiet); } .config b { font-weight: 500; text-align: right; overflow-wrap: anywhere; }
footer { margin-top: 36px; color: var(--quiet); font-size: 13px; }
@media (max-width: 560px) {
  main { padding: 18px 12px 28px; }
  .sample dl { grid-template-columns: minmax(0, 1fr); gap: 0; }
  .sample dd { margin-bottom: 6px; }
  .tiles { grid-template-columns: repeat(auto-fit, minmax(120px, 1fr)); gap: 8px; }
  .tile b { font-size: 20px; }
}
@media print { body { background: none; } .chart, .sample, .table { break-inside: avoid; } }
)css";

const char* const kReportScript = R"js(
"use strict";
const grouped = new Intl.NumberFormat("en", {maximumFractionDigits: 0});
const readable = (n) => {
  const size = Math.abs(n);
  if (size === 0) return "0";
  if (size >= 1e9 || size < 1e-3) return n.toExponential(3).replace(/\.?0+e/, "e").replace("e+", "e");
  if (size >= 1000) return grouped.format(n);
  return String(Number(n.toPrecision(4)));
};
for (const chart of document.querySelectorAll(".chart")) {
  const data = JSON.parse(chart.querySelector("script").textContent);
  const area = chart.querySelector(".area");
  const title = chart.querySelector("figcaption").firstChild.textContent.trim().toLowerCase();
  const make = (name) => {
    const made = document.createElement("div");
    made.className = name;
    made.hidden = true;
    area.append(made);
    return made;
  };
  const rule = make("rule"), tip = make("tip");
  const spots = data.series.map((_, i) => make("spot s" + i));
  const [x0, x1] = data.x, [y0, y1] = data.y;
  const nearest = (points, x) => {
    let low = 0, high = points.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (points[middle][0] < x) low = middle + 1; else high = middle;
    }
    return low > 0 && x - points[low - 1][0] < points[low][0] - x ? points[low - 1] : points[low];
  };
  const hide = () => { for (const part of [rule, tip, ...spots]) part.hidden = true; };
  const show = (event) => {
    const box = area.getBoundingClientRect();
    const x = x0 + (x1 - x0) * Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    const found = data.series.map((series) => nearest(series.points, x));
    const at = found.reduce((a, b) => (Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a))[0];
    const left = (px) => 100 * (px - x0) / (x1 - x0) + "%";
    rule.style.left = left(at);
    rule.hidden = tip.hidden = false;
    tip.replaceChildren();
    const row = (name, value, color) => {
      const line = document.createElement("div"), label = document.createElement("span");
      const number = document.createElement("b");
      if (color) {
        const dot = document.createElement("i");
        dot.className = color;
        label.append(dot);
      }
      label.append(name);
      number.textContent = value;
      line.append(label, number);
      tip.append(line);
    };
    row(data.name, grouped.format(at));
    const reach = 0.02 * (x1 - x0);
    found.forEach((point, i) => {
      const near = Math.abs(point[0] - at) <= reach;
      spots[i].hidden = !near;
      if (!near) return;
      spots[i].style.left = left(point[0]);
      spots[i].style.top = 100 * (y1 - point[1]) / (y1 - y0) + "%";
      row(data.series[i].name || title, readable(point[1]), "s" + i);
    });
    const place = box.width * (at - x0) / (x1 - x0);
    const beside = place + 14 + tip.offsetWidth <= box.width ? place + 14 : place - 14 - tip.offsetWidth;
    tip.style.left = Math.max(-40, beside) + "px";
  };
  area.addEventListener("pointermove", show);
  area.addEventListener("pointerdown", show);
  area.addEventListener("pointerleave", hide);
}
)js";

}  // namespace cohort::translate
