"""A synthetic shop: books, games and kits with titles, series, brands, prices, and customers.

The patterns in the data, strongest first: volume n of a series is followed by n + 1, at once or a
few steps later; an item is followed by its companions (a mystery novel, then a puzzle); a customer
prefers a few genres and one price tier; some items are more popular than others. No files or
network are needed. NumPy only; the same seed gives the same shop.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import Field, PositiveInt

from recsys.config import internal, section
from recsys.data.raw import EventStream, RawData, events_table

# A department has forms of titles, and a typical price in each tier; a genre has words of titles,
# two makers for each tier, and a companion, to which customers often turn after it.
WORDS: dict[str, Any] = json.loads(files("recsys.data").joinpath("shop.json").read_text("utf-8"))
SHELVES = [(shelves, genre) for shelves in WORDS["departments"] for genre in shelves["genres"]]
_NAMES = [genre["name"] for _, genre in SHELVES]
COMPANION = np.asarray([_NAMES.index(genre["companion"]) for _, genre in SHELVES])
SCHEMA = {
    "item_id": pa.string(),
    "title": pa.string(),
    "text": pa.string(),
    "categories": pa.list_(pa.string()),
    "brand": pa.string(),
    "series": pa.string(),
    "volume": pa.int64(),
    "price": pa.float64(),
    "year": pa.int64(),
}
TIERS = ("An inexpensive choice.", "A favourite of many.", "A collector's edition.")
TIER_SHARES = (0.35, 0.45, 0.2)  # of customers
SERIES_SHARE = 0.6  # of names that belong to a series
VOLUMES = (3, 6)  # volumes of a series, inclusive
# Probabilities of the next volume and, failing that, of a companion, if there is one.
NEXT_VOLUME, COMPANY = 0.55, 0.4
BETTER_COMPANION = 0.7
RECALL = (0.7, 0.15, 0.1, 0.05)  # that a series or companion continues 1, 2, ... events back
FAVOURITES = (0.55, 0.25, 0.12)  # of a customer's three genres in browsing; the rest is random
LOYALTY = 0.75  # probability that browsing stays in the customer's own price tier
POPULARITY = 0.9  # exponent of Zipf's law among the openings of one genre and tier
LENGTHS = (5, 60)  # shortest and longest history
REDRAWS = 8  # of an item that the customer already has; then the event is dropped
FIRST_DAY, DAYS, DAY_S = 19_358, 700, 86_400  # customers join during 700 days from 2023-01-01
GAP_DAYS, VOLUME_GAP_DAYS = 14.0, 4.0  # mean time between events, and before a next volume


@section
class SyntheticConfig:
    """Size of the shop."""

    users: PositiveInt = 3_000
    """Number of customers."""
    items: Annotated[int, Field(ge=240, le=100_000)] = 1_200
    """Number of items."""
    mean_length: Annotated[float, Field(gt=5, le=30)] = internal(default=12.0)
    """Mean number of events per customer; few have less than 5, none more than 60."""


@dataclass(frozen=True)
class _Shop:
    """The catalog as arrays over dense items.

    A cell is a genre and a price tier, numbered `3 * genre + tier`. An opening is the first volume
    of a series, or a single title.

    Attributes:
        cell: (items,).
        volume: (items,) from 1; 0 for a single title.
        following: (items,) the next volume, or -1.
        companions: (items, 2) companion items, the better match first.
        openings: dense items by cell, popular ones first.
        cumulative: cumulative popularity along `openings`; cell c ends at c + 1.
    """

    cell: NDArray[np.int64]
    volume: NDArray[np.int64]
    following: NDArray[np.int64]
    companions: NDArray[np.int64]
    openings: NDArray[np.int64]
    cumulative: NDArray[np.float64]

    def draw(self, cell: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
        """Draw one opening of each cell, with probability by popularity."""
        position = np.searchsorted(self.cumulative, cell + rng.random(len(cell)), side="right")
        return np.take(self.openings, position, mode="clip")


@dataclass(frozen=True)
class _People:
    """The preferences of customers.

    Attributes:
        genres: (customers, 3) favourite first; the second is the favourite's companion.
        tier: (customers,) preferred price tier.
    """

    genres: NDArray[np.int64]
    tier: NDArray[np.int64]


def generate(config: SyntheticConfig, seed: int = 0) -> EventStream:
    """Generate a catalog and the purchases of its customers, the same for the same seed."""
    rng = np.random.default_rng(seed)
    shop = _open(config.items, rng)
    items = _describe(shop, rng)
    people = _invite(config.users, rng)
    user, item, seconds, rating = _buy(shop, people, config.mean_length, rng)
    width = len(str(config.users))
    names = np.char.add("u", np.char.zfill(np.arange(1, config.users + 1).astype(str), width))
    events = events_table(
        pa.array(names).take(pa.array(user)),
        items["item_id"].combine_chunks().take(pa.array(item)),
        timestamp=seconds,
        rating=rating,
    )
    return RawData(events, items).stream()


def _open(num_items: int, rng: np.random.Generator) -> _Shop:
    """Assign series and single titles to the cells in turn; volumes of a series are neighbours."""
    in_series = rng.random(num_items) < SERIES_SHARE
    sizes = np.where(in_series, rng.integers(VOLUMES[0], VOLUMES[1] + 1, num_items), 1)
    count = int(np.searchsorted(np.cumsum(sizes), num_items)) + 1
    sizes = sizes[:count]
    sizes[-1] -= sizes.sum() - num_items
    starts = np.cumsum(sizes) - sizes
    opening = np.repeat(np.arange(count), sizes)  # (items,)
    cells = 3 * len(SHELVES)
    cell = np.concatenate([rng.permutation(cells) for _ in range(-(-count // cells))])[:count]
    volume = np.arange(num_items) - starts[opening]

    by_cell = np.lexsort((rng.random(count), cell))
    ordered = cell[by_cell]
    rank = np.arange(count) - np.searchsorted(ordered, ordered)
    weight = (rank + 1.0) ** -POPULARITY
    shop = _Shop(
        cell[opening],
        np.where(sizes[opening] > 1, volume + 1, 0),
        np.where(volume + 1 < sizes[opening], np.arange(num_items) + 1, -1),
        np.empty((0, 2), np.int64),
        starts[by_cell],
        np.cumsum(weight / np.bincount(ordered, weight)[ordered]),
    )
    there = 3 * COMPANION[cell // 3] + cell % 3
    companions = np.stack([shop.draw(there, rng), shop.draw(there, rng)], axis=1)
    return replace(shop, companions=companions[opening])


def _describe(shop: _Shop, rng: np.random.Generator) -> pa.Table:
    """Write titles, texts and attributes; volumes of a series share name, maker and price."""
    n = len(shop.cell)
    rows: dict[str, list[object]] = {name: [] for name in SCHEMA}
    used = [0] * len(SHELVES)
    orders = [rng.permutation(len(g["firsts"]) * len(g["seconds"])).tolist() for _, g in SHELVES]
    choices = rng.integers(0, 2, n).tolist()
    years = rng.integers(1998, 2017, n).tolist()
    spreads = rng.lognormal(0.0, 0.15, n).tolist()
    name = maker = ""
    price, year = 0.0, 0
    for item, (cell, volume) in enumerate(
        zip(shop.cell.tolist(), shop.volume.tolist(), strict=True)
    ):
        shelf, tier = divmod(cell, 3)
        department, genre = SHELVES[shelf]
        if volume <= 1:  # a new name; other volumes keep that of their first
            name = _name(department, genre, orders[shelf], used[shelf])
            used[shelf] += 1
            maker = genre["makers"][2 * tier + choices[item]]
            price, year = round(department["prices"][tier] * spreads[item]) + 0.99, years[item]
        title = department["volume"].format(name, volume) if volume else name
        part = f" Part {volume} of the series {name}." if volume else ""
        article = "An" if genre["phrase"][0] in "aeiou" else "A"
        rows["item_id"].append(f"{department['thing']}-{item + 1:0{len(str(n))}d}")
        rows["title"].append(title)
        rows["text"].append(f"{article} {genre['phrase']} by {maker}.{part} {TIERS[tier]}")
        rows["categories"].append([department["name"], genre["name"]])
        rows["brand"].append(maker)
        rows["series"].append(name if volume else None)
        rows["volume"].append(volume or None)
        rows["price"].append(price)
        rows["year"].append(year + volume)
    return pa.table({key: pa.array(rows[key], kind) for key, kind in SCHEMA.items()})


def _name(department: dict[str, Any], genre: dict[str, Any], order: list[int], used: int) -> str:
    """The next unused name of a genre; a place is appended when all names have been used."""
    again, combination = divmod(used, len(order))
    first, second = divmod(order[combination], len(genre["seconds"]))
    words = f"{genre['firsts'][first]} {genre['seconds'][second]}"
    name = str(department["title"].format(words))
    return f"{name} of {WORDS['places'][again - 1]}" if again else name


def _invite(people: int, rng: np.random.Generator) -> _People:
    """Draw the preferences of customers; some genres are more popular than others."""
    liked = 1 / np.sqrt(1 + rng.permutation(len(SHELVES)))
    liked /= liked.sum()
    first = rng.choice(len(SHELVES), people, p=liked)
    third = rng.choice(len(SHELVES), people, p=liked)
    genres = np.stack([first, COMPANION[first], third], axis=1)
    return _People(genres, rng.choice(3, people, p=TIER_SHARES))


def _buy(
    shop: _Shop, people: _People, mean_length: float, rng: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
    """Draw the purchases, one step of all customers at a time.

    Returns:
        user, item, unix seconds and rating of each event, by user and time.
    """
    n = len(people.tier)
    shortest, longest = LENGTHS
    lengths = shortest - 1 + rng.geometric(1 / (mean_length - shortest + 1), n)
    bought = np.full((n, int(min(lengths.max(), longest))), -1, np.int64)
    days = np.zeros(bought.shape)
    now = rng.random(n) * DAYS
    for step in range(bought.shape[1]):
        who = np.flatnonzero(lengths > step)
        before = bought[who, :step]
        item, sequel = _choose(shop, people, who, before, rng)
        for _ in range(REDRAWS):
            again = np.flatnonzero((before == item[:, None]).any(axis=1))
            if not len(again):
                break
            item[again] = _browse(shop, people, who[again], rng)
            sequel[again] = False
        item[(before == item[:, None]).any(axis=1)] = -1
        now[who] += rng.exponential(np.where(sequel, VOLUME_GAP_DAYS, GAP_DAYS))
        bought[who, step], days[who, step] = item, now[who]
    happened = bought >= 0
    user, item = np.nonzero(happened)[0], bought[happened]
    genre, tier = np.divmod(shop.cell[item], 3)
    fond = (genre[:, None] == people.genres[user]).any(axis=1)
    liking = 3.4 + 0.6 * fond + 0.5 * (tier == people.tier[user])
    rating = np.clip(np.round(liking + rng.normal(0, 0.7, len(item))), 1, 5).astype(np.float32)
    seconds = ((FIRST_DAY + days[happened]) * DAY_S).astype(np.int64)
    return user, item, seconds, rating


def _choose(
    shop: _Shop,
    people: _People,
    who: NDArray[np.int64],
    before: NDArray[np.int64],
    rng: np.random.Generator,
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Draw the next volume or a companion of a recent item, or an item from browsing.

    Of (n,) customers with (n, step) earlier purchases, which are -1 where an event was dropped, it
    gives (n,) items, and whether each is a next volume.
    """
    item = _browse(shop, people, who, rng)
    step = before.shape[1]
    if not step:
        return item, np.zeros(len(who), bool)
    lag = rng.choice(len(RECALL), len(who), p=RECALL).clip(max=step - 1)
    recent = before[np.arange(len(who)), step - 1 - lag]
    to_volume, to_company, better = rng.random((3, len(who)))
    company = (recent >= 0) & (to_company < COMPANY)
    which = (better >= BETTER_COMPANION).astype(np.int64)
    item[company] = shop.companions[recent[company], which[company]]
    sequel = (recent >= 0) & (shop.following[recent] >= 0) & (to_volume < NEXT_VOLUME)
    item[sequel] = shop.following[recent[sequel]]
    return item, sequel


def _browse(
    shop: _Shop, people: _People, who: NDArray[np.int64], rng: np.random.Generator
) -> NDArray[np.int64]:
    """Draw a popular opening from a genre and a price tier that each of `who` prefers."""
    n = len(who)
    choice = np.searchsorted(np.cumsum(FAVOURITES), rng.random(n), side="right")
    favourite = people.genres[who, choice.clip(max=len(FAVOURITES) - 1)]
    genre = np.where(choice < len(FAVOURITES), favourite, rng.integers(0, len(SHELVES), n))
    tier = np.where(rng.random(n) < LOYALTY, people.tier[who], rng.integers(0, 3, n))
    return shop.draw(3 * genre + tier, rng)
