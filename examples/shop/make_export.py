"""Make the export of an invented kitchen and garden shop, with the dirt that real exports have.

    python examples/shop/make_export.py --out shop --seed 0

It writes `events.csv` (customer_id, sku, ts, event, price) and `products.csv` (sku, name, category,
brand, price, in_stock, description). Customers have favourite categories, brands and price levels;
products of one line are bought one after another, and some categories follow others. The same seed
gives the same files. Only NumPy is needed.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import numpy as np

# Category path -> things of the category; each category is followed by the next one of its branch.
CATEGORIES = {
    "Kitchen > Knives": ("Chef's Knife", "Paring Knife", "Bread Knife", "Cleaver"),
    "Kitchen > Boards": ("Cutting Board", "Serving Board", "Carving Board"),
    "Kitchen > Sharpeners": ("Whetstone", "Honing Steel", "Pull-through Sharpener"),
    "Kitchen > Pans": ("Frying Pan", "Grill Pan", "Wok", "Sauté Pan"),
    "Kitchen > Pots": ("Saucepan", "Stockpot", "Casserole", "Pressure Cooker"),
    "Kitchen > Lids": ("Glass Lid", "Steamer Insert", "Splatter Guard"),
    "Coffee > Machines": ("Espresso Machine", "Filter Machine", "Moka Pot"),
    "Coffee > Grinders": ("Hand Grinder", "Burr Grinder", "Dosing Grinder"),
    "Coffee > Beans": ("House Blend", "Single Origin", "Decaf Blend", "Dark Roast"),
    "Coffee > Cups": ("Espresso Cup", "Cappuccino Cup", "Travel Mug"),
    "Tea > Pots": ("Teapot", "Cast Iron Kettle", "Glass Pot"),
    "Tea > Leaves": ("Green Tea", "Black Tea", "Rooibos", "White Tea"),
    "Tea > Strainers": ("Tea Strainer", "Tea Infuser", "Paper Filters"),
    "Garden > Seeds": ("Tomato Seeds", "Basil Seeds", "Wildflower Mix", "Chilli Seeds"),
    "Garden > Pots": ("Clay Pot", "Hanging Basket", "Balcony Box"),
    "Garden > Soil": ("Potting Soil", "Compost", "Perlite"),
    "Garden > Watering": ("Watering Can", "Hose Reel", "Drip Set"),
    "Garden > Tools": ("Trowel", "Pruning Shears", "Rake", "Dibber"),
    "Grill > Grills": ("Kettle Grill", "Gas Grill", "Table Grill"),
    "Grill > Fuel": ("Charcoal", "Briquettes", "Smoking Chips"),
    "Grill > Tools": ("Grill Tongs", "Grill Brush", "Meat Thermometer"),
}
BRANDS = (
    "Aldermoor", "Brixen", "Castellan", "Dunelund", "Eversholt", "Fjellhus", "Gorizia", "Hollis",
    "Ingelby", "Jarlsberg", "Kestrel", "Lindqvist",
)  # fmt: skip
STEMS = (
    "Aria", "Bora", "Cedar", "Delta", "Ember", "Flint", "Grove", "Harbor", "Iris", "Juniper",
    "Koru", "Lumen", "Mistral", "Nord", "Opal", "Prism", "Quill", "Rune", "Sierra", "Terra",
)  # fmt: skip
LEVELS = (0.6, 1.0, 1.9)  # factors of the price: budget, middle, premium
LINE = 4  # products of a line at most, bought one after another
START, DAYS = datetime(2024, 3, 1, tzinfo=UTC), 540
ZONES = (("+02:00", 2), ("+01:00", 1), ("Z", 0), ("", 0), ("-05:00", -5))  # as written, hours
ZONE_SHARES = (0.45, 0.25, 0.15, 0.1, 0.05)
BOT_EVENTS, UNKNOWN_SKUS = 5_000, 40
PRODUCT_COLUMNS = ("sku", "name", "category", "brand", "price", "in_stock", "description")
EVENT_COLUMNS = ("customer_id", "sku", "ts", "event", "price")


@dataclass(frozen=True)
class Product:
    """One product; `follower` is the place of the next product of its line, or -1."""

    sku: str
    name: str
    category: int
    brand: int
    level: int
    price: float
    follower: int


@dataclass(frozen=True)
class Event:
    """One event, before it is written as text."""

    customer: str
    sku: str
    moment: datetime
    kind: str
    price: float


def make_products(count: int, rng: np.random.Generator) -> list[Product]:
    """Make products line by line: those of a line share category, brand, level and name."""
    products: list[Product] = []
    names = list(CATEGORIES)
    while len(products) < count:
        category, brand = int(rng.integers(len(names))), int(rng.integers(len(BRANDS)))
        level, size = int(rng.choice(3, p=(0.35, 0.45, 0.2))), int(rng.integers(1, LINE + 1))
        things = CATEGORIES[names[category]]
        stem, base = str(rng.choice(STEMS)), float(rng.lognormal(3.0, 0.6)) * LEVELS[level]
        for part in range(min(size, count - len(products))):
            place = len(products)
            thing = things[part % len(things)]
            last = part == size - 1 or place == count - 1
            products.append(
                Product(
                    f"{10_000 + 7 * place:08}",  # the leading zeros are part of the id
                    f"{BRANDS[brand]} {stem} {thing}",
                    category,
                    brand,
                    level,
                    round(base * (1 + 0.15 * part), 2),
                    -1 if last else place + 1,
                )
            )
    return products


def shop_for(
    customer: str, products: list[Product], shelves: list[np.ndarray], rng: np.random.Generator
) -> Iterator[Event]:
    """Events of one customer: each product is viewed, then maybe put in the cart and bought."""
    favourites = rng.integers(len(CATEGORIES), size=2)
    level, brand = int(rng.choice(3, p=(0.35, 0.45, 0.2))), int(rng.integers(len(BRANDS)))
    now = START + timedelta(days=float(rng.random() * DAYS * 0.8))
    place = -1
    for _ in range(int(min(2 + rng.geometric(1 / 7), 40))):
        place = _choose(place, products, shelves, favourites, level, brand, rng)
        product = products[place]
        now += timedelta(days=float(rng.exponential(9.0)))
        if now > START + timedelta(days=DAYS):
            return
        for kind, chance, minutes in (("view", 1.0, 0), ("cart", 0.5, 4), ("purchase", 0.75, 9)):
            if rng.random() > chance:
                break
            moment = now + timedelta(minutes=minutes + float(rng.random() * 3))
            yield Event(customer, product.sku, moment, kind, product.price)
            if kind == "view" and rng.random() < 0.15:  # the page is loaded again
                again = moment + timedelta(seconds=40)
                yield Event(customer, product.sku, again, kind, product.price)
            if kind == "purchase" and rng.random() < 0.06:
                back = moment + timedelta(days=6)
                yield Event(customer, product.sku, back, "return", product.price)


def _choose(
    before: int,
    products: list[Product],
    shelves: list[np.ndarray],
    favourites: np.ndarray,
    level: int,
    brand: int,
    rng: np.random.Generator,
) -> int:
    """The next product: the follower in its line, one of the next category, or a favourite."""
    draw = rng.random()
    if before >= 0 and draw < 0.45 and products[before].follower >= 0:
        return products[before].follower
    if before >= 0 and draw < 0.7:
        shelf = shelves[(products[before].category + 1) % len(CATEGORIES)]
    elif draw < 0.95:
        shelf = shelves[int(rng.choice(favourites))]
    else:
        shelf = np.arange(len(products))
    found = [products[place] for place in shelf]
    fitting = [(p.level == level) * 2.0 + (p.brand == brand) * 3.0 + 0.2 for p in found]
    weights = np.asarray(fitting) / (1 + np.arange(len(shelf))) ** 0.7  # a few are popular
    return int(rng.choice(shelf, p=weights / weights.sum()))


def write_time(moment: datetime, rng: np.random.Generator) -> str:
    """The time as text, in one of the zones in which the shop's systems write."""
    text, hours = ZONES[int(rng.choice(len(ZONES), p=ZONE_SHARES))]
    local = moment.astimezone(timezone(timedelta(hours=hours)))
    return local.strftime("%Y-%m-%dT%H:%M:%S") + text


def write_events(
    events: list[Event], products: list[Product], path: Path, rng: np.random.Generator
) -> None:
    """Write the events in order of time, and the dirt between them."""
    bot_start = START + timedelta(days=200)
    for second in range(BOT_EVENTS):
        product = products[int(rng.integers(len(products)))]
        moment = bot_start + timedelta(seconds=6 * second)
        events.append(Event("C-99999", product.sku, moment, "view", product.price))
    gone = [f"SKU-GONE-{n + 1:02}" for n in range(UNKNOWN_SKUS)]
    for event in [events[int(n)] for n in rng.integers(len(events), size=5 * UNKNOWN_SKUS)]:
        sku = gone[int(rng.integers(UNKNOWN_SKUS))]
        events.append(Event(event.customer, sku, event.moment, "view", event.price))
    events.sort(key=lambda event: event.moment)
    rows = []
    for event in events:
        row = [event.customer, event.sku, write_time(event.moment, rng), event.kind]
        row.append(f"{event.price:.2f}" if event.kind != "view" else "")
        draw = rng.random()
        if draw < 0.004:
            row[2] = ""  # no time
        elif draw < 0.0045:
            row[2] = "2087" + row[2][4:]
        elif draw < 0.005:
            row[2] = "n/a"
        elif draw < 0.008:
            row[0] = ""  # no customer
        elif draw < 0.009:
            row[1] = ""  # no product
        elif draw < 0.04:
            row[0] = "guest"
        rows.append(row)
        if rng.random() < 0.01:
            rows.append(row)  # exact duplicate
    for place in rng.integers(len(rows), size=3):
        rows[int(place)] = rows[int(place)][:2]  # a row that was cut off
    _write(path, EVENT_COLUMNS, rows)


def write_products(products: list[Product], path: Path, rng: np.random.Generator) -> None:
    """Write the products, with markup, missing fields, repeated ids and prices of two styles."""
    paths = list(CATEGORIES)
    rows = []
    for product in products:
        category, draw = paths[product.category], rng.random()
        price = f"{product.price:.2f}" if draw > 0.1 else f"€ {product.price:.2f}".replace(".", ",")
        kind = category.rpartition(" > ")[2].lower()
        text = (
            f"<p>The <b>{product.name}</b> by {BRANDS[product.brand]} &amp; friends.</p>"
            f"<ul><li>{('Simple', 'Solid', 'Finest')[product.level]} quality</li>"
            f"<li>For lovers of {kind}</li></ul>"
        )
        stock = "false" if rng.random() < 0.12 else "true"
        row = [product.sku, product.name, category, BRANDS[product.brand], price, stock, text]
        for column, share in ((1, 0.005), (2, 0.01), (3, 0.03), (4, 0.02), (6, 0.1)):
            if rng.random() < share:
                row[column] = ""
        rows.append(row)
    rows += [rows[int(place)] for place in rng.integers(len(rows), size=6)]  # repeated ids
    _write(path, PRODUCT_COLUMNS, rows)


def _write(path: Path, columns: tuple[str, ...], rows: list[list[str]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(rows)


def make_export(out: Path, *, customers: int = 3_000, items: int = 1_200, seed: int = 0) -> None:
    """Write `events.csv` and `products.csv` to the folder `out`."""
    rng = np.random.default_rng(seed)
    products = make_products(items, rng)
    of = np.asarray([product.category for product in products])
    shelves = [np.flatnonzero(of == category) for category in range(len(CATEGORIES))]
    shelves = [shelf if len(shelf) else np.arange(items) for shelf in shelves]
    events = [
        event
        for n in range(customers)
        for event in shop_for(f"C-{n + 1:05}", products, shelves, rng)
    ]
    out.mkdir(parents=True, exist_ok=True)
    write_events(events, products, out / "events.csv", rng)
    write_products(products, out / "products.csv", rng)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("shop"), help="folder of the two files")
    parser.add_argument("--customers", type=int, default=3_000)
    parser.add_argument("--items", type=int, default=1_200)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    make_export(given.out, customers=given.customers, items=given.items, seed=given.seed)


if __name__ == "__main__":
    main()
