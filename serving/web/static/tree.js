// The tree of one decode as an SVG: the prompt at the left, one column per level, and the items of the
// answer at the right. Shape and colour show the fate: disc accepted, ring rejected, diamond patched.

import { logProb, svg } from "./dom.js";

const ROW = 21; // height of a row
const TOP = 14;
const NARROWEST = 138; // smallest width of a column
const ITEMS = 230; // width of the last column
const LABEL = { root: 9, accepted: 84, patched: 84, rejected: 40 }; // offset of the end of a node's text
const FEW = 2; // number of rejected children shown beside kept ones; of the others only the count is shown

/**
 * Compute the layout of a trace.
 *
 * @param trace trace of the answer, as in the response
 * @param items items of the answer, which become leaves by their semantic IDs
 * @returns {{nodes: object[], height: number}} nodes with `x` (column), `y`, `up` and `down`
 */
export function layout(trace, items) {
  const root = { kind: "root", depth: 0, code: null, path: [], down: [], items: null };
  const byId = new Map([[-1, root]]);
  for (const node of trace.nodes) {
    const up = byId.get(node.parent);
    const here = { ...node, kind: "node", up, path: [...up.path, node.code], down: [] };
    byId.set(node.id, here);
    up.down.push(here);
  }
  const byPath = new Map([...byId.values()].map((node) => [node.path.join("."), node]));
  for (const item of items) {
    const up = item.semantic_id && byPath.get(item.semantic_id.slice(0, -1).join("."));
    if (!up) continue;
    up.down.push({
      kind: "item", up, depth: up.depth + 1, path: item.semantic_id, code: item.semantic_id.at(-1),
      target_log_prob: item.score, title: item.title || item.item_id, rank: item.rank, pass: trace.passes, down: [],
    });
  }
  const nodes = [];
  let row = 0;
  const place = (node) => {
    nodes.push(node);
    node.down.sort((a, b) => b.target_log_prob - a.target_log_prob);
    const poor = node.down.filter((one) => one.fate === "rejected" && !one.down.some((two) => two.fate !== "rejected"));
    const few = poor.length < node.down.length ? FEW : 0;
    const hidden = poor.length > few + 1 ? poor.slice(few) : [];
    const shown = node.down.filter((one) => !hidden.includes(one));
    if (hidden.length) {
      shown.push({
        kind: "more", up: node, depth: node.depth + 1, path: node.path, count: hidden.length, down: [],
        pass: Math.min(...hidden.map((one) => one.pass)), target_log_prob: -Infinity,
      });
    }
    node.down = shown;
    if (shown.length === 0) node.y = row++;
    else {
      shown.forEach(place);
      node.y = shown[0].y; // the best path is a straight line
    }
  };
  place(root);
  return { nodes, height: row };
}

/** Describe a node in words. */
function describe(node, levels) {
  if (node.kind === "root") return "The history: the prompt";
  if (node.kind === "more") return `${node.count} more rejected nodes`;
  if (node.kind === "item") return `Rank ${node.rank}: ${node.title}, semantic ID ${node.path.join(" ")}, target ${logProb(node.target_log_prob)}`;
  const draft = node.draft_log_prob === null ? "not drafted" : `draft ${logProb(node.draft_log_prob)}`;
  return `Level ${node.depth} of ${levels}, code ${node.code}, ${node.fate}, ${draft}, target ${logProb(node.target_log_prob)}, ` +
    `pass ${node.pass}${node.items == null ? "" : `, ${node.items} items below`}`;
}

/**
 * Draw a layout.
 *
 * @param shape result of `layout`
 * @param levels number of codes in a semantic ID
 * @param width available width in pixels
 * @param look called with the description of the node that is under the pointer or has the focus
 * @returns {{picture: SVGElement, column: number}} the picture and the width of a column
 */
export function drawTree({ nodes, height }, levels, width, look) {
  const column = Math.max(NARROWEST, (width - ITEMS - 30) / levels);
  const x = (node) => 22 + node.depth * column;
  const y = (node) => TOP + node.y * ROW;
  const whole = { width: 22 + levels * column + ITEMS, height: height * ROW + TOP * 2 };
  const best = Math.max(...nodes.filter((n) => n.kind === "node").map((n) => n.target_log_prob), -Infinity);
  const edges = nodes.filter((node) => node.up).map((node) => {
    const [x0, y0, x1, y1] = [x(node.up) + LABEL[node.up.fate ?? "root"], y(node.up), x(node) - 9, y(node)];
    const bend = (x1 - x0) * 0.55;
    return svg("path", {
      d: `M${x0} ${y0}C${x0 + bend} ${y0} ${x1 - bend} ${y1} ${x1} ${y1}`, "data-pass": node.pass ?? 0,
      class: `edge ${node.kind === "item" ? "accepted" : node.fate ?? "rejected"}`,
      "stroke-width": node.kind === "node" ? (0.8 + 2.2 * Math.exp((node.target_log_prob - best) / 2)).toFixed(2) : 1,
    });
  });
  const marks = nodes.map((node, i) => mark(node, i, x(node), y(node), levels));
  const picture = svg("svg", {
    class: "tree", role: "tree", "aria-label": "The tree of the decode, one column per level", viewBox: `0 0 ${whole.width} ${whole.height}`,
    width: whole.width, height: whole.height,
  }, svg("g", { "aria-hidden": "true" }, edges), marks);
  for (const event of ["pointerover", "focusin"]) {
    picture.addEventListener(event, ({ target }) => {
      const over = target.closest?.("[data-node]");
      if (over) look(over.getAttribute("aria-label"));
    });
  }
  picture.addEventListener("keydown", (event) => walk(event, nodes, marks));
  return { picture, column };
}

function mark(node, i, x, y, levels) {
  const label = { root: "", node: node.code, item: `${node.rank}. ${short(node.title ?? "")}`, more: `+ ${node.count} rejected` }[node.kind];
  const shape = node.kind === "node"
    ? node.fate === "patched"
      ? svg("path", { class: "shape", d: `M${x} ${y - 7}l7 7-7 7-7-7z` })
      : svg("circle", { class: "shape", cx: x, cy: y, r: node.fate === "accepted" ? 6 : 4.5 })
    : node.kind === "item"
      ? svg("rect", { class: "shape", x: x - 6, y: y - 6, width: 12, height: 12, rx: 3 })
      : svg("circle", { class: "shape", cx: x, cy: y, r: node.kind === "root" ? 7 : 2.5 });
  return svg("g", {
    class: `mark ${node.kind} ${node.fate ?? ""}`, "data-node": i, "data-pass": node.pass ?? 0, role: "treeitem",
    tabindex: i === 0 ? 0 : -1, "aria-level": node.depth + 1, "aria-label": describe(node, levels),
    "aria-expanded": node.down.length ? "true" : undefined,
  },
  svg("rect", { class: "hit", x: x - 11, y: y - ROW / 2, width: 100, height: ROW }), svg("circle", { class: "halo", cx: x, cy: y, r: 11 }), shape,
  svg("text", { x: x + 12, y: y + 4, "aria-hidden": "true" }, label),
  node.kind === "node" && node.fate !== "rejected"
    ? svg("text", { class: "prob", x: x + 38, y: y + 4, "aria-hidden": "true" }, logProb(node.target_log_prob)) : null);
}

const short = (text) => (text.length > 28 ? `${text.slice(0, 27)}…` : text);

/** Arrow keys: left to the parent, right to the best child, up and down within the level. */
function walk(event, nodes, marks) {
  const at = marks.indexOf(event.target.closest("[data-node]"));
  if (at < 0) return;
  const node = nodes[at];
  const seen = (one) => one && !marks[nodes.indexOf(one)].classList.contains("later");
  const level = nodes.filter((one) => one.depth === node.depth && seen(one)).sort((a, b) => a.y - b.y);
  const next = {
    ArrowLeft: node.up, ArrowRight: node.down.find(seen), Home: nodes[0],
    ArrowUp: level[level.indexOf(node) - 1], ArrowDown: level[level.indexOf(node) + 1], End: level.at(-1),
  }[event.key];
  if (!next) return;
  event.preventDefault();
  marks[at].setAttribute("tabindex", "-1");
  const to = marks[nodes.indexOf(next)];
  to.setAttribute("tabindex", "0");
  to.focus();
}
