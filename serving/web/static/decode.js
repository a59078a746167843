// Inside the decode: the tree of one answer.

import { latest, request } from "./api.js";
import { attempt, empty, h, logProb, number, plural, render, tile } from "./dom.js";
import { ASKED } from "./results.js";
import { state, watch } from "./state.js";

const FATES = {
  accepted: "drafted, and a beam of the target's search",
  rejected: "run, but not a beam",
  patched: "a beam that was not drafted; added by a later pass",
};
const ask = latest();
let box;

export function mountDecode(root) {
  box = h("div", {});
  root.append(h("h2", {}, "Inside the decode"), box);
  watch(["view", ...ASKED], () => state.view === "decode" && load());
}

const load = () => attempt(box, async () => {
  render(box, h("p", { class: "fine", role: "status" }, "Decoding …"));
  // The model's exact search alone, without blending.
  const body = { ...request(["trace", "timing", "metadata"]), mode: "strict", blend: false };
  const answer = await ask("POST", "/v1/recommendations", body);
  if (answer) draw(answer); // else a newer request is under way
});

function draw(answer) {
  const { trace, timing } = answer;
  if (!trace?.nodes?.length) {
    render(box, empty("No tree", "This answer was computed without a draft, or without the model: there is no tree."));
    return;
  }
  const counts = count(trace.nodes);
  const passes = Math.max(...trace.nodes.map((node) => node.target_pass));
  const decode = timing?.decode ?? {};
  render(box,
    h("p", { class: "lead" }, decode.draft_passes
      ? "A small model drafts a tree of codes. The target scores the whole tree in one pass and keeps the beams of its own search. Another pass patches the beams that were not drafted."
      : "This bundle has no draft model: the tree has every allowed code of the first levels. The target scores it in one pass, keeps the beams of its own search, and patches those that are missing."),
    h("dl", { class: "tiles" },
      tile("target passes", number(decode.target_passes ?? passes), `plain search needs ${levelsOf(trace)}`),
      tile("nodes scored", number(trace.nodes.length), `${number(counts.accepted ?? 0)} accepted, ${number(counts.patched ?? 0)} patched`),
      tile("levels accepted", `${number(decode.accepted_levels ?? 0)} of ${levelsOf(trace) - 1}`, "by the first pass"),
      tile("compute", `${number(timing?.compute_ms, 1)} ms`, answer.certificate ?? "")),
    h("figure", { class: "tree-box" }, heads(answer), tree(answer)),
    legend());
}

/** The number of levels; the codes of the last are the items'. */
const levelsOf = (trace) => Object.keys(trace.blocked).length;

/** The nodes as nested lists, the best first, with the items of the answer as leaves. */
function tree({ trace, items: listed }) {
  const children = Map.groupBy([...trace.nodes.entries()], ([, node]) => node.parent);
  const leaves = Map.groupBy(listed, (item) => item.semantic_id.slice(0, -1).join("."));
  const branch = (id, path) => {
    const nodes = (children.get(id) ?? []).sort(([, a], [, b]) => b.target_log_prob - a.target_log_prob);
    const rejected = nodes.filter(([, node]) => node.fate === "rejected");
    const list = (some) => some.map(([place, node]) => leaf(node, branch(place, [...path, node.code])));
    const items = (leaves.get(path.join(".")) ?? []).map((item) => h("li", { class: "item" },
      h("span", { class: "node" }, `${item.rank}. ${item.title || item.item_id}`)));
    return (nodes.length > 0 || items.length > 0) && h("ul", { role: "list" }, list(nodes.filter(([, node]) => node.fate !== "rejected")), items,
      rejected.length > 0 && h("li", {}, h("details", {},
        h("summary", { class: "node" }, `${number(rejected.length)} rejected`), h("ul", { role: "list" }, list(rejected)))));
  };
  return h("div", { class: "tree" }, branch(-1, []));
}

const leaf = ({ code, fate, target_pass, items, draft_log_prob, target_log_prob }, below) =>
  h("li", { class: fate },
    h("span", { class: "node", title: `${fate} by pass ${target_pass}, ${plural(items, "item")} below` },
      h("span", { class: `dot ${fate}`, "aria-hidden": "true" }), h("span", { class: "sr" }, `${fate} code `), code,
      h("span", { class: "fine" }, logProb(target_log_prob), draft_log_prob ? ` (${logProb(draft_log_prob)})` : null)),
    below);

function count(nodes) {
  const counts = {};
  for (const { fate } of nodes) counts[fate] = (counts[fate] ?? 0) + 1;
  return counts;
}

const legend = () => h("ul", { class: "legend" }, Object.entries(FATES).map(([fate, text]) =>
  h("li", {}, h("span", { class: `dot ${fate}`, "aria-hidden": "true" }), h("strong", {}, fate), ` ${text}`)),
  h("li", {}, "Beside a code: its log-probability under the target, and (under the draft)."));

/** The counts of each level: nodes by fate, and codes that are not allowed. */
function heads({ trace, items }) {
  return h("div", { class: "levels" }, h("p", { class: "level" }, h("strong", {}, "History")), Array.from({ length: levelsOf(trace) }, (_, i) => {
    const level = i + 1;
    const at = count(trace.nodes.filter((node) => node.depth === level));
    const blocked = trace.blocked?.[level];
    return h("p", { class: "level" }, h("strong", {}, `Level ${level}`),
      level < levelsOf(trace)
        ? h("span", {}, ["accepted", "patched", "rejected"].filter((fate) => at[fate]).map((fate) =>
          h("span", { class: "fate-count" }, h("span", { class: `dot ${fate}`, "aria-hidden": "true" }), `${number(at[fate])}`, h("span", { class: "sr" }, ` ${fate} `))))
        : h("span", {}, `${number(items.length)} items`),
      blocked !== undefined && h("span", { class: "blocked", title: "Codes after the beams that lead to no item, or to none that matches the filter" },
        `${number(blocked)} blocked${state.filter ? " by trie or filter" : " by the trie"}`));
  }));
}
