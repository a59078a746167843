// The frame of the page, and its views.

import { apiKey, call, setApiKey } from "./api.js";
import { h, number, problemBox, render } from "./dom.js";
import { mountFilters } from "./filters.js";
import { mountHistory } from "./history.js";
import { mountOptions, mountResults } from "./results.js";
import { FOR_A_PERSON, format, state, update, watch } from "./state.js";

// Names of the views and what fills them, which is loaded when a view is first shown.
const VIEWS = {
  today: ["Today", async () => (await import("./today.js")).mountToday],
  recommend: ["Recommend", async () => mountResults],
  compare: ["Compare", async () => (await import("./compare.js")).mountCompare],
  catalog: ["Catalog", async () => (await import("./catalog.js")).mountCatalog],
  experiments: ["Experiments", async () => (await import("./experiments.js")).mountExperiments],
  decode: ["Inside the decode", async () => (await import("./decode.js")).mountDecode],
};
const $ = (id) => document.getElementById(id);

async function mount() {
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
  const sections = Object.fromEntries(Object.keys(VIEWS).map((view) => {
    const section = h("section", { class: `view ${view}`, hidden: true });
    $("main").append(section);
    return [view, section];
  }));
  let first;
  watch(["view"], () => { // before a view is mounted: it measures its size
    for (const [view, section] of Object.entries(sections)) section.hidden = view !== state.view;
    const personal = FOR_A_PERSON.includes(state.view);
    $("session").hidden = !personal;
    $("side").hidden = !personal;
    if (personal && !$("side").hasChildNodes()) {
      mountFilters($("side"));
      mountOptions($("side"));
    }
    document.title = state.view === "recommend" ? "recsys" : `${VIEWS[state.view][0]} · recsys`;
    if (first) loaded().catch(() => {}); // another model may have been promoted meanwhile
    const shown = show(state.view, sections[state.view]);
    first ??= shown;
  });
  watch(Object.keys(state), () => {
    for (const link of links) {
      link.href = format({ ...state, view: link.dataset.view });
      if (link.dataset.view === state.view) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
  });
  await first;
  $("body").classList.remove("waiting");
}

const mounted = new Set();

/** Load and fill a view, the first time that it is shown. */
async function show(view, section) {
  if (mounted.has(view)) return;
  mounted.add(view);
  try {
    const fill = await VIEWS[view][1]();
    render(section);
    fill(section);
  } catch (error) {
    mounted.delete(view);
    render(section, problemBox({ title: "The view cannot be loaded", detail: error.message, code: "unreachable" }, () => show(view, section)));
  }
}

/** Show the name of the model that answers, and the number of items that it may recommend. */
async function loaded() {
  const { models } = await call("GET", "/v1/models");
  const first = models.find((model) => model.aliases?.includes("champion")) ?? models[0];
  render($("loaded"), h("strong", {}, first.name), ` ${number(first.items)} items · ${first.levels} levels`);
}

/** Wait for the model and show its name; the views report other problems. */
async function ready() {
  $("body").hidden = false;
  for (;;) {
    try {
      await loaded();
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
  $("tools").append(h("details", { class: "settings" }, h("summary", { "aria-label": "Settings" }, "Settings"),
    h("div", { class: "panel" },
      h("form", { class: "option", onsubmit: (event) => event.preventDefault() }, h("label", { for: "key" }, "API key"), key),
      h("p", { class: "fine", id: "key-help" }, "Kept for this tab alone."))));
  document.addEventListener("keydown", (event) => event.key === "Escape" && $("tools").firstChild.removeAttribute("open"));
}

mount();
