// What a merchandiser looks at in the morning: what was recommended, what came of it, what to look into.

import { at, call, latest, remember } from "./api.js";
import { attempt, h, moment, number, percent, plural, render, table, tile } from "./dom.js";
import { openItem } from "./item.js";
import { state, update, watch } from "./state.js";

const EVERY_MS = 60_000;
const ask = latest();
let box, period, timer = 0;

export function mountToday(root) {
  period = h("select", { id: "days", onchange: () => update({ days: Number(period.value) }) },
    h("option", { value: 1 }, "the last 24 hours"), h("option", { value: 7 }, "the last 7 days"));
  box = h("div", { class: "today-box" });
  root.append(h("div", { class: "list-head" }, h("h2", {}, "Today"),
    h("p", { class: "field" }, h("label", { for: "days" }, "Period"), period)), box);
  watch(["view", "days"], () => {
    clearInterval(timer);
    if (state.view !== "today") return;
    load();
    timer = setInterval(() => document.visibilityState === "visible" && load(), EVERY_MS);
  });
}

const load = () => attempt(box, async () => {
  period.value = state.days;
  const [figures, trends] = await Promise.all([ask("GET", at("/v1/today", { days: state.days })), call("GET", "/v1/lists/trending")]);
  if (figures) draw(figures, trends.items);
});

function draw(figures, trends) {
  const { coverage } = figures;
  remember([...trends, ...figures.most_shown, ...figures.never_shown, ...figures.never_followed]);
  const [click, purchase] = figures.rates;
  render(box,
    h("p", { class: "fine" }, `${moment(figures.since_ms)} to ${moment(figures.until_ms)}`), // no status: it changes each minute
    h("dl", { class: "tiles" },
      tile("Recommendations", number(figures.answers), figures.answers ? `for ${plural(figures.people, "person", "people")}` : "none yet"),
      rate("Click rate", click, figures),
      rate("Purchase rate", purchase, figures),
      tile("Catalog shown", percent(coverage.items ? coverage.shown / coverage.items : null), `${number(coverage.shown)} of ${plural(coverage.items, "item")}`)),
    h("div", { class: "two" },
      items("Trending", "What people look at and buy now, wherever they found it. Each person counts once for an item, a purchase more than a look, and half after each day.",
        trends, { score: "score" }, "No events in the last seven days.", 1),
      items("Never shown", `${plural(coverage.never_shown, "item")} of the catalog ${coverage.never_shown === 1 ? "was" : "were"} in no recommendation; first those that people look for anyway.`,
        figures.never_shown, { people: "people" }, "Every item was shown."),
      items("Shown, and nothing came of it", `${plural(coverage.never_followed, "item")} ${coverage.never_followed === 1 ? "was" : "were"} shown, and nobody followed; most shown first.`,
        figures.never_followed, { shown: "shown", people: "people" }, "None."),
      items("Most shown", "The items that are recommended most, and how often somebody followed.",
        figures.most_shown, { shown: "shown", followed: "followed" }, "Nothing was recommended in this period.")),
    h("div", { class: "two" },
      h("section", { class: "panel" }, h("h3", {}, "What came of recommendations"),
        figures.answers > 0
          ? table("What came of recommendations", ["event", "followed", "rate", "95 % interval"], figures.rates.map((row) =>
            [row.type, number(row.followed), percent(row.rate), row.low === null ? "–" : `${percent(row.low)} to ${percent(row.high)}`]))
          : h("p", { class: "fine" }, "Nothing was recommended in this period.")),
      h("section", { class: "panel" }, h("h3", {}, "How to read this"), h("ul", { class: "notes" }, notes(figures).map((text) => h("li", {}, text))))));
}

function rate(name, row, figures) {
  if (row.rate === null) return tile(name, "–", "no recommendations");
  return tile(name, percent(row.rate), row.low === null
    ? `${number(row.followed)} of ${number(figures.answers)}; one person gives no interval`
    : `${percent(row.low)} to ${percent(row.high)} (95 %), ${number(row.followed)} of ${number(figures.answers)}`);
}

/** A panel of the first items of a list; `columns` are names of their figures, by field. */
function items(name, about, rows, columns, none, digits = 0) {
  const title = (row) => h("button", { type: "button", class: "link", "data-key": `${name}-${row.item_id}`, onclick: () => openItem(row.item_id) }, row.title || row.item_id);
  return h("section", { class: "panel" }, h("h3", {}, name), h("p", { class: "fine" }, about),
    rows.length
      ? table(name, ["item", ...Object.values(columns)], rows.slice(0, 10).map((row) => [title(row), ...Object.keys(columns).map((key) => number(row[key], digits))]))
      : h("p", {}, none));
}

/** What the figures mean, and what is not known. */
function notes(figures) {
  return [
    "A recommendation is a list that the service answered with, also to this page. Whether anybody saw it is not known.",
    "A click or purchase counts if the shop reports it with the recommendation_id of the list. What is reported without it may be due to a recommendation and does not count.",
    "Followed means that the person did something with an item of the list, such as a click, and did not just see or dismiss it.",
    "The newest recommendations may still be followed: purchases often come hours later.",
    "Intervals treat the lists of one person as dependent; they are for a look at any one time. To compare two models, use an experiment.",
    figures.answers_without_user > 0 && `${plural(figures.answers_without_user, "recommendation")} had no user id. Each counts as another person, so the intervals may be too narrow.`,
    !figures.answers_complete && "The store no longer remembers all recommendations of this period. Figures are of the newest ones.",
    !figures.events_complete && "There are more events than are looked at. Rates and trends are of the newest ones, so rates may be too low.",
    figures.answers > 0 && figures.rates.every((row) => row.followed === 0) && "No event names a recommendation. Check that the shop sends recommendation_id with its events.",
  ].filter(Boolean);
}
