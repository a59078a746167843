// The state of the page, kept in the fragment of its URL: it survives a reload, "back" works, links
// can be shared, and histories never appear in a server's log.

const DEFAULTS = {
  view: "recommend",
  user: "",
  history: null, // item ids of a session; null for the stored history of `user`
  k: 10,
  seen: null, // whether seen items may be recommended; null leaves it to the bundle
  model: "",
  filter: null,
  prefix: "",
  q: "",
  days: 1, // of the view "today"
  other: "", // the alias that `model` is compared with
};
export const MOST_HISTORY = 200; // largest number of items of a session; the model uses fewer
const VIEWS = ["today", "recommend", "compare", "catalog", "experiments", "decode"];
export const FOR_A_PERSON = ["recommend", "compare", "catalog", "decode"]; // views for a user or session

const watchers = [];
export let state = parse(location.hash);

/** Parse a fragment; missing and invalid values become defaults. */
export function parse(hash) {
  const parameters = new URLSearchParams(hash.replace(/^#/, ""));
  const parsed = { ...DEFAULTS };
  if (VIEWS.includes(parameters.get("view"))) parsed.view = parameters.get("view");
  for (const name of ["user", "model", "other", "prefix", "q"]) parsed[name] = parameters.get(name) ?? "";
  const k = Number(parameters.get("k"));
  if (Number.isInteger(k) && k >= 1 && k <= 200) parsed.k = k;
  if (parameters.get("days") === "7") parsed.days = 7;
  parsed.seen = { 0: false, 1: true }[parameters.get("seen")] ?? null;
  if (parameters.has("h")) parsed.history = parameters.getAll("h").filter(Boolean).slice(-MOST_HISTORY);
  try {
    const filter = JSON.parse(parameters.get("filter") ?? "null");
    if (filter && typeof filter === "object" && !Array.isArray(filter)) parsed.filter = filter;
  } catch {
    // not JSON: no filter
  }
  return parsed;
}

/** Format a state as a fragment, without default values. */
export function format(of) {
  const parameters = new URLSearchParams();
  for (const name of ["view", "user", "k", "model", "other", "prefix", "q", "days"]) {
    if (of[name] !== DEFAULTS[name]) parameters.set(name, of[name]);
  }
  if (of.seen !== null) parameters.set("seen", Number(of.seen));
  if (of.filter) parameters.set("filter", JSON.stringify(of.filter));
  if (of.history) for (const id of of.history.length ? of.history : [""]) parameters.append("h", id);
  return `#${parameters}`;
}

/** Change the state; the browser's "back" undoes it. */
export function update(changes) {
  const next = { ...state, ...changes };
  if (format(next) === format(state)) return;
  state = next;
  window.history.pushState(null, "", format(state));
  tell();
}

/** Call `act` now and whenever one of these fields changes. */
export function watch(fields, act) {
  const watcher = { fields, act, last: null };
  watchers.push(watcher);
  run(watcher);
}

function run(watcher) {
  const now = JSON.stringify(watcher.fields.map((name) => state[name]));
  if (now === watcher.last) return;
  watcher.last = now;
  watcher.act();
}

function tell() {
  for (const watcher of watchers) run(watcher);
}

function reread() {
  const next = parse(location.hash);
  if (format(next) === format(state)) return;
  state = next;
  tell();
}
window.addEventListener("popstate", reread);
window.addEventListener("hashchange", reread);
