// The measured quality of the bundle.

import { at, call } from "./api.js";
import { bars } from "./charts.js";
import { empty, h, number, problemBox, render } from "./dom.js";
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
  const files = Object.entries(answer.files).filter(([name]) => name !== "retraining"); // shown with experiments
  if (!files.length) {
    render(root, heading, empty("Not measured", "This bundle has no evaluation; `recsys evaluate` makes one."));
    return;
  }
  render(root, heading,
    h("p", { class: "lead" }, "Measured on events that the model had not seen."),
    files.sort(([, a], [, b]) => full(b) - full(a)).map(([name, content]) => h("section", { class: "panel" }, h("h3", {}, words(name)),
      full(content) ? report(content) : plain(content),
      h("details", { class: "inner" }, h("summary", {}, "As JSON"),
        h("pre", { tabindex: 0 }, h("code", {}, JSON.stringify(content, null, 1).slice(0, 200_000)))))));
}

const full = (content) => Array.isArray(content?.metrics);
const words = (name) => name.replace(/^.*\//, "").replace(/\.json$/, "").replaceAll(/[-_]/g, " ").replace(/^./, (c) => c.toUpperCase());

/** A report of `recsys evaluate`: rankers side by side, with 95 % intervals over users. */
function report(content) {
  const { seen, targets, k } = content.headline ?? content.metrics[0];
  const charts = Object.entries(NAMES).map(([metric, name]) => {
    const rows = content.metrics
      .filter((row) => row.metric === metric && row.k === k && row.seen === seen && row.targets === targets)
      .map((row) => ({ name: row.ranker, value: row.mean, low: row.low, high: row.high, strong: row.ranker === content.rankers?.[0] }));
    return rows.length > 0 && bars(`${name}@${k}, with 95 % intervals`, rows);
  });
  return [
    h("p", { class: "fine" }, [content.name, content.split && `${content.split} split`, content.data?.users_evaluated && `${number(content.data.users_evaluated)} users`, seen && `seen items ${seen}`].filter(Boolean).join(" · ")),
    h("div", { class: "charts" }, charts),
  ];
}

/** Figures by subject, {target: {"recall@10": 0.1, users: 2000}}: one chart per metric. */
function plain(content) {
  const subjects = flat(content ?? {}, "");
  const metrics = new Set(subjects.flatMap(([, figures]) => Object.keys(figures).filter((key) => key.includes("@") && typeof figures[key] === "number")));
  const facts = subjects.map(([subject, figures]) => [subject, Object.entries(figures).filter(([key, value]) => !metrics.has(key) && typeof value !== "object")]);
  return [
    h("div", { class: "charts" }, [...metrics].sort().reverse().map((metric) => bars(label(metric),
      subjects.filter(([, figures]) => typeof figures[metric] === "number")
        .map(([name, figures], i) => ({ name, value: figures[metric], strong: i === 0 }))))),
    h("div", { class: "charts" }, facts.filter(([, list]) => list.length).map(([subject, list]) => h("div", {},
      h("h4", {}, subject),
      h("dl", { class: "facts" }, list.map(([key, value]) => [h("dt", {}, key.replaceAll("_", " ")), h("dd", {}, typeof value === "number" ? number(value, Number.isInteger(value) ? 0 : 2) : String(value))]))))),
  ];
}

/** [subject, figures] of an object and of its nested objects, which are named by their paths. */
function flat(of, path) {
  const isGroup = (value) => value && typeof value === "object" && !Array.isArray(value);
  const own = Object.entries(of).filter(([, value]) => !isGroup(value));
  const inner = Object.entries(of).filter(([, value]) => isGroup(value));
  return [
    ...(own.length ? [[path || "all", Object.fromEntries(own)]] : []),
    ...inner.flatMap(([name, value]) => flat(value, path ? `${path}, ${name}` : name)),
  ];
}

const label = (metric) => metric.replace(/^\w+/, (name) => NAMES[name] ?? name);
