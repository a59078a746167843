// The filter of the request: conditions that clicks on tags add, or a link has.

import { h, render } from "./dom.js";
import { FOR_A_PERSON, state, update, watch } from "./state.js";

const GROUPS = { must: "", should: "or ", must_not: "not " };
let conditions, clear;

export function mountFilters(root) {
  conditions = h("div", { class: "tags" });
  clear = h("button", { type: "button", class: "quiet", onclick: () => update({ filter: null }) }, "Clear the filter");
  root.append(h("details", { class: "panel", id: "filter-panel", open: matchMedia("(min-width: 960px)").matches },
    h("summary", {}, h("h2", {}, "Filter")),
    conditions, clear,
    h("p", { class: "fine" }, "A click on a tag of an item adds a condition.")));
  watch(["filter"], show);
}

/** Add a condition that requires this value. */
export function onlyWith(key, value) {
  const test = typeof value === "number" ? { range: { gte: value, lte: value } } : { match: value };
  const clause = { key, ...test };
  const filter = state.filter ?? {};
  const must = filter.must ?? [];
  if (must.some((other) => JSON.stringify(other) === JSON.stringify(clause))) return;
  const view = FOR_A_PERSON.includes(state.view) ? state.view : "recommend";
  update({ view, filter: { ...filter, must: [...must, clause] } });
  document.getElementById("filter-panel").open = true;
}

function show() {
  const filter = state.filter ?? {};
  clear.hidden = !state.filter;
  render(conditions, Object.entries(GROUPS).flatMap(([group, word]) =>
    (Array.isArray(filter[group]) ? filter[group] : []).map((clause, i) => h("button", {
      type: "button", class: "tag", "data-key": `condition-${group}-${i}`, title: "Remove",
      "aria-label": `Remove the condition ${word}${inWords(clause)}`, onclick: () => remove(group, i),
    }, word, inWords(clause), " ×"))));
}

/** A clause in words; a nested group as JSON. */
function inWords({ key, ...test }) {
  const [name, value] = Object.entries(test)[0] ?? [];
  if (!key || !name) return JSON.stringify(test);
  if (name === "range") return `${key} ${Object.entries(value ?? {}).map(([end, bound]) => `${{ gte: "≥", gt: ">", lte: "≤", lt: "<" }[end] ?? end} ${bound}`).join(", ")}`;
  if (name === "exists") return `${key} ${value ? "known" : "unknown"}`;
  return `${key} ${[value].flat().join(" or ")}`;
}

function remove(group, place) {
  const left = state.filter[group].filter((_, i) => i !== place);
  const filter = { ...state.filter, [group]: left };
  if (!left.length) delete filter[group];
  update({ filter: Object.keys(filter).length ? filter : null });
}
