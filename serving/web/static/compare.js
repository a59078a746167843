// Two models side by side for one user or session.

import { call, latest, remember, request } from "./api.js";
import { attempt, empty, h, number, plural, render } from "./dom.js";
import { openItem } from "./item.js";
import { ASKED } from "./results.js";
import { state, update, watch } from "./state.js";

const CHAMPION = "champion";
const asks = [latest(), latest()];
let box, about, fields;

export function mountCompare(root) {
  about = h("p", { class: "facts-line", role: "status" });
  fields = [field("left", "First model", (model) => ({ model: model === CHAMPION ? "" : model })), field("right", "Second model", (other) => ({ other }))];
  box = h("div", {});
  root.append(h("div", { class: "list-head" }, h("h2", {}, "Compare"), about),
    h("p", { class: "lead" }, "The same request, answered by two models, or by one model with other standing rules."),
    h("div", { class: "row pair" }, fields), box);
  watch(["view", "other", ...ASKED], () => state.view === "compare" && load());
}

const field = (id, name, changes) => h("p", { class: "field" }, h("label", { for: id }, name),
  h("select", { id, onchange: (event) => update(changes(event.target.value)) }));

const load = () => attempt(box, async () => {
  about.textContent = "";
  const { aliases, available } = await call("GET", "/v1/models");
  const names = aliases.map((alias) => alias.name);
  const left = state.model || CHAMPION;
  const right = state.other || names.find((name) => name !== left) || "";
  fields.forEach((part, i) => {
    const select = part.querySelector("select");
    render(select, [...new Set([...names, [left, right][i]])].filter(Boolean).map((name) => h("option", { value: name }, name)));
    select.value = [left, right][i];
    part.hidden = names.length < 2;
  });
  if (!right) return alone(available);
  const answers = await Promise.all([left, right].map((model, i) => asks[i]("POST", "/v1/recommendations", request(["timing", "metadata"], { ...state, model }))));
  if (answers.every(Boolean)) draw(answers, [left, right]);
});

/** There is no second model: say what can be done. */
function alone(available) {
  render(box, empty("There is one model", "Give a second bundle an alias, for example with PUT /v1/aliases/challenger. ",
    available.length ? `Bundles: ${available.join(", ")}.` : ""));
}

function draw(answers, names) {
  remember(answers.flatMap((answer) => answer.items));
  const places = answers.map((answer) => new Map(answer.items.map((item) => [item.item_id, item.rank])));
  const both = [...places[0].keys()].filter((id) => places[1].has(id)).length;
  const longest = Math.max(...answers.map((answer) => answer.items.length));
  const same = both === longest && answers[0].items.every((item, i) => item.item_id === answers[1].items[i]?.item_id);
  about.textContent = same ? `The same ${plural(longest, "item")} in the same order.` : `${number(both)} of ${plural(longest, "item")} in both lists.`;
  render(box, h("div", { class: "two" }, answers.map((answer, i) => list(answer, names[i], places[1 - i], names[1 - i]))));
}

function list(answer, name, others, other) {
  return h("section", { class: "panel" }, h("h3", {}, name),
    h("p", { class: "fine" }, [answer.model.name, answer.certificate, answer.timing && `${number(answer.timing.total_ms, 1)} ms`].filter(Boolean).join(" · ")),
    answer.note && h("p", { class: "note" }, answer.note.detail),
    h("ol", { class: "side", role: "list" }, answer.items.map((item) => h("li", {},
      h("span", { class: "rank" }, h("span", { class: "sr" }, "Rank "), item.rank),
      h("button", { type: "button", class: "link", "data-key": `${name}-${item.item_id}`, onclick: () => openItem(item.item_id) }, item.title || item.item_id),
      h("span", { class: "fine" }, item.source),
      where(item, others.get(item.item_id), other)))),
    answer.items.length === 0 && h("p", {}, "No item."));
}

/** Where the other list has an item. */
function where(item, rank, other) {
  if (rank === undefined) return h("span", { class: "moved new" }, "only here");
  if (rank === item.rank) return h("span", { class: "moved down" }, "same place");
  return h("span", { class: "moved down" }, h("span", { class: "sr" }, `in ${other} `), `place ${rank}`);
}
