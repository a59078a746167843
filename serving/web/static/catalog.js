// The catalog by semantic ID, code by code, and by words.

import { at, latest, remember } from "./api.js";
import { attempt, empty, h, identity, number, plural, render } from "./dom.js";
import { add } from "./history.js";
import { openItem } from "./item.js";
import { state, update, watch } from "./state.js";

const PAGE = 60;
const ask = latest();
let box, crumbs, children, list, more, field, total, cursor = null;

export function mountCatalog(root) {
  field = h("input", { type: "search", id: "q", placeholder: "words of a title", "aria-label": "Search titles" });
  crumbs = h("nav", { class: "crumbs", "aria-label": "Code prefix" });
  children = h("div", { class: "children" });
  total = h("p", { class: "summary", role: "status" });
  list = h("ul", { class: "catalog" });
  more = h("button", { type: "button", onclick: () => load(true) }, "More");
  box = h("div", {});
  root.append(
    h("div", { class: "list-head" }, h("h2", {}, "Catalog"), total,
      h("form", { class: "field", role: "search", onsubmit: (event) => (event.preventDefault(), update({ q: field.value.trim() })) },
        field, h("button", {}, "Search"))),
    h("p", { class: "lead" }, "Items whose semantic IDs begin alike are alike: each code narrows them down, coarse to fine."),
    crumbs, box);
  watch(["view", "prefix", "q", "model"], () => state.view === "catalog" && load());
}

const load = (next = false) => attempt(box, async () => {
  field.value = state.q;
  const path = at("/v1/items", {
    prefix: state.prefix, q: state.q, limit: PAGE, cursor: next ? cursor : "", model: state.model,
  });
  const answer = await ask("GET", path);
  if (!answer) return;
  remember(answer.items);
  cursor = answer.next;
  if (next) {
    const first = list.children.length;
    list.append(...answer.items.map(line));
    list.children[first]?.querySelector("button")?.focus();
  } else {
    total.textContent = plural(answer.total, "item");
    crumb();
    branch(answer.children);
    render(list, answer.items.length ? answer.items.map(line) : h("li", { class: "wide" }, empty("Nothing here", "No item has this prefix and these words.")));
  }
  more.hidden = !cursor;
  if (list.parentNode !== box) render(box, children, list, more); // at first, and after a problem
});

function crumb() {
  const path = state.prefix ? state.prefix.split(".") : [];
  const step = (label, prefix, here) => h("button", {
    type: "button", class: "chip", "aria-current": here ? "true" : undefined, "data-key": `crumb-${prefix}`,
    onclick: () => update({ prefix }),
  }, label);
  render(crumbs, step("all codes", "", path.length === 0),
    path.map((code, i) => [h("span", { "aria-hidden": "true" }, "›"), step(code, path.slice(0, i + 1).join("."), i === path.length - 1)]));
}

/** The codes that can follow the prefix, with their numbers of items. */
function branch(next) {
  const path = state.prefix ? state.prefix.split(".") : [];
  render(children, next.length > 1 && [
    h("p", { class: "fine", id: "next-codes" }, `Codes of level ${path.length + 1}, and the items below them`),
    h("div", { class: "code-grid", role: "group", "aria-labelledby": "next-codes" }, next.map(({ code, items }) => h("button", {
      type: "button", class: "code-button", "aria-label": `Code ${code}, ${plural(items, "item")}`,
      onclick: () => update({ prefix: [...path, code].join(".") }),
    }, code, h("small", { "aria-hidden": "true" }, number(items))))),
  ]);
}

function line(item) {
  const name = item.title || item.item_id;
  return h("li", { class: "line" },
    h("button", { type: "button", class: "link", "data-key": `line-${item.item_id}`, onclick: () => openItem(item.item_id) }, name),
    identity(item),
    h("button", { type: "button", class: "chip", "aria-label": `Add ${name} to the session`, onclick: () => add(item.item_id) }, "+ add"));
}
