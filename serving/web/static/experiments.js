// Experiments with users.

import { call } from "./api.js";
import { bars } from "./charts.js";
import { empty, h, moment, number, plural, problemBox, render } from "./dom.js";
import { state, watch } from "./state.js";

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
    results.arms.some((arm) => arm.waiting) && h("p", { class: "fine" }, `Not counted yet: ${results.arms.map((arm) => `${arm.alias} ${plural(arm.waiting, "user")}`).join(", ")}.`),
  ];
}
