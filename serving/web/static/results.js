// The recommendations as cards, and the changes since the previous list.

import { call, latest, learn, remember, request, title } from "./api.js";
import { announce, empty, h, identity, number, plural, problemBox, render } from "./dom.js";
import { onlyWith } from "./filters.js";
import { add } from "./history.js";
import { inWords, isShown, openItem, picture, price, values } from "./item.js";
import { state, update, watch } from "./state.js";

/** Fields of the state that change an answer. */
export const ASKED = ["user", "history", "k", "seen", "model", "filter"];
const SOURCES = {
  model: "found by the model's search",
  retrieval: "proposed by retrieval from the items of the history",
  popular: "a popular item, as a fallback",
  pinned: "pinned by a rule",
};
const MOST_TAGS = 4;
const ask = latest();
let list, head, note, answered = null;
let ranks = new Map(), before = ranks; // of the current list, and of the previous one

export function mountResults(root) {
  head = h("p", { class: "summary" });
  note = h("div", {});
  list = h("ol", { class: "cards", role: "list" });
  root.append(
    h("div", { class: "list-head" }, h("h2", { id: "list-title", tabindex: -1 }, "Recommended"), head),
    note, list);
  watch(["view", ...ASKED], () => state.view === "recommend" && load());
}

async function load() {
  const asked = JSON.stringify(request());
  if (answered === asked) return;
  list.setAttribute("aria-busy", "true");
  try {
    const answer = await ask("POST", "/v1/recommendations", request());
    if (!answer) return;
    answered = asked;
    remember(answer.items);
    const why = answer.items.map((item) => item.because).filter(Boolean);
    draw(answer);
    if (why.length) await learn(why).then(nameReasons, () => {});
  } catch (problem) {
    answered = null;
    head.textContent = "";
    render(list);
    render(note, problemBox(problem, load));
  } finally {
    list.removeAttribute("aria-busy");
  }
}

/** Replace ids of reasons by titles that were fetched after the list was drawn. */
function nameReasons() {
  for (const reason of list.querySelectorAll("q")) reason.textContent = title(reason.dataset.item);
}

function draw(answer) {
  const { items } = answer;
  const facts = [
    plural(items.length, "item"),
    `from ${number(answer.eligible_items)} eligible`,
    answer.timing && `${number(answer.timing.total_ms, 1)} ms`,
    answer.certificate,
  ].filter(Boolean);
  head.textContent = facts.join(" · ");
  const unknown = answer.unknown_items ?? [];
  render(note,
    answer.note && h("p", { class: "note" }, answer.note.detail),
    unknown.length > 0 && h("p", { class: "note" }, `The model does not know ${plural(unknown.length, "item")} of the history: ${unknown.slice(0, 5).join(", ")}${unknown.length > 5 ? " …" : ""}`));
  const focused = [...list.children].findIndex((entry) => entry.contains(document.activeElement));
  [before, ranks] = [ranks, new Map(items.map((item) => [item.item_id, item.rank]))];
  render(list, items.length
    ? items.map(card)
    : h("li", { class: "wide" }, empty("Nothing to recommend", "No item matches; relax the filter.")));
  if (focused >= 0 && !list.contains(document.activeElement)) { // the focused card is gone: focus the card at its place
    const cards = list.querySelectorAll(".card-add");
    (cards[Math.min(focused, cards.length - 1)] ?? document.getElementById("list-title")).focus({ preventScroll: true });
  }
  announce(`${facts.slice(0, 2).join(" ")}. First: ${items[0]?.title ?? "none"}.`);
}

function card(item) {
  const name = item.title || item.item_id;
  return h("li", { class: "card", "data-id": item.item_id },
    h("div", { class: "card-top" },
      h("span", { class: "rank" }, h("span", { class: "sr" }, "Rank "), item.rank),
      moved(item),
      h("button", { type: "button", class: "link more", "data-key": `more-${item.item_id}`, onclick: () => openItem(item.item_id), "aria-label": `Details of ${name}` }, "Details")),
    h("h3", {}, h("button", {
      type: "button", class: "card-add", "data-key": `card-${item.item_id}`, title: "Add to the session",
      "aria-label": `Add ${name} to the session`,
      onclick: () => add(item.item_id),
    }, name)),
    picture(item),
    price(item.metadata),
    identity(item),
    h("p", { class: "why" },
      h("span", { class: `source ${item.source}`, title: SOURCES[item.source] }, item.source),
      item.because && h("span", {}, " because of ", h("q", { "data-item": item.because }, title(item.because)))),
    tags(item));
}

function moved(item) {
  if (before.size === 0) return null;
  const rank = before.get(item.item_id);
  if (rank === undefined) return h("span", { class: "moved new" }, "new");
  const step = rank - item.rank;
  if (step === 0) return null;
  return h("span", { class: `moved ${step > 0 ? "up" : "down"}` },
    h("span", { class: "sr" }, step > 0 ? "up " : "down "), h("span", { "aria-hidden": "true" }, step > 0 ? "▲ " : "▼ "), Math.abs(step));
}

function tags(item) {
  const all = Object.entries(item.metadata ?? {}).filter(([key, value]) => isShown(key) && value !== false).flatMap(([key, value]) => values(value).map((tag) => [key, tag]));
  const ordered = [...new Map(all.map(([key, tag]) => [key, tag])), ...all]; // a tag of each key, then the others
  const shown = [...new Map(ordered.map((pair) => [inWords(...pair), pair])).values()].slice(0, MOST_TAGS);
  if (!shown.length) return null;
  return h("p", { class: "tags" }, shown.map(([key, tag]) => h("button", {
    type: "button", class: "tag", title: `Only items with ${key} ${tag}`,
    "aria-label": `Only items with ${key} ${tag}`, onclick: () => onlyWith(key, tag),
  }, inWords(key, tag))));
}

// Options of the request

export function mountOptions(root) {
  const k = h("input", { type: "number", id: "k", min: 1, max: 200, onchange: () => k.reportValidity() && update({ k: Number(k.value) || 10 }) });
  const model = h("select", { id: "model", onchange: () => update({ model: model.value }) }, h("option", { value: "" }, "champion"));
  const seen = h("input", { type: "checkbox", id: "seen", onchange: () => update({ seen: seen.checked }) });
  root.append(h("details", { class: "panel", open: matchMedia("(min-width: 960px)").matches },
    h("summary", {}, h("h2", {}, "Options")),
    labelled("Items", k), labelled("Model", model), h("p", { class: "option" }, h("label", {}, seen, " Include seen items"))));
  let models = [];
  const show = () => {
    k.value = state.k;
    model.value = state.model;
    const asked = models.find(({ aliases }) => aliases.includes(state.model || "champion"));
    seen.checked = state.seen ?? asked?.exclude_seen === false;
  };
  watch(["k", "model", "seen"], show);
  call("GET", "/v1/models").then((known) => {
    models = known.models;
    const others = known.aliases.filter(({ name }) => name !== "champion");
    model.append(...others.map(({ name }) => h("option", { value: name }, name)));
    show();
  }, () => {}); // only the champion can be chosen
}

const labelled = (text, field) => h("p", { class: "option" }, h("label", { for: field.id }, text), field);
