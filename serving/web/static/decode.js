// Inside the decode: the tree of one answer, pass by pass, compared with plain beam search.

import { call, request } from "./api.js";
import { announce, codes, empty, h, logProb, number, problemBox, render, share, tile } from "./dom.js";
import { ASKED } from "./results.js";
import { state, watch } from "./state.js";
import { drawTree, layout } from "./tree.js";

const FATES = {
  accepted: "drafted, and a beam of the target's search",
  rejected: "run, but not a beam",
  patched: "a beam that was not drafted; added by a later pass",
};
let root, pass = 1, all = false, answer = null, runs = null, asked = 0;

export function mountDecode(into) {
  root = into;
  watch(["view", ...ASKED], () => state.view === "decode" && load());
  window.addEventListener("resize", () => state.view === "decode" && answer && draw());
}

/** The request to inspect: the model's exact search alone, without blending. */
const speculative = () => ({
  ...request(["trace", "timing", "metadata"]),
  mode: "strict", blend: false,
});

async function load() {
  const mine = ++asked;
  render(root, h("h2", {}, "Inside the decode"), h("p", { class: "fine", role: "status" }, "Decoding …"));
  try {
    const found = await call("POST", "/v1/recommendations", { body: speculative() });
    if (mine !== asked) return;
    answer = found;
  } catch (problem) {
    if (mine !== asked) return;
    answer = null;
    render(root, h("h2", {}, "Inside the decode"), problemBox(problem, load));
    return;
  }
  pass = answer.trace?.passes ?? 1;
  runs = null;
  draw();
  compare();
}

function draw() {
  const { trace, timing } = answer;
  const title = h("h2", {}, "Inside the decode");
  if (!trace?.nodes?.length) {
    render(root, title, empty("No tree", "This answer was computed without a draft, or without the model: there is no tree."));
    return;
  }
  const counts = count(trace.nodes);
  const decode = timing?.decode ?? {};
  render(root, title,
    h("p", { class: "lead" }, decode.draft_passes
      ? "A small model drafts a tree of codes. The target scores the whole tree in one pass and keeps the beams of its own search. Another pass patches the beams that were not drafted."
      : "This bundle has no draft model: the tree has every allowed code of the first levels. The target scores it in one pass, keeps the beams of its own search, and patches those that are missing."),
    h("dl", { class: "tiles" },
      tile("target passes", number(decode.target_passes ?? trace.passes), `plain search needs ${trace.levels}`),
      tile("nodes scored", number(trace.nodes.length), `${number(counts.accepted ?? 0)} accepted, ${number(counts.patched ?? 0)} patched`),
      tile("levels accepted", `${number(decode.accepted_levels ?? 0)} of ${trace.levels - 1}`, "by the first pass"),
      tile("compute", `${number(timing?.compute_ms, 1)} ms`, answer.certificate ?? "")),
    stepper(trace),
    h("figure", { class: "tree-box", id: "tree" }),
    h("div", { class: "look", id: "look", "aria-live": "polite" }, legend()),
    h("section", { id: "compare", "aria-labelledby": "compare-title" }, side(), h("p", { class: "fine" }, "Searching plainly, too …")));
  picture();
  if (runs) drawComparison();
}

function count(nodes) {
  const found = {};
  for (const { fate } of nodes) found[fate] = (found[fate] ?? 0) + 1;
  return found;
}

const legend = () => h("ul", { class: "legend" }, Object.entries(FATES).map(([fate, text]) =>
  h("li", {}, h("span", { class: `dot ${fate}`, "aria-hidden": "true" }), h("strong", {}, fate), ` ${text}`)));

// The picture

function picture() {
  const box = root.querySelector("#tree");
  const { trace, items } = answer;
  const shape = layout(trace, items, all);
  const { picture: tree, column } = drawTree(shape, trace.levels, box.clientWidth, look);
  const head = heads(trace);
  head.style.gridTemplateColumns = `${12 + column}px repeat(${trace.levels - 1}, ${column}px) 1fr`;
  head.style.width = `${tree.getAttribute("width")}px`;
  render(box, head, tree);
  step(pass);
}

/** The counts of each level: nodes by fate, and codes that are not allowed. */
function heads(trace) {
  return h("div", { class: "levels" }, h("p", { class: "level" }, h("strong", {}, "History")), Array.from({ length: trace.levels }, (_, i) => {
    const level = i + 1;
    const at = count(trace.nodes.filter((node) => node.depth === level));
    const blocked = trace.blocked?.[level];
    return h("p", { class: "level" }, h("strong", {}, `Level ${level}`),
      level < trace.levels
        ? h("span", {}, ["accepted", "patched", "rejected"].filter((fate) => at[fate]).map((fate) =>
          h("span", { class: "fate-count" }, h("span", { class: `dot ${fate}`, "aria-hidden": "true" }), `${number(at[fate])}`, h("span", { class: "sr" }, ` ${fate} `))))
        : h("span", {}, `${number(answer.items.length)} items`),
      blocked !== undefined && h("span", { class: "blocked", title: "Codes after the beams that lead to no item, or to none that matches the filter" },
        `${number(blocked)} blocked${state.filter ? " by trie or filter" : " by the trie"}`));
  }));
}

function look(node) {
  const pane = root.querySelector("#look");
  if (node.kind !== "node") {
    render(pane, node.kind === "item"
      ? h("p", {}, h("strong", {}, `${node.rank}. ${node.title}`), codes(node.path), ` target ${logProb(node.target_log_prob)} (${share(node.target_log_prob)})`)
      : legend());
    return;
  }
  render(pane, h("p", {},
    h("span", { class: `dot ${node.fate}`, "aria-hidden": "true" }), h("strong", {}, node.fate), codes(node.path),
    ` level ${node.depth}, pass ${node.pass}`,
    node.items != null && `, ${number(node.items)} items below`),
  h("p", { class: "probs" },
    probability("draft", node.draft_log_prob), probability("target", node.target_log_prob)));
}

function probability(name, value) {
  const bar = h("span", { class: `bar ${name}`, "aria-hidden": "true" });
  bar.style.setProperty("--part", value === null ? 0 : Math.max(0.01, Math.min(1, Math.exp(value))));
  return h("span", { class: "prob-line" }, h("span", {}, name), bar,
    h("span", {}, value === null ? "not drafted" : `${logProb(value)} (${share(value)})`));
}

// Passes

function stepper(trace) {
  const to = (n) => () => step(n());
  const slider = h("input", {
    type: "range", id: "pass", min: 0, max: trace.passes, step: 1, value: pass, "aria-label": "Passes shown",
    oninput: (event) => step(Number(event.target.value)),
  });
  const every = h("input", { type: "checkbox", id: "every", checked: all, onchange: (event) => ((all = event.target.checked), picture()) });
  return h("div", { class: "stepper", role: "group", "aria-label": "Passes of the target" },
    h("button", { type: "button", id: "back", "aria-label": "Pass before", onclick: to(() => Math.max(0, pass - 1)) }, "◂"),
    slider,
    h("button", { type: "button", id: "forth", "aria-label": "Next pass", onclick: to(() => Math.min(trace.passes, pass + 1)) }, "▸"),
    h("output", { id: "pass-text", for: "pass" }),
    h("label", { class: "end" }, every, " every rejected node"));
}

function step(to) {
  pass = to;
  const { trace } = answer;
  for (const one of root.querySelectorAll(".tree [data-pass]")) one.classList.toggle("later", Number(one.dataset.pass) > pass);
  for (const one of root.querySelectorAll(".tree .mark")) {
    if (one.classList.contains("later")) one.setAttribute("aria-hidden", "true");
    else one.removeAttribute("aria-hidden");
  }
  const here = count(trace.nodes.filter((node) => node.pass === pass));
  const text = pass === 0
    ? "before the first pass"
    : `pass ${pass} of ${trace.passes}: ${Object.entries(here).map(([fate, n]) => `${n} ${fate}`).join(", ") || "the last level"}`;
  root.querySelector("#pass").value = pass;
  root.querySelector("#pass-text").textContent = text;
  announce(text);
}

// Side by side with plain beam search

async function compare() {
  const mine = asked;
  const body = { ...speculative(), include: ["timing"] };
  try {
    const plain = await call("POST", "/v1/recommendations", { body: { ...body, mode: "beam" } });
    const tree = await call("POST", "/v1/recommendations", { body }); // tracing takes time
    if (mine !== asked) return;
    runs = { plain, tree };
    drawComparison();
  } catch (problem) {
    if (mine !== asked) return;
    render(root.querySelector("#compare"), side(), problemBox(problem, compare));
  }
}

function drawComparison() {
  const box = root.querySelector("#compare");
  if (!box) return;
  const { plain, tree } = runs;
  const ids = (of) => of.items.map((item) => item.item_id);
  const [ours, theirs] = [ids(answer), ids(plain)];
  const same = ours.length === theirs.length && ours.every((id, i) => id === theirs[i]);
  const decode = (of) => of.timing?.decode ?? {};
  const rows = [
    ["target passes", (of) => number(decode(of).target_passes)],
    ["tokens processed by the target", (of) => number(decode(of).target_tokens)],
    ["nodes drafted", (of) => number(decode(of).drafted_nodes ?? 0)],
    ["certificate", (of) => of.certificate ?? "–"],
    ["compute", (of) => `${number(of.timing?.compute_ms, 1)} ms`],
  ];
  render(box,
    side(),
    h("p", { class: same ? "same" : "differs" }, same ? `The same ${ours.length} items in the same order.` : `${ours.filter((id) => theirs.includes(id)).length} of ${theirs.length} items are the same.`),
    h("table", {}, h("caption", { class: "sr" }, "Counts and time of each search"),
      h("thead", {}, h("tr", {}, h("td", {}), h("th", { scope: "col" }, "speculative"), h("th", { scope: "col" }, "plain"))),
      h("tbody", {}, rows.map(([name, of]) =>
        h("tr", {}, h("th", { scope: "row" }, name), h("td", {}, of(tree)), h("td", {}, of(plain)))))),
    h("p", { class: "fine" }, "Which search is faster depends on the cost of a pass: on an accelerator, a wide pass takes little longer than a narrow one; on a CPU, its time grows with its tokens."));
}

const side = () => h("h3", { id: "compare-title" }, "Side by side with plain beam search");
