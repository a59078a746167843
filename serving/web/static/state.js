// What the page shows, kept in the fragment of its address: a reload keeps it, "back" goes back,
// a link shares it, and no server's log ever sees a person's history.

const DEFAULTS = {
  view: "recommend",
  user: "",
  history: null, // item ids of a session; null: the history that the service has of `user`
  k: 10,
  mode: "auto",
  guarantee: "beam",
  seed: null, // draw by it instead of searching for the best
  diversity: 0,
  seen: false, // may seen items be recommended
  blend: "", // "" as the bundle says, or "on" or "off"
  model: "",
  filter: null,
  prefix: "",
  q: "",
};
export const MOST_HISTORY = 200; // items of a session; the model looks at fewer
const VIEWS = ["recommend", "decode", "catalog", "evaluation", "operations"];
const MODES = ["auto", "strict", "relaxed", "beam"];

const watchers = [];
export let state = parse(location.hash);

/** The state that a fragment says; whatever it does not say, or says wrongly, is the default. */
export function parse(hash) {
  const given = new URLSearchParams(hash.replace(/^#/, ""));
  const found = { ...DEFAULTS };
  const among = (name, allowed) => {
    if (allowed.includes(given.get(name))) found[name] = given.get(name);
  };
  among("view", VIEWS);
  among("mode", MODES);
  among("guarantee", ["beam", "global"]);
  among("blend", ["on", "off"]);
  for (const name of ["user", "model", "prefix", "q"]) found[name] = given.get(name) ?? "";
  const k = Number(given.get("k"));
  if (Number.isInteger(k) && k >= 1 && k <= 200) found.k = k;
  const diversity = Number(given.get("diversity"));
  if (diversity > 0 && diversity <= 1) found.diversity = diversity;
  const seed = Number(given.get("seed") ?? NaN);
  if (Number.isSafeInteger(seed) && seed >= 0) found.seed = seed;
  found.seen = given.get("seen") === "1";
  if (given.has("h")) found.history = given.getAll("h").filter(Boolean).slice(-MOST_HISTORY);
  try {
    const filter = JSON.parse(given.get("filter") ?? "null");
    if (filter && typeof filter === "object" && !Array.isArray(filter)) found.filter = filter;
  } catch {
    // not JSON: no filter
  }
  return found;
}

/** The fragment of a state; what is the default is left out. */
export function format(of) {
  const said = new URLSearchParams();
  for (const name of ["view", "user", "k", "mode", "guarantee", "seed", "diversity", "blend", "model", "prefix", "q"]) {
    if (of[name] !== DEFAULTS[name]) said.set(name, of[name]);
  }
  if (of.seen) said.set("seen", "1");
  if (of.filter) said.set("filter", JSON.stringify(of.filter));
  if (of.history) for (const id of of.history.length ? of.history : [""]) said.append("h", id);
  return `#${said}`;
}

/** Change the state; a step that "back" undoes, unless `replace`. */
export function update(changes, { replace = false } = {}) {
  const next = { ...state, ...changes };
  if (format(next) === format(state)) return;
  state = next;
  window.history[replace ? "replaceState" : "pushState"](null, "", format(state));
  tell();
}

/** Call `act` now and whenever one of these fields changes. Returns a function that forces it. */
export function watch(fields, act) {
  const watcher = { fields, act, last: null };
  watchers.push(watcher);
  run(watcher);
  return () => act();
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
