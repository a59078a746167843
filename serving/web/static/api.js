// The wire: one function a request, problems as exceptions, items remembered by id.

import { MOST_HISTORY, state } from "./state.js";

const KEY = "recsys-key";
const NO_HISTORY = ["impression", "dismiss", "dislike", "skip", "feedback"]; // as the service has it
const known = new Map(); // item id -> {item_id, title, semantic_id?, metadata?}

/** A refusal, as the service puts it (RFC 9457), or a service that cannot be reached. */
export class Problem extends Error {
  constructor(body, retryAfter) {
    super(body.detail);
    Object.assign(this, body);
    this.retryAfter = retryAfter;
  }
}

// The key is kept for this tab alone and goes nowhere but into the Authorization header.
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
      detail: "No answer came from it. Is it running?",
    });
  }
  const text = await response.text();
  let answer = null;
  try {
    answer = text ? JSON.parse(text) : null;
  } catch {
    // a proxy's page: told by its status below
  }
  if (!response.ok) {
    throw new Problem(
      { title: "The request failed", code: `http_${response.status}`, detail: `Status ${response.status}.`, ...answer },
      Number(response.headers.get("retry-after")) || null,
    );
  }
  return answer;
}

/** A call whose earlier, unfinished call is given up. Resolves to undefined if it was given up. */
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

/** What the state asks for, as the body of POST /v1/recommendations. */
export function request(include = ["metadata", "explanation", "timing"], of = state) {
  const body = of.history === null && of.user ? { user: of.user } : { history: of.history ?? [] };
  body.k = of.k;
  if (of.seen) body.exclude_seen = false;
  if (of.mode !== "auto") body.mode = of.mode;
  if (of.guarantee !== "beam") body.guarantee = of.guarantee;
  if (of.seed !== null) body.seed = of.seed;
  if (of.diversity) body.diversity = of.diversity;
  if (of.blend) body.blend = of.blend === "on";
  if (of.model) body.model = of.model;
  if (of.filter) body.filter = of.filter;
  body.include = include;
  return body;
}

/** The same as a line for a terminal. The key itself is not in it. */
export function curl(path, body) {
  const quote = (text) => `'${text.replaceAll("'", "'\\''")}'`;
  const parts = [`curl -s ${quote(location.origin + path)}`];
  if (apiKey()) parts.push(`-H "Authorization: Bearer $RECSYS_KEY"`);
  if (body !== undefined) parts.push("-H 'Content-Type: application/json'", `-d ${quote(JSON.stringify(body))}`);
  return parts.join(" \\\n  ");
}

/** `path` with what `parameters` says; empty ones are left out. */
export function at(path, parameters = {}) {
  const said = new URLSearchParams(Object.entries(parameters).filter(([, value]) => value !== "" && value != null));
  return said.size ? `${path}?${said}` : path;
}

export function remember(items) {
  for (const item of items ?? []) known.set(item.item_id, { ...known.get(item.item_id), ...item });
}

export const title = (id) => known.get(id)?.title || id;
export const remembered = (id) => known.get(id);

/** An item with its attributes, asked for once; null if the model has no such item. */
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

/** Learn the titles of these items, a few at a time. */
export async function learn(ids) {
  const missing = [...new Set(ids)].filter((id) => !known.has(id));
  const worker = async () => {
    for (let id = missing.pop(); id !== undefined; id = missing.pop()) {
      if ((await item(id)) === null) known.set(id, { item_id: id, title: id, unknown: true });
    }
  };
  await Promise.all([worker(), worker(), worker(), worker()]);
}

/** Item ids of a user's history, oldest first: of the newest events that are part of it. */
export async function history(user) {
  const path = at(`/v1/users/${encodeURIComponent(user)}/history`, { limit: MOST_HISTORY });
  const { events } = await call("GET", path); // newest first
  const part = events.filter((event) => !NO_HISTORY.includes(event.type)).reverse();
  remember(part.filter((event) => event.title).map(({ item, title }) => ({ item_id: item, title })));
  return part.map((event) => event.item);
}
