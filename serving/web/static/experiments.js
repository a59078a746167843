// Experiments with users.

import { call } from "./api.js";
import { attempt, empty, h, moment, number, percent, plural, problemBox, render, table } from "./dom.js";
import { state, watch } from "./state.js";

let list;

export function mountExperiments(root) {
  list = h("div", { class: "stack" });
  root.append(h("h2", {}, "Experiments"),
    h("p", { class: "lead" }, "Users are divided among aliases. A rate is the mean over users of the share of their answers that were followed. Intervals hold at every time, so you may look as often as you like."),
    list);
  watch(["view"], () => state.view === "experiments" && load());
}

const load = () => attempt(list, async () => {
  const { experiments } = await call("GET", "/v1/models");
  const results = await Promise.all(experiments.map((experiment) => call("GET", `/v1/experiments/${experiment.name}/results`).catch((problem) => problem)));
  render(list, experiments.length ? experiments.map((experiment, i) => panel(experiment, results[i]))
    : empty("No experiment", "PUT /v1/experiments/NAME starts one."));
});

function panel(experiment, results) {
  return h("section", { class: "panel" }, h("h3", {}, experiment.name),
    h("p", { class: "fine" }, [
      experiment.status, `${moment(experiment.started_ms)} to ${moment(experiment.ends_ms)}`, experiment.by && `by ${experiment.by}`,
      `counts ${experiment.event} within ${number(experiment.window_s / 3600, experiment.window_s % 3600 ? 1 : 0)} hours`,
    ].filter(Boolean).join(" · ")),
    h("p", {}, `Shares: ${experiment.arms.map((arm) => `${arm.alias} ${number(100 * arm.share)} %`).join(", ")}.`),
    results instanceof Error ? problemBox(results, load) : measured(results));
}

function measured(results) {
  const points = (share) => number(100 * share, 2);
  const rows = results.arms.filter((arm) => arm.rate !== null).map((arm) => [
    arm.alias, number(arm.observed), percent(arm.rate), arm.low == null ? "–" : `${points(arm.difference)} (${points(arm.low)} to ${points(arm.high)})`,
  ]);
  return [
    h("p", { class: "verdict" }, results.verdict),
    rows.length > 0 && table(`Rates of ${results.name}`, ["arm", "users", "rate", "difference in points"], rows),
    results.arms.some((arm) => arm.waiting) && h("p", { class: "fine" }, `Not counted yet: ${results.arms.map((arm) => `${arm.alias} ${plural(arm.waiting, "user")}`).join(", ")}.`),
  ];
}
