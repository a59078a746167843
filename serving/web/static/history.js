// The user or session to recommend for, and the strip with the items of the history.

import { history, learn, remembered, title } from "./api.js";
import { announce, byKey, empty, h, plural, problemBox, render } from "./dom.js";
import { openItem } from "./item.js";
import { askAgain } from "./results.js";
import { MOST_HISTORY, state, update, watch } from "./state.js";

const SHOWN = 40; // number of newest items; of the others only the count is shown
let strip, count, field, shown = []; // ids of the history on the page, oldest first
let loading = Promise.resolve();

export function mountHistory(root) {
  field = h("input", {
    id: "user", autocomplete: "off", spellcheck: "false", placeholder: "user id",
    "aria-describedby": "user-help",
  });
  strip = h("ol", { class: "strip", role: "list", "aria-label": "History, oldest first" });
  count = h("p", { class: "fine strip-count" });
  const form = h("form", { class: "who", onsubmit: pick },
    h("label", { for: "user" }, "Recommend for"),
    h("div", { class: "field" }, field, h("button", { class: "primary" }, "Go")));
  root.append(
    h("h2", { class: "sr", id: "session-title" }, "User or session"),
    form,
    h("div", { class: "strip-box" },
      h("div", { class: "strip-head" }, h("h3", {}, "History"), count,
        h("button", { type: "button", class: "quiet", id: "clear", onclick: () => choose("", []) }, "New session")),
      strip,
      h("p", { class: "fine keys", id: "user-help" }, "Arrow keys walk the strip; ",
        h("kbd", {}, "Alt"), " + ", h("kbd", {}, "←"), h("kbd", {}, "→"), " moves an item, ",
        h("kbd", {}, "Del"), " removes it.")));
  strip.addEventListener("keydown", keys);
  watch(["user", "history"], show);
}

function pick(event) {
  event.preventDefault();
  const user = field.value.trim();
  if (user === state.user && state.history === null) { // reload: there may be new events
    show();
    askAgain();
  } else if (user) choose(user, null);
}

function choose(user, items) {
  update({ user, history: items });
}

/** Add an item to the session, which then differs from the stored history. */
export async function add(id) {
  await loading;
  update({ history: [...shown, id].slice(-MOST_HISTORY) });
  announce(`Added ${title(id)} to the history.`);
}

function show() {
  field.value = state.user;
  loading = load();
}

async function load() {
  if (state.history === null && state.user) {
    try {
      const user = state.user;
      const found = await history(user);
      if (user !== state.user || state.history !== null) return;
      shown = found;
    } catch (problem) {
      shown = [];
      count.textContent = "";
      render(strip, h("li", {}, problemBox(problem, show)));
      return;
    }
  } else {
    shown = state.history ?? [];
  }
  draw();
  await learn(shown.slice(-SHOWN)).then(draw, () => {});
}

function draw() {
  const hidden = Math.max(0, shown.length - SHOWN);
  count.textContent = shown.length
    ? `${plural(shown.length, "item")}, oldest first${state.history && state.user ? ` · edited from ${state.user}` : ""}`
    : "";
  if (!shown.length) {
    render(strip, h("li", { class: "strip-empty" },
      empty("No history", "The list below is for a new user. Choose items to begin a session, or choose a user.")));
    return;
  }
  const last = shown.length - 1;
  render(strip, hidden > 0 && h("li", { class: "older" }, `${hidden} older`),
    shown.slice(hidden).map((id, i) => chip(id, i + hidden, i + hidden === last)));
  strip.scrollLeft = strip.scrollWidth;
}

function chip(id, place, isLast) {
  const name = title(id);
  const known = remembered(id);
  return h("li", { class: `event ${known?.unknown ? "unknown" : ""}` },
    h("button", {
      type: "button", class: "event-name", "data-key": `event-${place}`, "data-place": place,
      tabindex: isLast ? 0 : -1, title: name, "aria-keyshortcuts": "Alt+ArrowLeft Alt+ArrowRight Delete",
      "aria-label": `${place + 1} of ${shown.length}: ${name}${known?.unknown ? ", which the model does not know" : ""}`,
      onclick: () => openItem(id),
    }, h("span", { class: "event-place", "aria-hidden": "true" }, place + 1), h("span", { class: "event-title" }, name)),
    h("span", { class: "event-tools" },
      tool("‹", `Move ${name} earlier`, place > 0 && (() => move(place, -1))),
      tool("›", `Move ${name} later`, place < shown.length - 1 && (() => move(place, 1))),
      tool("×", `Remove ${name}`, () => remove(place))));
}

const tool = (sign, label, act) =>
  h("button", { type: "button", tabindex: -1, "aria-label": label, title: label, disabled: !act, onclick: act || undefined }, sign);

function move(place, step) {
  const to = place + step;
  if (to < 0 || to >= shown.length) return;
  const items = [...shown];
  [items[place], items[to]] = [items[to], items[place]];
  update({ history: items.slice(-MOST_HISTORY) });
  focus(to);
  announce(`${title(items[to])} is number ${to + 1} now.`);
}

function remove(place) {
  const name = title(shown[place]);
  update({ history: shown.filter((_, i) => i !== place).slice(-MOST_HISTORY) });
  focus(Math.min(place, shown.length - 1));
  announce(`Removed ${name}.`);
}

function focus(place) {
  const target = byKey(strip, `event-${place}`) ?? field;
  for (const button of strip.querySelectorAll(".event-name")) button.tabIndex = -1;
  target.tabIndex = 0;
  target.focus();
}

function keys(event) {
  const at = event.target.dataset?.place;
  if (at === undefined) return;
  const place = Number(at);
  const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (step && event.altKey) move(place, step);
  else if (step) focus(Math.max(0, Math.min(shown.length - 1, place + step)));
  else if (event.key === "Home") focus(Math.max(0, shown.length - SHOWN));
  else if (event.key === "End") focus(shown.length - 1);
  else if (event.key === "Delete" || event.key === "Backspace") remove(place);
  else return;
  event.preventDefault();
}
