// Bars with intervals.

import { h, number, svg } from "./dom.js";

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
