// Models, aliases, and the last ten minutes of the service, updated while the view is visible.

import { call } from "./api.js";
import { sparkline } from "./charts.js";
import { h, number, problemBox, render } from "./dom.js";
import { state, watch } from "./state.js";

const EVERY_MS = 2000;
let tables, charts, timer = 0;

export function mountOperations(root) {
  tables = h("div", { class: "two" });
  charts = h("div", { class: "sparks" });
  root.append(h("h2", {}, "Operations"), h("h3", { class: "sr" }, "The last ten minutes"), charts, tables);
  watch(["view"], () => {
    clearInterval(timer);
    if (state.view !== "operations") return;
    refresh();
    list();
    timer = setInterval(() => document.visibilityState === "visible" && refresh(), EVERY_MS);
  });
}

async function list() {
  try {
    const { models } = await call("GET", "/v1/models");
    const { aliases } = await call("GET", "/v1/aliases").catch(() => ({ aliases: [] }));
    render(tables,
      tableOf("Models", models, { name: "name", version: "version", items: "items", levels: "levels", epoch: "epoch" }),
      aliases.length > 0 && tableOf("Aliases", aliases, { name: "alias", bundle: "bundle", version: "version", previous: "before that", status: "status", refused: "refused" }));
  } catch (problem) {
    render(tables, problemBox(problem, list));
  }
}

function tableOf(caption, rows, columns) {
  const shown = Object.entries(columns).filter(([key]) => rows.some((row) => row[key] !== undefined && row[key] !== null));
  return h("div", { class: "panel scroll", tabindex: 0, role: "region", "aria-label": caption }, h("table", {}, h("caption", {}, caption),
    h("thead", {}, h("tr", {}, shown.map(([, name]) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, rows.map((row) => h("tr", {}, shown.map(([key], i) => {
      const value = typeof row[key] === "number" ? number(row[key]) : row[key] ?? "–";
      return i ? h("td", {}, key === "version" ? h("code", {}, value) : value) : h("th", { scope: "row" }, value);
    }))))));
}

async function refresh() {
  let answer;
  try {
    answer = await call("GET", "/v1/stats");
  } catch (problem) {
    render(charts, problemBox(problem, refresh));
    return;
  }
  const { series, last_minute: minute, queue, process } = answer;
  const of = (...names) => names.map((name) => ({ name: name.replace(/_ms$/, ""), values: series[name] }));
  const percent = (name) => [{ name, values: series[name].map((value) => (value === null ? null : 100 * value)) }];
  render(charts,
    sparkline("Answers per second", of("qps"), { now: [minute.qps] }),
    sparkline("Latency", of("p50_ms", "p99_ms"), { unit: " ms", now: [minute.p50_ms, minute.p99_ms] }),
    sparkline("Drafted levels that were accepted", percent("acceptance"), { unit: " %", digits: 0 }),
    sparkline("Target passes per answer", of("target_passes"), { digits: 2 }),
    sparkline("Requests per batch", of("batch_size")),
    sparkline("Problems answered", of("errors"), { digits: 0, now: [minute.errors] }),
    sparkline("Answers filled up", of("fallbacks"), { digits: 0, now: [minute.fallbacks] }),
    sparkline("Events stored", of("events"), { digits: 0, now: [minute.events] }),
    series.shadow_overlap.some((value) => value !== null) && sparkline("Overlap with the shadow", percent("shadow_overlap"), { unit: " %", digits: 0 }),
    h("p", { class: "fine wide" }, [
      `${number(queue.depth)} of ${number(queue.limit)} places in the queue taken`, `up for ${span(process.uptime_s)}`,
      process.rss_bytes && `${number(process.rss_bytes / 2 ** 20)} MiB of memory`, `version ${answer.version}`,
    ].filter(Boolean).join(" · "), ". Figures are of the last minute, lines of the last ten minutes."));
}

function span(seconds) {
  if (seconds < 120) return `${number(seconds)} s`;
  return seconds < 7200 ? `${number(seconds / 60)} minutes` : `${number(seconds / 3600, 1)} hours`;
}
