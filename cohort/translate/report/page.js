// SPDX-License-Identifier: Apache-2.0
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
