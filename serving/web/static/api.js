// Requests to the service: problems become exceptions, and items are cached by id.

import { MOST_HISTORY, state } from "./state.js";

const KEY = "recsys-key";
const NO_HISTORY = ["impression", "dismiss", "dislike", "skip", "feedback"]; // the service's default
const known = new Map(); // item id -> {item_id, title, semantic_id?, metadata?}

/** A problem of the service (RFC 9457), or a service that cannot be reached. */
export class Problem extends Error {
  constructor(body, retryAfter) {
    super(body.detail);
    Object.assign(this, body);
    this.retryAfter = retryAfter;
  }
}

// The key is stored for this tab only and sent only in the Authorization header.
export const apiKey = () => sessionStorage.getItem(KEY) ?? "";
export function setApiKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

export async function call(method, path, { body, signal } = {}) {
  const headers = { accept: "application/json" };
  if (body !== undefined) headers["content-type"] = "application/json";
  if (apiKey()) headers.authorization = `Bearer ${apiKey()}`;
  let response;
  try {
    response = await fetch(path, {
      method, headers, signal, cache: "no-store",
      body: body === undefined ? undefined : JSON.stringify(body),
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem({
      title: "The service cannot be reached", code: "unreachable",
      detail: "It does not respond. Is it running?",
    });
  }
  const text = await response.text();
  let answer = null;
  try {
    answer = text ? JSON.parse(text) : null;
  } catch {
    // the page of a proxy: reported by its status below
  }
  if (!response.ok) {
    throw new Problem(
      { title: "The request failed", code: `http_${response.status}`, detail: `Status ${response.status}.`, ...answer },
      Number(response.headers.get("retry-after")) || null,
    );
  }
  return answer;
}

/** Returns a function that calls the service and aborts its previous, unfinished call, which resolves to undefined. */
export function latest() {
  let running = null;
  return async (method, path, body) => {
    running?.abort();
    const mine = (running = new AbortController());
    try {
      const answer = await call(method, path, { body, signal: mine.signal });
      return mine === running ? answer : undefined;
    } catch (error) {
      if (mine !== running || error.name === "AbortError") return undefined;
      throw error;
    }
  };
}

/** The body of POST /v1/recommendations for a state. */
export function request(include = ["metadata", "explanation", "timing"], of = state) {
  const body = of.history === null && of.user ? { user: of.user } : { history: of.history ?? [] };
  body.k = of.k;
  if (of.seen !== null) body.exclude_seen = !of.seen;
  if (of.model) body.model = of.model;
  if (of.filter) body.filter = of.filter;
  body.include = include;
  return body;
}

/** A path with query parameters; empty ones are left out. */
export function at(path, parameters = {}) {
  const query = new URLSearchParams(Object.entries(parameters).filter(([, value]) => value !== "" && value != null));
  return query.size ? `${path}?${query}` : path;
}

export function remember(items) {
  for (const item of items ?? []) known.set(item.item_id, { ...known.get(item.item_id), ...item });
}

export const title = (id) => known.get(id)?.title || id;
export const remembered = (id) => known.get(id);

/** An item with its attributes, fetched once; null if the model does not know it. */
export async function item(id) {
  if (!known.get(id)?.metadata) {
    try {
      remember([await call("GET", at(`/v1/items/${encodeURIComponent(id)}`, { model: state.model }))]);
    } catch (error) {
      if (error.code !== "unknown_item") throw error;
      return null;
    }
  }
  return known.get(id);
}

/** Fetch the titles of these items; the browser limits how many at a time. */
export async function learn(ids) {
  const missing = [...new Set(ids)].filter((id) => !known.has(id));
  await Promise.all(missing.map(async (id) => {
    if ((await item(id)) === null) known.set(id, { item_id: id, title: id, unknown: true });
  }));
}

/** Item ids of a user's history, oldest first, from the newest events that belong to it. */
export async function history(user) {
  const path = at(`/v1/users/${encodeURIComponent(user)}/history`, { limit: MOST_HISTORY });
  const { events } = await call("GET", path); // newest first
  const part = events.filter((event) => !NO_HISTORY.includes(event.type)).reverse();
  remember(part.filter((event) => event.title).map(({ item, title }) => ({ item_id: item, title })));
  return part.map((event) => event.item);
}
