// The measured quality of the bundle: the report of `recsys evaluate`, with its weaknesses.

import { at, call } from "./api.js";
import { bars } from "./charts.js";
import { empty, h, number, plural, problemBox, render } from "./dom.js";
import { state, watch } from "./state.js";

const NAMES = { recall: "Recall", ndcg: "NDCG", mrr: "MRR" };
let root;

export function mountEvaluation(into) {
  root = into;
  watch(["view", "model"], () => state.view === "evaluation" && load());
}

async function load() {
  const heading = h("h2", {}, "Evaluation");
  let answer;
  try {
    answer = await call("GET", at("/v1/evaluation", { model: state.model }));
  } catch (problem) {
    render(root, heading, problemBox(problem, load));
    return;
  }
  const { retraining, ...files } = answer.files; // retraining is shown with experiments
  const content = Object.values(files).find((one) => Array.isArray(one?.metrics));
  render(root, heading,
    content ? report(content) : empty("Not measured", "This bundle has no report; `recsys evaluate` makes one."),
    Object.entries(files).map(([name, file]) => h("details", { class: "inner" }, h("summary", {}, `${name} as JSON`),
      h("pre", { tabindex: 0 }, h("code", {}, JSON.stringify(file, null, 1).slice(0, 200_000))))));
}

/** What is served, and the model alone, in words; baselines keep their names. */
const inWords = (ranker, served) => (ranker === served ? "served list" : ranker === "model" ? "model alone" : ranker);

/** Rankers side by side, with 95 % intervals over users. */
function report(content) {
  const { seen, targets, k } = content.headline ?? content.metrics[0];
  const [served] = content.rankers ?? [];
  const charts = Object.entries(NAMES).map(([metric, name]) => {
    const rows = content.metrics
      .filter((row) => row.metric === metric && row.k === k && row.seen === seen && row.targets === targets)
      .map((row) => ({ name: inWords(row.ranker, served), value: row.mean, low: row.low, high: row.high, strong: row.ranker === served }));
    return rows.length > 0 && bars(`${name}@${k}, with 95 % intervals`, rows);
  });
  const users = content.data?.users_evaluated;
  const weak = [...(content.warnings ?? []), ...(content.weaknesses ?? [])];
  return [
    h("p", { class: "lead" }, "Measured on events that the model had not seen. The served list is what visitors get."),
    h("section", { class: "panel", "aria-labelledby": "weak-title" }, h("h3", { id: "weak-title" }, "Weaknesses"),
      weak.length ? h("ul", { class: "notes" }, weak.map((text) => h("li", {}, text))) : h("p", {}, "The report names none.")),
    h("section", { class: "panel" }, h("h3", {}, "Report"),
      h("p", { class: "fine" }, [
        content.name, users && `${number(users)} of ${plural(content.data.users_in_split ?? users, "user")} of the ${content.split} split`,
        seen && `seen items ${seen}`,
      ].filter(Boolean).join(" · ")),
      h("div", { class: "charts" }, charts)),
  ];
}
