// Experiments with users.

import { call } from "./api.js";
import { bars } from "./charts.js";
import { empty, h, moment, number, plural, problemBox, render, svg } from "./dom.js";
import { state, watch } from "./state.js";

const [WIDE, HIGH] = [600, 160];
let list;

export function mountExperiments(root) {
  list = h("div", { class: "stack" });
  root.append(h("h2", {}, "Experiments"),
    h("p", { class: "lead" }, "Users are divided among aliases. Intervals hold at every time, so you may look as often as you like."),
    list);
  watch(["view"], () => state.view === "experiments" && load());
}

async function load() {
  try {
    const { experiments } = await call("GET", "/v1/models");
    const results = await Promise.all(experiments.map((one) => call("GET", `/v1/experiments/${one.name}/results`).catch((problem) => problem)));
    render(list, experiments.length ? experiments.map((one, i) => panel(one, results[i]))
      : empty("No experiment", "PUT /v1/experiments/NAME starts one."));
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
