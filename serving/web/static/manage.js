// What a shop does with an item: hide it, pin it, boost it; the rules that concern it, and who changed them.

import { at, call, forget } from "./api.js";
import { announce, h, moment, number, plural, problemBox, render } from "./dom.js";

const USUAL = "merchandising"; // name of the rule that the form offers
const CHAMPION = "champion";
const [MOST_RULES, MOST_CHANGES, MOST_NAMED] = [50, 8, 3];
const PAGE = 200;

const only = (id) => ({ key: "item_id", match: id });
const path = (...parts) => `/v1/${parts.map(encodeURIComponent).join("/")}`;

/** The part of an item's sheet in which it is managed; `changed` draws the sheet again. */
export function manage(item, changed) {
  const status = h("div", {});
  const rules = h("div", {});
  const trail = h("div", {});
  const load = () => Promise.all([availability(item, status, changed), concerned(item, rules, trail, load)]);
  load();
  return h("section", { class: "manage", "aria-labelledby": "manage-title" },
    h("h3", { id: "manage-title" }, "In the shop"), status, rules, form(item, load), trail);
}

async function eligible(id, filter) {
  const must = filter ? [only(id), filter] : [only(id)];
  return (await call("POST", "/v1/filters/validate", { body: { filter: { must } } })).eligible_items > 0;
}

// Availability

async function availability(item, box, changed) {
  let shown;
  try {
    shown = await eligible(item.item_id);
  } catch (problem) {
    render(box, problemBox(problem));
    return;
  }
  const set = async (available) => {
    try {
      await call("PATCH", path("items", item.item_id), { body: { attributes: { available } } });
      forget(item.item_id);
      announce(available ? "It can be recommended again." : "It is hidden in all lists.");
      changed();
    } catch (problem) {
      render(box, problemBox(problem, () => availability(item, box, changed)));
    }
  };
  render(box, h("p", { class: "row" },
    h("strong", { class: shown ? "good" : "off" }, shown ? "Can be recommended" : "Hidden"),
    shown
      ? h("button", { type: "button", "data-key": "availability", onclick: () => set(false) }, "Hide in all lists")
      : h("button", { type: "button", "data-key": "availability", onclick: () => set(true) }, "Show again")),
  !shown && item.metadata?.available !== false && h("p", { class: "fine" }, "It is hidden by available_from or available_until."));
}

// Rules

/** The rules that concern an item, what they do with it, and their last changes. */
async function concerned(item, box, trail, load) {
  let rules, next;
  try {
    ({ rules, next } = await call("GET", at("/v1/rules", { limit: MOST_RULES })));
    rules = (await Promise.all(rules.map((rule) => effects(item.item_id, rule)))).filter((one) => one.effects.length);
  } catch (problem) {
    render(box, problemBox(problem, load));
    return;
  }
  render(box, rules.length
    ? h("ul", { class: "notes" }, rules.map(({ rule, effects }) => h("li", {},
      h("strong", {}, rule.name), `: ${effects.join(", ")}. `,
      rule.aliases.length ? `Applies to ${rule.aliases.join(", ")}.` : "Applies to requests that name it. ",
      !rule.aliases.includes(CHAMPION) && h("button", { type: "button", class: "link", "data-key": `stand-${rule.name}`, onclick: () => stand(rule.name, box, load) }, `Apply to all lists of ${CHAMPION}`))))
    : h("p", { class: "fine" }, "No rule concerns this item."),
  next && h("p", { class: "fine" }, `Only the first ${MOST_RULES} rules were looked at.`));
  await audit(rules.map(({ rule }) => rule.name), trail);
}

async function effects(id, rule) {
  const found = [];
  const place = rule.pin?.indexOf(id) ?? -1;
  if (place >= 0) found.push(`pinned, place ${place + 1}`);
  if (rule.filter && !(await eligible(id, rule.filter))) found.push("kept out by the filter");
  for (const boost of rule.boosts ?? []) {
    if (await eligible(id, boost.filter)) found.push(`${boost.weight > 0 ? "boosted" : "buried"} by ${number(boost.weight, 1).replace("-", "−")}`);
  }
  return { rule, effects: found };
}

async function stand(name, box, load) {
  try {
    const { rules } = await call("GET", path("aliases", CHAMPION));
    await call("PUT", path("aliases", CHAMPION), { body: { rules: [...rules, name] } });
    announce(`The rule ${name} applies to all lists of ${CHAMPION}.`);
    await load();
  } catch (problem) {
    box.append(problemBox(problem));
  }
}

function form(item, load) {
  const name = h("input", { id: "rule-name", value: USUAL, pattern: "[a-z0-9][a-z0-9_\\-]{0,63}", required: true, spellcheck: "false", autocomplete: "off" });
  const weight = h("input", { id: "rule-weight", type: "number", value: 1, step: 0.5, min: -20, max: 20 });
  const told = h("div", {});
  const act = (change, done) => h("button", {
    type: "button",
    onclick: async () => {
      if (!name.reportValidity() || !weight.reportValidity()) return;
      try {
        await edit(name.value, item.item_id, change(Number(weight.value)));
        render(told);
        announce(done);
        await load();
      } catch (problem) {
        render(told, problemBox(problem));
      }
    },
  });
  const button = (text, change, done) => {
    const made = act(change, done);
    made.append(text);
    return made;
  };
  return h("details", { class: "inner" }, h("summary", {}, "Pin or boost"),
    h("p", { class: "option" }, h("label", { for: "rule-name" }, "In the rule"), name),
    h("p", { class: "option" }, h("label", { for: "rule-weight" }, "Weight of the boost; below 0 it buries"), weight),
    h("div", { class: "row" },
      button("Pin to the top", () => ({ pin: true }), "It is pinned."),
      button("Boost", (value) => ({ weight: value }), "It is boosted."),
      button("Take out of the rule", () => ({}), "The rule names it no longer.")), told);
}

/** Change what a rule says about one item: `pin` and `weight` are set, or nothing is said any more. */
async function edit(name, id, { pin, weight }) {
  const rule = await existing(name);
  const isOurs = (boost) => JSON.stringify(boost.filter) === JSON.stringify({ must: [only(id)] });
  const isOut = !pin && !weight;
  const pins = (rule.pin ?? []).filter((one) => one !== id || (!pin && !isOut));
  const boosts = (rule.boosts ?? []).filter((boost) => !isOurs(boost) || (!weight && !isOut));
  if (pin) pins.unshift(id);
  if (weight) boosts.push({ filter: { must: [only(id)] }, weight });
  const body = { filter: rule.filter ?? null, boosts, pin: pins, max_per: rule.max_per ?? {} };
  if (body.filter || boosts.length || pins.length || Object.keys(body.max_per).length) await call("PUT", path("rules", name), { body });
  else if (rule.name) await call("DELETE", path("rules", name));
}

/** A rule as it is; empty if there is none of this name. */
async function existing(name) {
  let page = { next: "" };
  while (page.next !== null) {
    page = await call("GET", at("/v1/rules", { limit: PAGE, cursor: page.next }));
    const found = page.rules.find((rule) => rule.name === name);
    if (found) return found;
  }
  return {};
}

// Who changed what

async function audit(names, box) {
  if (!names.length) {
    render(box);
    return;
  }
  let changes;
  try {
    const found = await Promise.all(names.slice(0, MOST_NAMED).map((name) => call("GET", at("/v1/rule-changes", { name, limit: MOST_CHANGES }))));
    changes = [...new Map(found.flatMap((one) => one.changes).map((change) => [change.id, change])).values()];
  } catch (problem) {
    render(box, problem.code === "forbidden" ? h("p", { class: "fine" }, "The changes of rules are read with a key of scope write.") : problemBox(problem));
    return;
  }
  changes.sort((a, b) => b.time_ms - a.time_ms);
  render(box, h("details", { class: "inner" }, h("summary", {}, `Changes of ${names.length === 1 ? "this rule" : "these rules"}`),
    h("ol", { class: "notes trail" }, changes.slice(0, MOST_CHANGES).map((change) => h("li", {},
      `${moment(change.time_ms)}, ${change.by ?? "without a key"}: ${said(change)}`)))));
}

function said({ op, name, rule, rules }) {
  if (op === "delete") return `${name} was deleted`;
  if (op === "alias") return rules.length ? `${name} has the rules ${rules.join(", ")}` : `${name} has no rules`;
  const parts = [
    rule.pin?.length && `${plural(rule.pin.length, "pin")}: ${rule.pin.slice(0, 3).join(", ")}${rule.pin.length > 3 ? " …" : ""}`,
    rule.boosts?.length && plural(rule.boosts.length, "boost"), rule.filter && "a filter",
    rule.max_per && Object.keys(rule.max_per).length > 0 && "a cap",
  ].filter(Boolean);
  return `${name} was put with ${parts.join(", ")}`;
}
