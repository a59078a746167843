// Creates elements without a framework. Markup is never made from strings, and style attributes are
// never written: the content security policy (CSP) forbids both.

import { Problem } from "./api.js";

/** Create an HTML element. `on…` properties are listeners; the others are attributes. */
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked") element[name] = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** Replace the children of `parent`. Focus moves to the new element with the same `data-key`. */
export function render(parent, ...children) {
  const key = parent.contains(document.activeElement) && document.activeElement.dataset.key;
  parent.replaceChildren(...children.flat(3).filter(Boolean));
  if (key) byKey(parent, key)?.focus({ preventScroll: true });
}

export function byKey(parent, key) {
  return parent.querySelector(`[data-key="${CSS.escape(key)}"]`);
}

let speaker;

/** Announce a text to screen readers; it is not shown. */
export function announce(text) {
  speaker ??= document.getElementById("announcer");
  speaker.textContent = "";
  requestAnimationFrame(() => (speaker.textContent = text));
}

export const number = (value, digits = 0) =>
  value === null || value === undefined || Number.isNaN(value)
    ? "–"
    : value.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: digits });

export const plural = (count, one, many = `${one}s`) => `${number(count)} ${count === 1 ? one : many}`;

/** A log-probability with two digits and a proper minus sign. */
export const logProb = (value) => number(value, 2).replace("-", "−");

/** A share between 0 and 1 in per cent. */
export function percent(value) {
  if (value === null || value === undefined) return "–";
  const share = 100 * value;
  return share === 0 || share >= 0.1 ? `${number(share, share < 10 && share > 0 ? 1 : 0)} %` : "< 0.1 %";
}

/** When something happened, in the visitor's time zone. */
export const moment = (ms) => new Date(ms).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" });

/** A semantic ID as a row of codes. */
export const codes = (semanticId) =>
  h("span", { class: "codes", title: "Semantic ID, coarse to fine" },
    h("span", { class: "sr" }, "semantic ID "),
    (semanticId ?? []).map((code, level) => h("span", { class: "code", "data-level": level }, code)));

/** Id and semantic ID of an item; an id equal to the title is left out. */
export const identity = (item) =>
  h("p", { class: "ids" }, item.title && item.title !== item.item_id && h("code", {}, item.item_id), codes(item.semantic_id));

/** A box with a problem and, optionally, a button to try again. */
export function problemBox(problem, retry) {
  const fields = (problem.errors ?? []).filter((e) => !problem.detail.includes(e.detail));
  const box = h("div", { class: `problem ${problem.code === "not_ready" ? "waiting" : ""}`, role: "alert" },
    h("strong", {}, problem.title),
    h("p", {}, problem.detail),
    fields.length > 0 && h("ul", {}, fields.map((e) => h("li", {}, h("code", {}, e.pointer || "/"), ` ${e.detail}`))),
    h("p", { class: "fine" }, problem.code, problem.request_id && ` · request ${problem.request_id}`),
    retry && h("button", { type: "button", onclick: retry }, "Try again"));
  if (retry && problem.code === "not_ready") {
    setTimeout(() => box.isConnected && retry(), 1000 * (problem.retryAfter ?? 1));
  }
  return box;
}

/** Do something; if the service refuses it, show the problem in `box`, with a button to try again. */
export async function attempt(box, act) {
  try {
    await act();
  } catch (problem) {
    if (!(problem instanceof Problem)) throw problem;
    render(box, problemBox(problem, () => attempt(box, act)));
  }
}

export const empty = (title, ...text) =>
  h("div", { class: "empty" }, h("p", { class: "empty-title" }, title), h("p", {}, ...text));

/** A table of figures: the first cell of each row is its heading. */
export const table = (name, columns, rows) =>
  h("table", { class: "ranked" },
    h("caption", { class: "sr" }, name),
    h("thead", {}, h("tr", {}, columns.map((text, i) => h("th", { scope: "col", class: i ? "count" : undefined }, text)))),
    h("tbody", {}, rows.map(([heading, ...cells]) => h("tr", {}, h("th", { scope: "row" }, heading), cells.map((cell) => h("td", { class: "count" }, cell))))));

/** A figure with its name and a remark. */
export const tile = (name, value, about) =>
  h("div", { class: "tile" }, h("dt", {}, name), h("dd", {}, value, h("span", { class: "fine" }, about)));
