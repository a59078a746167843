// Experiments with users, the report of `recsys evaluate`, and the verdicts of retraining.

import { at, call } from "./api.js";
import { bars } from "./charts.js";
import { empty, h, moment, number, plural, problemBox, render, svg } from "./dom.js";
import { state, watch } from "./state.js";

const [WIDE, HIGH] = [600, 160];
const METRICS = { recall: "Recall", ndcg: "NDCG", mrr: "MRR" };
let list, quality, nights;

export function mountExperiments(root) {
  list = h("div", { class: "stack" });
  quality = h("div", { class: "stack" });
  nights = h("div", { class: "stack" });
  root.append(h("h2", {}, "Experiments"),
    h("p", { class: "lead" }, "Users are divided among aliases. Intervals hold at every time, so you may look as often as you like."),
    list, h("h2", {}, "Evaluation"), quality, h("h2", {}, "Retraining"), nights);
  watch(["view", "model"], () => {
    if (state.view !== "experiments") return;
    load();
    loadFiles();
  });
}

async function load() {
  try {
    const { experiments } = await call("GET", "/v1/experiments");
    const results = await Promise.all(experiments.map((one) => call("GET", `/v1/experiments/${one.name}/results`).catch((problem) => problem)));
    render(list, experiments.length ? experiments.map((one, i) => panel(one, results[i]))
      : empty("No experiment", "One is started with: recsys experiment put homepage --arm champion=1 --arm challenger=1"));
  } catch (problem) {
    render(list, problemBox(problem, load));
  }
}

function panel(one, results) {
  const stopped = one.arms.filter((arm) => arm.stopped_ms);
  const guardrail = !one.guardrail ? "off" : stopped.length ? stopped.map((arm) => `stopped ${arm.alias} on ${moment(arm.stopped_ms)}`).join(", ") : "on, no arm was stopped";
  return h("section", { class: "panel" }, h("h3", {}, one.name),
    h("p", { class: "fine" }, [
      one.status, `${moment(one.started_ms)} to ${moment(one.ends_ms)}`, one.by && `by ${one.by}`,
      `counts ${one.event} within ${number(one.window_s / 3600, one.window_s % 3600 ? 1 : 0)} hours`,
    ].filter(Boolean).join(" · ")),
    h("p", {}, "Guardrail: ", h("strong", { class: stopped.length ? "off" : "" }, guardrail), ". Shares: ",
      one.arms.map((arm) => `${arm.alias} ${number(100 * arm.share)} %`).join(", "), "."),
    results instanceof Error ? problemBox(results, load) : measured(results));
}

function measured(results) {
  const rows = results.arms.filter((arm) => arm.rate !== null).map((arm, i) => ({
    name: `${arm.alias} (${plural(arm.observed, "user")})`, value: 100 * arm.rate, strong: i === 0,
  }));
  return [
    h("p", { class: "verdict" }, results.verdict),
    rows.length > 0 && bars("Per cent of a user's answers that were followed, mean over users", rows, 2),
    results.arms.filter((arm) => arm.looks?.length).map((arm) => course(arm, results)),
    results.arms.some((arm) => arm.waiting) && h("p", { class: "fine" }, `Not counted yet: ${results.arms.map((arm) => `${arm.alias} ${plural(arm.waiting, "user")}`).join(", ")}.`),
  ];
}

/** The interval of an arm as it developed with the number of users. */
function course(arm, results) {
  const { looks } = arm;
  const first = results.arms[0].alias;
  const most = Math.max(...looks.slice(Math.floor(looks.length / 4)).flatMap((look) => [Math.abs(look.low), Math.abs(look.high)]), 1e-6);
  const users = looks.at(-1).observed;
  const x = (look) => (WIDE * look.observed) / users;
  const y = (value) => HIGH / 2 - (HIGH / 2 - 4) * Math.max(-1, Math.min(1, value / most));
  const line = (key) => looks.map((look) => `${x(look).toFixed(1)} ${y(look[key]).toFixed(1)}`);
  const points = (value) => `${value > 0 ? "+" : ""}${number(100 * value, 2)}`.replace("-", "−");
  const name = `${arm.alias} minus ${first}, in percentage points`;
  return h("figure", { class: "course" },
    h("figcaption", { class: "fine" }, `${name}, by number of users; the band is the interval, the line at 0 is no difference`),
    svg("svg", { viewBox: `0 0 ${WIDE} ${HIGH}`, preserveAspectRatio: "none", role: "img",
      "aria-label": `${name}: after ${plural(users, "user")} ${points(arm.difference)}, between ${points(arm.low)} and ${points(arm.high)}` },
    svg("path", { class: "band", d: `M${line("low").join("L")}L${line("high").reverse().join("L")}Z` }),
    svg("line", { class: "zero", x1: 0, x2: WIDE, y1: HIGH / 2, y2: HIGH / 2 }),
    svg("path", { class: "line line-0", d: `M${line("difference").join("L")}` })),
    h("details", { class: "inner" }, h("summary", {}, "As a table"), h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": name }, h("table", {},
      h("thead", {}, h("tr", {}, ["until", "users", "difference", "from", "to"].map((text) => h("th", { scope: "col" }, text)))),
      h("tbody", {}, looks.map((look) => h("tr", {}, h("th", { scope: "row" }, moment(look.time_ms)), h("td", {}, number(look.observed)),
        h("td", {}, points(look.difference)), h("td", {}, points(look.low)), h("td", {}, points(look.high)))))))));
}

// What was measured without users

async function loadFiles() {
  let files, models;
  try {
    ({ files } = await call("GET", at("/v1/evaluation", { model: state.model })));
    models = await call("GET", "/v1/models");
  } catch (problem) {
    render(quality, problemBox(problem, loadFiles));
    render(nights);
    return;
  }
  render(quality, files.report ? report(files.report) : empty("Not measured", "This bundle has no report; `recsys evaluate` makes one."));
  const lines = files.retraining ?? [];
  if (!lines.length) {
    render(nights, h("section", { class: "panel" },
      h("p", {}, "The service sees no log of a retraining: either there was none, or its folder is on another machine.")));
    return;
  }
  const served = new Set(models.models.map((model) => model.name));
  render(nights, lines.map((line) => night(line, served)));
}

/** What is served, and the model alone, in words; baselines keep their names. */
const inWords = (ranker, served) => (ranker === served ? "served list" : ranker === "model" ? "model alone" : ranker);

/** Weaknesses, and the rankers with 95 % intervals over users. */
function report({ name, split, data, headline, metrics, rankers, warnings = [], weaknesses = [] }) {
  const { seen, targets, k } = headline;
  const weak = [...warnings, ...weaknesses];
  const rows = metrics.filter((row) => row.k === k && row.seen === seen && row.targets === targets);
  const shown = Object.keys(METRICS).filter((metric) => rows.some((row) => row.metric === metric));
  const cell = (ranker, metric) => {
    const row = rows.find((one) => one.ranker === ranker && one.metric === metric);
    return h("td", {}, row ? `${number(row.mean, 3)} (${number(row.low, 3)}–${number(row.high, 3)})` : "–");
  };
  return h("section", { class: "panel" }, h("h3", {}, name),
    h("p", { class: "fine" }, `${number(data.users_evaluated)} of ${plural(data.users_in_split, "user")} of the ${split} split · seen items ${seen} · report.html has the charts`),
    weak.length > 0 && h("ul", { class: "notes" }, weak.map((text) => h("li", {}, text))),
    h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Quality by recommender" }, h("table", {},
      h("caption", {}, "On events that the model had not seen, with 95 % intervals"),
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "recommender"), shown.map((metric) => h("th", { scope: "col" }, `${METRICS[metric]}@${k}`)))),
      h("tbody", {}, rankers.map((ranker) => h("tr", {}, h("th", { scope: "row" }, inWords(ranker, rankers[0])), shown.map((metric) => cell(ranker, metric))))))));
}

function night(line, served) {
  const when = line.time ? moment(1000 * line.time) : "";
  if (line.step !== "judged") return h("p", { class: "promoted" }, `${when}: ${line.version} was promoted.`);
  const gate = line.gate;
  return h("section", { class: "panel" },
    h("h3", {}, line.version, " ", h("span", { class: `mark-${line.offered ? "good" : "off"}` }, line.offered ? "offered" : "refused"), served.has(line.version) && h("span", { class: "fine" }, " loaded now")),
    h("p", { class: "fine" }, [when, `continues ${line.parent}`, gate?.window && `${plural(gate.window.users, "user")} in the window`].filter(Boolean).join(" · ")),
    line.reasons?.length > 0 && h("ul", { class: "notes" }, line.reasons.map((reason) => h("li", {}, reason))),
    gate?.comparisons?.length > 0 && h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `Comparison of ${line.version}` }, h("table", {},
      h("caption", {}, `${line.version} beside ${line.parent}, which it continues, on the newest events`),
      h("thead", {}, h("tr", {}, ["next items", "metric", line.version, line.parent, "difference", "95 % interval"].map((text) => h("th", { scope: "col" }, text)))),
      h("tbody", {}, gate.comparisons.map((row) => h("tr", {},
        h("th", { scope: "row" }, row.target), h("td", {}, `${row.metric}@${row.k}`), h("td", {}, number(row.a, 4)), h("td", {}, number(row.b, 4)),
        h("td", {}, number(row.mean, 4).replace("-", "−")), h("td", {}, `${number(row.low, 4)} to ${number(row.high, 4)}`.replaceAll("-", "−"))))))));
}
