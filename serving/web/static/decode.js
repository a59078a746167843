// Inside the decode: the tree of one answer, pass by pass.

import { latest, request } from "./api.js";
import { announce, empty, h, number, problemBox, render, tile } from "./dom.js";
import { ASKED } from "./results.js";
import { state, watch } from "./state.js";
import { drawTree, layout } from "./tree.js";

const FATES = {
  accepted: "drafted, and a beam of the target's search",
  rejected: "run, but not a beam",
  patched: "a beam that was not drafted; added by a later pass",
};
const ask = latest();
let root, pass = 1, answer = null;

export function mountDecode(into) {
  root = into;
  watch(["view", ...ASKED], () => state.view === "decode" && load());
  window.addEventListener("resize", () => state.view === "decode" && answer && draw());
}

async function load() {
  render(root, h("h2", {}, "Inside the decode"), h("p", { class: "fine", role: "status" }, "Decoding …"));
  // The model's exact search alone, without blending.
  const body = { ...request(["trace", "timing", "metadata"]), mode: "strict", blend: false };
  let found;
  try {
    found = await ask("POST", "/v1/recommendations", body);
  } catch (problem) {
    answer = null;
    render(root, h("h2", {}, "Inside the decode"), problemBox(problem, load));
    return;
  }
  if (!found) return; // a newer request is under way
  answer = found;
  pass = answer.trace?.passes ?? 1;
  draw();
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
    h("p", { class: "look", id: "look" }),
    legend());
  const pane = root.querySelector("#look");
  const box = root.querySelector("#tree");
  const { picture, column } = drawTree(layout(trace, answer.items), trace.levels, box.clientWidth, (text) => (pane.textContent = text));
  const head = heads(trace);
  head.style.gridTemplateColumns = `${12 + column}px repeat(${trace.levels - 1}, ${column}px) 1fr`;
  head.style.width = `${picture.getAttribute("width")}px`;
  render(box, head, picture);
  step(pass);
}

function count(nodes) {
  const found = {};
  for (const { fate } of nodes) found[fate] = (found[fate] ?? 0) + 1;
  return found;
}

const legend = () => h("ul", { class: "legend" }, Object.entries(FATES).map(([fate, text]) =>
  h("li", {}, h("span", { class: `dot ${fate}`, "aria-hidden": "true" }), h("strong", {}, fate), ` ${text}`)));

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

// Passes

function stepper(trace) {
  return h("div", { class: "stepper" },
    h("input", {
      type: "range", id: "pass", min: 0, max: trace.passes, step: 1, value: pass, "aria-label": "Passes of the target shown",
      oninput: (event) => step(Number(event.target.value)),
    }),
    h("output", { id: "pass-text", for: "pass" }));
}

function step(to) {
  pass = to;
  const { trace } = answer;
  for (const one of root.querySelectorAll(".tree [data-pass]")) {
    const isLater = Number(one.dataset.pass) > pass;
    one.classList.toggle("later", isLater);
    one.setAttribute("aria-hidden", isLater);
  }
  const here = count(trace.nodes.filter((node) => node.pass === pass));
  const text = pass === 0
    ? "before the first pass"
    : `pass ${pass} of ${trace.passes}: ${Object.entries(here).map(([fate, n]) => `${n} ${fate}`).join(", ") || "the last level"}`;
  root.querySelector("#pass-text").textContent = text;
  announce(text);
}
