// The filter builder: rows of must, should and must_not over the catalog's attributes, and the filter
// as JSON.

import { at, call } from "./api.js";
import { h, problemBox, render } from "./dom.js";
import { FOR_A_PERSON, state, update, watch } from "./state.js";

const GROUPS = { must: "All of", should: "At least one of", must_not: "None of" };
const TESTS = { match: "is", range: "is between" }; // others are edited as JSON
const [PLACES, SAMPLE] = [6, 40]; // number of places in the catalog to read attributes from, and items at each
const MOST_OFFERED = 60; // values of an attribute

let attributes = new Map(); // name -> {type, values}
let rows = []; // of the builder; unfinished rows are not in the filter yet
let root, groups, clear, json, wrong;

export function mountFilters(into) {
  root = into;
  groups = h("div", {});
  wrong = h("div", { role: "status" });
  clear = h("button", { type: "button", class: "quiet", onclick: () => ((rows = []), update({ filter: null }), draw()) }, "Clear the filter");
  json = h("textarea", { id: "filter-json", rows: 8, spellcheck: "false", onchange: takeJson });
  root.append(h("details", { class: "panel", id: "filter-panel", open: matchMedia("(min-width: 960px)").matches },
    h("summary", {}, h("h2", {}, "Filter")),
    wrong, groups, clear,
    h("details", { class: "inner" }, h("summary", {}, "As JSON"),
      h("label", { class: "fine", for: "filter-json" }, "Groups may be nested, and there are other tests; the rows show values and ranges only."), json)));
  watch(["filter"], show);
  watch(["model"], learnAttributes);
}

/** Add a row that requires this value. */
export function onlyWith(key, value) {
  const test = typeof value === "number" ? { range: { gte: value, lte: value } } : { match: value };
  const clause = { key, ...test };
  const filter = state.filter ?? {};
  const must = filter.must ?? [];
  if (must.some((one) => JSON.stringify(one) === JSON.stringify(clause))) return;
  const view = FOR_A_PERSON.includes(state.view) ? state.view : "recommend";
  update({ view, filter: { ...filter, must: [...must, clause] } });
  document.getElementById("filter-panel").open = true;
}

async function learnAttributes() {
  const look = (prefix) => call("GET", at("/v1/items", { prefix, limit: SAMPLE, model: state.model }));
  let items;
  try {
    const all = await look("");
    const step = Math.max(1, Math.ceil(all.children.length / PLACES)); // adjacent codes have similar items: choose distant ones
    const apart = all.children.filter((_, i) => i % step === step - 1);
    items = [all, ...(await Promise.all(apart.map(({ code }) => look(code))))].flatMap((page) => page.items);
  } catch {
    return; // a filter can still be entered as JSON
  }
  const found = new Map();
  for (const { metadata } of items) {
    for (const [key, value] of Object.entries(metadata ?? {})) {
      for (const one of Array.isArray(value) ? value : [value]) {
        if (one === null || one === undefined) continue;
        if (!found.has(key)) found.set(key, { type: typeof one, values: new Set() });
        found.get(key).values.add(one);
      }
    }
  }
  found.set("item_id", { type: "string", values: new Set(items.map((item) => item.item_id)) });
  attributes = found;
  draw();
}

// From the filter to rows

function show() {
  const made = filterOf(rows);
  if (JSON.stringify(made) !== JSON.stringify(state.filter)) rows = rowsOf(state.filter);
  json.value = state.filter ? JSON.stringify(state.filter, null, 1) : "";
  draw();
}

/** The rows of a filter; null if it has more than rows can show. */
function rowsOf(filter) {
  if (!filter) return [];
  const found = [];
  for (const [group, clauses] of Object.entries(filter)) {
    if (!(group in GROUPS) || !Array.isArray(clauses)) return null;
    for (const clause of clauses) {
      const test = Object.keys(TESTS).find((name) => name in (clause ?? {}));
      if (!test || typeof clause.key !== "string") return null;
      found.push({ group, key: clause.key, test, value: clause[test] });
    }
  }
  return found;
}

function filterOf(of) {
  const filter = {};
  for (const row of of ?? []) {
    if (finished(row)) (filter[row.group] ??= []).push({ key: row.key, [row.test]: row.value });
  }
  return Object.keys(filter).length ? filter : null;
}

function finished({ key, test, value }) {
  if (!key) return false;
  if (test === "range") return value !== null && typeof value === "object" && Object.keys(value).length > 0;
  return value !== undefined && value !== "" && value !== null;
}

function changed() {
  update({ filter: filterOf(rows) });
  draw();
}

function takeJson() {
  let filter;
  try {
    filter = json.value.trim() ? JSON.parse(json.value) : null;
    if (filter !== null && (typeof filter !== "object" || Array.isArray(filter))) throw new Error("A filter is an object.");
  } catch (error) {
    json.setAttribute("aria-invalid", "true");
    render(wrong, problemBox({ title: "This is not JSON", code: "malformed_body", detail: error.message }));
    return;
  }
  json.removeAttribute("aria-invalid");
  render(wrong);
  update({ filter });
}

// Rows

function draw() {
  clear.hidden = rows !== null && rows.length === 0;
  if (rows === null) {
    render(groups, h("p", { class: "fine" }, "The rows cannot show this filter; edit it as JSON."));
    return;
  }
  render(groups, Object.entries(GROUPS).map(([group, name]) =>
    h("fieldset", { class: "group" }, h("legend", {}, name, " ", h("code", { class: "fine" }, group)),
      rows.map((row, i) => row.group === group && line(row, i)),
      h("button", {
        type: "button", class: "chip", "data-key": `add-${group}`, "aria-label": `Add a condition to ${group}`,
        onclick: () => addRow(group),
      }, "+ condition"))));
}

function addRow(group) {
  const key = [...attributes.keys()][0] ?? "";
  rows.push({ group, key, test: attributes.get(key)?.type === "number" ? "range" : "match", value: undefined });
  draw();
  groups.querySelector(`[data-key="key-${rows.length - 1}"]`)?.focus();
}

function line(row, i) {
  const kind = attributes.get(row.key)?.type ?? typeof row.value;
  const tests = Object.keys(TESTS).filter((test) => test !== "range" || kind === "number" || row.test === "range");
  const names = attributes.has(row.key) ? [...attributes.keys()] : [...attributes.keys(), row.key];
  return h("div", { class: "clause" },
    select(`key-${i}`, "Attribute", names, row.key, (key) => {
      const number = attributes.get(key)?.type === "number";
      Object.assign(row, { key, test: number ? "range" : "match", value: undefined });
      changed();
    }),
    select(`test-${i}`, "Test", tests, row.test, (test) => {
      Object.assign(row, { test, value: undefined });
      changed();
    }, TESTS),
    operand(row, i, kind),
    h("button", {
      type: "button", class: "quiet", "aria-label": `Remove the condition on ${row.key}`, title: "Remove",
      onclick: () => (rows.splice(i, 1), changed()),
    }, "×"));
}

const select = (key, label, options, value, act, names = {}) =>
  h("select", { "data-key": key, "aria-label": label, onchange: (event) => act(event.target.value) },
    options.map((option) => h("option", { value: option, selected: option === value }, names[option] ?? option)));

function operand(row, i, kind) {
  if (row.test === "range") return h("span", { class: "range" }, bound(row, i, "gte"), "to", bound(row, i, "lte"));
  return value(row, i, kind, row.value ?? "", `Value of ${row.key}`, (given) => {
    row.value = given;
    changed();
  });
}

/** One end of a range; a strict end (gt, lt) from JSON stays strict. */
function bound(row, i, name) {
  const strict = { gte: "gt", lte: "lt" }[name];
  const of = row.value ?? {};
  const kept = strict in of ? strict : name;
  return h("input", {
    type: "number", step: "any", "data-key": `${name}-${i}`, value: of[kept] ?? "",
    "aria-label": `${row.key} ${name === "gte" ? (kept === "gt" ? "above" : "at least") : (kept === "lt" ? "below" : "at most")}`,
    placeholder: { gte: "min", gt: "above", lte: "max", lt: "below" }[kept],
    oninput: (event) => {
      const next = { ...row.value };
      delete next[kept];
      if (event.target.value !== "") next[kept] = Number(event.target.value);
      row.value = next;
    },
    onchange: changed,
  });
}

function value(row, i, kind, now, label, act) {
  const list = `values-${i}`;
  const offered = [...(attributes.get(row.key)?.values ?? [])].sort().slice(0, MOST_OFFERED);
  return h("span", { class: "value" },
    h("input", {
      "data-key": `value-${i}`, list, value: now, "aria-label": label, autocomplete: "off", placeholder: "value",
      inputmode: kind === "number" ? "decimal" : undefined,
      onchange: (event) => act(typed(event.target.value.trim(), kind)),
    }),
    h("datalist", { id: list }, offered.map((one) => h("option", { value: one }))));
}

function typed(text, kind) {
  if (kind === "number" && text !== "" && !Number.isNaN(Number(text))) return Number(text);
  if (kind === "boolean" && (text === "true" || text === "false")) return text === "true";
  return text;
}
