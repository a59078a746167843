// The details of an item: attributes, similar items, actions.

import { at, call, item, remember } from "./api.js";
import { attempt, byKey, h, identity, number, problemBox, render } from "./dom.js";
import { onlyWith } from "./filters.js";
import { add } from "./history.js";
import { FOR_A_PERSON, state, update } from "./state.js";

const SIMILAR = 6;
export const PICTURE = /^(image|picture|photo|thumbnail|img)s?(_?(url|uri|link|src)s?)?$/i; // attributes with a picture
const PRICE = /^price$/i;
const HIDDEN = /^available(_from|_until)?$/; // what is recommended is available
const DATA_URL = /^data:image\/(png|jpeg|gif|webp|avif);base64,/;
const HOSTS = document.querySelector("meta[name=image-hosts]").content.split(" ").filter(Boolean);

/** The values of an attribute as a list, without empty ones. */
export const values = (value) => (Array.isArray(value) ? value : [value]).filter((v) => v !== null && v !== undefined && v !== "");

/** Whether an attribute is shown beside the others; picture, price and availability have places of their own. */
export const isShown = (key) => !PICTURE.test(key) && !PRICE.test(key) && !HIDDEN.test(key);

/** A value in words: whether something holds is the attribute's name, and no bare "true". */
export const inWords = (key, value) => (typeof value === "boolean" ? `${value ? "" : "not "}${key}` : typeof value === "number" ? `${key} ${value}` : String(value));

/** The price of an item with two decimals, in the shop's currency if the item has one; null without. */
export function price(metadata) {
  const [, value] = Object.entries(metadata ?? {}).find(([key]) => PRICE.test(key)) ?? [];
  if (typeof value !== "number") return value ? h("p", { class: "price" }, String(value)) : null;
  const { currency } = metadata;
  const named = /^[A-Z]{3}$/.test(currency ?? "") ? { style: "currency", currency } : { minimumFractionDigits: 2, maximumFractionDigits: 2 };
  return h("p", { class: "price", title: "price" }, h("span", { class: "sr" }, "price "), value.toLocaleString("en", named));
}

/** Open the dialog with the details of an item. */
export async function openItem(id) {
  const sheet = document.getElementById("sheet");
  const box = h("div", { class: "sheet" }, h("p", {}, "…"));
  const close = h("button", { type: "button", class: "quiet close", "aria-label": "Close", onclick: () => sheet.close() }, "×");
  render(sheet, close, box);
  sheet.setAttribute("aria-labelledby", "sheet-title");
  if (!sheet.open) {
    const opener = document.activeElement?.dataset?.key;
    sheet.addEventListener("close", () => {
      // the browser does not return the focus to an element that was redrawn meanwhile
      if (document.activeElement === document.body) ((opener && byKey(document, opener)) || document.getElementById("main")).focus();
    }, { once: true });
    sheet.showModal();
  }
  let details;
  try {
    details = await item(id);
  } catch (problem) {
    render(box, h("h2", { id: "sheet-title" }, id), problemBox(problem, () => openItem(id)));
    return;
  }
  if (!details) {
    render(box, h("h2", { id: "sheet-title" }, id), h("p", {}, "The model does not know this item."));
    return;
  }
  const similar = h("div", { class: "similar" });
  render(box,
    h("h2", { id: "sheet-title" }, details.title || id),
    identity(details),
    price(details.metadata),
    picture(details) ?? missing(details),
    details.text && h("p", { class: "text" }, details.text.slice(0, 600)),
    facts(details.metadata ?? {}, sheet),
    h("div", { class: "row" },
      h("button", { type: "button", class: "primary", onclick: () => (sheet.close(), add(id), FOR_A_PERSON.includes(state.view) || update({ view: "recommend" })) }, "Add to the session"),
      h("button", {
        type: "button",
        onclick: () => (sheet.close(), update({ view: "catalog", q: "", prefix: details.semantic_id.slice(0, -1).join(".") })),
      }, "Neighbours by code")),
    h("h3", {}, "Similar items"), similar);
  await attempt(similar, async () => {
    const answer = await call("GET", at(`/v1/items/${encodeURIComponent(id)}/similar`, { k: SIMILAR, model: state.model }));
    remember(answer.items);
    render(similar, answer.items.length
      ? h("ol", {}, answer.items.map((entry) => h("li", {},
        h("button", { type: "button", class: "link", onclick: () => openItem(entry.item_id) }, entry.title || entry.item_id),
        h("span", { class: "fine" }, ` ${number(entry.score, 2)}`))))
      : h("p", { class: "fine" }, "None are known."));
  });
}

function facts(metadata, sheet) {
  const known = Object.entries(metadata).filter(([key, value]) => values(value).length && isShown(key));
  if (!known.length) return null;
  return h("dl", { class: "facts" }, known.map(([key, value]) => [
    h("dt", {}, key),
    h("dd", {}, values(value).map((entry) => h("button", {
      type: "button", class: "tag", title: `Only items with ${key} ${entry}`,
      onclick: () => (sheet.close(), onlyWith(key, entry)),
    }, entry === true ? "yes" : entry === false ? "no" : String(entry)))),
  ]));
}

const pictures = (metadata) => Object.entries(metadata ?? {}).filter(([key]) => PICTURE.test(key)).flatMap(([, value]) => values(value));

/** The picture of an item, if the page may show it: a data URL, or https from a host of `image_hosts`; null otherwise. */
export function picture({ title, item_id, metadata }) {
  const source = pictures(metadata).find((url) => typeof url === "string" && (DATA_URL.test(url) || allowed(url)));
  return source ? h("img", { class: "picture", src: source, alt: `Picture of ${title || item_id}`, referrerpolicy: "no-referrer", loading: "lazy" }) : null;
}

const missing = ({ metadata }) =>
  h("p", { class: "picture none" }, pictures(metadata).length ? "The picture is on a host that this page may not load from (image_hosts)." : "No picture");

function allowed(url) {
  const { protocol, host } = URL.canParse(url) ? new URL(url) : {};
  return protocol === "https:" && HOSTS.some((entry) => entry === host || (entry.startsWith("*.") && host.endsWith(entry.slice(1))));
}
