// The frame of the page, and its views.

import { apiKey, call, setApiKey } from "./api.js";
import { mountCatalog } from "./catalog.js";
import { mountCompare } from "./compare.js";
import { mountDecode } from "./decode.js";
import { h, number, problemBox, render } from "./dom.js";
import { mountEvaluation } from "./evaluation.js";
import { mountExperiments } from "./experiments.js";
import { mountFilters } from "./filters.js";
import { mountHistory } from "./history.js";
import { mountOperations } from "./operations.js";
import { mountOptions, mountResults } from "./results.js";
import { format, state, update, watch } from "./state.js";
import { mountToday } from "./today.js";

const VIEWS = {
  today: ["Today", mountToday],
  recommend: ["Recommend", mountResults],
  compare: ["Compare", mountCompare],
  catalog: ["Catalog", mountCatalog],
  experiments: ["Experiments", mountExperiments],
  evaluation: ["Evaluation", mountEvaluation],
  operations: ["Operations", mountOperations],
  decode: ["Inside the decode", mountDecode],
};
const FOR_A_PERSON = ["recommend", "compare", "decode", "catalog"]; // views for a user or session
const THEMES = { "": "As the system", light: "Light", dark: "Dark" };
const THEME = "recsys-theme";
const $ = (id) => document.getElementById(id);

async function mount() {
  theme(localStorage.getItem(THEME) ?? "");
  tools();
  $("skip").addEventListener("click", () => $("main").focus());
  $("sheet").addEventListener("click", (event) => event.target === $("sheet") && $("sheet").close());
  await ready();
  const links = Object.entries(VIEWS).map(([view, [name]]) => h("a", {
    href: "/", "data-view": view,
    onclick: (event) => {
      if (event.metaKey || event.ctrlKey || event.shiftKey) return; // opens a new tab
      event.preventDefault();
      update({ view });
    },
  }, name));
  render($("views"), links);
  mountHistory($("session"));
  const sections = Object.fromEntries(Object.entries(VIEWS).map(([view, [, fill]]) => {
    const section = h("section", { class: `view ${view}`, hidden: true });
    $("main").append(section);
    return [view, [section, fill]];
  }));
  watch(["view"], () => { // before the views are mounted: they measure their size
    for (const [view, [section]] of Object.entries(sections)) section.hidden = view !== state.view;
    const personal = FOR_A_PERSON.includes(state.view);
    $("session").hidden = !personal;
    $("side").hidden = !personal;
    document.title = state.view === "recommend" ? "recsys" : `${VIEWS[state.view][0]} · recsys`;
  });
  watch(Object.keys(state), () => {
    for (const link of links) {
      link.href = format({ ...state, view: link.dataset.view });
      if (link.dataset.view === state.view) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
  });
  for (const [section, fill] of Object.values(sections)) fill(section);
  mountFilters($("side"));
  mountOptions($("side"));
  $("body").classList.remove("waiting");
}

/** Wait for the model and show its name; the views report other problems. */
async function ready() {
  $("body").hidden = false;
  for (;;) {
    try {
      const [first] = (await call("GET", "/v1/models")).models;
      render($("loaded"), h("strong", {}, first.name), ` ${number(first.items)} items · ${first.levels} levels`);
      break;
    } catch (problem) {
      if (problem.code === "unauthenticated") $("tools").firstChild.open = true; // the key is entered there
      if (problem.code !== "not_ready") break;
      render($("main"), problemBox(problem));
      await new Promise((done) => setTimeout(done, 1000 * (problem.retryAfter ?? 1)));
    }
  }
  render($("main"));
}

function tools() {
  const key = h("input", {
    type: "password", id: "key", autocomplete: "off", value: apiKey(), placeholder: "rk_…", "aria-describedby": "key-help",
    onchange: (event) => (setApiKey(event.target.value.trim()), location.reload()),
  });
  const look = h("select", { id: "theme", onchange: (event) => theme(event.target.value) },
    Object.entries(THEMES).map(([value, name]) => h("option", { value, selected: value === (localStorage.getItem(THEME) ?? "") }, name)));
  $("tools").append(h("details", { class: "settings" }, h("summary", { "aria-label": "Settings" }, "Settings"),
    h("div", { class: "panel" },
      h("form", { class: "option", onsubmit: (event) => event.preventDefault() }, h("label", { for: "key" }, "API key"), key),
      h("p", { class: "fine", id: "key-help" }, "Kept for this tab alone."),
      h("p", { class: "option" }, h("label", { for: "theme" }, "Colours"), look))));
  document.addEventListener("keydown", (event) => event.key === "Escape" && $("tools").firstChild.removeAttribute("open"));
}

function theme(name) {
  if (name) localStorage.setItem(THEME, name);
  else localStorage.removeItem(THEME);
  document.documentElement.className = name;
}

mount();
