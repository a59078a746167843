// Small SVG charts: lines of recent values, and bars with intervals.

import { h, number, svg } from "./dom.js";

const [WIDE, HIGH] = [240, 56];

/**
 * Lines of recent values with names, present values and range. A null is a gap.
 *
 * @param lines [{name, values}], with the same unit
 * @param now the present value of each line; by default its last value
 */
export function sparkline(title, lines, { unit = "", digits = 1, now } = {}) {
  const all = lines.flatMap((line) => line.values).filter((value) => value !== null && value !== undefined);
  const [low, high] = [Math.min(0, ...all), Math.max(...all, 1e-9)];
  const last = (values) => values.findLast((value) => value !== null && value !== undefined);
  const text = lines.map((line) => `${line.name} ${number(last(line.values), digits)}${unit}`).join(", ");
  const picture = svg("svg", { class: "spark", viewBox: `0 0 ${WIDE} ${HIGH}`, role: "img", preserveAspectRatio: "none",
    "aria-label": all.length ? `${title}: now ${text}; highest ${number(high, digits)}${unit}` : `${title}: nothing yet` },
  svg("line", { class: "base", x1: 0, x2: WIDE, y1: HIGH - 2, y2: HIGH - 2 }),
  lines.map((line, i) => {
    const { path, dots } = stroke(line.values, low, high);
    return [svg("path", { class: `line line-${i}`, d: path }), svg("path", { class: `dots line-${i}`, d: dots })];
  }));
  return h("div", { class: "spark-box" },
    h("h4", {}, title),
    h("p", { class: "spark-now" }, all.length ? lines.map((line, i) =>
      h("span", {}, h("span", { class: `key line-${i}`, "aria-hidden": "true" }), lines.length > 1 && `${line.name} `,
        h("strong", {}, number(now?.[i] ?? last(line.values), digits)), unit)) : "nothing yet"),
    picture,
    h("p", { class: "fine" }, all.length ? `up to ${number(high, digits)}${unit}` : ""));
}

/** Lines between adjacent values, and dots for values without a neighbour. */
function stroke(values, low, high) {
  const step = (WIDE - 6) / Math.max(1, values.length - 1);
  const known = (value) => value !== null && value !== undefined;
  let [path, dots] = ["", ""];
  values.forEach((value, i) => {
    if (!known(value)) return;
    const y = HIGH - 4 - ((HIGH - 10) * (value - low)) / (high - low || 1);
    const point = `${(3 + i * step).toFixed(1)} ${y.toFixed(1)}`;
    if (known(values[i - 1])) path += `L${point}`;
    else if (known(values[i + 1])) path += `M${point}`;
    else dots += `M${point}h0`;
  });
  return { path, dots };
}

/**
 * A table of horizontal bars with their values and, if known, their intervals.
 *
 * @param rows [{name, value, low, high, strong}]
 */
export function bars(caption, rows, digits = 3) {
  const most = Math.max(...rows.map((row) => row.high ?? row.value), 1e-9);
  return h("table", { class: "bars" }, h("caption", {}, caption),
    h("tbody", {}, rows.map((row) => {
      const at = (value) => (100 * value) / most;
      return h("tr", { class: row.strong ? "strong" : "" },
        h("th", { scope: "row" }, row.name),
        h("td", { class: "bar-cell" }, svg("svg", { viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" },
          svg("rect", { class: "bar-fill", x: 0, y: 1, width: at(row.value), height: 8 }),
          row.high !== undefined && row.low !== undefined
            ? svg("path", { class: "interval", d: `M${at(row.low)} 5H${at(row.high)}M${at(row.low)} 3v4M${at(row.high)} 3v4` }) : null)),
        h("td", { class: "figure" }, number(row.value, digits),
          row.low !== undefined && h("span", { class: "fine" }, ` ${number(row.low, digits)}–${number(row.high, digits)}`)));
    })));
}
