// The user or session to recommend for, and the strip with the items of the history.

import { history, learn, remembered, title } from "./api.js";
import { announce, byKey, empty, h, plural, problemBox, render } from "./dom.js";
import { openItem } from "./item.js";
import { MOST_HISTORY, state, update, watch } from "./state.js";

const SHOWN = 40; // number of newest items; of the others only the count is shown
let strip, count, field, shown = []; // ids of the history on the page, oldest first
let loading = Promise.resolve();

export function mountHistory(root) {
  field = h("input", {
    id: "user", autocomplete: "off", spellcheck: "false", placeholder: "user id",
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
        h("button", { type: "button", class: "quiet", id: "clear", onclick: () => update({ user: "", history: [] }) }, "New session")),
      strip));
  watch(["user", "history"], show);
}

function pick(event) {
  event.preventDefault();
  const user = field.value.trim();
  if (user === state.user && state.history === null) location.reload(); // there may be new events
  else if (user) update({ user, history: null });
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
      const items = await history(user);
      if (user !== state.user || state.history !== null) return;
      shown = items;
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
  render(strip, hidden > 0 && h("li", { class: "older" }, `${hidden} older`),
    shown.slice(hidden).map((id, i) => chip(id, i + hidden)));
  strip.scrollLeft = strip.scrollWidth;
}

function chip(id, place) {
  const name = title(id);
  const known = remembered(id);
  return h("li", { class: `event ${known?.unknown ? "unknown" : ""}` },
    h("button", {
      type: "button", class: "event-name", "data-key": `event-${place}`, title: name,
      "aria-label": `${place + 1} of ${shown.length}: ${name}${known?.unknown ? ", which the model does not know" : ""}`,
      onclick: () => openItem(id),
    }, h("span", { class: "event-place", "aria-hidden": "true" }, place + 1), h("span", { class: "event-title" }, name)),
    h("button", { type: "button", class: "event-remove", "aria-label": `Remove ${name}`, title: "Remove", onclick: () => remove(place) }, "×"));
}

function remove(place) {
  const name = title(shown[place]);
  update({ history: shown.filter((_, i) => i !== place).slice(-MOST_HISTORY) });
  (byKey(strip, `event-${Math.min(place, shown.length - 1)}`) ?? field).focus();
  announce(`Removed ${name}.`);
}
